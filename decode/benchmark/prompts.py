"""What the benchmark asks: rows of a JSONL file, subsets that keep its proportions."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_heads.errors import ConfigError


@dataclass(frozen=True)
class Prompt:
    """One question. Only its first turn is asked."""

    id: str
    category: str
    text: str
    messages: tuple[Mapping[str, Any], ...] = ()
    """The conversation up to the question and with it, where there is more of it than the question."""


def read_prompts(path: Path) -> list[Prompt]:
    """Rows `{question_id, category, turns}`. Raises ConfigError that names the line which is none."""
    prompts = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the prompts {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompts.append(Prompt(str(row["question_id"]), str(row["category"]), str(row["turns"][0])))
        except (json.JSONDecodeError, KeyError, IndexError, TypeError) as error:
            raise ConfigError(
                f"{path}, line {number}: not a row with question_id, category, turns ({type(error).__name__}: {error})"
            ) from None
    if not prompts:
        raise ConfigError(f"{path} holds no prompts")
    ids = [prompt.id for prompt in prompts]
    if len(set(ids)) < len(ids):
        raise ConfigError(f"{path} repeats question ids: {sorted({i for i in ids if ids.count(i) > 1})[:5]}")
    return prompts


def file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def stratified(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` prompts, evenly spaced over all of them sorted by category: each category keeps its share within one."""
    if count < 1:
        raise ConfigError(f"a subset has at least one prompt, not {count}")
    ordered = sorted(prompts, key=lambda prompt: prompt.category)  # stable: file order within a category
    if count >= len(ordered):
        return ordered
    return [ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count)]


def per_category(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """At most `count` prompts of each category, evenly spaced within it."""
    categories = sorted({prompt.category for prompt in prompts})
    return [p for name in categories for p in stratified([q for q in prompts if q.category == name], count)]


def shuffled(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    """In random order, so that what a cut run has measured is a fair sample."""
    return random.Random(seed).sample(list(prompts), len(prompts))
