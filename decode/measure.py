"""The machine's costs by the clock: a pass of the base over T nodes, drafting with heads, and whole rounds of decoding.

Sizes take turns within each repetition, so that a change of the machine's speed meets all of them; medians are kept.
The pass is the engine's own: positions and mask of a tree, the base's states, the logits of every node, their argmax.
A pass alone, again and again, finds its weights and its kernels warmer than decoding does: what is predicted from
passes is too fast. So trees are chosen by the rounds.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from decode.cache import TreeCache
from decode.engine import likeliest
from decode.tree import Tree
from decode.tuning import RoundCost
from medusa_heads.errors import ConfigError

if TYPE_CHECKING:
    from decode.engine import Decoder
    from decode.settings import GenerationSettings
    from medusa_heads.base import Base
    from medusa_heads.medusa import MedusaHeads

Key = TypeVar("Key", int, str)
SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CONTEXTS = (128, 512)
WARM_UP = 2
"""Repetitions before those that count."""


@dataclass(frozen=True)
class Costs:
    """Median seconds, with quartiles beside them."""

    forward: dict[int, dict[int, tuple[float, float, float]]]
    """[context][nodes]: first quartile, median, third quartile of a pass."""
    draft: dict[int, tuple[float, float, float]]
    """[depth]: of drafting that many tokens ahead; empty without heads."""
    repeats: int

    def round_cost(self, context: int | None = None, fixed: float = 0.0) -> RoundCost:
        """What the choice of a tree asks for: medians at one context, or their mean over all measured contexts."""
        if context is not None and context not in self.forward:
            raise ConfigError(f"no costs at a context of {context}; measured are {sorted(self.forward)}")
        chosen = list(self.forward.values()) if context is None else [self.forward[context]]
        forward = {size: statistics.fmean(at[size][1] for at in chosen) for size in chosen[0]}
        draft = {depth: spread[1] for depth, spread in self.draft.items()}
        return RoundCost(forward, draft or None, fixed)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Costs:
        """From JSON, whose keys are strings."""
        forward = {
            int(context): {int(size): _spread_of(spread) for size, spread in at.items()}
            for context, at in data["forward"].items()
        }
        draft = {int(depth): _spread_of(spread) for depth, spread in data["draft"].items()}
        return cls(forward, draft, int(data["repeats"]))


def measure_costs(
    base: Base,
    heads: MedusaHeads | None = None,
    *,
    sizes: Sequence[int] = SIZES,
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = 15,
    ranks: int = 8,
    seed: int = 0,
) -> Costs:
    """Times the base over `sizes` nodes behind `contexts` committed tokens, and the heads if there are any.

    Args:
        ranks: candidates asked of each head while drafting is timed.
    """
    if repeats < 1 or min(sizes, default=0) < 1 or min(contexts, default=0) < 1:
        raise ConfigError("costs are measured over at least one size, one context and one repetition, all positive")
    order = random.Random(seed)
    forward = {}
    for context in contexts:
        jobs = {size: pass_over(base, context, size) for size in sizes}
        forward[context] = time_in_turns(jobs, repeats, order)
    draft = {} if heads is None else time_in_turns(_draft_jobs(base, heads, ranks), repeats, order)
    return Costs(forward, draft, repeats)


def pass_over(base: Base, context: int, size: int) -> Callable[[], object]:
    """A job: one pass over a tree of `size` nodes behind `context` tokens. It leaves its cache as it was."""
    generator = torch.Generator().manual_seed(size)

    def draw(count: int) -> Tensor:
        return torch.randint(base.vocab_size, (1, count), generator=generator).to(base.device)

    cache = TreeCache(base.num_layers, capacity=context + size)
    positions = torch.arange(context, device=base.device)[None]
    base.forward(draw(context), position_ids=positions, cache=cache)
    cache.commit([range(context)])
    tree, tokens = bushy_tree(size), draw(size)
    depths = torch.tensor(tree.depths, device=base.device)
    ancestors = tree.ancestor_mask.to(base.device)

    def job() -> Tensor:
        positions = cache.positions(depths)
        output = base.forward(
            tokens,
            position_ids=positions,
            attention_mask=cache.visible(ancestors),
            key_positions=cache.key_positions(positions),
            cache=cache,
        )
        return likeliest(base.project(output.last_hidden_state)).to("cpu")

    return job


def _draft_jobs(base: Base, heads: MedusaHeads, ranks: int) -> dict[int, Callable[[], object]]:
    from decode.drafters.medusa import MedusaDrafter

    hidden = torch.randn(1, base.hidden_size, generator=torch.Generator().manual_seed(0)).to(base.device, base.dtype)
    root = torch.tensor([0], device=base.device)
    jobs: dict[int, Callable[[], object]] = {}
    for depth in range(1, heads.config.num_heads + 1):
        drafter = MedusaDrafter(heads, base, _caterpillar(depth, ranks))
        jobs[depth] = lambda drafter=drafter: drafter.fill(hidden, root).to("cpu")  # type: ignore[misc]
    return jobs


def measure_rounds(
    decoders: Mapping[int, Decoder], prompts: Sequence[Sequence[int]], settings: GenerationSettings, repeats: int
) -> dict[int, tuple[float, float, float]]:
    """Seconds of a round of each decoder in the midst of decoding, all stages included, the prompt's pass not.

    In each repetition every decoder answers one prompt, in an order that changes; the first repetition warms up.
    """
    order, seconds = random.Random(0), {key: list[float]() for key in decoders}
    for repetition in range(repeats + 1):
        for key in order.sample(list(decoders), len(decoders)):
            stats = decoders[key].generate(prompts[repetition % len(prompts)], settings).stats
            if repetition > 0 and stats.rounds > 0:
                seconds[key].append((stats.seconds - stats.stage_seconds["prefill"]) / stats.rounds)
    if not all(seconds.values()):
        raise ConfigError("no rounds to measure: the base ends its answers at once")
    return {key: spread(values) for key, values in seconds.items()}


def bushy_tree(size: int) -> Tree:
    """A tree of `size` nodes with two children a node: as deep and as wide as draft trees are."""
    return Tree((-1, *((node - 1) // 2 for node in range(1, size))), (0, *((node - 1) % 2 for node in range(1, size))))


def _caterpillar(depth: int, ranks: int) -> Tree:
    """A chain `depth` deep whose root has `ranks` children."""
    return Tree.from_rank_paths([(0,) * d for d in range(1, depth + 1)] + [(rank,) for rank in range(1, ranks)])


def time_in_turns(
    jobs: Mapping[Key, Callable[[], object]], repeats: int, order: random.Random
) -> dict[Key, tuple[float, float, float]]:
    """Quartiles of each job's seconds. In each repetition every job runs once, in an order that changes;
    `WARM_UP` repetitions more go before."""
    seconds: dict[Key, list[float]] = {key: [] for key in jobs}
    for repetition in range(repeats + WARM_UP):
        for key in order.sample(list(jobs), len(jobs)):
            begin = time.perf_counter()
            jobs[key]()  # ends with a copy to the CPU, so a device has finished
            if repetition >= WARM_UP:
                seconds[key].append(time.perf_counter() - begin)
    return {key: spread(values) for key, values in seconds.items()}


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _spread_of(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = values
    return float(low), float(middle), float(high)
