"""Masked attention over grouped queries without repeating the keys.

With a mask, transformers' `sdpa` path copies every key and value once for each query head of its group. Folding the
group into the query axis gives the same products on the keys as they are: for g query heads a key head, queries
(B, H, T, d) become (B, H/g, g·T, d), and the mask's rows are repeated g times instead. Registered through
transformers' public attention interface; no model file is touched.
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
    """Attention of `query` (B, H, T, d) over `key`, `value` (B, H/g, S, d); mask (B, 1, T, S). Returns (B, T, H, d)."""
    batch, heads, length, _ = query.shape
    groups = heads // key.shape[1]
    plain = attention_mask is None or groups == 1 or attention_mask.shape[1] != 1
    if plain or kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    assert attention_mask is not None
    folded = query.reshape(batch, key.shape[1], groups * length, query.shape[-1])
    mask = attention_mask.repeat(1, 1, groups, 1)
    out = torch.nn.functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
    )
    out = out.reshape(batch, heads, length, value.shape[-1])
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Makes the name `FOLDED` known to transformers. Idempotent."""
    AttentionInterface.register(FOLDED, folded_attention)
    AttentionMaskInterface.register(FOLDED, sdpa_mask)
