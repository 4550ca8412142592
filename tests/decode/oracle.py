"""A drafter for tests that knows the texts to come and drafts them right with some probability."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decode.drafters import Draft, DraftRow
from decode.tree import Tree
from tests.conftest import VOCAB

TREE = Tree((-1, 0, 0, 1, 2, 4, 1), (0, 0, 1, 0, 0, 0, 1))
"""Two branches of two and three nodes, and a twig: a right path may lie on nodes that are not consecutive."""


class Oracle:
    """Draws for each round and row a branch of the tree to hold the truth; each of its nodes is right with probability
    `right`, all other nodes are random. Where no text continues the row's own, everything is random."""

    layers: Sequence[int] = ()

    def __init__(self, texts: Sequence[Sequence[int]], right: float = 0.8, seed: int = 0):
        self.texts = [list(text) for text in texts]
        self.right = right
        self.random = torch.Generator().manual_seed(seed)

    def start(self, rows: Sequence[DraftRow]) -> OracleSession:
        return OracleSession(self, len(rows))

    def continuation(self, text: list[int]) -> list[int]:
        """What follows a row's text; where a kept prefix was not shown again, `text` is the end of it alone."""
        for known in self.texts:
            for start in range(len(known) - len(text)):
                if known[start : start + len(text)] == text:
                    return known[start + len(text) : start + len(text) + TREE.depth]
        return []

    def fill(self, text: list[int]) -> list[int]:
        tokens = [text[-1], *torch.randint(VOCAB, (TREE.size - 1,), generator=self.random).tolist()]
        leaf = (3, 5)[int(torch.randint(2, (), generator=self.random))]
        for node, token in zip(TREE.path(leaf)[1:], self.continuation(text), strict=False):
            if torch.rand((), generator=self.random) < self.right:
                tokens[node] = token
        return tokens


class OracleSession:
    def __init__(self, oracle: Oracle, batch_size: int):
        self.oracle = oracle
        self.seen: list[list[int]] = [[] for _ in range(batch_size)]

    def observe(self, output: object, tokens: torch.Tensor, paths: Sequence[Sequence[int]]) -> None:
        for seen, row, path in zip(self.seen, tokens.tolist(), paths, strict=True):
            seen += [row[node] for node in path]

    def draft(self, roots: Sequence[int], nodes: int | None = None) -> Draft:
        rows = [self.oracle.fill([*seen, root]) for seen, root in zip(self.seen, roots, strict=True)]
        return Draft([TREE] * len(rows), torch.tensor(rows))

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.seen = [self.seen[row] for row in rows]

    def resume(self, row: DraftRow, length: int) -> None:
        self.seen = [self.seen[0][:length]]
