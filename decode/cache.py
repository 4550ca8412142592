"""A key-value cache that takes a tree and keeps a path.

Keys and values live in preallocated buffers. Row b has committed its first `lengths[b]` slots. A forward pass writes
its T tokens at `offset = max(lengths)` for all rows at once and attention reads views (B, H, S, d) of the buffers;
nothing that is committed is copied. `commit` then moves the kept nodes of each row behind its committed slots, in
place. What lies between a row's length and the offset is hidden by the mask.

Keys and values of one shape, in most models those of all layers, share one buffer, so that a commit is one gather for
all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(frozen=True)
class Place:
    """Where the pass under way writes, and how far it reads, in shapes that stay the same while the text grows."""

    slots: Tensor
    """(T,), the slot of each token."""
    window: int
    """Slots that attention reads, from the first: those of the pass and more, which the mask hides."""


class TreeLayer(CacheLayerMixin):
    """One layer's keys and values. Writes where its cache says (`owner.offset`).

    What the first pass gives is kept as it comes; by its end the shapes of all layers are known, and the cache makes
    the buffers whose views `keys` and `values` then are.
    """

    is_sliding = False

    def __init__(self, owner: TreeCache, number: int):
        super().__init__()
        self.owner = owner
        self.number = number
        self.in_buffer = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = key_states, value_states
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes (B, H, T, d) behind the committed slots and returns views (B, H, offset + T, d); or as the cache's
        `place` says."""
        place = self.owner.place
        if place is not None:
            assert self.keys is not None and self.values is not None
            self.keys.index_copy_(2, place.slots, key_states)
            self.values.index_copy_(2, place.slots, value_states)
            return self.keys[:, :, : place.window], self.values[:, :, : place.window]
        start, end = self.owner.offset, self.owner.offset + key_states.shape[-2]
        if not self.in_buffer:
            if start == 0:
                self.lazy_initialization(key_states, value_states)
                return key_states, value_states
            if not self.is_initialized:
                self.lazy_initialization(key_states[:, :, :0], value_states[:, :, :0])
            self.owner.make_buffers()
        self.owner.reserve(end)
        assert self.keys is not None and self.values is not None
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        place = self.owner.place
        return self.owner.offset if place is None else place.window - place.slots.shape[0]

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        length = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() + length, 0


class _Buffer:
    """Keys and values of one shape, of any layers, in one tensor (planes, B, H, S, d)."""

    def __init__(self, planes: Sequence[tuple[TreeLayer, str]], capacity: int):
        self.planes = planes
        first: Tensor = getattr(*planes[0])
        self.fixed = False
        # Zeros, not empty memory: a hidden slot still enters 0 · value, and 0 · NaN is NaN.
        self.data = first.new_zeros((len(planes), *first.shape[:2], capacity, first.shape[-1]))
        for place, plane in enumerate(planes):
            given: Tensor = getattr(*plane)
            self.data[place, :, :, : given.shape[-2]] = given
        self._hand_out()

    @property
    def capacity(self) -> int:
        return self.data.shape[-2]

    def grow(self, capacity: int) -> None:
        grown = self.data.new_zeros((*self.data.shape[:3], capacity, self.data.shape[-1]))
        grown[:, :, :, : self.capacity] = self.data
        self.data = grown
        self._hand_out()

    def keep_rows(self, index: Tensor) -> None:
        self.data = self.data.index_select(1, index.to(self.data.device))
        self._hand_out()

    def move(self, row: int, source: Tensor, first: int, last: int) -> None:
        """Slots `source` of a row to the slots from `first` up to `last`."""
        own = self.data[:, row]
        # index_select copies before the slice is written, so overlapping source and target are safe.
        own[:, :, first:last] = own.index_select(2, source.to(self.data.device))

    def views(self, start: int, end: int) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        """For each layer of which both keys and values are here, by its number: slots `start` to `end` of both
        (2, B, H, T, d), and its keys and values up to `end`."""
        written, read = self.data[..., start:end, :], self.data[..., :end, :].unbind(0)
        found = {}
        for place in range(len(self.planes) - 1):
            (layer, name), (other, _) = self.planes[place : place + 2]
            if layer is other and name == "keys":
                found[layer.number] = (written[place : place + 2], read[place], read[place + 1])
        return found

    def fix(self) -> None:
        """Tells a compiler that the planes stay where they are from pass to pass, so that none is copied."""
        if not self.fixed:
            for layer, name in self.planes:
                torch._dynamo.mark_static_address(getattr(layer, name))
            self.fixed = True

    def _hand_out(self) -> None:
        self.fixed = False
        for (layer, name), plane in zip(self.planes, self.data, strict=True):
            setattr(layer, name, plane)
            layer.in_buffer = True


