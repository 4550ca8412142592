"""Heads and their loss as one module, so that whatever wraps a module (DDP, autocast) wraps all of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from medusa_heads.errors import ConfigError
from train.batches import PackedBatch
from train.losses import LossSettings, Projection, Rows, chunked_loss

if TYPE_CHECKING:
    from decode.drafters import Drafter
    from decode.dynamic import DynamicTree
    from medusa_heads.base import Base
    from medusa_heads.draft_model import DraftModel
    from medusa_heads.eagle import EagleHeads
    from medusa_heads.hydra import HydraHeads
    from medusa_heads.medusa import MedusaHeads
    from train.config import TrainingConfig
    from train.states import StateSource

    Heads = MedusaHeads | HydraHeads | EagleHeads | DraftModel


def row_labels(ids: Tensor | None, vocab_size: int) -> Tensor | None:
    """(vocabulary,): the place of each token among `ids`, −1 for none."""
    if ids is None:
        return None
    labels = torch.full((vocab_size,), -1, dtype=torch.long, device=ids.device)
    labels[ids] = torch.arange(len(ids), device=ids.device)
    return labels


def sample_rows(count: int, wanted: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """A random part of `count` ≥ `wanted` ≥ 2 rows.

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


class HeadsTrainer(nn.Module, ABC):
    """Heads with the loss of `train.losses` over the rows they draft from.

    Whatever the family, `head_states[i, p]` guesses the token 2 + i places behind position p, given the tokens between.

    Raises:
        ConfigError: `loss.sampled_rows` is more than the rows that there are.
    """

    def __init__(self, heads: Heads, base: Base, config: TrainingConfig, depth: int):
        super().__init__()
        self.heads = heads
        self.base = base
        self.depth = depth
        """Tokens ahead that the loss is over: heads, or unrolled steps."""
        self.seed = config.seed
        self.sampled_rows = config.loss.sampled_rows
        loss = config.loss
        self.settings = LossSettings(
            loss.teacher_weight, loss.teacher_temperature, loss.chunk_positions, loss.acceptance_weight, loss.acceptance
        )
        self.teacher = BaseRows(base, heads.draft_ids)
        rows = len(self.teacher.weight)
        if self.sampled_rows is not None and self.sampled_rows > rows:
            raise ConfigError(f"loss.sampled_rows is {self.sampled_rows}, but the heads draft from {rows} rows")
        self.labels = row_labels(heads.draft_ids, base.vocab_size)
        self.own_parameters: tuple[nn.Parameter, ...] = ()
        """Vocabulary projections that are trained: one for all depths, or one each."""

    def check_source(self, source: StateSource) -> None:
        """Raises FeaturesError where the source lacks states that these heads read."""

    def read(self, source: StateSource, rows: Sequence[int]) -> PackedBatch:
        """What a step reads of `rows`."""
        return source.batch(rows)

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        """Of a step's states: autocast's, or the heads' own."""
        if torch.is_autocast_enabled(device.type):
            return torch.get_autocast_dtype(device.type)
        return next(self.parameters()).dtype

    @abstractmethod
    def head_states(self, batch: PackedBatch, step: int | None = None, depth: int | None = None) -> Tensor:
        """(depth, P, h), as the vocabulary projection reads them.

        Args:
            step: number of the training step, for what is random in it; None: nothing is.
            depth: tokens ahead, where the family can choose; default as trained.
        """

    def drafter(self, tree: DynamicTree) -> Drafter:
        """A drafter with the heads as they are now, for families that grow their trees."""
        raise TypeError(f"{type(self).__name__} drafts static trees")

    def further_loss(self, head_states: Tensor, batch: PackedBatch, scale: Tensor) -> Tensor | None:
        """What a family adds to the loss on tokens."""
        return None

    def forward(self, batch: PackedBatch, scale: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """The loss, and the figures of `train.losses.chunked_loss`."""
        rows, teacher = Rows(self.labels), self.teacher
        if self.sampled_rows is not None:
            rows, teacher = self._sampled(step)
        states = self.head_states(batch, step)
        loss, figures = chunked_loss(
            states,
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
        further = self.further_loss(states, batch, scale)
        return (loss if further is None else loss + further), figures

    def projection(self, shared: Projection) -> Projection:
        """(K, C, h) → (K, C, V): the heads' own projections, or the shared rows."""
        own = self.own_parameters
        if not own:
            return shared
        if len(own) == 1:
            return lambda states: nn.functional.linear(states, own[0].to(states.dtype))
        return lambda states: torch.stack(
            [nn.functional.linear(x, w.to(x.dtype)) for x, w in zip(states, own, strict=True)]
        )

    def _sampled(self, step: int) -> tuple[Rows, BaseRows]:
        ids = self.heads.draft_ids
        if ids is None:
            ids = torch.arange(self.base.vocab_size, device=self.base.device)
        places, log_weights = sample_rows(len(ids), int(self.sampled_rows or 0), self.seed, step)
        chosen = ids[places.to(ids.device)]
        return Rows(row_labels(chosen, self.base.vocab_size), log_weights.to(ids.device)), BaseRows(self.base, chosen)


class MedusaTrainer(HeadsTrainer):
    """Medusa heads: all of them read the base's state at the position itself."""

    heads: MedusaHeads

    def __init__(self, heads: MedusaHeads, base: Base, config: TrainingConfig):
        super().__init__(heads, base, config, depth=heads.config.num_heads)
        if heads.config.own_projection:
            self.own_parameters = tuple(heads.lm_heads.parameters())

    def head_states(self, batch: PackedBatch, step: int | None = None, depth: int | None = None) -> Tensor:
        return self.heads(batch.states.to(self.compute_dtype(batch.states.device)))
