"""Hydra heads in training: every head is given the right tokens before its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from train.batches import PackedBatch, SequenceBatch
from train.rounds import group_rows, shared_attention
from train.trainer import HeadsTrainer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from decode.drafters import Drafter
    from decode.dynamic import DynamicTree
    from medusa_heads.base import Base
    from medusa_heads.hydra import HydraHeads, PrefixAttention
    from train.config import TrainingConfig
    from train.states import StateSource


def prefixed(prefix: PrefixAttention, batch: SequenceBatch, states: Tensor) -> Tensor:
    """The prefix attention's output (P, h) at the supervised positions, from the states (N, h) of whole rows."""
    layer, where = prefix.layer, batch.where
    q, k, v = (t[0].transpose(0, 1) for t in layer.project(prefix.input_layernorm(states)[None], batch.positions[None]))
    attended, _ = shared_attention(q[where], k, v, group_rows(batch))
    return prefix.finish(layer.merge(attended.flatten(1)[None], states[where][None]))[0]


def tokens_ahead(batch: PackedBatch, count: int) -> Tensor:
    """(P, count): the tokens 1 … count places behind each position; past a span's end its last one."""
    steps = torch.arange(count, device=batch.next_ids.device)
    ahead = torch.minimum(steps, batch.remaining[:, None])
    return batch.next_ids[torch.arange(len(batch.next_ids), device=ahead.device)[:, None] + ahead]


class HydraTrainer(HeadsTrainer):
    """Hydra heads with the losses of `train.losses`."""

    heads: HydraHeads

    def __init__(self, heads: HydraHeads, base: Base, config: TrainingConfig):
        super().__init__(heads, base, config, depth=heads.config.num_heads)
        if heads.config.own_projection:
            self.own_parameters = tuple(heads.lm_heads.parameters())

    def check_source(self, source: StateSource) -> None:
        source.require(["last"])  # by the prefix attention, and by the drafter when its trees are evaluated

    def read(self, source: StateSource, rows: Sequence[int]) -> PackedBatch:
        return source.batch(rows) if self.heads.prefix is None else source.sequences(rows, ["last"])

    def head_states(self, batch: PackedBatch, step: int | None = None, depth: int | None = None) -> Tensor:
        dtype = self.compute_dtype(batch.states.device)
        states = batch.states.to(dtype)
        if self.heads.prefix is not None:
            assert isinstance(batch, SequenceBatch)
            states = prefixed(self.heads.prefix, batch, batch.features[0].to(dtype))
        return self.heads(states, self.base.embed(tokens_ahead(batch, self.depth)).to(dtype))

    def drafter(self, tree: DynamicTree) -> Drafter:
        from decode.drafters.hydra import HydraDrafter

        return HydraDrafter(self.heads, self.base, tree)
