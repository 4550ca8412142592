"""The draft tree for a machine: what a tree gains, by the heads' measured accuracy, over what it costs, by the clock.

A round takes seconds by its tree's size and depth, and gives the tree's expected length; the best tree maximises their
ratio.
For one size and depth limit the tree of greatest expected length is found exactly (`decode.tree.search_tree` from
accuracies by depth and rank; the likeliest paths from joint measurements), and sizes and depths are tried one by one,
so that the choice is optimal for the figures given. (Cai et al. 2024, section 2.3.3; Chen et al. 2024, "Sequoia",
section 4.3, which adds the machine's cost.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from decode.tree import Tree, expected_length, search_tree
from medusa_heads.errors import ConfigError

RankPath = tuple[tuple[int, ...], float]
"""A rank path and how often it comes true."""


@dataclass(frozen=True)
class RoundCost:
    """Seconds of a round by the tree's size and depth."""

    forward: Mapping[int, float]
    """By number of nodes: the base's pass over them and the choice of a path. Between two measured sizes a straight
    line is assumed; larger trees than the largest measured are not considered."""
    draft: Mapping[int, float] | None = None
    """By depth of the tree, from 1: what drafting takes. None: nothing."""
    fixed: float = 0.0
    """What any round takes beside, a round without drafts included."""

    def __post_init__(self) -> None:
        if 1 not in self.forward or min(self.forward) < 1 or min(self.forward.values()) <= 0.0:
            raise ConfigError("costs of verifying need positive seconds for sizes from 1 node on, 1 included")

    @property
    def largest(self) -> int:
        return max(self.forward)

    @property
    def deepest(self) -> int | None:
        """The greatest depth whose drafting was measured; None: any."""
        return None if self.draft is None else max(self.draft, default=0)

    def seconds(self, size: int, depth: int) -> float:
        """Seconds of a round that verifies `size` nodes, `depth` below the root."""
        draft = 0.0 if depth == 0 or self.draft is None else self.draft[depth]
        return interpolate(self.forward, size) + draft + self.fixed


@dataclass(frozen=True)
class Option:
    """A tree and what it is expected to give."""

    tree: Tree
    expected_length: float
    """Tokens a round, the base's own included."""
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.expected_length / self.seconds


def interpolate(measured: Mapping[int, float], size: int) -> float:
    """The value at `size` on the polygon through the measured points. Raises ConfigError outside their range."""
    if size in measured:
        return measured[size]
    sizes = sorted(measured)
    right = bisect_left(sizes, size)
    if right in (0, len(sizes)):
        raise ConfigError(f"no cost was measured around {size} nodes; measured are {', '.join(map(str, sizes))}")
    low, high = sizes[right - 1], sizes[right]
    weight = (size - low) / (high - low)
    return (1.0 - weight) * measured[low] + weight * measured[high]


def options_from_accuracy(accuracy: Sequence[Sequence[float]], cost: RoundCost) -> list[Option]:
    """For each size and depth limit the tree of greatest expected length, by size.

    Args:
        accuracy: (K, R); [k][r] is the probability that the rank-r candidate at depth k + 1 is right, given that its
            parent is.
    """

    def best(size: int, depth: int) -> tuple[Tree, float]:
        tree = search_tree(accuracy[:depth], size)
        return tree, expected_length(tree, accuracy)

    return _options(best, len(accuracy), cost)


def options_from_paths(paths: Sequence[RankPath], cost: RoundCost) -> list[Option]:
    """The same from joint measurements: how often each whole rank path comes true.

    Heads are right together and wrong together, so that products of accuracies misjudge a tree; paths do not.
    Paths are taken likeliest first; a path whose beginning is missing from the list is left out.
    """
    order = sorted(paths, key=lambda item: (-item[1], len(item[0]), item[0]))
    by_depth: dict[int, list[RankPath]] = {}

    def best(size: int, depth: int) -> tuple[Tree, float]:
        if depth not in by_depth:
            by_depth[depth] = _rooted([item for item in order if len(item[0]) <= depth])
        chosen = by_depth[depth][: size - 1]
        return Tree.from_rank_paths([path for path, _ in chosen]), 1.0 + sum(p for _, p in chosen)

    return _options(best, max((len(path) for path, _ in paths), default=0), cost)


def _rooted(order: Sequence[RankPath]) -> list[RankPath]:
    taken: set[tuple[int, ...]] = {()}
    kept = []
    for path, probability in order:
        if path and path[:-1] in taken and probability > 0.0:
            taken.add(path)
            kept.append((path, probability))
    return kept


def _options(best: Callable[[int, int], tuple[Tree, float]], num_heads: int, cost: RoundCost) -> list[Option]:
    deepest = num_heads if cost.deepest is None else min(num_heads, cost.deepest)
    found: dict[Tree, Option] = {}
    for size in range(1, cost.largest + 1):
        for depth in range(1, deepest + 1) if size > 1 else (0,):
            tree, length = best(size, depth)
            if tree not in found:
                found[tree] = Option(tree, length, cost.seconds(tree.size, tree.depth))
    return sorted(found.values(), key=lambda option: (option.tree.size, option.tree.depth))


def revalued(options: Sequence[Option], length: Callable[[Tree], float]) -> list[Option]:
    """The same trees with other figures of what they give."""
    return [replace(option, expected_length=length(option.tree)) for option in options]


def cost_of_rounds(seconds: Mapping[int, float], depths: Mapping[int, int], draft: Mapping[int, float]) -> RoundCost:
    """Costs from whole rounds.

    Args:
        seconds: by number of nodes, of a round with one tree of that size.
        depths: that tree's depth.
        draft: seconds of drafting by depth; only its differences weigh, for trees of other depths.

    Raises:
        ConfigError: a round took no longer than drafting alone, which only a disturbed measurement says.
    """
    drafting = {0: 0.0, **draft}
    left = {size: value - drafting[depths[size]] for size, value in seconds.items()}
    for size, value in left.items():
        if value <= 0.0:
            raise ConfigError(
                f"a round of {size} nodes was measured as no longer than drafting them alone: "
                "the machine was busy with other work, tune again when it is not"
            )
    return RoundCost(left, draft)


def best_option(options: Sequence[Option]) -> Option:
    """The fastest; of equally fast ones the smallest."""
    return max(options, key=lambda option: (option.tokens_per_second, -option.tree.size))
