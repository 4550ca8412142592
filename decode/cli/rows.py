"""The machine interface: JSONL rows in, one JSONL line out for each answered turn.

An input row has `id` (or `question_id`) and one of

    prompt    one user turn
    turns     user turns, answered one after the other, each with the history before it
    messages  chat messages; each user turn that no assistant message follows is answered, a given answer is history

An output line is `{id, turn, token_ids, text, finish_reason, exact, stats}`, in input order; `turn` counts the row's
user turns from 0. `token_ids` are the new tokens, an end-of-text token that ended them included. `exact` is false where
an approximate rule kept drafts; `stats.acceptance` names it.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from medusa_heads.errors import UserError

Message = dict[str, Any]
KINDS = ("prompt", "turns", "messages")


class RowError(UserError):
    """An input row that does not follow the interface."""


@dataclass(frozen=True)
class Row:
    """One conversation. `script` holds its messages in order; those of the assistant that are given are history."""

    id: str | int
    script: tuple[Message, ...]
    occurrence: int = 0
    """How many rows before this one have the same id."""
    category: str | None = None

    @classmethod
    def of_prompt(cls, identity: str | int, prompt: str) -> Row:
        return cls(identity, ({"role": "user", "content": prompt},))

    def to_answer(self) -> Iterator[tuple[int, int]]:
        """(turn, position in the script) of each user turn that is to be answered."""
        turn = -1
        for position, message in enumerate(self.script):
            if message["role"] != "user":
                continue
            turn += 1
            following = self.script[position + 1 :][:1]
            if not following or following[0]["role"] != "assistant":
                yield turn, position

    def turn_seed(self, seed: int | None, turn: int) -> int | None:
        """A seed of this row and turn alone: neither the row's place in the file nor other rows change its text."""
        if seed is None:
            return None
        key = json.dumps([seed, self.id, self.occurrence, turn])
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1


def parse_row(record: Any) -> Row:
    """A row of the interface. Raises `RowError` with the reason, without naming the line."""
    if not isinstance(record, dict):
        raise RowError("not a JSON object")
    identity = record.get("id", record.get("question_id"))
    if isinstance(identity, bool) or not isinstance(identity, str | int):
        raise RowError("needs 'id' (or 'question_id'), a string or a whole number")
    present = [kind for kind in KINDS if kind in record]
    if len(present) != 1:
        raise RowError(f"needs one of {', '.join(KINDS)}; has {' and '.join(present) or 'none'}")
    value = record[present[0]]
    if present[0] == "prompt":
        value = [value]
    if not isinstance(value, list) or not value:
        raise RowError(f"'{present[0]}' must be a list that is not empty")
    script = _messages(value) if present[0] == "messages" else _user_turns(value, present[0])
    category = record.get("category")
    row = Row(identity, script, category=None if category is None else str(category))
    if next(row.to_answer(), None) is None:
        raise RowError("'messages' has no user turn without an answer")
    return row


def _user_turns(turns: list[Any], kind: str) -> tuple[Message, ...]:
    if not all(isinstance(turn, str) and turn for turn in turns):
        raise RowError(f"'{kind}' must be text that is not empty")
    return tuple({"role": "user", "content": turn} for turn in turns)


def _messages(messages: list[Any]) -> tuple[Message, ...]:
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise RowError("each of 'messages' must be an object with 'role' and 'content'")
    return tuple(dict(message) for message in messages)


def read_rows(lines: Iterable[str], name: str) -> list[Row]:
    """All rows of a JSONL text; blank lines are passed over. Raises `RowError` that names file and line."""
    rows: list[Row] = []
    seen: Counter[str | int] = Counter()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_row(json.loads(line))
        except json.JSONDecodeError as error:
            raise RowError(f"{name}, line {number}: not JSON: {error}") from error
        except RowError as error:
            raise RowError(f"{name}, line {number}: {error}") from error
        rows.append(replace(row, occurrence=seen[row.id]))
        seen[row.id] += 1
    if not rows:
        raise RowError(f"{name} has no rows")
    return rows


def output_line(row: Row, turn: int, result: Any) -> dict[str, Any]:
    """The output of one answered turn, from the engine's `GenerationResult`."""
    return {
        "id": row.id,
        "turn": turn,
        "token_ids": list(result.token_ids),
        "text": result.text,
        "finish_reason": result.finish_reason,
        "exact": result.stats.exact,
        "stats": result.stats.as_dict(),
    }


def write_line(sink: IO[str], record: Mapping[str, Any]) -> None:
    """Write one JSON line and hand it to the system at once, so that it can be read while the rest is made."""
    sink.write(json.dumps(record, ensure_ascii=False) + "\n")
    sink.flush()


@contextmanager
def output_file(path: Path) -> Iterator[IO[str]]:
    """A text file that is at `path` only when it is whole.

    Lines go to `<path>.partial`, which can be watched as it grows and stays behind where the run ends early; the next
    run starts it anew. A pipe or a device is written directly.
    """
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        with path.open("w", encoding="utf-8") as sink:
            yield sink
        return
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as sink:
        yield sink
        sink.flush()
        os.fsync(sink.fileno())
    partial.replace(path)
