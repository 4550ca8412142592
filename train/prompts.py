"""Where the prompts to distil come from.

A prompt is the user's side of a conversation: an id that never changes and one or more user turns. The base
answers every turn. Prompts are read from a JSONL file (plain or gzip), from a dataset of the `datasets` library,
or written by the base itself (`train.distill --self-prompts`).
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Prompt:
    """The user's side of one conversation."""

    id: str
    turns: tuple[str, ...]
    system: str | None = None
    source: str | None = None


class PromptError(ValueError):
    """A row of the prompt source cannot be used."""


def parse_row(row: dict[str, Any], where: str) -> Prompt:
    """Reads `{id?, turns | messages | prompt, source?}`.

    A row without an id gets one from its text, so that a run resumes by id also over sources that have none. Of
    `messages` the system and user turns are kept; the assistant's are left for the base to answer anew.
    """
    system: str | None = None
    if "turns" in row:
        turns = row["turns"]
    elif "messages" in row:
        messages = row["messages"]
        turns = [m["content"] for m in messages if m["role"] == "user"]
        systems = [m["content"] for m in messages if m["role"] == "system"]
        system = systems[0] if systems else None
    elif "prompt" in row:
        turns = [row["prompt"]]
    else:
        raise PromptError(f"{where}: a row needs 'turns', 'messages' or 'prompt'; it has {sorted(row)}")
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise PromptError(f"{where}: every user turn must be a text that is not empty")
    identity = row.get("id", row.get("question_id"))
    if identity is None:
        identity = hashlib.sha256(json.dumps([system, list(turns)]).encode()).hexdigest()[:16]
    return Prompt(str(identity), tuple(turns), system, row.get("source"))


def read_jsonl(path: Path) -> Iterator[Prompt]:
    """Prompts of a JSONL file; `.gz` is read through gzip."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise PromptError(f"{path}:{number}: not JSON: {error}") from None
            yield parse_row(row, f"{path}:{number}")


def read_dataset(name: str, split: str) -> Iterator[Prompt]:
    """Prompts of a Hub dataset id or of a dataset saved on disk (`save_to_disk`)."""
    import datasets

    if Path(name).is_dir() and (Path(name) / "dataset_info.json").exists():
        rows: Iterable[Any] = datasets.load_from_disk(name)
    else:
        rows = datasets.load_dataset(name, split=split)
    for number, row in enumerate(rows):
        yield parse_row(dict(row), f"{name}[{number}]")


def drop_duplicates(prompts: Iterable[Prompt]) -> tuple[list[Prompt], int]:
    """Keeps the first of prompts that say the same (case and white space aside). Returns them and how many fell.

    Two rows of one id that say different things are an error: resuming goes by id.
    """
    kept: list[Prompt] = []
    seen: set[str] = set()
    ids: set[str] = set()
    dropped = 0
    for prompt in prompts:
        key = "\x00".join(" ".join(turn.lower().split()) for turn in (prompt.system or "", *prompt.turns))
        if key in seen:
            dropped += 1
            continue
        if prompt.id in ids:
            raise PromptError(f"two different prompts share the id {prompt.id!r}")
        seen.add(key)
        ids.add(prompt.id)
        kept.append(prompt)
    return kept, dropped
