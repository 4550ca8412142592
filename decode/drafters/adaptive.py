"""How far to draft: the confidence of a draft model, corrected by what came of it lately.

A row's `Record` keeps what was drafted until the text shows what was right, and learns from it: how often the draft
model's tokens are kept against its own probabilities, and of drawn ones how often each draw is. A draft then goes on as
long as a further pass of the draft model is expected to earn more than it costs.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from decode.drafters import Draft, DraftRow
from decode.drafters.growth import FilledGrowth, Growth, LikeliestGrowth
from decode.drafters.trie import History, Trie
from decode.dynamic import DynamicTree
from decode.tree import Tree, search_tree
from medusa_heads.errors import ConfigError

DRAWN = (0.6, 0.3, 0.2, 0.15)
"""Chance that the first, second, … draw at a node is kept if none before it was: where a row's history begins. Further
draws have the last one's."""
LIKELIEST = "likeliest"


@dataclass(frozen=True)
class Reach:
    """How far a draft model may go.

    Raises ConfigError for limits that are none.
    """

    depth: int = 6
    """Passes of the draft model at most: the most tokens that a round can accept."""
    width: int = 1
    """Nodes read in a pass, and children of a node, at most; 1 drafts a chain."""
    nodes: int | None = None
    """Nodes to verify at most, the root included; None: depth + 1 for a chain, 16 for a tree."""
    node_floor: float = 0.04
    """A token less likely to be kept is not verified."""
    pass_cost: float | None = None
    """Of a pass of the draft model, in passes of the base; a pass is made if it is expected to earn at least as many
    tokens. None: the ratio of the parameters that they read."""

    def __post_init__(self) -> None:
        for name in ("depth", "width"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of a draft must be at least 1, not {getattr(self, name)}")
        if self.nodes is not None and self.nodes < 1:
            raise ConfigError(f"a draft has at least its root: nodes is {self.nodes}")
        if not 0.0 <= self.node_floor <= 1.0:
            raise ConfigError(f"node_floor is a probability, not {self.node_floor}")
        if self.pass_cost is not None and not self.pass_cost >= 0.0:
            raise ConfigError(f"pass_cost cannot be {self.pass_cost}")

    @property
    def most_nodes(self) -> int:
        if self.nodes is not None:
            return self.nodes
        return self.depth + 1 if self.width == 1 else 16


class Record:
    """One row's history, and its last draft until what came of it is known."""

    def __init__(self, row: DraftRow):
        self.row = row
        self.history = History()
        self.trie: Trie | None = None
        self.drafted_at = 0
        """Length of the text, the root included, that the draft continues."""

    def learn(self, text: Sequence[int]) -> None:
        """Counts the last draft's outcome; `text` ends in the new root."""
        if self.trie is not None:
            self.trie.learn(text[self.drafted_at :], self.history)
        self.history.fade()
        self.trie, self.drafted_at = None, len(text)

    def growth(self, root: int, reach: Reach, cost: float, nodes: int, rows: Tensor | None, vocab_size: int) -> Growth:
        """The next tree of the row, to be grown. rows (R,) on the CPU, the token of each logit; None: all of them."""
        if self.row.temperature == 0.0:
            ratio = self.history.ratio(LIKELIEST)
            floor = min(1.0, reach.node_floor / ratio)
            return LikeliestGrowth(root, DynamicTree(reach.depth, reach.width, nodes, floor, cost / ratio))
        tree = self.drawn_tree(reach, cost, nodes)
        temperature = self.row.temperature if tree.size > 1 else 0.0
        return FilledGrowth(root, tree, temperature, self.row.generator, rows, vocab_size)

    def drawn_tree(self, reach: Reach, cost: float, nodes: int) -> Tree:
        """The topology for drawn drafts. It goes by the history alone: drawn values may not choose it."""
        rates = [
            min(1.0, DRAWN[min(rank, len(DRAWN) - 1)] * self.history.ratio(("drawn", rank)))
            for rank in range(reach.width)
        ]
        kept = 1.0 - math.prod(1.0 - rate for rate in rates)
        depth = 1
        while depth < reach.depth and kept**depth >= cost:
            depth += 1
        at_once, left = [], 1.0
        for rate in rates:
            at_once.append(rate * left)
            left *= 1.0 - rate
        return search_tree([at_once] * depth, nodes)

    def keep(self, grown: Growth, tree: Tree, tokens: Sequence[int]) -> list[float]:
        """Remembers a draft, for `learn`. Returns the estimated chance of each node."""
        self.trie, places = Trie(tokens[0]), [0]
        confidence = dict(zip(grown.paths, grown.scores, strict=True)) if isinstance(grown, LikeliestGrowth) else None
        for node, path in enumerate(tree.rank_paths(), 1):
            parent = places[tree.parents[node]]
            if confidence is not None:
                kind: Hashable = LIKELIEST
                estimate = math.exp(confidence[path] - confidence[path[:-1]])
            else:
                kind = ("drawn", path[-1])
                estimate = DRAWN[min(path[-1], len(DRAWN) - 1)] * self.trie.left(parent)
            places.append(self.trie.add(parent, tokens[node], estimate, kind, self.history.ratio(kind)))
        return [self.trie.reach[place] for place in places]


def remember(records: Sequence[Record], growths: Sequence[Growth], draft: Draft) -> Draft:
    """The draft that was grown, with the chance of each node, kept by each row's record."""
    rows = zip(records, growths, draft.trees, draft.tokens.tolist(), strict=True)
    chances = [record.keep(growth, tree, tokens) for record, growth, tree, tokens in rows]
    return Draft(draft.trees, draft.tokens, draft.laws, chances)