class TreeCache(Cache):
    """The cache of one call of the decoder: B rows, each with a committed length of its own."""

    def __init__(self, num_layers: int, batch_size: int = 1, capacity: int = 256):
        self.capacity = capacity
        self.lengths: list[int] = [0] * batch_size
        self.held = 0
        self.place: Place | None = None
        self._buffers: list[_Buffer] = []
        self._room: tuple[tuple[int, int], dict[int, tuple[Tensor, Tensor, Tensor]]] | None = None
        super().__init__(layers=[TreeLayer(self, i) for i in range(num_layers)])

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

    def room(self, layer: int, length: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """What `TreeLayer.update` does, without its copy: for a pass over T = `length` tokens, where the layer's keys
        and values are to be written (2, B, H, T, d), and the keys and values that it then reads (B, H, offset + T, d).
        None where they do not lie together, or not yet."""
        if self.place is not None:
            return None
        asked = (self.offset, length)
        if self._room is None or self._room[0] != asked:
            self.reserve(sum(asked))
            views = [buffer.views(self.offset, sum(asked)) for buffer in self._buffers]
            self._room = (asked, {number: view for found in views for number, view in found.items()})
        return self._room[1].get(layer)

    def make_buffers(self) -> None:
        """Puts what layers have been given into buffers, where it is not yet."""
        shapes: dict[tuple[Any, ...], list[tuple[TreeLayer, str]]] = {}
        layer: Any
        for layer in self.layers:
            if layer.is_initialized and not layer.in_buffer:
                for name in ("keys", "values"):
                    states: Tensor = getattr(layer, name)
                    shape = (states.shape[:2], states.shape[-1], states.dtype, states.device)
                    shapes.setdefault(shape, []).append((layer, name))
        for planes in shapes.values():
            longest = max(getattr(*plane).shape[-2] for plane in planes)
            self._buffers.append(_Buffer(planes, max(self.capacity, longest)))
            self._room = None

    def reserve(self, slots: int) -> None:
        """Has room for so many slots in every buffer."""
        for buffer in self._buffers:
            if slots > buffer.capacity:
                buffer.grow(max(slots, 2 * buffer.capacity))
                self._room = None

    @contextmanager
    def placed(self, slots: Tensor, window: int) -> Iterator[None]:
        """Around a pass whose tokens go to `slots` (T,) and whose attention reads the first `window` slots."""
        self.make_buffers()
        self.reserve(window)
        for buffer in self._buffers:
            buffer.fix()
        self.place = Place(slots, window)
        try:
            yield
        finally:
            self.place = None

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
        self.make_buffers()
        for row, path in enumerate(paths):
            start = self.lengths[row]
            moved = [(offset + node, start + i) for i, node in enumerate(path) if offset + node != start + i]
            if moved:
                source = torch.tensor([s for s, _ in moved])
                for buffer in self._buffers:
                    buffer.move(row, source, moved[0][1], moved[-1][1] + 1)
        self.lengths = [length + len(path) for length, path in zip(self.lengths, paths, strict=True)]

    def truncate(self, length: int, row: int = 0) -> None:
        """Forgets all of a row but its first `length` tokens."""
        if not 0 <= length <= self.lengths[row]:
            raise ValueError(f"cannot keep {length} of {self.lengths[row]} committed tokens")
        self.lengths[row] = length

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drops all rows but these, in this order."""
        self.make_buffers()
        index = torch.tensor(list(rows))
        for buffer in self._buffers:
            buffer.keep_rows(index)
        self._room = None
        self.lengths = [self.lengths[row] for row in rows]
