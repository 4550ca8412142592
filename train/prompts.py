"""Where the prompts to distil come from.

A prompt is the user's side of a conversation: an id that never changes and one or more user turns. The base answers
every turn. Prompts are read from a JSONL file (plain or gzip) or from a dataset of the `datasets` library, or the base
writes them itself (`train.selfprompts`).
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_heads.errors import UserError


@dataclass(frozen=True)
class Prompt:
    """The user's side of one conversation."""

    id: str
    turns: tuple[str, ...]
    system: str | None = None
    source: str = ""


class PromptError(UserError):
    """The source of prompts, or a row of it, cannot be used."""


def parse_row(row: Any, where: str, source: str = "") -> Prompt:
    """Reads `{id | question_id, turns | messages | prompt, source}`.

    A row without an id gets one from its text, so that a run resumes by id also over sources that have none. Of
    `messages` the system and user turns are kept; the assistant's are left for the base to answer anew.

    Args:
        where: names the row in error messages.
        source: stands for the row's own `source` where it has none.
    """
    if not isinstance(row, Mapping):
        raise PromptError(f"{where}: a row must be an object, not {type(row).__name__}")
    system: Any = None
    if row.get("turns") is not None:
        turns = row["turns"]
    elif row.get("messages") is not None:
        system, turns = _sides(row["messages"], where)
    elif row.get("prompt") is not None:
        turns = [row["prompt"]]
    else:
        raise PromptError(f"{where}: a row needs 'turns', 'messages' or 'prompt'; it has {sorted(row)}")
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise PromptError(f"{where}: needs at least one user turn, and every one a text that is not empty")
    if system is not None and not isinstance(system, str):
        raise PromptError(f"{where}: the system turn must be a text")
    identity = row["id"] if row.get("id") is not None else row.get("question_id")
    if identity is None:
        identity = hashlib.sha256(json.dumps([system, turns]).encode()).hexdigest()[:16]
    return Prompt(str(identity), tuple(turns), system or None, str(row.get("source") or source))


def _sides(messages: Any, where: str) -> tuple[Any, list[Any]]:
    """The system turn, if any, and the user turns of a conversation."""
    try:
        said = [(message["role"], message["content"]) for message in messages]
    except (KeyError, TypeError):
        raise PromptError(f"{where}: 'messages' must be a list of objects with 'role' and 'content'") from None
    systems = [content for role, content in said if role == "system"]
    return (systems[0] if systems else None), [content for role, content in said if role == "user"]


def read_jsonl(path: Path) -> Iterator[Prompt]:
    """Prompts of a JSONL file; `.gz` is read through gzip."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise PromptError(f"{path}:{number}: not JSON: {error}") from None
                yield parse_row(row, f"{path}:{number}", path.name)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read the prompts in {path}: {error}") from error


def read_dataset(name: str, split: str) -> Iterator[Prompt]:
    """Prompts of a dataset: a Hub id, a local directory of data files, or one that `save_to_disk` wrote."""
    import datasets

    directory = Path(name)
    try:
        if (directory / "dataset_dict.json").exists():
            rows = datasets.load_from_disk(name)[split]
        elif (directory / "dataset_info.json").exists():
            rows = datasets.load_from_disk(name)
        else:
            rows = datasets.load_dataset(name, split=split)
    except Exception as error:  # the library's errors for "not found" and "no such split" share no class
        summary = str(error).strip().splitlines() or [type(error).__name__]
        raise PromptError(f"cannot load the split {split!r} of the dataset {name!r}: {summary[0]}") from error
    for number, row in enumerate(rows):
        yield parse_row(row, f"{name}[{number}]", name)


def drop_duplicates(prompts: Iterable[Prompt]) -> tuple[list[Prompt], int]:
    """Keeps the first of prompts that say the same (case and white space aside). Returns them and how many fell.

    Two rows of one id that say different things are an error: resuming goes by id.
    """
    kept: list[Prompt] = []
    seen: set[tuple[str, ...]] = set()
    ids: set[str] = set()
    dropped = 0
    for prompt in prompts:
        key = tuple(" ".join(turn.lower().split()) for turn in (prompt.system or "", *prompt.turns))
        if key in seen:
            dropped += 1
            continue
        if prompt.id in ids:
            raise PromptError(f"two different prompts share the id {prompt.id!r}")
        seen.add(key)
        ids.add(prompt.id)
        kept.append(prompt)
    return kept, dropped
