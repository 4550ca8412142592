"""Chat rows to token sequences with a supervision mask.

The mask covers what the base itself generates: the tokens of each assistant answer and, where the answer was
finished, the end-of-turn token after it. The prompt is rendered through the base's chat template exactly as the
decoder renders it and the answer's own tokens follow, so nothing depends on offsets in a template's text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from train.shards import DataError, read_lines, shard_paths

if TYPE_CHECKING:
    from medusa_heads.base import Base


@dataclass(frozen=True)
class Example:
    """One token sequence to train on."""

    row_id: str
    input_ids: tuple[int, ...]
    supervised: tuple[bool, ...]
    """For each token, whether the base generated it: an answer's token, or the end of turn after it."""
    temperature: float | None = None
    """At which the answers were sampled; None where the row does not say."""

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True)
class DataReport:
    """What became of the rows."""

    rows: int
    examples: int
    tokens: int
    supervised_tokens: int
    truncated: int
    dropped: int
    """Examples with nothing left to supervise after truncation."""


def row_files(path: Path) -> list[Path]:
    """The file, or the shards of a directory in order. Raises DataError where there is neither."""
    if not (path.is_dir() or path.is_file()):
        raise DataError(f"{path} is neither a directory of shards nor a file")
    return shard_paths(path) if path.is_dir() else [path]


def load_chat_rows(paths: Sequence[str | Path]) -> Iterator[dict[str, Any]]:
    """Rows of chat data, in order.

    Args:
        paths: directories of `shard-*.jsonl` as `train.distill` writes them, or JSON-lines files.

    Raises:
        DataError: a path that holds no rows or does not exist, or a line that is none.
    """
    for name in paths:
        path = Path(name)
        empty = True
        for file in row_files(path):
            for row in read_lines(file, whole=path.is_file()):
                empty = False
                yield row
        if empty:
            raise DataError(f"{path} holds no chat rows")


def end_of_turn_id(base: Base) -> int | None:
    """The id that ends an assistant's turn in the base's chat template.

    It is the last of the base's EOS ids in a rendered conversation that ends with an answer. A template that closes
    its turns without one leaves the first EOS id, which is what ended a finished answer then. None without EOS ids.
    """
    eos = base.eos_token_ids
    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rendered = base.render_chat(conversation, add_generation_prompt=False)
    found = [token for token in rendered if token in eos]
    return found[-1] if found else (eos[0] if eos else None)


def encode_answer(tokenizer: Any, text: str, row_id: str) -> list[int]:
    """Ids of an answer as it stands after the prompt, without special tokens around it.

    Raises:
        DataError: the ids do not decode to the text (a leading space that the tokenizer adds is allowed).
    """
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    decoded = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if decoded != text and decoded.removeprefix(" ") != text:
        raise DataError(f"row {row_id!r}: the answer's tokens decode to {decoded[:60]!r}, its text is {text[:60]!r}")
    return ids


def encode_row(base: Base, row: Mapping[str, Any], end_of_turn: int | None) -> list[Example]:
    """The examples of one chat row, `{id, messages, finished?, temperature?}`.

    Each assistant turn is prompted by the template's rendering of all messages before it. Where the rendering for a
    later turn begins with the earlier prompt and answer, both turns share one sequence; where the template rewrites
    history (dropped reasoning, say), the turns become sequences of their own, each as it was generated.

    `finished: false` says that the last answer was cut: no end of turn is supervised there.

    Raises:
        DataError: a row without messages or without an answer, a message without role or content, messages that the
            template refuses, or an answer that its tokens do not reproduce.
    """
    row_id = str(row.get("id", "?"))
    messages = _messages(row, row_id)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise DataError(f"row {row_id!r} has no assistant message")
    done: list[Example] = []
    ids: list[int] = []
    mask: list[bool] = []
    for i in answers:
        try:
            prompt = base.render_chat(messages[:i], add_generation_prompt=True)
        except TemplateError as error:
            raise DataError(f"row {row_id!r}: the chat template refuses its messages: {error}") from None
        answer = encode_answer(base.tokenizer, messages[i]["content"], row_id)
        cut = i == answers[-1] and row.get("finished") is False
        if not cut and end_of_turn is not None:
            answer = [*answer, end_of_turn]
        if prompt[: len(ids)] != ids:
            done.append(Example(row_id, tuple(ids), tuple(mask), row.get("temperature")))
            mask = []
        mask = mask + [False] * (len(prompt) - len(mask)) + [True] * len(answer)
        ids = prompt + answer
    done.append(Example(row_id, tuple(ids), tuple(mask), row.get("temperature")))
    return done


def _messages(row: Mapping[str, Any], row_id: str) -> list[dict[str, str]]:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise DataError(f"row {row_id!r} has no messages")
    for number, message in enumerate(messages, 1):
        for key in ("role", "content"):
            if not isinstance(message, dict) or not isinstance(message.get(key), str):
                raise DataError(f"row {row_id!r}: message {number} has no {key}, or one that is not text")
    return messages


def truncate(example: Example, max_length: int) -> Example | None:
    """The first `max_length` tokens; None where no supervised token with a token before it is left."""
    ids, mask = example.input_ids[:max_length], example.supervised[:max_length]
    if not any(mask[1:]):
        return None
    return Example(example.row_id, ids, mask, example.temperature)


def encode_rows(
    base: Base, rows: Iterable[Mapping[str, Any]], max_length: int | None = None
) -> tuple[list[Example], DataReport]:
    """Examples of chat rows, each cut to `max_length` tokens, with a report of what became of the rows.

    `max_length` None takes the base's own context limit.
    """
    limit = max_length or base.max_positions
    end_of_turn = end_of_turn_id(base)
    examples: list[Example] = []
    count = truncated = dropped = 0
    for row in rows:
        count += 1
        for example in encode_row(base, row, end_of_turn):
            kept = truncate(example, limit or len(example))
            if kept is None:
                dropped += 1
                continue
            truncated += len(kept) < len(example)
            examples.append(kept)
    report = DataReport(
        rows=count,
        examples=len(examples),
        tokens=sum(len(e) for e in examples),
        supervised_tokens=sum(sum(e.supervised) for e in examples),
        truncated=truncated,
        dropped=dropped,
    )
    return examples, report


def held_out(row_id: str, fraction: float) -> bool:
    """Whether a row belongs to the held-out part: decided by its id alone, so it stays where it is as data grow."""
    return _place(row_id) < fraction


def choose_rows(row_ids: Sequence[str], sizes: Sequence[int], most: int | None) -> list[int]:
    """Numbers, ascending, of the rows with the lowest hashes of their ids whose sizes together are at most `most`."""
    if most is None:
        return list(range(len(row_ids)))
    order = sorted(range(len(row_ids)), key=lambda r: (_place("chosen " + row_ids[r]), r))
    together = list(accumulate(sizes[r] for r in order))
    return sorted(order[: bisect_right(together, most)])


def _place(text: str) -> float:
    """Where a text's hash lies in [0, 1)."""
    return int.from_bytes(sha256(text.encode()).digest()[:8], "big") / 2**64
