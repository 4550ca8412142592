"""Many rows at once: a fixed number of workers, the rows that failed, and when to give up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Iterable
from pathlib import Path
from typing import TypeVar

from train.answerers import AnswererError, RowError, first_line
from train.shards import read_lines, write_beside

T = TypeVar("T")

FAILURES_IN_A_ROW = 20
"""After so many the answerer is taken to be broken, not the rows. Each has been retried already."""


async def run_workers(items: Iterable[T], work: Callable[[T], Awaitable[None]], count: int) -> None:
    """Awaits `work(item)` for every item, `count` at a time. The first exception cancels the others and is raised."""
    queue = iter(items)

    async def worker() -> None:
        for item in queue:
            await work(item)

    workers = [asyncio.create_task(worker()) for _ in range(count)]
    try:
        await asyncio.gather(*workers)
    finally:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


class Failures:
    """The rows that are still unanswered because their last attempt failed, listed in a file as they happen.

    Args:
        path: JSON lines `{id, error}`; those of earlier runs are read back.
        answered: ids of rows that need no listing any more.
    """

    def __init__(self, path: Path, answered: Collection[str] = ()):
        self.path = path
        self.errors: dict[str, str] = {}
        self._in_a_row = 0
        self._ever_answered = bool(answered)
        if path.exists():
            self.errors = {row["id"]: row["error"] for row in read_lines(path) if row["id"] not in answered}
            self.save()

    def add(self, identity: str, error: Exception) -> None:
        """Lists a failed row. Raises `AnswererError` when so many failed in a row that no row is likely to succeed.

        A row that cannot be answered by itself does not count for that, unless no row has been answered yet.
        """
        self.errors[identity] = first_line(error)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"id": identity, "error": self.errors[identity]}) + "\n")
        if isinstance(error, RowError) and self._ever_answered:
            return
        self._in_a_row += 1
        if self._in_a_row >= FAILURES_IN_A_ROW:
            raise AnswererError(f"{self._in_a_row} rows failed one after another, the last with {first_line(error)}")

    def answered(self, identity: str) -> None:
        self.errors.pop(identity, None)
        self._in_a_row = 0
        self._ever_answered = True

    def save(self) -> None:
        """Rewrites the list: each row once, without those that a later attempt answered."""
        lines = (json.dumps({"id": identity, "error": error}) + "\n" for identity, error in self.errors.items())
        write_beside(self.path, "".join(lines))
