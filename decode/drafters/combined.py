"""Several drafters in one tree, whose budget goes to what has been accepted lately.

Each source drafts its own tree; the trees are merged by their tokens, and of all nodes the likeliest are verified. A
node's chance is its source's own estimate, or a prior by depth and rank where it makes none, corrected by how that
source's guesses at that depth have fared (`trie.History`).

Where a source draws (rows sampled from a draft law), a node's children must be all the draws of one law and no others,
so such a row takes one source's tree in a round, by the tokens that it has been giving lately: what was drawn may not
choose it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decode.cache import TreeCache
from decode.drafters import Draft, Drafter, DraftRow, SharesCache
from decode.drafters.seen import SeenText
from decode.drafters.trie import History, Trie
from decode.tree import Tree
from medusa_heads.base import BaseOutput
from medusa_heads.errors import ConfigError

PRIOR = 0.4
"""Chance of a source's first candidate at a depth, given its parent, where the source makes no estimate; the next one
has the same share of what is left, and so on."""

RESTING = 0.3
"""A source whose first guesses come true less often than this share of what was expected is asked only now and then: as
often as its failures fade (`History.fade`)."""


class CombinedDrafter:
    """Drafters of one base in one tree.

    Args:
        nodes: most nodes of a tree, the root included.
        least: a token is verified if the chance that it is kept is at least this.
    """

    def __init__(self, drafters: Sequence[Drafter], device: torch.device, *, nodes: int = 16, least: float = 0.05):
        if len(drafters) < 2:
            raise ConfigError("at least two drafters are combined")
        if nodes < 1 or not 0.0 <= least <= 1.0:
            raise ConfigError(f"a tree has at least its root ({nodes=}), and least is a probability ({least=})")
        self.drafters = list(drafters)
        self.device, self.nodes, self.least = device, nodes, least
        self.layers: Sequence[int] = sorted({layer for drafter in drafters for layer in drafter.layers})

    def start(self, rows: Sequence[DraftRow]) -> CombinedSession:
        return CombinedSession(self, rows)

    def states_for(self, drafter: Drafter, output: BaseOutput) -> BaseOutput:
        """The states that one of the drafters asked for."""
        states = tuple(output.layer_states[self.layers.index(layer)] for layer in drafter.layers)
        return BaseOutput(output.last_hidden_state, states)


class CombinedSession:
    """The sessions of all sources, and for each row what came of their guesses."""

    def __init__(self, drafter: CombinedDrafter, rows: Sequence[DraftRow]):
        self.drafter = drafter
        self.sessions = [source.start(rows) for source in drafter.drafters]
        self.seen = SeenText(len(rows))
        self.rows = [_RowState(row) for row in rows]

    def share(self, cache: TreeCache) -> None:
        for session in self.sessions:
            if isinstance(session, SharesCache):
                session.share(cache)

    def observe(self, output: BaseOutput, tokens: Tensor, paths: Sequence[Sequence[int]]) -> None:
        self.seen.observe(tokens, paths)
        for source, session in zip(self.drafter.drafters, self.sessions, strict=True):
            session.observe(self.drafter.states_for(source, output), tokens, paths)

    def draft(self, roots: Sequence[int], nodes: int | None = None) -> Draft:
        limit = self.drafter.nodes if nodes is None else min(nodes, self.drafter.nodes)
        for state, seen, root in zip(self.rows, self.seen.ids, roots, strict=True):
            state.learn([*seen, root])
        limits = [1 if self._rests(source) else limit for source in range(len(self.sessions))]
        drafts = [session.draft(roots, own) for session, own in zip(self.sessions, limits, strict=True)]
        ids = [draft.tokens.tolist() for draft in drafts]
        trees: list[Tree] = []
        tokens: list[list[int]] = []
        laws: list[Tensor | Sequence[Tensor | None] | None] = []
        reach: list[list[float]] = []
        for row, state in enumerate(self.rows):
            offers = [Offer.of(draft, found[row], row) for draft, found in zip(drafts, ids, strict=True)]
            if any(offer.laws is not None for offer in offers):
                chosen = state.choose(offers)
                trees.append(offers[chosen].tree)
                tokens.append(offers[chosen].tokens)
                laws.append(offers[chosen].laws)
                reach.append(offers[chosen].chances)
                continue
            trie = state.merge(offers)
            tree, order = trie.layout(trie.best(limit, self.drafter.least))
            trees.append(tree)
            tokens.append([trie.tokens[node] for node in order])
            laws.append(None)
            reach.append([trie.reach[node] for node in order])
        width = max(map(len, tokens))
        padded = torch.tensor([row + [0] * (width - len(row)) for row in tokens], device=self.drafter.device)
        return Draft(trees, padded, laws if any(law is not None for law in laws) else None, reach)

    def _rests(self, source: int) -> bool:
        """Whether no row expects anything of a source. Rows whose drafts are drawn are always asked for: what is drawn
        from a row's generator must not hang on the rows beside it."""
        return all(not state.drawn and state.history.ratio((source, 1)) < RESTING for state in self.rows)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.seen.keep_rows(rows)
        self.rows = [self.rows[row] for row in rows]
        for session in self.sessions:
            session.keep_rows(rows)

    def resume(self, row: DraftRow, length: int) -> None:
        self.seen.truncate(length)
        self.rows = [_RowState(row)]
        for session in self.sessions:
            session.resume(row, length)


