"""A key-value cache that takes a tree and keeps a path.

Keys and values live in preallocated buffers (B, H, S, d), one pair a layer. Row b has committed its first
`lengths[b]` slots. A forward pass writes its T tokens at `offset = max(lengths)` for all rows at once and attention
reads views of the buffers; nothing that is committed is copied. `commit` then moves the kept nodes of each row behind
its committed slots, in place. What lies between a row's length and the offset is hidden by the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class TreeLayer(CacheLayerMixin):
    """One layer's buffers. Writes where its cache says (`owner.offset`)."""

    is_sliding = False

    def __init__(self, owner: TreeCache):
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # Zeros, not empty memory: a hidden slot still enters 0 · value, and 0 · NaN is NaN.
        self.keys = key_states.new_zeros((*key_states.shape[:2], self.owner.capacity, key_states.shape[-1]))
        self.values = value_states.new_zeros((*value_states.shape[:2], self.owner.capacity, value_states.shape[-1]))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes (B, H, T, d) behind the committed slots and returns views (B, H, offset + T, d)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        start, end = self.owner.offset, self.owner.offset + key_states.shape[-2]
        if end > self.keys.shape[-2]:
            self._grow(end)
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _grow(self, needed: int) -> None:
        assert self.keys is not None and self.values is not None
        capacity = max(needed, 2 * self.keys.shape[-2])
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros((*old.shape[:2], capacity, old.shape[-1]))
            new[:, :, : old.shape[-2]] = old
            setattr(self, name, new)

    def get_seq_length(self) -> int:
        return self.owner.offset

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        length = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.owner.offset + length, 0


class TreeCache(Cache):
    """The cache of one call of the decoder: B rows, each with a committed length of its own."""

    def __init__(self, num_layers: int, batch_size: int = 1, capacity: int = 256):
        self.capacity = capacity
        self.lengths: list[int] = [0] * batch_size
        self.held = 0
        super().__init__(layers=[TreeLayer(self) for _ in range(num_layers)])

    @property
    def start(self) -> int:
        """Slot of node 0: behind the longest committed row."""
        return max(self.lengths)

    @property
    def offset(self) -> int:
        """Slot at which the next forward pass writes its first token."""
        return self.start + self.held

    def hold(self, nodes: int) -> None:
        """Keeps the last pass's `nodes` tokens uncommitted while a tree grows: the next pass writes behind them, and
        the nodes of all held passes are numbered through. `commit` and `release` end it."""
        self.held += nodes

    def release(self) -> None:
        """Forgets what is held."""
        self.held = 0

    def positions(self, depths: Tensor) -> Tensor:
        """Position of each node: its row's committed length plus its depth. Depths (T,) or (B, T) → (B, T)."""
        lengths = torch.tensor(self.lengths, device=depths.device)
        return lengths[:, None] + depths

    def visible(self, ancestors: Tensor) -> Tensor:
        """Which slots the nodes see: committed ones of their row, and their ancestors.

        Args:
            ancestors: boolean (T, held + T) or (B, T, held + T).

        Returns:
            Boolean (B, T, offset + T).
        """
        batch, (rows, nodes) = len(self.lengths), ancestors.shape[-2:]
        slots = torch.arange(self.start, device=ancestors.device)
        lengths = torch.tensor(self.lengths, device=ancestors.device)
        committed = (slots < lengths[:, None])[:, None].expand(batch, rows, self.start)
        return torch.cat((committed, ancestors.expand(batch, rows, nodes)), dim=-1)

    def key_positions(self, positions: Tensor) -> Tensor:
        """Position of the token in each slot: (B, offset + T), from those of all nodes, held ones first."""
        slots = torch.arange(self.start, device=positions.device).expand(len(self.lengths), self.start)
        return torch.cat((slots, positions), dim=-1)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keeps, for each row, these nodes of the last forward pass (with what was held before it, numbered through),
        in this order; an empty path keeps none."""
        offset = self.start
        self.held = 0
        for row, path in enumerate(paths):
            start = self.lengths[row]
            moved = [(offset + node, start + i) for i, node in enumerate(path) if offset + node != start + i]
            if moved:
                source = torch.tensor([s for s, _ in moved])
                first, last = moved[0][1], moved[-1][1] + 1
                for layer in self.layers:
                    self._move(layer, row, source, first, last)
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]

    @staticmethod
    def _move(layer: Any, row: int, source: Tensor, first: int, last: int) -> None:
        source = source.to(layer.keys.device)
        # index_select copies before the slice is written, so overlapping source and target are safe.
        layer.keys[row, :, first:last] = layer.keys[row].index_select(1, source)
        layer.values[row, :, first:last] = layer.values[row].index_select(1, source)

    def truncate(self, length: int, row: int = 0) -> None:
        """Forgets all of a row but its first `length` tokens."""
        if not 0 <= length <= self.lengths[row]:
            raise ValueError(f"cannot keep {length} of {self.lengths[row]} committed tokens")
        self.lengths[row] = length

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drops all rows but these, in this order."""
        index = torch.tensor(list(rows))
        layer: Any
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys = layer.keys.index_select(0, index.to(layer.keys.device))
                layer.values = layer.values.index_select(0, index.to(layer.values.device))
        self.lengths = [self.lengths[row] for row in rows]
