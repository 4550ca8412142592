"""EAGLE heads in training: unrolled on their own states, as they will draft.

EAGLE-1 (Li et al. 2024) asks for the base's next state, SmoothL1, and a tenth of a soft cross-entropy, after one step;
EAGLE-3 (Li et al. 2025) unrolls ("training-time test") and asks for tokens alone. Here both versions may be unrolled
and every loss goes with both, but for the regression, which EAGLE-3's states are free of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from medusa_heads.base import BaseOutput
from train.batches import PackedBatch, SequenceBatch, state_name
from train.losses import feature_loss
from train.rounds import group_rows, join_own_keys, shared_attention
from train.trainer import HeadsTrainer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from decode.drafters import Drafter
    from decode.dynamic import DynamicTree
    from medusa_heads.base import Base
    from medusa_heads.eagle import EagleHeads
    from train.config import TrainingConfig
    from train.states import StateSource


def unrolled_features(heads: EagleHeads, base: Base, batch: SequenceBatch, features: Tensor, steps: int) -> Tensor:
    """What the head draws from its own states in the round that begins at each supervised position.

    Args:
        features: (N, h), fused states of the base.
        steps: how many tokens each round goes ahead.

    Returns:
        (steps, P, h): step j of the round begun at p has read the right tokens up to p + 1 + j and guesses the next.
    """
    groups = group_rows(batch)
    layer, where, positions = heads.layer, batch.where, batch.positions
    embeddings = base.embed(batch.following).to(features.dtype)
    x, residual = heads.inputs(embeddings, features)
    q, k, v = (t[0].transpose(0, 1) for t in layer.project(x[None], positions[None]))
    q, residual = q[where], residual[where]
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    found: list[Tensor] = []
    for step in range(steps):
        if step:
            # Past the end of a span a round goes on with its last token; no loss looks there.
            ahead = where + batch.remaining.clamp_max(step)
            x, residual = heads.inputs(embeddings[ahead], found[-1])
            turned = layer.project(x[None], (positions[where] + step)[None])
            q, own_k, own_v = (t[0].transpose(0, 1) for t in turned)
            own_keys.append(own_k)
            own_values.append(own_v)
        out, log_z = shared_attention(q, k, v, groups)
        attended = join_own_keys(out, log_z, q, own_keys, own_values).flatten(1)
        found.append(layer.merge(attended[None], residual[None])[0].to(features.dtype))
    return torch.stack(found)


class EagleTrainer(HeadsTrainer):
    """An EAGLE head with the losses of `train.losses` on each unrolled step."""

    heads: EagleHeads

    def __init__(self, heads: EagleHeads, base: Base, config: TrainingConfig):
        super().__init__(heads, base, config, depth=config.loss.unroll)
        self.feature_weight = config.loss.feature_weight
        self.feature_noise = config.loss.feature_noise
        self.names = [state_name(base, layer) for layer in heads.layers] or ["last"]
        if heads.config.own_projection:
            self.own_parameters = tuple(heads.lm_head.parameters())

    def check_source(self, source: StateSource) -> None:
        source.require(["last", *self.names])

    def read(self, source: StateSource, rows: Sequence[int]) -> SequenceBatch:
        return source.sequences(rows, self.names)

    def _features(self, batch: SequenceBatch, step: int | None) -> Tensor:
        """(N, h), with noise while training."""
        states = tuple(x.to(self.compute_dtype(x.device)) for x in batch.features)
        if step is not None and self.feature_noise:
            states = tuple(x + self._noise(batch, step, i, x) for i, x in enumerate(states))
        return self.heads.fuse(BaseOutput(states[0], states))

    def _noise(self, batch: SequenceBatch, step: int, kind: int, like: Tensor) -> Tensor:
        """Uniform in ± half the width; a row's own in each step, however rows are shared out."""
        drawn = [like.new_zeros(0, like.shape[-1])]
        for row, length in zip(batch.rows, batch.lengths, strict=True):
            draw = np.random.default_rng([self.seed, step, row, kind])
            uniform = draw.random((length, like.shape[-1]), dtype=np.float32) - 0.5
            drawn.append(torch.from_numpy(uniform).to(like))
        return torch.cat(drawn) * self.feature_noise

    def head_states(self, batch: PackedBatch, step: int | None = None, depth: int | None = None) -> Tensor:
        assert isinstance(batch, SequenceBatch)
        features = self._features(batch, step)
        return self.heads.states(unrolled_features(self.heads, self.base, batch, features, depth or self.depth))

    def further_loss(self, head_states: Tensor, batch: PackedBatch, scale: Tensor) -> Tensor | None:
        if not self.feature_weight:
            return None
        return self.feature_weight * feature_loss(head_states, batch.states, batch.remaining, scale)

    def drafter(self, tree: DynamicTree) -> Drafter:
        from decode.drafters.eagle import EagleDrafter

        return EagleDrafter(self.heads, self.base, tree)