class Offer:
    """What one source drafts for one row."""

    def __init__(
        self,
        tree: Tree,
        tokens: list[int],
        laws: Tensor | Sequence[Tensor | None] | None,
        chances: Sequence[float] | None,
    ):
        self.tree, self.tokens, self.laws = tree, tokens, laws
        self.chances = list(chances) if chances is not None else prior_chances(tree)

    @classmethod
    def of(cls, draft: Draft, tokens: list[int], row: int) -> Offer:
        tree = draft.trees[row]
        laws = None if draft.laws is None else draft.laws[row]
        return cls(tree, tokens[: tree.size], laws, None if draft.reach is None else draft.reach[row])

    def given_parent(self, node: int) -> float:
        """The chance of a node, given its parent."""
        above = self.chances[self.tree.parents[node]]
        return min(1.0, self.chances[node] / above) if above > 0.0 else 0.0


def prior_chances(tree: Tree) -> list[float]:
    """Chances of a tree's nodes where nothing but depth and rank is known."""
    chances = [1.0]
    for node in range(1, tree.size):
        chances.append(chances[tree.parents[node]] * PRIOR * (1.0 - PRIOR) ** tree.ranks[node])
    return chances


class _RowState:
    """What came of each source's guesses in one row; the last round's, until it is known."""

    def __init__(self, row: DraftRow) -> None:
        self.drawn = row.temperature > 0.0
        self.history = History()
        self.tries: list[Trie] = []
        self.drafted_at = 0
        self.given: dict[int, float] = {}
        """Tokens that each source's own tree would have given a round, lately; of rows whose drafts are drawn."""

    def learn(self, text: Sequence[int]) -> None:
        truth = text[self.drafted_at :]
        for source, trie in enumerate(self.tries):
            trie.learn(truth, self.history)
            right = len(trie.follow(truth))
            self.given[source] = right if source not in self.given else 0.9 * self.given[source] + 0.1 * right
        self.history.fade()
        self.tries, self.drafted_at = [], len(text)

    def choose(self, offers: Sequence[Offer]) -> int:
        """The source whose trees have been giving most; one that is not known yet is tried."""
        self._remember(offers)
        return max(range(len(offers)), key=lambda source: self.given.get(source, float("inf")))

    def merge(self, offers: Sequence[Offer]) -> Trie:
        """All drafts in one; a token that several sources draft has the best chance that one of them gives it."""
        self._remember(offers)
        merged = Trie(offers[0].tokens[0])
        for trie in self.tries:
            merged.merge(trie)
        return merged

    def _remember(self, offers: Sequence[Offer]) -> None:
        for source, offer in enumerate(offers):
            trie, places = Trie(offer.tokens[0]), [0]
            for node in range(1, offer.tree.size):
                kind = (source, min(offer.tree.depths[node], 4))
                parent = places[offer.tree.parents[node]]
                places.append(
                    trie.add(parent, offer.tokens[node], offer.given_parent(node), kind, self.history.ratio(kind))
                )
            self.tries.append(trie)
