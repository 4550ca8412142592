"""Verification: which path of a draft tree to keep, and the base's own token that follows it.

All rules see one row: a topology, the drafted tokens and the base's law at each node. They hold no state and do not
know the engine. `verify_greedy`, `verify_point_mass`, `verify_sampled` and `accept_or_resample` are exact: what they
emit has the law of the base alone (proofs and a worked example in docs/exactness.md, the same by enumeration in
tests/decode/test_verify_exact.py). `verify_typical` is approximate.

Laws are float32 (or float64) probabilities over the whole vocabulary. The rules normalise them in float64 on the CPU,
so that what is accepted and what is resampled add up to the law to 1e-15, and ask for the law of a node only when they
reach it: a rejected branch costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from decode.tree import Tree

Law = Callable[[int], Tensor]
"""Node -> (V,) the base's probabilities of the token that follows that node's path."""

NORMALISATION_TOLERANCE = 1e-4
"""A float32 softmax over 256 Ki entries sums to 1 within 1e-6; a law further off than this is not one."""


@dataclass(frozen=True)
class Verdict:
    """What a round emits: the tokens of `path` after the root, then `next_token`.

    path: accepted node indices from the root (always 0) down, each a child of the one before.
    next_token: the base's own token after the last of them; it is the root of the next round.
    """

    path: list[int]
    next_token: int


class Chooser(Protocol):
    """The two random decisions of the rules. The tests enumerate them instead of drawing."""

    def accept(self, probability: float) -> bool:
        """True with `probability`."""
        ...

    def draw(self, weights: Tensor) -> int:
        """An index with probability weights / weights.sum(); `weights` are (V,) float64, non-negative, not all zero."""
        ...


class GeneratorChooser:
    """Decisions drawn from a CPU `torch.Generator`, one float64 uniform each; the global state is left alone."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def _uniform(self) -> Tensor:
        return torch.rand((), generator=self._generator, dtype=torch.float64)

    def accept(self, probability: float) -> bool:
        return self._uniform().item() < probability

    def draw(self, weights: Tensor) -> int:
        # Inverse distribution function. u < 1 keeps u * total < total, and the first entry above it has weight > 0.
        cumulative = weights.cumsum(0)
        return int(torch.searchsorted(cumulative, self._uniform() * cumulative[-1], right=True))


def verify_greedy(tree: Tree, tokens: Tensor, choices: Tensor | Callable[[int], int]) -> Verdict:
    """Keep drafted tokens as long as each is the base's own choice after the path before it.

    tokens (N,): drafted token of each node, the root's included. choices: argmax of the base's processed logits at each
    node, (N,) for all at once, or node -> token to be asked for the nodes of the kept path alone, from the root down
    (processors that look at the prefix are costly, and may have state). Emits the tokens of plain greedy decoding.
    """
    drafted = _per_node(tree, tokens, "tokens")
    choose = choices if callable(choices) else _per_node(tree, choices, "choices").__getitem__
    path = [0]
    while True:
        token = choose(path[-1])
        child = _child_with_token(tree, drafted, path[-1], token)
        if child is None:
            return Verdict(path, token)
        path.append(child)


def verify_point_mass(tree: Tree, tokens: Tensor, law: Law, generator: torch.Generator | Chooser) -> Verdict:
    """Exact for any drafts that were chosen without a look at `generator`: sample the target, keep the child it equals.

    The same law as trying the children in turn with the draft law "all mass on this token" (accept with probability
    p(x), else zero p(x) and renormalise), in one draw a depth.
    """
    drafted, chooser = _per_node(tree, tokens, "tokens"), _chooser(generator)
    path = [0]
    while True:
        token = chooser.draw(_target_law(law, path[-1]))
        child = _child_with_token(tree, drafted, path[-1], token)
        if child is None:
            return Verdict(path, token)
        path.append(child)


def accept_or_resample(
    p_target: Tensor, p_draft: Tensor, draft_token: int, generator: torch.Generator | Chooser
) -> tuple[bool, int]:
    """Speculative sampling of one token: whether the drafted one was accepted, and the token to emit.

    p_target, p_draft (V,): the base's law p and the law q that `draft_token` was sampled from. Accepts with probability
    min(1, p/q), else samples max(0, p - q) renormalised (Leviathan et al. 2023, algorithm 1; Chen et al. 2023).
    Raises ValueError for a law that is none, and for a drafted token that q cannot have given.
    """
    chooser = _chooser(generator)
    p = as_law(p_target, "the target law")
    q = as_law(p_draft, "the draft law", size=len(p))
    _require_support(q, draft_token, "the draft law")
    residual = _accept(p, q, draft_token, chooser)
    return (True, draft_token) if residual is None else (False, chooser.draw(residual))


