"""Growing a draft tree depth by depth, for draft models that see what they have drafted.

A round has one `Step` a depth: the draft model reads the frontier of every row's tree in one batch and gives logits for
the children. What the children are and which of them go on is a row's own `Growth`:

- `LikeliestGrowth`: a dynamic tree. Children are the likeliest tokens, the frontier is the best of a depth by the
  product of confidences, and what is verified in the end are the best nodes of all depths (Li et al. 2024, "EAGLE-2").
- `FilledGrowth`: a tree of a given topology, its children the likeliest tokens or drawn without replacement from the
  draft model's law. Drawn children need a topology that does not look at their values: docs/eagle.md has the proof.

Rows of a batch may grow differently; they share the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from decode.drafters import Draft, DraftRow
from decode.dynamic import DynamicTree, TreeChoice
from decode.tree import Tree
from decode.verify import draw_siblings

Step = Callable[[list[list[int]] | None, list[list[int]]], Tensor]
"""(parents, tokens) → logits (B, M, R) of what follows M drafted tokens a row. parents: for each token, the place of
its parent among those of the step before; None for the roots, the first step. R counts the rows of the vocabulary that
are drafted from."""


@dataclass(frozen=True)
class Best:
    """The likeliest continuations of M nodes, k each, best first."""

    tokens: list[list[int]]
    logs: list[list[float]]
    """Log-probabilities, at most 0."""


class Growth(Protocol):
    """One row's tree in the making. Nodes are numbered by their place in `tokens`; 0 is the root."""

    tokens: list[int]
    frontier: list[int]
    """Nodes that the next step reads; empty when the tree is whole."""
    places: list[int]
    """For each of them, its parent's place in the frontier before."""
    ranks: int
    """Continuations of each node that `take` looks at."""

    def take(self, logits: Tensor, best: Best) -> None:
        """Gives the frontier its children: logits (M, R) float32 of what follows each of its M nodes."""
        ...

    def finish(self) -> tuple[Tree, list[int], list[Tensor | None] | None]:
        """Topology, tokens of its nodes, and the laws that children were drawn from (see `decode.drafters.Draft`)."""
        ...

    def reach(self) -> list[float] | None:
        """By node, how likely it is to be kept; None where the growth makes no estimate."""
        ...


class LikeliestGrowth:
    """A dynamic tree.

    No path is more confident than its beginning, so that the best nodes of all are connected, and a node that is not
    among the best so far has no descendant that will be: it is not read, which changes nothing in what is found.
    """

    def __init__(self, root: int, rule: DynamicTree):
        self.rule = rule
        self.tokens = [root]
        self.paths: list[tuple[int, ...]] = [()]
        """Ranks from the root to each node."""
        self.scores = [0.0]
        """Log-confidence of each node."""
        self.kept: list[int] = []
        """The best nodes below the root so far."""
        self.depth = 0
        self.ranks = min(rule.width, rule.nodes - 1)
        self.frontier = [0] if rule.nodes > 1 else []
        self.places = [0] if rule.nodes > 1 else []
        self._floor = math.log(rule.node_floor) if rule.node_floor > 0.0 else -math.inf

    def take(self, logits: Tensor, best: Best) -> None:
        born = len(self.tokens)
        above = []
        """Place of each new node's parent in the frontier."""
        for place, node in enumerate(self.frontier):
            base, path = self.scores[node], self.paths[node]
            for rank, (token, log) in enumerate(zip(best.tokens[place], best.logs[place], strict=True)):
                score = base + log
                if rank == self.ranks or not score >= self._floor:
                    break
                self.tokens.append(token)
                self.paths.append((*path, rank))
                self.scores.append(score)
                above.append(place)
        # Of equally confident nodes the earlier wins: a parent before its children, a likelier sibling before others.
        order = sorted([*self.kept, *range(born, len(self.tokens))], key=lambda node: (-self.scores[node], node))
        self.kept = order[: self.rule.nodes - 1]
        self.depth += 1
        self.frontier = [node for node in self.kept if node >= born][: self.rule.width]
        if self.depth == self.rule.depth or self._gain() < self.rule.step_floor:
            self.frontier = []
        self.places = [above[node - born] for node in self.frontier]

    def _gain(self) -> float:
        return sum(math.exp(self.scores[node]) for node in self.frontier)

    def finish(self) -> tuple[Tree, list[int], None]:
        order = self._in_order()
        tree = Tree.from_rank_paths([self.paths[node] for node in order[1:]])
        return tree, [self.tokens[node] for node in order], None

    def reach(self) -> list[float]:
        return [math.exp(self.scores[node]) for node in self._in_order()]

    def _in_order(self) -> list[int]:
        """What is kept, the root included, as the finished tree numbers it."""
        return [0, *sorted(self.kept, key=self.paths.__getitem__)]


@lru_cache(maxsize=64)
def _plan(tree: Tree) -> list[tuple[list[int], list[int]]]:
    """The frontiers of a topology: for each depth, its nodes with children, and their parents' places before."""
    frontiers: list[tuple[list[int], list[int]]] = []
    before: list[int] = []
    for depth in range(tree.depth):
        nodes = [n for n in range(tree.size) if tree.depths[n] == depth and tree.children[n]]
        frontiers.append((nodes, [before.index(tree.parents[n]) if depth else 0 for n in nodes]))
        before = nodes
    return [*frontiers, ([], [])]


