"""A base with so few tokens that its law can be enumerated."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from medusa_heads.base import Base


def small_base(vocabulary: int, *, layers: int = 1, positions: int = 200, seed: int = 0) -> Base:
    """A random Llama without a tokenizer, whose texts never end. Its laws are far from flat and differ from prefix to
    prefix."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight *= 20.0
    return Base.from_model(model)
