"""Prompt lookup: what followed the last tokens where they stood before, in the prompt or in what was generated.

The longest match comes first, the latest of equal ones before earlier ones; several continuations become one tree
(Saxena 2023, "Prompt Lookup Decoding"; Fu et al. 2024 and Yang et al. 2023 copy from the text likewise). How much of a
continuation is drafted depends on the chance that it goes on, which is learnt from the row itself: a match of m tokens
that came true makes one of m + 1.

The index is a hash chain as in LZ77: each position points at the previous one that ends in the same tokens. A token is
entered in constant time, a search looks at a bounded number of places, and nothing is ever scanned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from decode.drafters import Draft, DraftRow
from decode.drafters.seen import SeenText
from decode.drafters.trie import History, Trie, draft_of
from medusa_heads.base import BaseOutput
from medusa_heads.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from medusa_heads.base import Base

ORDERS = (4, 2, 1)
"""Lengths of the n-grams that are chained, the longest first."""
WALK = 24
"""Earlier places that a search looks at in each chain."""
LONGEST = 16
"""Match lengths are told apart up to this."""
CHANCE = {1: 0.2, 2: 0.4, 3: 0.55, 4: 0.65, 6: 0.75, 9: 0.85, LONGEST: 0.92}
"""Chance that the next token is the copied one, by the least length of the match: where a row's history begins."""


class NgramIndex:
    """Where the tokens of one growing text stood before."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._last: list[dict[tuple[int, ...], int]] = [{} for _ in ORDERS]
        """For each order: an n-gram and the latest place behind it."""
        self._previous: list[list[int]] = [[0] for _ in ORDERS]
        """[order][place]: the place before it that is behind the same n-gram; 0 where there is none."""

    def append(self, token: int) -> None:
        self.ids.append(token)
        place = len(self.ids)
        for order, last, previous in zip(ORDERS, self._last, self._previous, strict=True):
            if place < order:
                previous.append(0)
                continue
            gram = tuple(self.ids[-order:])
            previous.append(last.get(gram, 0))
            last[gram] = place

    def truncate(self, length: int) -> None:
        """Forgets all but the first `length` tokens, as if they had never been entered."""
        while len(self.ids) > length:
            for order, last, previous in zip(ORDERS, self._last, self._previous, strict=True):
                before = previous.pop()
                if len(self.ids) < order:
                    continue
                gram = tuple(self.ids[-order:])
                if before:
                    last[gram] = before
                else:
                    del last[gram]
            self.ids.pop()

    def extend_to(self, text: Sequence[int]) -> None:
        """Enters what `text`, which begins with the text so far, has beyond it."""
        for token in text[len(self.ids) :]:
            self.append(token)

    def matches(self) -> list[tuple[int, int]]:
        """(length, place): earlier places behind the same tokens as the text's end; the longest match first, the latest
        of equal ones before earlier ones."""
        found: dict[int, int] = {}
        for order, previous in zip(ORDERS, self._previous, strict=True):
            place = previous[-1]
            for _ in range(WALK):
                if not place:
                    break
                if place not in found:
                    found[place] = self._length(place, order)
                place = previous[place]
        return sorted(((length, place) for place, length in found.items()), reverse=True)

    def _length(self, place: int, known: int) -> int:
        """How many tokens before `place` equal the text's last ones, of which `known` are known to."""
        ids, end = self.ids, len(self.ids)
        length = known
        while length < min(place, LONGEST) and ids[place - 1 - length] == ids[end - 1 - length]:
            length += 1
        return length

    def continuation(self, place: int, length: int) -> Iterator[int]:
        """`length` tokens from `place` on. One that reaches the text's end copies itself, as a repeated phrase does."""
        ids, copied = self.ids, list[int]()
        for at in range(place, place + length):
            copied.append(ids[at] if at < len(ids) else copied[at - len(ids)])
            yield copied[-1]


class LookupDrafter:
    """Prompt lookup. No weights; any base.

    Args:
        nodes: most nodes of a tree, the root included.
        depth: most tokens of one continuation.
        candidates: most continuations that are merged.
        least: a token is drafted if the chance that it is kept is at least this: what a further node costs in a pass,
            in passes over one token, times the tokens that a pass gives.
    """

    layers: Sequence[int] = ()

    def __init__(self, base: Base, *, nodes: int = 16, depth: int = 15, candidates: int = 6, least: float = 0.06):
        if min(nodes, depth, candidates) < 1:
            raise ConfigError("prompt lookup needs at least one node, one token of depth and one candidate")
        if not 0.0 <= least <= 1.0:
            raise ConfigError(f"least is a probability, not {least}")
        self.device = base.device
        self.nodes, self.depth, self.candidates, self.least = nodes, depth, candidates, least

    def start(self, rows: Sequence[DraftRow]) -> LookupSession:
        return LookupSession(self, len(rows))

    def gather(self, index: NgramIndex, history: History) -> Trie:
        """The continuations of the text's end, merged."""
        trie = Trie(index.ids[-1])
        for length, place in index.matches()[: 4 * self.candidates]:
            if len(trie.children[0]) >= self.candidates or trie.size > 4 * self.nodes:
                break
            node = 0
            for step, token in enumerate(index.continuation(place, self.depth)):
                known = trie.child(node, token)
                if known is None:
                    bucket = max(least for least in CHANCE if least <= length + step)
                    kind = (bucket, min(1, len(trie.children[node])))
                    known = trie.add(node, token, CHANCE[bucket] * trie.left(node), kind, history.ratio(kind))
                    if trie.reach[known] < self.least:
                        break  # what follows is less likely still; the node is left out of the tree with it
                node = known
        return trie


class LookupSession:
    """The text of each row and its index; the last draft, until what came of it is known."""

    def __init__(self, drafter: LookupDrafter, rows: int):
        self.drafter = drafter
        self.seen = SeenText(rows)
        self.rows = [_RowState() for _ in range(rows)]

    def observe(self, output: BaseOutput, tokens: Tensor, paths: Sequence[Sequence[int]]) -> None:
        self.seen.observe(tokens, paths)

    def draft(self, roots: Sequence[int], nodes: int | None = None) -> Draft:
        limit = self.drafter.nodes if nodes is None else min(nodes, self.drafter.nodes)
        tries = [
            self._draft_row(row, [*seen, root]) for row, seen, root in zip(self.rows, self.seen.ids, roots, strict=True)
        ]
        return draft_of(tries, limit, self.drafter.least, self.drafter.device)

    def _draft_row(self, row: _RowState, text: list[int]) -> Trie:
        if row.trie is not None:
            row.trie.learn(text[row.drafted_at :], row.history)
            row.history.fade()
        row.index.extend_to(text)
        row.trie, row.drafted_at = self.drafter.gather(row.index, row.history), len(text)
        return row.trie

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.seen.keep_rows(rows)
        self.rows = [self.rows[row] for row in rows]

    def resume(self, row: DraftRow, length: int) -> None:
        """The index is cut back, not made anew; what was learnt of another answer is forgotten, so that a seed gives
        the same text whatever was said before."""
        self.seen.truncate(length)
        (only,) = self.rows
        only.index.truncate(length)
        only.trie, only.history = None, History()


class _RowState:
    def __init__(self) -> None:
        self.index = NgramIndex()
        self.history = History()
        self.trie: Trie | None = None
        self.drafted_at = 0
        """Length of the text, the root included, when `trie` was made."""
