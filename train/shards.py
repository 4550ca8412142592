"""Rows on disk in shards of JSON lines that survive a kill.

A row is one line, handed to the system at once. A kill can cut at most the last line of the last shard; opening the
store for writing removes such a torn line, so that what is left is whole rows and a run goes on by their ids.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from medusa_heads.errors import UserError


class DataError(UserError):
    """Rows that cannot be read or used; the message names the file and line, or the row."""


def shard_paths(directory: Path) -> list[Path]:
    """The store's shards in order."""
    return sorted(directory.glob("shard-*.jsonl"))


def read_rows(directory: Path) -> Iterator[dict[str, Any]]:
    """All whole rows of a store, in the order they were written."""
    for path in shard_paths(directory):
        yield from read_lines(path)


def read_lines(path: Path, whole: bool = False) -> Iterator[dict[str, Any]]:
    """The rows of one file of JSON lines.

    Args:
        whole: the file is not being written: a last line without its end is a row too, else it is not there yet.

    Raises:
        DataError: a line that holds no row; the message names the file and the line.
    """
    with path.open("rb") as lines:  # a line may be torn within a character
        for number, line in enumerate(lines, 1):
            if not (line.endswith(b"\n") or whole):
                return
            if line.strip():
                yield _parse(line, f"{path}:{number}")


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is damaged: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise DataError(f"{where} is not a row: {row!r:.60} is no object")
    return row


def write_beside(path: Path, text: str) -> None:
    """Replaces a small file in one step: readers see the old text or the new one."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


@contextmanager
def sole_writer(directory: Path) -> Iterator[None]:
    """Makes the directory and holds it against a second run. The lock of a killed run is free again at once."""
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(directory / ".lock", timeout=0):
            yield
    except Timeout:
        raise UserError(f"another run is writing to {directory}") from None


class LineWriter:
    """Appends rows to one file of JSON lines. Removes a torn last line first."""

    def __init__(self, path: Path):
        self.path = path
        self._file = path.open("ab", buffering=0)
        data = path.read_bytes()
        self._size = data.rfind(b"\n") + 1
        self.rows = data.count(b"\n")
        self._file.truncate(self._size)

    def append(self, row: dict[str, Any]) -> None:
        """Writes a whole line or, where the disk does not take it, nothing (and raises `OSError`)."""
        data = (json.dumps(row, ensure_ascii=False) + "\n").encode()
        written = 0
        try:
            while written < len(data):
                written += self._file.write(data[written:]) or 0
        except OSError as error:
            self._file.truncate(self._size)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._size += len(data)
        self.rows += 1

    def close(self) -> None:
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> LineWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class ShardWriter:
    """Appends rows to `directory/shard-00000.jsonl` and on, `rows_per_shard` to a file."""

    def __init__(self, directory: Path, rows_per_shard: int = 1000):
        self.directory = directory
        self.rows_per_shard = rows_per_shard
        directory.mkdir(parents=True, exist_ok=True)
        existing = shard_paths(directory)
        self._index = int(existing[-1].stem.removeprefix("shard-")) if existing else 0
        self._file = self._open()

    def _open(self) -> LineWriter:
        return LineWriter(self.directory / f"shard-{self._index:05d}.jsonl")

    def append(self, row: dict[str, Any]) -> None:
        if self._file.rows >= self.rows_per_shard:
            self._file.close()
            self._index += 1
            self._file = self._open()
        self._file.append(row)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
