"""Passes over trees in few shapes, from tensors that stay in their place.

A GPU replays a recorded pass (a CUDA graph) in a fraction of the time that launching its kernels one by one takes, but
a recording has one size of everything and reads its inputs where they were. So the number of nodes is padded to a
multiple of `NODES` (a single one stays single), the slots that attention reads to a multiple of `SLOTS` of the cache's
buffer, and token ids, positions and slots are written into tensors that are made once. A padded node sees the
committed text and itself, is seen by no other, and is cut off before anything is chosen; its keys and values lie behind
the tree's, where the mask hides them and the next tree is written. What is computed for the nodes of the tree is the
same.

The lists of a round are written to host memory that the device can fetch by itself (pinned) and copied without waiting:
the choices, read at its end, stay the one point where the host waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decode.cache import TreeCache
from decode.drafters import Draft
from decode.mask import RunningMask
from medusa_heads.base import Base, BaseOutput

NODES = 8
SLOTS = 256


def padded_nodes(nodes: int) -> int:
    """Nodes of the pass for a tree of so many."""
    return 1 if nodes == 1 else rounded_up(nodes, NODES)


def rounded_up(count: int, step: int) -> int:
    return -(-count // step) * step


class FixedPasses:
    """The passes of one call of the decoder."""

    def __init__(self, base: Base, cache: TreeCache, mask: RunningMask | None):
        self.base = base
        self.cache = cache
        self.mask = mask
        self._inputs: dict[tuple[int, int], _Inputs] = {}

    def over(self, draft: Draft, layers: Sequence[int]) -> BaseOutput:
        """States (B, N, h) of a draft's nodes, as `Base.forward` gives them."""
        rows, size = draft.tokens.shape
        start, nodes = self.cache.start, padded_nodes(size)
        window = rounded_up(start + nodes, SLOTS)
        inputs = self._inputs.get((rows, nodes))
        if inputs is None:
            inputs = self._inputs[rows, nodes] = _Inputs(rows, nodes, self.base.device)
        inputs.write(draft, self.cache.lengths)
        with self.cache.placed(inputs.slots, window):
            if self.mask is not None:
                visible, keys = self.mask.over(inputs.ancestors, window), None
            else:
                visible, keys = inputs.visible(start, window), inputs.key_positions(start, window)
            output = self.base.forward(
                inputs.tokens,
                position_ids=inputs.positions,
                attention_mask=visible,
                key_positions=keys,
                cache=self.cache,
                layers=layers,
                step=True,
            )
        # Copies: a replay writes its results where those of the pass before were.
        states = tuple(state[:, :size].clone() for state in output.layer_states)
        return BaseOutput(output.last_hidden_state[:, :size].clone(), states)


class _Inputs:
    """What a pass over T nodes of B rows reads, on the device and on the host."""

    def __init__(self, rows: int, nodes: int, device: torch.device):
        shapes = {"positions": (rows, nodes), "slots": (nodes,), "lengths": (rows,), "ancestors": (rows, nodes, nodes)}
        self._host: dict[str, Tensor] = {}
        self._device: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            dtype = torch.bool if name == "ancestors" else torch.long
            self._host[name] = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
            self._device[name] = torch.zeros(shape, dtype=dtype, device=device)
        self.tokens = torch.zeros((rows, nodes), dtype=torch.long, device=device)
        self.positions, self.slots = self._device["positions"], self._device["slots"]
        self.lengths, self.ancestors = self._device["lengths"], self._device["ancestors"]
        for tensor in (self.tokens, self.positions, self.slots):
            torch._dynamo.mark_static_address(tensor)

    def write(self, draft: Draft, lengths: Sequence[int]) -> None:
        """Takes in a round's draft. What lies behind a row's tree is at its root's position."""
        size, nodes = draft.tokens.shape[1], self.tokens.shape[1]
        self.tokens[:, :size] = draft.tokens
        self.tokens[:, size:] = 0
        start = max(lengths)
        torch.arange(start, start + nodes, out=self._host["slots"])
        for row, (tree, length) in enumerate(zip(draft.trees, lengths, strict=True)):
            depths = (*tree.depths, *(0 for _ in range(nodes - tree.size)))
            self._host["positions"][row] = torch.tensor(depths).add_(length)
            self._host["lengths"][row] = length
            own = self._host["ancestors"][row]
            own.zero_().fill_diagonal_(True)
            own[: tree.size, : tree.size] = tree.ancestor_mask
        for name, tensor in self._host.items():
            self._device[name].copy_(tensor, non_blocking=True)

    def visible(self, start: int, window: int) -> Tensor:
        """Boolean (B, T, window): committed slots of the row, and a node's ancestors behind `start`."""
        nodes = self.tokens.shape[1]
        slots = torch.arange(window, device=self.tokens.device)
        seen = (slots < self.lengths[:, None])[:, None].repeat(1, nodes, 1)
        seen[:, :, start : start + nodes] = self.ancestors
        return seen

    def key_positions(self, start: int, window: int) -> Tensor:
        """Position of the token in each slot: (B, window). Of slots behind the tree, which are hidden, any."""
        keys = torch.arange(window, device=self.tokens.device).repeat(len(self.tokens), 1)
        keys[:, start : start + self.tokens.shape[1]] = self.positions
        return keys
