"""Small tensor functions that drafters share: states that were kept, and values of chosen nodes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_heads.base import BaseOutput


def kept_states(output: BaseOutput, row: int, path: Sequence[int]) -> BaseOutput:
    """The states (n, h) of a row's kept positions: views of a run of prompt tokens, copies of a tree's path."""
    index: slice | list[int] = slice(path.start, path.stop) if isinstance(path, range) else list(path)
    return BaseOutput(output.last_hidden_state[row, index], tuple(s[row, index] for s in output.layer_states))


def join_states(parts: Sequence[BaseOutput]) -> BaseOutput:
    """States (n, h) one after the other, as one row: (1, Σ n, h)."""
    return BaseOutput(
        torch.cat([part.last_hidden_state for part in parts])[None],
        tuple(torch.cat(layer)[None] for layer in zip(*(part.layer_states for part in parts), strict=True)),
    )


def take(values: Tensor, places: Tensor) -> Tensor:
    """Each row's entries at its places: (B, S, n), (B, M) → (B, M, n)."""
    rows = torch.arange(len(values), device=values.device)[:, None]
    return values[rows, places]
