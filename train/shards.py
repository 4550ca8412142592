"""Rows on disk in shards of JSON lines that survive a kill.

A row is one line, written and flushed at once. A kill can cut at most the last line of one shard; opening the
store again removes such a torn line, so that what is left is whole rows and a run goes on by their ids.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any


def shard_paths(directory: Path) -> list[Path]:
    """The store's shards in order."""
    return sorted(directory.glob("shard-*.jsonl"))


def read_rows(directory: Path) -> Iterator[dict[str, Any]]:
    """All whole rows of a store, in the order they were written."""
    for path in shard_paths(directory):
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                if line.endswith("\n"):
                    yield json.loads(line)


def _remove_torn_line(path: Path) -> None:
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)


class ShardWriter:
    """Appends rows to `directory/shard-00000.jsonl` and on, `rows_per_shard` to a file."""

    def __init__(self, directory: Path, rows_per_shard: int = 1000):
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.rows_per_shard = rows_per_shard
        existing = shard_paths(directory)
        self._index = max(len(existing) - 1, 0)
        self._rows = 0
        if existing:
            _remove_torn_line(existing[-1])
            self._rows = existing[-1].read_bytes().count(b"\n")
        self._file = self._path().open("a", encoding="utf-8")

    def _path(self) -> Path:
        return self.directory / f"shard-{self._index:05d}.jsonl"

    def append(self, row: dict[str, Any]) -> None:
        if self._rows >= self.rows_per_shard:
            self._file.close()
            self._index += 1
            self._rows = 0
            self._file = self._path().open("a", encoding="utf-8")
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._file.flush()
        self._rows += 1

    def close(self) -> None:
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
