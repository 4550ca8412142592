"""Drafts of one row while they are being gathered: tokens by prefix, each with the chance that it is kept."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from decode.drafters import Draft
from decode.tree import Tree


class History:
    """What came of guesses lately: for each kind of guess, kept ones against the number that was expected.

    Counts fade by `DECAY` a trial, so that the last few dozen decide, and by `FADE` a round, so that what is not tried
    any more gets another chance; `WEIGHT` expected hits are taken to have come true at the start.
    """

    DECAY = 0.96
    FADE = 0.99
    WEIGHT = 2.0

    def __init__(self) -> None:
        self._counts: dict[Hashable, tuple[float, float]] = {}

    def count(self, kind: Hashable, expected: float, kept: bool) -> None:
        hits, hoped = self._counts.get(kind, (0.0, 0.0))
        self._counts[kind] = (self.DECAY * hits + kept, self.DECAY * hoped + expected)

    def fade(self) -> None:
        """A round has passed."""
        self._counts = {kind: (self.FADE * hits, self.FADE * hoped) for kind, (hits, hoped) in self._counts.items()}

    def ratio(self, kind: Hashable) -> float:
        """Hits ÷ expected hits; 1 for a kind that was never tried."""
        hits, hoped = self._counts.get(kind, (0.0, 0.0))
        return (hits + self.WEIGHT) / (hoped + self.WEIGHT)


class Trie:
    """Drafted tokens by prefix. Node 0 is the root; a node comes after its parent."""

    def __init__(self, root: int):
        self.tokens = [root]
        self.parents = [-1]
        self.children: list[list[int]] = [[]]
        self.depths = [0]
        self.reach = [1.0]
        """Estimated probability that the node is kept; never above its parent's."""
        self.estimates = [1.0]
        """The drafter's own estimate of it, given the parent, before `History` corrected it."""
        self.kinds: list[Hashable] = [None]
        """Under which kind of guess the node's outcome is counted."""

    @property
    def size(self) -> int:
        return len(self.tokens)

    def child(self, node: int, token: int) -> int | None:
        return next((child for child in self.children[node] if self.tokens[child] == token), None)

    def left(self, node: int) -> float:
        """The estimated probability that none of the node's children is right."""
        return max(0.0, 1.0 - sum(self.estimates[child] for child in self.children[node]))

    def add(self, parent: int, token: int, estimate: float, kind: Hashable = None, ratio: float = 1.0) -> int:
        """A child of `parent`, with the drafter's estimate given the parent and the correction of it. One that is
        there already stays as it is."""
        known = self.child(parent, token)
        if known is not None:
            return known
        node = self.size
        self.tokens.append(token)
        self.parents.append(parent)
        self.children.append([])
        self.children[parent].append(node)
        self.depths.append(self.depths[parent] + 1)
        self.reach.append(self.reach[parent] * min(1.0, estimate * ratio))
        self.estimates.append(estimate)
        self.kinds.append(kind)
        return node

    def merge(self, other: Trie) -> None:
        """Takes in another's nodes, each with its chance given its parent; one that both have gets the greater."""
        places = [0]
        for node in range(1, other.size):
            above = other.reach[other.parents[node]]
            chance = min(1.0, other.reach[node] / above) if above > 0.0 else 0.0
            place = self.add(places[other.parents[node]], other.tokens[node], chance)
            self.estimates[place] = max(self.estimates[place], chance)
            places.append(place)
        self.reach = [1.0]
        for node in range(1, self.size):
            self.reach.append(self.reach[self.parents[node]] * self.estimates[node])

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """The nodes below the root that spell `tokens`, as far as there are any."""
        nodes: list[int] = []
        for token in tokens:
            child = self.child(nodes[-1] if nodes else 0, token)
            if child is None:
                break
            nodes.append(child)
        return nodes

    def path(self, node: int) -> list[int]:
        """Nodes from below the root to `node`."""
        nodes = []
        while node:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def learn(self, truth: Sequence[int], history: History) -> None:
        """Counts what came of the guesses: `truth` is the text behind the root."""
        node = 0
        for token in truth:
            left = 1.0
            for child in self.children[node]:
                kept = self.tokens[child] == token
                if self.kinds[child] is not None and left > 0.0:
                    history.count(self.kinds[child], min(1.0, self.estimates[child] / left), kept)
                if kept:
                    node = child
                    break
                left -= self.estimates[child]
            else:
                return

    def best(self, nodes: int | None, least: float = 0.0) -> set[int]:
        """The root and at most `nodes` - 1 others: those of greatest reach, none below `least`. No node has a greater
        reach than its parent, and a parent comes first, so that the choice is a tree."""
        order = sorted(range(1, self.size), key=lambda node: -self.reach[node])
        chosen = order if nodes is None else order[: max(0, nodes - 1)]
        return {0, *(node for node in chosen if self.reach[node] >= least)}

    def layout(self, chosen: set[int]) -> tuple[Tree, list[int]]:
        """The topology of the chosen nodes, and which node of the trie each of its nodes is. Depth-first, likelier
        siblings first: the likeliest path is committed without a move."""
        order, parents, ranks = [0], [-1], [0]
        waiting = [(child, 0, rank) for rank, child in self._ranked(0, chosen)]
        while waiting:
            node, parent, rank = waiting.pop()
            waiting += [(child, len(order), place) for place, child in self._ranked(node, chosen)]
            order.append(node)
            parents.append(parent)
            ranks.append(rank)
        return Tree(tuple(parents), tuple(ranks)), order

    def _ranked(self, node: int, chosen: set[int]) -> list[tuple[int, int]]:
        """(rank, child) of the chosen children, the least likely first."""
        kept = sorted((c for c in self.children[node] if c in chosen), key=lambda child: -self.reach[child])
        return list(enumerate(kept))[::-1]


def draft_of(tries: Sequence[Trie], nodes: int | None, least: float, device: torch.device) -> Draft:
    """The best nodes of each row's trie as a draft without laws; the shorter rows are padded."""
    laid = [trie.layout(trie.best(nodes, least)) for trie in tries]
    width = max(tree.size for tree, _ in laid)
    tokens, reach = [], []
    for trie, (tree, order) in zip(tries, laid, strict=True):
        tokens.append([trie.tokens[node] for node in order] + [0] * (width - tree.size))
        reach.append([trie.reach[node] for node in order])
    return Draft([tree for tree, _ in laid], torch.tensor(tokens, device=device), reach=reach)
