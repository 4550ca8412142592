"""Token ids to text as they come: whole characters only, and never past a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns a growing list of token ids into text, piece by piece.

    A piece is given out once its characters are whole (a character may span tokens) and once it cannot be the
    beginning of a stop string any more. The pieces joined are `text`; it ends before the first stop string.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        if any(not s for s in stop):
            raise ValueError("a stop string must not be empty")
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._shown = 0
        """Tokens whose text is in `_text`; those of the last window stay as context for the next ones."""
        self._window = 0
        self._text = ""
        self._given = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """All text so far, up to a stop string."""
        return self._text

    def push(self, token: int) -> bool:
        """Takes in one token. Returns whether a stop string is now complete."""
        self._ids.append(token)
        # Decoding a token alone can differ from decoding it behind others (a leading space, a split character).
        before = self._decode(self._ids[self._window : self._shown])
        after = self._decode(self._ids[self._window :])
        if len(after) > len(before) and not after.endswith(REPLACEMENT):
            self._append(self._added(before, after))
            self._window, self._shown = self._shown, len(self._ids)
        return self.stopped

    def finish(self) -> None:
        """No more tokens come: what was held back as half a character or half a stop string is text."""
        if self.stopped:
            return
        before = self._decode(self._ids[self._window : self._shown])
        after = self._decode(self._ids[self._window :])
        self._append(self._added(before, after))
        self._shown = len(self._ids)
        self._stop = ()

    def take(self) -> str:
        """The text that became certain since the last call."""
        end = len(self._text) if self.stopped else len(self._text) - self._held_back()
        piece = self._text[self._given : end]
        self._given = max(self._given, end)
        return piece

    def _append(self, piece: str) -> None:
        start = len(self._text)
        self._text += piece
        found = [self._text.find(s, max(0, start - len(s) + 1)) for s in self._stop]
        hits = [position for position in found if position >= 0]
        if hits:
            self._text = self._text[: min(hits)]
            self.stopped = True

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _added(self, before: str, after: str) -> str:
        """What the tokens behind the shown ones add to the text."""
        if after.startswith(before):
            return after[len(before) :]
        # A byte-fallback decoder takes back a whole character when half of one follows it: what is shown stays.
        return self._decode(self._ids[self._shown :])

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
