"""Heads and their loss as one module, so that whatever wraps a module (DDP, autocast) wraps all of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from medusa_heads.medusa import MedusaHeads
from train.batches import PackedBatch
from train.data import Example
from train.losses import LossSettings, Projection, Rows, chunked_loss
from train.states import choose_draft_ids

if TYPE_CHECKING:
    from medusa_heads.base import Base
    from train.config import TrainingConfig


def make_heads(config: TrainingConfig, base: Base, examples: Sequence[Example]) -> MedusaHeads:
    """New heads as the config asks; a draft vocabulary is chosen from the training examples."""
    size = config.heads.draft_vocab_size
    heads = MedusaHeads.for_base(
        base,
        num_heads=config.heads.num_heads,
        num_layers=config.heads.num_layers,
        own_projection=config.heads.own_projection,
        draft_ids=None if size is None else choose_draft_ids(examples, size),
    )
    return heads.float()


def row_labels(ids: Tensor | None, vocab_size: int) -> Tensor | None:
    """(vocabulary,): the place of each token among `ids`, −1 for none."""
    if ids is None:
        return None
    labels = torch.full((vocab_size,), -1, dtype=torch.long, device=ids.device)
    labels[ids] = torch.arange(len(ids), device=ids.device)
    return labels


def sample_rows(count: int, wanted: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """A random part of `count` rows that are ordered by frequency.

    The first `wanted // 2` are always there; the others are drawn without replacement from the rest, each standing
    for (rest ÷ drawn) rows.

    Returns:
        places (wanted,) int64 ascending and their log weights (wanted,) float32.
    """
    always = wanted // 2
    drawn, rest = wanted - always, count - always
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    places = torch.randperm(rest, generator=generator)[:drawn].sort().values + always
    weights = torch.zeros(wanted)
    weights[always:] = torch.log(torch.tensor(rest / drawn))
    return torch.cat([torch.arange(always), places]), weights


class BaseRows:
    """The base's projection restricted to some of its rows, differentiable by the states."""

    def __init__(self, base: Base, ids: Tensor | None):
        self.base = base
        bias = base.projection_bias
        self.weight = base.projection_weight if ids is None else base.projection_weight[ids]
        self.bias = bias if bias is None or ids is None else bias[ids]

    def __call__(self, states: Tensor) -> Tensor:
        return self.base.rescale(nn.functional.linear(states.to(self.weight.dtype), self.weight, self.bias))


class MedusaTrainer(nn.Module):
    """Medusa heads with the loss of `train.losses` over the rows they draft from."""

    def __init__(self, heads: MedusaHeads, base: Base, config: TrainingConfig):
        super().__init__()
        self.heads = heads
        self.base = base
        self.seed = config.seed
        self.sampled_rows = config.loss.sampled_rows
        self.settings = LossSettings(
            config.loss.teacher_weight, config.loss.teacher_temperature, config.loss.chunk_positions
        )
        self.teacher = BaseRows(base, heads.draft_ids)
        self.labels = row_labels(heads.draft_ids, base.vocab_size)
        own = heads.config.own_projection
        self.own_parameters = tuple(heads.lm_heads.parameters()) if own else ()

    def head_states(self, states: Tensor) -> Tensor:
        """(P, h) → (K, P, h), in the autocast dtype or the heads' own."""
        kind = states.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else next(self.parameters()).dtype
        return self.heads(states.to(dtype))

    def forward(self, batch: PackedBatch, scale: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Loss and figures of `train.losses.chunked_loss`."""
        rows, teacher = Rows(self.labels), self.teacher
        if self.sampled_rows is not None:
            rows, teacher = self._sampled(step)
        return chunked_loss(
            self.head_states(batch.states),
            batch.states,
            batch.next_ids,
            batch.remaining,
            scale,
            self.projection(teacher),
            teacher,
            rows,
            self.settings,
            self.own_parameters,
        )

    def projection(self, shared: Projection) -> Projection:
        """(K, C, h) → (K, C, V): the heads' own projections, or the shared rows."""
        if not self.own_parameters:
            return shared
        return lambda states: torch.stack(
            [nn.functional.linear(x, own.to(x.dtype)) for x, own in zip(states, self.own_parameters, strict=True)]
        )

    def _sampled(self, step: int) -> tuple[Rows, BaseRows]:
        ids = self.heads.draft_ids
        if ids is None:
            ids = torch.arange(self.base.vocab_size, device=self.base.device)
        places, log_weights = sample_rows(len(ids), int(self.sampled_rows or 0), self.seed, step)
        chosen = ids[places.to(ids.device)]
        return Rows(row_labels(chosen, self.base.vocab_size), log_weights.to(ids.device)), BaseRows(self.base, chosen)
