"""Masked attention over grouped queries without repeating the keys.

With a mask, transformers' `sdpa` path copies every key and value once for each query head of its group. Folding the
group into the query axis gives the same products on the keys as they are: for g query heads a key head, queries
(B, H, T, d) become (B, H/g, g·T, d), and the mask's rows are repeated g times instead: once a pass, by `fold_mask`,
which also spares the kernel its conversion of a boolean mask in every layer. Registered through transformers' public
attention interface; no model file is touched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

FOLDED = "medusa_folded_sdpa"


def folded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of `query` (B, H, T, d) over `key`, `value` (B, H/g, S, d). Returns (B, T, H, d).

    The mask is (B, 1, T, S), boolean or additive, or what `fold_mask` made of one.
    """
    batch, heads, length, _ = query.shape
    groups = heads // key.shape[1]
    if attention_mask is not None and attention_mask.shape[2] not in (length, groups * length):
        attention_mask = attention_mask[:, :, :length]  # folded for another number of groups than this layer's
    plain = attention_mask is None or groups == 1 or attention_mask.shape[1] != 1
    if plain or kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None:
        mask = None if attention_mask is None else attention_mask[:, :, :length]
        return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, **kwargs)
    assert attention_mask is not None
    folded = query.reshape(batch, key.shape[1], groups * length, query.shape[-1])
    mask = attention_mask if attention_mask.shape[2] == groups * length else attention_mask.repeat(1, 1, groups, 1)
    if mask.is_floating_point() and mask.dtype != query.dtype:
        mask = mask.to(query.dtype)
    out = torch.nn.functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
    )
    out = out.reshape(batch, heads, length, value.shape[-1])
    return out.transpose(1, 2).contiguous(), None


def fold_mask(visible: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """The additive mask of folded queries: boolean (B, 1, T, S), which slots a token sees → (B, 1, groups · T, S)."""
    hidden = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
    return hidden.repeat(1, 1, groups, 1)


def register() -> None:
    """Makes the name `FOLDED` known to transformers. Idempotent."""
    AttentionInterface.register(FOLDED, folded_attention)
    AttentionMaskInterface.register(FOLDED, sdpa_mask)