def verify_sampled(
    tree: Tree,
    tokens: Tensor,
    draft_law: Sequence[Tensor | None] | Tensor,
    law: Law,
    generator: torch.Generator | Chooser,
) -> Verdict:
    """Exact for siblings sampled without replacement: reject in turn, with the residual after each sibling.

    tokens (N,): the children of node n, by rank 0, 1, …, are the draws of `draw_siblings` from draft_law[n]; a missing
    rank is an error. Nodes of one depth may share the draws (a head that does not see the path), since a round visits
    one node a depth.
    draft_law (N, V), or (V,) by node: that of node n is the law q those draws had; those of leaves are not read and
    may be None.

    At a node the j-th child x is accepted with probability min(1, p(x)/q(x)), where p is the law left by the rejected
    siblings before it (at first the base's) and q the draft law without their tokens, renormalised; on rejection p
    becomes max(0, p - q), renormalised. After the last child the next token is drawn from the p that is left.
    (Recursive rejection sampling: SpecInfer, Miao et al. 2023; without replacement: Jeon et al. 2024, Sequoia 2024.)
    """
    drafted, chooser = _per_node(tree, tokens, "tokens"), _chooser(generator)
    if len(draft_law) != tree.size:
        raise ValueError(f"draft_law has {len(draft_law)} rows for a tree of {tree.size} nodes")
    path = [0]
    while True:
        node = path[-1]
        p = _target_law(law, node)
        children = tree.children[node]
        q = _draft_law(draft_law[node], node, len(p)) if children else p
        for draw, child in enumerate(children):
            if tree.ranks[child] != draw:
                raise ValueError(f"node {child} has rank {tree.ranks[child]} but is draw {draw} of its siblings")
            token = drafted[child]
            q_now = _law_of_draw(q, token, f"the draft law at node {node}")
            residual = _accept(p, q_now, token, chooser)
            if residual is None:
                path.append(child)
                break
            p = residual
            q = q.index_fill(0, torch.tensor(token), 0.0)
        else:
            return Verdict(path, chooser.draw(p))


def verify_typical(
    tree: Tree,
    tokens: Tensor,
    law: Law,
    generator: torch.Generator | Chooser,
    ended: Callable[[int], bool] = lambda node: False,
    *,
    epsilon: float = 0.09,
    alpha: float = 0.3,
) -> Verdict:
    """APPROXIMATE: keep the longest path whose tokens are all typical; the emitted law is not the base's.

    A child x is kept if p(x) > min(epsilon, alpha * exp(-H(p))), p the base's law at its parent and H its entropy in
    nats (Medusa, Cai et al. 2024, section 2.3.1). Of paths of equal length the more probable one is kept. The token
    after the path is drawn from the base's law there. Laws of all typical inner nodes are asked for, but for those
    whose text has `ended`: nothing is kept below them.
    """
    if not 0.0 < epsilon <= 1.0 or not alpha > 0.0:
        raise ValueError(f"typical acceptance needs 0 < epsilon <= 1 and alpha > 0, got {epsilon=}, {alpha=}")
    drafted, chooser = _per_node(tree, tokens, "tokens"), _chooser(generator)
    laws: dict[int, Tensor] = {}
    best = (1, 0.0, [0])  # length, log-probability, path
    frontier = [best]
    while frontier:
        length, score, path = frontier.pop()
        best = max(best, (length, score, path), key=lambda found: found[:2])
        if not tree.children[path[-1]] or ended(path[-1]):
            continue
        p = laws[path[-1]] = _target_law(law, path[-1])
        entropy = torch.special.entr(p).sum()
        threshold = min(epsilon, alpha * float(torch.exp(-entropy)))
        for child in tree.children[path[-1]]:
            probability = float(p[drafted[child]])
            if probability > threshold:
                frontier.append((length + 1, score + float(torch.log(p[drafted[child]])), [*path, child]))
    last = best[2][-1]
    return Verdict(best[2], chooser.draw(laws[last] if last in laws else _target_law(law, last)))


