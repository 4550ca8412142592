"""Hydra heads: each also reads the embeddings of the tokens drafted before it.

Head i (from 0) at position t reads the base's last state there and the embeddings of tokens t + 1 … t + 1 + i, of which
t + 1 is the base's own, and guesses token t + 2 + i. Ankner et al. 2024, "Hydra: Sequentially-Dependent Draft Heads for
Medusa Decoding", equation 2; with the decoder layer over the base's states ("prefix attention") and MLPs of several
layers it is their Hydra++. The base's embedding and, unless told otherwise, its vocabulary projection are shared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from medusa_heads.config import HydraConfig
from medusa_heads.hub import HeadsHubMixin
from medusa_heads.layer import DraftLayer, KeyValueStore, make_norm, shape_of
from medusa_heads.medusa import ResidualBlock, check_draft_ids, draft_vocabulary

if TYPE_CHECKING:
    from medusa_heads.base import Base


class EntryBlock(nn.Module):
    """R z [+ r] + SiLU(W z + b) for z the state and the embeddings, end to end: (..., (1 + n)·h) → (..., h).

    R starts by picking the state out of z, W and b at zero, so that a new head says what the base says.
    """

    def __init__(self, hidden_size: int, embeddings: int, bias: bool = False):
        super().__init__()
        width = (1 + embeddings) * hidden_size
        self.linear = nn.Linear(width, hidden_size)
        self.res_connection = nn.Linear(width, hidden_size, bias=bias)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        nn.init.zeros_(self.res_connection.weight)
        if bias:
            nn.init.zeros_(self.res_connection.bias)
        with torch.no_grad():
            self.res_connection.weight[:, :hidden_size] = torch.eye(hidden_size)

    def forward(self, z: Tensor) -> Tensor:
        return self.res_connection(z) + nn.functional.silu(self.linear(z))


class PrefixAttention(nn.Module):
    """One decoder layer of the base's own kind over the base's last states, normed at its entry."""

    def __init__(self, config: HydraConfig):
        super().__init__()
        self.input_layernorm = make_norm(config.hidden_size, config.shape)
        self.layer = DraftLayer(config.hidden_size, config.hidden_size, config.shape)
        self.norm = make_norm(config.hidden_size, config.shape) if config.prefix_norm else None

    def finish(self, states: Tensor) -> Tensor:
        """What the heads read of the layer's output: (..., h) → (..., h)."""
        return states if self.norm is None else self.norm(states)

    def forward(
        self,
        states: Tensor,
        position_ids: Tensor,
        visible: Tensor | None = None,
        cache: KeyValueStore | None = None,
    ) -> Tensor:
        """(B, T, h) at positions (B, T) → (B, T, h); `visible` and `cache` as in `medusa_heads.layer.DraftLayer`."""
        return self.finish(self.layer(self.input_layernorm(states), states, position_ids, visible, cache))


class HydraHeads(nn.Module, HeadsHubMixin):
    """k heads, each an entry block over state and embeddings and L − 1 residual blocks."""

    config: HydraConfig
    config_class = HydraConfig
    draft_ids: Tensor | None
    """(draft_vocab_size,) vocabulary rows that the heads draft from, most frequent first; None: all rows."""

    def __init__(self, config: HydraConfig, draft_ids: Tensor | None = None):
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.prefix = PrefixAttention(config) if config.prefix_attention else None
        self.heads = nn.ModuleList(
            nn.Sequential(
                EntryBlock(size, i + 1, config.entry_bias), *(ResidualBlock(size) for _ in range(config.num_layers - 1))
            )
            for i in range(config.num_heads)
        )
        rows = config.draft_vocab_size or config.vocab_size
        if config.own_projection:
            bias = config.projection_bias
            self.lm_heads = nn.ModuleList(nn.Linear(size, rows, bias=bias) for _ in range(config.num_heads))
        self.register_buffer("draft_ids", draft_vocabulary(config, draft_ids))

    @classmethod
    def for_base(
        cls,
        base: Base,
        *,
        num_heads: int = 4,
        num_layers: int = 1,
        prefix_attention: bool = False,
        own_projection: bool = False,
        draft_ids: Tensor | None = None,
    ) -> HydraHeads:
        """New heads that say what the base says; projections of their own start as copies of the base's."""
        config = HydraConfig(
            num_heads=num_heads,
            num_layers=num_layers,
            prefix_attention=prefix_attention,
            layer=shape_of(base) if prefix_attention else None,
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

    def head(self, i: int, states: Tensor, embeddings: Tensor) -> Tensor:
        """Head i's state before the projection.

        Args:
            states: (..., h), the base's last state, or what the prefix attention makes of it.
            embeddings: (..., i + 1, h), of the token behind the state and those drafted since.
        """
        return self.heads[i](torch.cat((states, embeddings.flatten(-2)), dim=-1))

    def forward(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """All heads' states, given the tokens between: (..., h), (..., num_heads, h) → (num_heads, ..., h)."""
        return torch.stack([self.head(i, states, embeddings[..., : i + 1, :]) for i in range(self.config.num_heads)])

    def head_logits(self, head_states: Tensor, base: Base, first: int = 0) -> Tensor:
        """Logits over the draft vocabulary: (n, ..., h), heads `first` and on → (n, ..., draft_vocab_size or V)."""
        if self.config.own_projection:
            own = self.lm_heads[first : first + len(head_states)]
            return torch.stack([lm(x) for lm, x in zip(own, head_states, strict=True)])
        if self.draft_ids is None:
            return base.project(head_states)
        return base.project_rows(head_states, self.draft_ids)