class FilledGrowth:
    """A tree of a given topology.

    Args:
        tree: for drawn children its ranks do not matter, but the order of siblings that they give.
        temperature: 0: a node of rank r takes candidate r of its parent. Above: the children of a node are drawn
            without replacement from softmax(logits ÷ temperature), in the order of their ranks.
        generator: what they are drawn with.
        rows: (R,) on the CPU, the token of each logit; None: the logits cover the whole vocabulary.
    """

    def __init__(
        self,
        root: int,
        tree: Tree,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
        rows: Tensor | None = None,
        vocab_size: int = 0,
    ):
        self.tree = tree if temperature == 0.0 else tree.in_drawing_order()
        self.tokens = [root] * tree.size
        self.temperature = temperature
        self.generator = generator
        self.rows = rows
        self.vocab_size = vocab_size
        self.laws: list[Tensor | None] | None = None if temperature == 0.0 else [None] * tree.size
        self.ranks = 1 + max(tree.ranks) if temperature == 0.0 else 0
        self._plan = _plan(self.tree)
        self.depth = 0
        self.frontier, self.places = self._plan[0]

    def take(self, logits: Tensor, best: Best) -> None:
        laws = None
        if self.laws is not None:
            laws = torch.softmax(logits / self.temperature, dim=-1).to("cpu")
        for place, node in enumerate(self.frontier):
            children = self.tree.children[node]
            if laws is None:
                tokens = [best.tokens[place][self.tree.ranks[child]] for child in children]
            else:
                tokens = self._draw(node, laws[place], len(children))
            for child, token in zip(children, tokens, strict=True):
                self.tokens[child] = token
        self.depth += 1
        self.frontier, self.places = self._plan[self.depth]

    def _draw(self, node: int, q: Tensor, count: int) -> list[int]:
        """Draws the children of a node from q (R,) and keeps the law over the whole vocabulary."""
        assert self.laws is not None and self.generator is not None
        drawn = draw_siblings(q, count, self.generator)
        if self.rows is None:
            self.laws[node] = q
            return drawn
        self.laws[node] = q.new_zeros(self.vocab_size).index_copy_(0, self.rows, q)
        return self.rows[drawn].tolist()

    def finish(self) -> tuple[Tree, list[int], list[Tensor | None] | None]:
        return self.tree, self.tokens, self.laws

    def reach(self) -> None:
        """Ranks alone say nothing of how likely a node is."""


def start_growths(
    choice: TreeChoice,
    rows: Sequence[DraftRow],
    roots: Sequence[int],
    *,
    nodes: int | None,
    deepest: int,
    ids: Tensor | None,
    vocab_size: int,
) -> list[Growth]:
    """Each row's growth, by its temperature.

    Args:
        nodes: of a tree at most; None: as many as `choice` says.
        deepest: the depth to which all rows have room; a given topology that is deeper shrinks to its root.
        ids: (R,) on the CPU, the token of each logit; None: the logits cover the vocabulary of `vocab_size`.
    """
    growths: list[Growth] = []
    for row, root in zip(rows, roots, strict=True):
        drawn = row.temperature > 0.0
        tree = choice.drawn if drawn else choice.likeliest
        if isinstance(tree, DynamicTree):
            limits = {
                "depth": min(tree.depth, deepest),
                "nodes": tree.nodes if nodes is None else min(tree.nodes, nodes),
            }
            growths.append(LikeliestGrowth(root, replace(tree, **limits) if deepest > 0 else DynamicTree(1, 1, 1)))
            continue
        tree = tree if nodes is None else tree.pruned(nodes)
        tree = tree if tree.depth <= deepest else Tree.chain(1)
        temperature = row.temperature if tree.size > 1 else 0.0
        growths.append(FilledGrowth(root, tree, temperature, row.generator, ids, vocab_size))
    return growths


def best_continuations(logits: Tensor, count: int, rows: Tensor | None) -> tuple[list[Any], list[Any]]:
    """Tokens and log-probabilities (B, M, count) of the greatest logits (B, M, R), as lists."""
    values, places = logits.topk(count, dim=-1)
    logs = (values - logits.logsumexp(-1, keepdim=True)).clamp_max_(0.0)
    return (places if rows is None else rows[places]).tolist(), logs.tolist()


def grow(step: Step, growths: Sequence[Growth], rows: Tensor | None, device: torch.device) -> Draft:
    """Runs the steps until every tree is whole. rows: the token of each logit, None for the whole vocabulary."""
    parents = None
    while width := max(len(growth.frontier) for growth in growths):
        tokens = [[g.tokens[node] for node in g.frontier] + [0] * (width - len(g.frontier)) for g in growths]
        logits = step(parents, tokens).float()
        count = min(max(growth.ranks for growth in growths), logits.shape[-1])
        token_lists, log_lists = best_continuations(logits, count, rows)
        for row, growth in enumerate(growths):
            size = len(growth.frontier)
            if size:
                growth.take(logits[row, :size], Best(token_lists[row][:size], log_lists[row][:size]))
        width = max(len(growth.frontier) for growth in growths)
        parents = [growth.places + [0] * (width - len(growth.places)) for growth in growths]
    grown = [growth.finish() for growth in growths]
    size = max(tree.size for tree, _, _ in grown)
    padded = torch.tensor([ids + [0] * (size - len(ids)) for _, ids, _ in grown], device=device)
    trees, laws = [tree for tree, _, _ in grown], [law for _, _, law in grown]
    return Draft(trees, padded, laws, [growth.reach() for growth in growths])
