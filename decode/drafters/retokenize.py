"""A text in the tokens of another vocabulary, as it grows; and what two vocabularies have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decode.drafters.model import vocabulary_difference
from decode.text import REPLACEMENT
from medusa_heads.base import Base
from medusa_heads.errors import HeadsError

WINDOW = 48
"""Tokens at the text's end that are read again with each new one, at least: a tokenizer looks back no further."""
SAMPLE = "The cat, 12 dogs and a bird."


class Retokenizer:
    """Reads a growing text of one model in the tokens of another.

    Text goes through its characters, special tokens through their counterparts (the same name, or the same part as
    beginning or end of text; one without counterpart is left out). What lies more than a window back is not read
    again, once it is sure that reading it apart makes no difference.
    """

    def __init__(self, source: Base, target: Base):
        self.source, self.target = source.tokenizer, target.tokenizer
        self._there = counterparts(source, target)
        self._back = {theirs: ours for ours, theirs in self._there.items() if theirs is not None}
        self._target_specials = special_ids(target)
        self._source_size, self._target_size = source.vocab_size, target.vocab_size
        self._frozen: list[int] = []
        self._frozen_target: list[int] = []
        self._window: list[int] = []
        self._freeze_at = 2 * WINDOW

    @staticmethod
    def check(model: Base) -> None:
        """Raises HeadsError for a model whose tokenizer does not give back the text that it has read."""
        if model.tokenizer is None:
            raise HeadsError(f"{model.name!r} has no tokenizer: its tokens cannot be read through text")
        again = _decode(model.tokenizer, _encode(model.tokenizer, SAMPLE)).strip()
        if again != SAMPLE:
            raise HeadsError(
                f"the tokenizer of {model.name!r} reads {SAMPLE!r} as {again!r}: drafts cannot go through text"
            )

    def __call__(self, text: Sequence[int]) -> list[int]:
        """The whole text in the target's tokens. An unfinished character at its end is left out."""
        if list(text[: len(self._frozen)]) != self._frozen:
            self._frozen, self._frozen_target, self._freeze_at = [], [], 2 * WINDOW
        self._window = list(text[len(self._frozen) :])
        target = self.convert(self._window)
        if len(self._window) >= self._freeze_at:
            self._freeze(target)
        return [*self._frozen_target, *self.convert(self._window)] if self._frozen else target

    def _freeze(self, whole: list[int]) -> None:
        for split in range(len(self._window) - WINDOW, WINDOW // 2, -1):
            first, rest = self.convert(self._window[:split]), self.convert(self._window[split:])
            if first + rest == whole:
                self._frozen += self._window[:split]
                self._frozen_target += first
                self._window = self._window[split:]
                self._freeze_at = 2 * WINDOW
                return
        self._freeze_at = len(self._window) + WINDOW

    def convert(self, ids: Sequence[int]) -> list[int]:
        """A piece of text by itself."""
        found: list[int] = []
        run: list[int] = []
        for token in ids:
            if token not in self._there:
                run.append(token)
                continue
            found += self._encode_run(run)
            run = []
            theirs = self._there[token]
            if theirs is not None:
                found.append(theirs)
        return found + self._encode_run(run)

    def _encode_run(self, run: list[int]) -> list[int]:
        if not run:
            return []
        ids = _encode(self.target, _decode(self.source, run).rstrip(REPLACEMENT))
        return [i for i in ids if i < self._target_size]  # a tokenizer may have tokens that its model does not

    def back(self, drafted: Sequence[int]) -> list[tuple[int, int]]:
        """What the target drafted behind the text, in the source's tokens: (token, how many drafted tokens it takes to
        spell it). An unfinished character at the end, and what follows a special token, is left out."""
        run = self._last_run()
        theirs = self._encode_run(run)
        before = _decode(self.target, theirs)
        ends: list[int] = []
        whole, special = before, None
        for count, token in enumerate(drafted, 1):
            if token in self._target_specials:
                special = self._back.get(token)
                break
            whole = _decode(self.target, [*theirs, *drafted[:count]])
            if not whole.startswith(before):
                return []
            ends.append(len(whole) - len(before))
        found = self._spell(run, whole[len(before) :].rstrip(REPLACEMENT), ends)
        if special is not None:
            found.append((special, len(ends) + 1))
        return found

    def _last_run(self) -> list[int]:
        """The text behind the last special token."""
        start = len(self._window)
        while start and self._window[start - 1] not in self._there:
            start -= 1
        return self._window[start:]

    def _spell(self, run: list[int], added: str, ends: Sequence[int]) -> list[tuple[int, int]]:
        if not added:
            return []
        own = _decode(self.source, run).rstrip(REPLACEMENT)
        whole = _encode(self.source, own + added)
        # Where the border falls within a token, as the tokenizer would read it: what is new, by itself.
        new = whole[len(run) :] if whole[: len(run)] == run else _encode(self.source, added)
        found = []
        for count, token in enumerate(new, 1):
            if token >= self._source_size:
                break
            spelled = len(_decode(self.source, [*run, *new[:count]])) - len(own)
            taken = next((i for i, end in enumerate(ends, 1) if end >= spelled), len(ends))
            found.append((token, taken))
        return found


class Mismatch:
    """What keeps two vocabularies apart, and what that has cost a drafter so far."""

    def __init__(self, model: Base, base: Base, way: str):
        self.way = way
        difference = vocabulary_difference(model, base)
        self.difference = f"{model.name!r} has another tokenizer than {base.name!r}: {difference}"
        self.rejections = 0
        self.by_mismatch = 0

    def count(self, lost: bool) -> None:
        """A round ended at a token that was not drafted; whether for the vocabularies' sake alone."""
        self.rejections += 1
        self.by_mismatch += lost

    def report(self) -> dict[str, Any]:
        """`lost_share`: of the rounds in which a draft ended, those that ended at a token which the draft model could
        not have drafted (`shared`), or whose characters it had right in other tokens (`text`)."""
        return {
            "way": self.way,
            "difference": self.difference,
            "rounds": self.rejections,
            "lost_by_mismatch": self.by_mismatch,
            "lost_share": self.by_mismatch / self.rejections if self.rejections else None,
        }


def special_ids(model: Base) -> set[int]:
    """Ids that stand for no text."""
    added = {i for i, token in model.tokenizer.added_tokens_decoder.items() if token.special}
    return {*added, *model.tokenizer.all_special_ids, *model.eos_token_ids}


def counterparts(source: Base, target: Base) -> dict[int, int | None]:
    """Each special token of the source, and the target's of the same name, or of the same part in a text; None where
    there is none."""
    theirs = special_ids(target)
    by_name = {token: i for token, i in target.tokenizer.get_vocab().items() if i in theirs}
    found: dict[int, int | None] = {}
    for i in special_ids(source):
        same = by_name.get(str(source.tokenizer.convert_ids_to_tokens(i)))
        if same is None and i in source.eos_token_ids and target.eos_token_ids:
            same = target.eos_token_ids[0]
        if same is None and i == source.tokenizer.bos_token_id:
            same = target.tokenizer.bos_token_id
        found[i] = same
    return found


def shared_tokens(model: Base, base: Base) -> tuple[list[int], list[int]]:
    """Ids of the draft model and, in the same order, of the base that spell the same: text within a text, and special
    tokens that are each other's counterparts."""
    ours, theirs = _spellings(base), _spellings(model)
    pairs = [(theirs[spelling], i) for spelling, i in ours.items() if spelling in theirs]
    taken = {i for _, i in pairs}
    for i, counterpart in counterparts(base, model).items():
        if counterpart is not None and i not in taken and i < base.vocab_size and counterpart < model.vocab_size:
            pairs.append((counterpart, i))
    pairs.sort(key=lambda pair: pair[1])
    return [draft for draft, _ in pairs], [own for _, own in pairs]


def _spellings(model: Base) -> dict[str, int]:
    """What each token adds behind another one, and the first id that does; parts of a character by their name."""
    tokenizer = model.tokenizer
    anchor = _encode(tokenizer, SAMPLE)[-1]
    before = _decode(tokenizer, [anchor])
    specials = special_ids(model)
    ids = [i for i in range(min(len(tokenizer), model.vocab_size)) if i not in specials]
    texts = tokenizer.batch_decode([[anchor, i] for i in ids], skip_special_tokens=False)
    found: dict[str, int] = {}
    for i, text in zip(ids, texts, strict=True):
        spelling = text[len(before) :] if text.startswith(before) else ""
        if not spelling or REPLACEMENT in spelling:
            spelling = f"\0{tokenizer.convert_ids_to_tokens(i)}"
        found.setdefault(spelling, i)
    return found


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))
