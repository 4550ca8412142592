"""The additive attention mask of a call, kept from round to round and changed where the cache has changed.

Made anew each round, a mask costs a few passes over (nodes × committed tokens), which grows with the text. But between
two rounds only a few columns differ: those that the last round committed have become visible, and those of its tree
give way to the next tree. So the mask stays in one buffer, and a round touches a few columns of it, however long the
text is. Equal, entry by entry, to `fold_mask(cache.visible(ancestors))`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decode.cache import TreeCache
from medusa_heads.attention import FOLDED
from medusa_heads.base import Base

SPARE = 256
"""Slots beyond those needed when the buffer is made."""


class RunningMask:
    """The mask of trees behind a cache's rows, for the base's folded attention (`medusa_heads.attention`)."""

    def __init__(self, cache: TreeCache, groups: int, dtype: torch.dtype, device: torch.device):
        self.cache = cache
        self.groups = groups
        self._buffer = torch.empty(0, 1, 0, 0, dtype=dtype, device=device)
        """(B, 1, groups · nodes, slots): all rows of queries alike but for the tree's columns."""
        self._shown: list[int] = []
        """Of each row, how many slots from the first are visible; all others are hidden."""
        self._tree = (0, 0)
        """Columns of the last round's trees."""

    @classmethod
    def for_base(cls, base: Base, cache: TreeCache) -> RunningMask | None:
        """None where the base wants masks of another kind: another attention, or windows, which move."""
        if base.config._attn_implementation != FOLDED or base.layer_kinds != ("full_attention",):
            return None
        return cls(cache, base.query_groups, base.dtype, base.device)

    def over(self, ancestors: Tensor, slots: int | None = None) -> Tensor:
        """The mask for trees of T nodes: boolean (T, T) or (B, T, T), what each sees of its own → (B, 1, groups · T,
        offset + T), a view that holds until the next call. 0 is visible, -inf hidden. With `slots` the view is so wide,
        and what is behind the tree is hidden."""
        nodes, offset = ancestors.shape[-1], self.cache.offset
        width = offset + nodes if slots is None else slots
        self._make_room(nodes, width)
        first, last = self._tree
        self._buffer[..., first:last] = -torch.inf
        for row, length in enumerate(self.cache.lengths):
            shown = min(self._shown[row], first)
            if length > shown:
                self._buffer[row, ..., shown:length] = 0.0
            elif length < shown:
                self._buffer[row, ..., length:shown] = -torch.inf
            self._shown[row] = length
        self._tree = (offset, offset + nodes)
        view = self._buffer[:, :, : self.groups * nodes, :width]
        own = torch.zeros(ancestors.shape, dtype=view.dtype, device=view.device).masked_fill_(~ancestors, -torch.inf)
        view[..., offset : offset + nodes] = own.reshape(-1, 1, nodes, nodes).repeat(1, 1, self.groups, 1)
        return view

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drops all rows but these, as the cache does."""
        if self._shown:
            self._buffer = self._buffer[list(rows)]
            self._shown = [self._shown[row] for row in rows]

    def _make_room(self, nodes: int, slots: int) -> None:
        batch, queries = len(self.cache.lengths), self.groups * nodes
        held = self._buffer.shape
        if batch == held[0] and queries <= held[2] and slots <= held[3]:
            return
        shape = (batch, 1, max(queries, held[2]), max(slots + SPARE, self.cache.capacity, held[3]))
        self._buffer = self._buffer.new_full(shape, -torch.inf)
        self._shown, self._tree = [0] * batch, (0, 0)
