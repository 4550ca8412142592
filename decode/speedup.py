"""What speculation can earn: the formulas, as small pure functions.

Costs are in passes of the base over one token, unless a function says seconds. A *round* drafts, verifies in one pass
of the base and keeps what is right, so that the speed-up over plain decoding is the expected tokens of a round divided
by its cost. The idealised acceptance rate alpha is the probability that a drafted token is accepted, independent of all
others; measured acceptances go in by depth or by tree instead.

Sources: Leviathan, Kalman, Matias 2023, "Fast Inference from Transformers via Speculative Decoding" (equation 1,
theorem 3.8); Cai et al. 2024, "Medusa" (section 2.3.3); Williams, Waterman, Patterson 2009, "Roofline".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decode.tree import Tree, expected_length
from medusa_heads.errors import ConfigError


def expected_tokens(alpha: float, gamma: int) -> float:
    """Expected tokens of a round that drafts a chain of `gamma` tokens, the base's own token included.

    (1 − alpha^(gamma+1)) / (1 − alpha), which is gamma + 1 at alpha = 1: Leviathan et al. 2023, equation 1. It is
    summed as 1 + alpha + … + alpha^gamma, which loses no digits near alpha = 1.

    Raises:
        ConfigError: alpha outside [0, 1] or gamma negative.
    """
    _check_probability(alpha)
    if gamma < 0:
        raise ConfigError(f"gamma counts drafted tokens and cannot be negative: {gamma}")
    return expected_tokens_by_depth([alpha] * gamma)


def expected_tokens_by_depth(rates: Sequence[float]) -> float:
    """The same where acceptance differs by depth: 1 + a₁ + a₁a₂ + …

    Args:
        rates: [d] is the probability that depth d + 1 is accepted given that depth d was; for a tree with siblings,
            that any of them is.
    """
    total = reached = 1.0
    for rate in rates:
        _check_probability(rate)
        reached *= rate
        total += reached
    return total


def expected_tokens_of_tree(tree: Tree, accuracy: Sequence[Sequence[float]]) -> float:
    """The tree form: 1 plus, for each node below the root, the product of the accuracies along its path.

    Args:
        accuracy: (K, R), [k][r] the probability that the rank-r candidate at depth k + 1 is right given its parent is.
    """
    return expected_length(tree, accuracy)


def round_cost(gamma: int, draft_cost: float, verify_cost: float = 1.0, fixed_cost: float = 0.0) -> float:
    """Cost of a round: gamma drafted tokens, one verification, and what a round costs whatever it drafts.

    Args:
        draft_cost: of one drafted token (Leviathan's c). Heads that draft all tokens at once go in as `fixed_cost`.
        verify_cost: of the pass over the gamma + 1 nodes; 1 where it costs no more than one token's.
    """
    if min(draft_cost, fixed_cost) < 0.0 or verify_cost <= 0.0:
        raise ConfigError("costs cannot be negative, and a verification is not free")
    return gamma * draft_cost + verify_cost + fixed_cost


def speedup(tokens: float, cost: float) -> float:
    """How many times as fast as plain decoding: expected tokens of a round ÷ its cost. For a chain this is
    (1 − alpha^(gamma+1)) / ((1 − alpha)(gamma·c + 1)), Leviathan et al. 2023, theorem 3.8."""
    return tokens / cost


def break_even_alpha(gamma: int, cost: float) -> float | None:
    """The acceptance rate at which a round of this cost earns exactly what it costs: E(alpha, gamma) = cost.

    None where even alpha = 1 does not pay (cost above gamma + 1); 0 where a round costs no more than plain decoding.
    """
    if cost > gamma + 1:
        return None
    low, high = 0.0, 1.0
    if cost <= 1.0:
        return low
    # E rises strictly with alpha for gamma ≥ 1, and here E(0) = 1 < cost ≤ gamma + 1 = E(1).
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            return high
        if expected_tokens(middle, gamma) < cost:
            low = middle
        else:
            high = middle


def best_gamma(alpha: float, draft_cost: float, verify_costs: Sequence[float]) -> int:
    """The chain length that is fastest.

    Args:
        verify_costs: [gamma] is the cost of a pass over gamma + 1 nodes, from gamma = 0 on.
    """
    gains = [
        speedup(expected_tokens(alpha, gamma), round_cost(gamma, draft_cost, verify))
        for gamma, verify in enumerate(verify_costs)
    ]
    return max(range(len(gains)), key=gains.__getitem__)


@dataclass(frozen=True)
class ModelShape:
    """What a pass of a decoder reads and computes."""

    parameters: float
    """Those a token is multiplied with: all but an embedding that is only looked up. Tied weights count once."""
    bytes_per_parameter: float = 2.0
    kv_values_per_token: float = 0.0
    """Keys and values that a token leaves behind: 2 · layers · key heads · head size."""
    attention_width: float = 0.0
    """layers · query heads · head size: a token costs 4 of these FLOP for each token it attends to."""
    bytes_per_kv_value: float = 2.0


@dataclass(frozen=True)
class Device:
    """A machine by its two limits."""

    bytes_per_second: float
    flop_per_second: float

    def __post_init__(self) -> None:
        if self.bytes_per_second <= 0.0 or self.flop_per_second <= 0.0:
            raise ConfigError("a device's bandwidth and FLOP rate are positive")

    @property
    def ridge(self) -> float:
        """FLOP per byte at which both limits are met."""
        return self.flop_per_second / self.bytes_per_second


def pass_flop(shape: ModelShape, tokens: int, context: int = 0) -> float:
    """FLOP of a pass over `tokens` behind `context`: 2 a parameter and token, 4 an attention width and token pair."""
    return tokens * (2.0 * shape.parameters + 4.0 * shape.attention_width * (context + tokens))


def pass_bytes(shape: ModelShape, tokens: int, context: int = 0) -> float:
    """Bytes that a pass moves at least: the weights once, keys and values of the context and of the new tokens once."""
    kv_values = shape.kv_values_per_token * (context + tokens)
    return shape.parameters * shape.bytes_per_parameter + kv_values * shape.bytes_per_kv_value


def arithmetic_intensity(shape: ModelShape, tokens: int, context: int = 0) -> float:
    """FLOP per byte of a pass; about `tokens` for 2-byte weights and a short context."""
    return pass_flop(shape, tokens, context) / pass_bytes(shape, tokens, context)


def roofline_seconds(shape: ModelShape, device: Device, tokens: int, context: int = 0) -> float:
    """The least time a pass can take: the slower of moving its bytes and computing its FLOP (Williams et al. 2009)."""
    memory = pass_bytes(shape, tokens, context) / device.bytes_per_second
    compute = pass_flop(shape, tokens, context) / device.flop_per_second
    return max(memory, compute)


def roofline_verify_cost(shape: ModelShape, device: Device, tokens: int, context: int = 0) -> float:
    """Cost of verifying `tokens` nodes in passes over one token, both at the roofline: 1 while memory limits."""
    return roofline_seconds(shape, device, tokens, context) / roofline_seconds(shape, device, 1, context)


def free_nodes(shape: ModelShape, device: Device, context: int = 0) -> int:
    """The most nodes of a pass that memory, not arithmetic, still limits; at least 1."""
    low, high = 1, 2
    while arithmetic_intensity(shape, high, context) <= device.ridge:
        low, high = high, 2 * high
        if high > 1 << 20:
            break
    while high - low > 1:
        middle = (low + high) // 2
        if arithmetic_intensity(shape, middle, context) <= device.ridge:
            low = middle
        else:
            high = middle
    return low


def _check_probability(value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"a probability lies between 0 and 1: {value}")
