"""Medusa heads: each guesses one position further ahead from the base's last hidden state.

Head i (from 0) at position t guesses token t + 2 + i; token t + 1 is the base's own. Cai et al. 2024, "Medusa: Simple
LLM Inference Acceleration Framework with Multiple Decoding Heads", equation 1, with the base's vocabulary projection
shared among the heads unless told otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from medusa_heads.config import HeadsConfig, MedusaConfig
from medusa_heads.hub import HeadsHubMixin

if TYPE_CHECKING:
    from medusa_heads.base import Base


def check_draft_ids(ids: Tensor, vocab_size: int) -> None:
    """Raises ValueError unless `ids` are distinct rows of the vocabulary."""
    if ids.min() < 0 or ids.max() >= vocab_size or len(ids.unique()) < len(ids):
        raise ValueError(f"draft_ids must be distinct ids within the vocabulary of {vocab_size}")


def draft_vocabulary(config: HeadsConfig, draft_ids: Tensor | None) -> Tensor | None:
    """The rows that new heads draft from: (draft_vocab_size,) int64; the first ones where none are given yet, as before
    weights are loaded; None for all rows. Raises ValueError where ids and config contradict each other."""
    rows = config.draft_vocab_size
    if rows is None:
        return None
    ids = torch.arange(rows) if draft_ids is None else draft_ids.to(torch.int64).clone()
    if ids.shape != (rows,):
        raise ValueError(f"draft_ids has shape {tuple(ids.shape)}; draft_vocab_size is {rows}")
    check_draft_ids(ids, config.vocab_size)
    return ids


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b). W and b start at zero, so that a new head says what the base says."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


class MedusaHeads(nn.Module, HeadsHubMixin):
    """k heads of L residual blocks."""

    config: MedusaConfig
    config_class = MedusaConfig

    draft_ids: Tensor | None
    """(draft_vocab_size,) vocabulary rows that the heads draft from, most frequent first; None: all rows."""

    def __init__(self, config: MedusaConfig, draft_ids: Tensor | None = None):
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(size) for _ in range(config.num_layers))) for _ in range(config.num_heads)
        )
        rows = config.draft_vocab_size or config.vocab_size
        if config.own_projection:
            self.lm_heads = nn.ModuleList(nn.Linear(size, rows, bias=False) for _ in range(config.num_heads))
        self.register_buffer("draft_ids", draft_vocabulary(config, draft_ids))

    @classmethod
    def for_base(
        cls,
        base: Base,
        num_heads: int = 4,
        num_layers: int = 1,
        own_projection: bool = False,
        draft_ids: Tensor | None = None,
    ) -> MedusaHeads:
        """New heads that say what the base says: zero blocks, and copies of the base's projection if they own one.

        A projection of their own is a matrix alone: a bias of the base's, or what it does to its logits afterwards
        (`Base.rescale`), is not part of it.
        """
        config = MedusaConfig(
            num_heads=num_heads,
            num_layers=num_layers,
            own_projection=own_projection,
            draft_vocab_size=None if draft_ids is None else len(draft_ids),
            **base.fingerprint(),
        )
        heads = cls(config, draft_ids)
        if own_projection:
            rows = base.projection_weight if draft_ids is None else base.projection_weight[draft_ids]
            projection: Any
            for projection in heads.lm_heads:
                projection.weight.data.copy_(rows)
        return heads.to(base.device)

    def check_loaded(self) -> None:
        if self.draft_ids is not None:
            check_draft_ids(self.draft_ids, self.config.vocab_size)

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Head states before the projection: (..., h) → (num_heads, ..., h)."""
        return torch.stack([head(hidden_states) for head in self.heads])

    def head_logits(self, head_states: Tensor, base: Base) -> Tensor:
        """Logits over the draft vocabulary: (num_heads, ..., h) → (num_heads, ..., draft_vocab_size or V)."""
        if self.config.own_projection:
            return torch.stack([lm(x) for lm, x in zip(self.lm_heads, head_states, strict=True)])
        if self.draft_ids is None:
            return base.project(head_states)
        return base.project_rows(head_states, self.draft_ids)
