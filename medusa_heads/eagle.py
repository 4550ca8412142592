"""EAGLE heads: one draft layer that goes on by itself from the base's states.

At position t the head reads the feature there and the embedding of token t + 1, and guesses token t + 2; its output is
the feature of position t + 1 for the next step. (The base's own state at t gives token t + 1.)

EAGLE-1 and EAGLE-2 (Li et al. 2024): the feature is the base's last state, joined with the embedding by one projection
before a decoder layer without an input norm; the output imitates the next last state. EAGLE-3 (Li et al. 2025): the
feature is a projection of three layers' states; attention reads the normed embedding beside the normed feature; the
output is normed before the vocabulary projection. Embedding and, unless told otherwise, vocabulary projection are the
base's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from medusa_heads.config import EagleConfig
from medusa_heads.errors import ConfigError
from medusa_heads.hub import HeadsHubMixin
from medusa_heads.layer import DraftLayer, KeyValueStore, make_norm, shape_of
from medusa_heads.medusa import check_draft_ids, draft_vocabulary

if TYPE_CHECKING:
    from medusa_heads.base import Base, BaseOutput


class EagleHeads(nn.Module, HeadsHubMixin):
    """The draft layer and what is around it. Called a head of depth without end: each call guesses one token more."""

    config: EagleConfig
    config_class = EagleConfig
    draft_ids: Tensor | None
    """(draft_vocab_size,) vocabulary rows that the head drafts from, most frequent first; None: all rows."""

    def __init__(self, config: EagleConfig, draft_ids: Tensor | None = None):
        super().__init__()
        self.config = config
        size, shape = config.hidden_size, config.shape
        if config.version == 1:
            self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
            self.layer = DraftLayer(size, size, shape)
        else:
            count = len(config.layers)
            self.fc = nn.Linear(count * size, size, bias=False)
            widths = {None: [], "joined": [count * size], "each": [size] * count}[config.state_norm]
            self.state_norms = nn.ModuleList(make_norm(width, shape) for width in widths)
            self.input_norm = make_norm(size, shape)
            self.hidden_norm = make_norm(size, shape)
            self.layer = DraftLayer(2 * size, size, shape)
            self.norm = make_norm(size, shape)
        rows = config.draft_vocab_size or config.vocab_size
        if config.own_projection:
            self.lm_head = nn.Linear(size, rows, bias=False)
        self.register_buffer("draft_ids", draft_vocabulary(config, draft_ids))

    @classmethod
    def for_base(
        cls,
        base: Base,
        *,
        version: int = 3,
        layers: Sequence[int] | None = None,
        own_projection: bool = False,
        draft_ids: Tensor | None = None,
    ) -> EagleHeads:
        """A new head that passes the base's last fused state on: what the draft layer adds starts at zero.

        Args:
            layers: version 3: the states to fuse; default low, middle and high as published: those that enter layers
                2, n/2 and n − 3 (within the base's range, each once).
        """
        if version == 3 and layers is None:
            n = base.num_layers
            layers = sorted({min(2, n), n // 2, max(n - 3, 0)})
        if any(not 0 <= i <= base.num_layers for i in layers or ()):
            raise ConfigError(f"layers {list(layers or ())} do not lie within the base's {base.num_layers}")
        config = EagleConfig(
            version=version,
            layers=tuple(layers or ()),
            layer=shape_of(base),
            own_projection=own_projection,
            draft_vocab_size=None if draft_ids is None else len(draft_ids),
            **base.fingerprint(),
        )
        heads = cls(config, draft_ids)
        with torch.no_grad():
            heads.fc.weight[:, -config.hidden_size :] = torch.eye(config.hidden_size)
            heads.fc.weight[:, : -config.hidden_size] = 0
            if version == 3:
                _copy_norm(base.final_norm, heads.norm)
            if own_projection:
                rows = base.projection_weight if draft_ids is None else base.projection_weight[draft_ids]
                heads.lm_head.weight.copy_(rows)
        return heads.to(base.device)

    def check_loaded(self) -> None:
        if self.draft_ids is not None:
            check_draft_ids(self.draft_ids, self.config.vocab_size)

    @property
    def layers(self) -> tuple[int, ...]:
        """The states that `fuse` reads beside the last one (`Base.forward`'s `layers`)."""
        return self.config.layers

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def fuse(self, output: BaseOutput) -> Tensor:
        """The base's states as features: (B, T, h)."""
        if self.config.version == 1:
            return output.last_hidden_state
        states = torch.cat(output.layer_states, dim=-1)
        if self.state_norms:
            chunks = states.chunk(len(self.state_norms), dim=-1)
            states = torch.cat([norm(chunk) for norm, chunk in zip(self.state_norms, chunks, strict=True)], dim=-1)
        return self.fc(states)

    def inputs(self, embeddings: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """What the draft layer's attention reads, and its residual: from (B, T, h) each."""
        if self.config.version == 1:
            joined = self.fc(torch.cat((embeddings, features), dim=-1))
            return joined, joined
        normed = self.hidden_norm(features)
        residual = normed if self.config.norm_before_residual else features
        return torch.cat((self.input_norm(embeddings), normed), dim=-1), residual

    def forward(
        self,
        embeddings: Tensor,
        features: Tensor,
        position_ids: Tensor,
        visible: Tensor | None = None,
        cache: KeyValueStore | None = None,
    ) -> Tensor:
        """One step of drafting, or a whole text at once.

        Args:
            embeddings: (B, T, h), of the token that follows each position.
            features: (B, T, h), from `fuse` or from the step before.
            position_ids: (B, T), the features' own positions.
            visible: boolean (B, T, S), which of the S keys (cached and new) each sees; None: causal.
            cache: keys and values of what came before; written to.

        Returns:
            (B, T, h): features of the positions one further, which `head_logits` reads as well.
        """
        x, residual = self.inputs(embeddings, features)
        return self.layer(x, residual, position_ids, visible, cache)

    def states(self, features: Tensor) -> Tensor:
        """Output features (..., h) as the vocabulary projection reads them."""
        return features if self.config.version == 1 else self.norm(features)

    def head_logits(self, features: Tensor, base: Base) -> Tensor:
        """Logits over the draft vocabulary: (..., h) → (..., draft_vocab_size or V)."""
        states = self.states(features)
        if self.config.own_projection:
            return self.lm_head(states)
        if self.draft_ids is None:
            return base.project(states)
        return base.project_rows(states, self.draft_ids)


def _copy_norm(source: nn.Module | None, target: Any) -> None:
    """Gives a norm the scale of the base's own, whatever way the family stores it."""
    if source is None:
        return
    weight: Any = next(source.parameters())
    probe = torch.randn(1, len(target.weight), dtype=weight.dtype, device=weight.device)
    bare = type(target)(len(target.weight), target.eps).to(probe)
    zero = source(torch.zeros_like(probe))
    target.weight.copy_(((source(probe) - zero) / bare(probe))[0])
    if getattr(target, "bias", None) is not None:
        target.bias.copy_(zero[0])
