"""Topology of draft trees: parents, depths, ancestors, paths.

A tree of N nodes is numbered so that every parent comes before its children. Node 0 is the root, the last emitted
token, which the base has not seen yet. The worked example that the documentation and the tests share:

    node     0  1  2  3  4  5
    parent  -1  0  0  1  1  2          0 ─┬─ 1 ─┬─ 3
    rank     0  0  1  0  1  0             │     └─ 4
    depth    0  1  1  2  2  2             └─ 2 ─── 5

`rank` says which candidate of its depth a node takes: 0 is the head's most likely token, 1 the next. With candidates
A, B at depth 1 and C, D at depth 2, nodes 1…5 hold A, B, C, D, C, and node 4 sees exactly the slots of 0, 1 and 4.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from medusa_heads.errors import ConfigError


@dataclass(frozen=True)
class Tree:
    """A draft tree's topology; the tokens are kept elsewhere, so that one topology serves every round."""

    parents: tuple[int, ...]
    """Parent of each node; -1 for the root, which is node 0."""
    ranks: tuple[int, ...]
    """Which candidate of its depth a node takes; the root's is 0 and means nothing."""

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.ranks) or not self.parents or self.parents[0] != -1:
            raise ConfigError("a tree needs as many ranks as parents, and -1 as the parent of node 0")
        taken = set()
        for node, (parent, rank) in enumerate(zip(self.parents[1:], self.ranks[1:], strict=True), 1):
            if not 0 <= parent < node:
                raise ConfigError(f"node {node} of a tree has parent {parent}; a parent comes before its children")
            if rank < 0 or (parent, rank) in taken:
                raise ConfigError(f"node {node} of a tree repeats rank {rank} under node {parent}, or it is negative")
            taken.add((parent, rank))

    @property
    def size(self) -> int:
        """Number of nodes N, the root included."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Length of the longest path below the root: the most tokens that can be accepted in a round."""
        return max(self.depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node, most likely first."""
        lists: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], 1):
            lists[parent].append(node)
        return tuple(tuple(sorted(nodes, key=lambda n: self.ranks[n])) for nodes in lists)

    @cached_property
    def ancestor_mask(self) -> Tensor:
        """(N, N) boolean; [i, j] says whether j is i itself or one of its ancestors: what node i sees of the tree."""
        mask = torch.eye(self.size, dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], 1):
            mask[node] |= mask[parent]
        return mask

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        nodes = [node]
        while self.parents[nodes[-1]] >= 0:
            nodes.append(self.parents[nodes[-1]])
        return nodes[::-1]

    @classmethod
    def chain(cls, size: int) -> Tree:
        """A tree that does not branch: `size` nodes, the root included."""
        return cls(tuple(range(-1, size - 1)), (0,) * size)

    @classmethod
    def from_rank_paths(cls, paths: Sequence[Sequence[int]]) -> Tree:
        """The tree whose nodes are reached by these rank paths, e.g. `(0,), (1,), (0, 0), (0, 1), (1, 0)`.

        Nodes come depth-first, likelier siblings first, so that the likeliest path lies in consecutive nodes and is
        committed to the cache without being moved.
        """
        index: dict[tuple[int, ...], int] = {(): 0}
        parents, ranks = [-1], [0]
        for path in sorted(map(tuple, paths)):
            if not path or path[:-1] not in index:
                raise ConfigError(f"the rank path {path} has no parent in the tree")
            if path in index:
                raise ConfigError(f"the rank path {path} is given twice")
            index[path] = len(parents)
            parents.append(index[path[:-1]])
            ranks.append(path[-1])
        return cls(tuple(parents), tuple(ranks))

    def rank_paths(self) -> list[tuple[int, ...]]:
        """The rank path of each node below the root: the inverse of `from_rank_paths` up to the order of nodes."""
        return [tuple(self.ranks[n] for n in self.path(node)[1:]) for node in range(1, self.size)]

    def in_drawing_order(self) -> Tree:
        """The same topology with the children of each node ranked 0, 1, 2, … in the order of their ranks: how siblings
        are numbered that are drawn one after the other."""
        ranks = [0] * self.size
        for children in self.children:
            for place, child in enumerate(children):
                ranks[child] = place
        return self if tuple(ranks) == self.ranks else Tree(self.parents, tuple(ranks))

    def pruned(self, nodes: int) -> Tree:
        """The `nodes` nodes (root included) that are worth most, in their order here; the tree itself if no larger.

        A node is worth the product of 0.4 · (1 + rank)^-1.7 over its path: what trained heads come to (the embedded
        ones are right with 0.40, 0.11, 0.06, 0.04 at ranks 0 … 3). No node is worth more than its parent or than a
        sibling of lower rank, so what is left is a tree, in which each node has lost its last children.
        """
        if nodes < 1:
            raise ConfigError(f"a tree has at least its root: {nodes} nodes are allowed")
        if nodes >= self.size:
            return self
        worth = [1.0]
        for parent, rank in zip(self.parents[1:], self.ranks[1:], strict=True):
            worth.append(worth[parent] * 0.4 * (1 + rank) ** -1.7)
        kept = sorted(sorted(range(self.size), key=lambda node: (-worth[node], node))[:nodes])
        place = {node: i for i, node in enumerate(kept)}
        parents = (-1, *(place[self.parents[node]] for node in kept[1:]))
        return Tree(parents, tuple(self.ranks[node] for node in kept))

    def to_dict(self) -> dict[str, Any]:
        return {"parents": list(self.parents), "ranks": list(self.ranks)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Tree:
        if set(data) != {"parents", "ranks"}:
            raise ConfigError(f"a tree has the keys parents and ranks, not {sorted(data)}")
        for key, numbers in data.items():
            if not isinstance(numbers, list) or any(type(n) is not int for n in numbers):
                raise ConfigError(f"{key} of a tree must be a list of integers, not {numbers!r}")
        return cls(tuple(data["parents"]), tuple(data["ranks"]))


def search_tree(accuracy: Sequence[Sequence[float]], budget: int) -> Tree:
    """The tree of `budget` nodes (root included) with the greatest expected length.

    Args:
        accuracy: (K, R); [k][r] is the measured probability that the rank-r candidate at depth k + 1 is right, given
            that its parent is.
        budget: number of nodes that the base is to verify in one pass, 1 or more.

    A node is accepted when all nodes on its path are right, with probability ∏ accuracy[d][rank_d]. The expected
    length is 1 plus the sum of that product over all nodes below the root, and no product exceeds its parent's; so
    taking the best reachable node again and again is optimal, not only greedy (Cai et al. 2024, section 2.3.3).
    Stops early where nothing reachable has a positive probability.
    """
    if budget < 1:
        raise ConfigError(f"a tree has at least its root: the budget is {budget}")
    chosen: list[tuple[int, ...]] = []
    frontier: list[tuple[float, tuple[int, ...]]] = []

    def offer(probability: float, path: tuple[int, ...]) -> None:
        depth, rank = len(path) - 1, path[-1]
        if depth < len(accuracy) and rank < len(accuracy[depth]) and accuracy[depth][rank] > 0.0:
            heapq.heappush(frontier, (-probability * accuracy[depth][rank], path))

    # A sibling is offered only after the likelier one was taken: ranks must be sorted by accuracy for that.
    order = [sorted(range(len(row)), key=lambda r: -row[r]) for row in accuracy]
    accuracy = [[row[r] for r in ranks] for row, ranks in zip(accuracy, order, strict=True)]
    reach: dict[tuple[int, ...], float] = {(): 1.0}
    offer(1.0, (0,))
    while frontier and len(chosen) < budget - 1:
        negative, path = heapq.heappop(frontier)
        chosen.append(path)
        reach[path] = -negative
        offer(reach[path[:-1]], (*path[:-1], path[-1] + 1))
        offer(reach[path], (*path, 0))
    return Tree.from_rank_paths([tuple(order[d][r] for d, r in enumerate(path)) for path in chosen])


def expected_length(tree: Tree, accuracy: Sequence[Sequence[float]]) -> float:
    """Expected tokens a round: 1 (the base's own) plus each node's probability of being accepted."""
    reach = [1.0]
    for node in range(1, tree.size):
        reach.append(reach[tree.parents[node]] * accuracy[tree.depths[node] - 1][tree.ranks[node]])
    return sum(reach)
