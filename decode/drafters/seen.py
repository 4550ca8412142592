"""The token ids that the base has seen, row by row: what drafters go by that read text and not states."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class SeenText:
    """Grows by what each pass kept."""

    def __init__(self, rows: int):
        self.ids: list[list[int]] = [[] for _ in range(rows)]

    def observe(self, tokens: Tensor, paths: Sequence[Sequence[int]]) -> None:
        """tokens (B, T), and for each row the kept positions among the T."""
        for seen, row, path in zip(self.ids, tokens.tolist(), paths, strict=True):
            seen.extend(row[node] for node in path)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.ids = [self.ids[row] for row in rows]

    def truncate(self, length: int) -> None:
        """Forgets all of the only row but its first `length` tokens."""
        (only,) = self.ids
        del only[length:]