def draw_siblings(draft_law: Tensor, count: int, generator: torch.Generator | Chooser) -> list[int]:
    """`count` distinct tokens, drawn from draft_law (V,) one after the other without replacement: drafts for
    `verify_sampled`.

    Where fewer than `count` tokens have probability, the smallest other ids fill up; `verify_sampled` knows them, by
    the draft law having nothing left, as drafts without a law.
    """
    chooser = _chooser(generator)
    weights = as_law(draft_law, "the draft law")
    if count > len(weights):
        raise ValueError(f"cannot draw {count} distinct tokens from a vocabulary of {len(weights)}")
    supported = min(count, int(torch.count_nonzero(weights)))
    drawn: list[int] = []
    for _ in range(supported):
        drawn.append(chooser.draw(weights))
        weights = weights.index_fill(0, torch.tensor(drawn[-1]), 0.0)
    fillers = (token for token in range(len(weights)) if token not in drawn)
    return drawn + [next(fillers) for _ in range(count - supported)]


def as_law(probabilities: Tensor, name: str, size: int | None = None) -> Tensor:
    """`probabilities` (V,) checked and normalised to sum 1 in float64 on the CPU; ValueError says what is wrong."""
    if probabilities.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name} must be float32 or float64 probabilities, got {probabilities.dtype}")
    if probabilities.dim() != 1 or (size is not None and len(probabilities) != size):
        expected = "(V,)" if size is None else f"({size},)"
        raise ValueError(f"{name} must have shape {expected}, got {tuple(probabilities.shape)}")
    law = probabilities.detach().to(device="cpu", dtype=torch.float64)
    smallest, total = law.min().item(), law.sum().item()
    if not smallest >= 0.0:  # a NaN fails this too
        raise ValueError(f"{name} has a {'negative' if smallest < 0.0 else 'NaN'} entry ({smallest})")
    if not abs(total - 1.0) <= NORMALISATION_TOLERANCE:
        raise ValueError(f"{name} sums to {total}, not to 1")
    return law / total


def _accept(p: Tensor, q: Tensor, token: int, chooser: Chooser) -> Tensor | None:
    """None if `token`, drawn from q, is accepted for p; else the normalised residual max(0, p - q).

    A residual without mass means p = q, where rejection has probability 0. Only rounding leads there; p itself is left.
    """
    if chooser.accept(min(1.0, (p[token] / q[token]).item())):
        return None
    residual = torch.clamp(p - q, min=0.0)
    mass = residual.sum().item()
    return residual / mass if mass > 0.0 else p


def _law_of_draw(q: Tensor, token: int, name: str) -> Tensor:
    """The law of the next draw without replacement: q (earlier siblings zeroed) renormalised; a point mass on `token`
    where nothing is left to draw, as any token that was not drawn is a draft without a law."""
    _require_known(q, token)
    left = q.sum().item()
    if left == 0.0:  # exactly: every entry has been set to zero
        return torch.zeros_like(q).index_fill_(0, torch.tensor(token), 1.0)
    _require_support(q, token, f"{name} (without the siblings before it)")
    return q / left


def _require_known(q: Tensor, token: int) -> None:
    if not 0 <= token < len(q):
        raise ValueError(f"drafted token {token} is not in the vocabulary of {len(q)}")


def _require_support(q: Tensor, token: int, name: str) -> None:
    _require_known(q, token)
    if q[token] == 0.0:
        raise ValueError(f"{name} gives the drafted token {token} probability 0: it was not sampled from that law")


def _target_law(law: Law, node: int) -> Tensor:
    return as_law(law(node), f"the target law at node {node}")


def _draft_law(law: Tensor | None, node: int, size: int) -> Tensor:
    if law is None:
        raise ValueError(f"node {node} has children drawn from a law, but no draft law is given for it")
    return as_law(law, f"the draft law at node {node}", size=size)


def _per_node(tree: Tree, values: Tensor, name: str) -> list[int]:
    if values.shape != (tree.size,):
        raise ValueError(f"{name} must have shape ({tree.size},), one for each node, got {tuple(values.shape)}")
    return values.tolist()


def _child_with_token(tree: Tree, drafted: list[int], node: int, token: int) -> int | None:
    return next((child for child in tree.children[node] if drafted[child] == token), None)


def _chooser(generator: torch.Generator | Chooser) -> Chooser:
    return GeneratorChooser(generator) if isinstance(generator, torch.Generator) else generator
