"""What formats' tests write out by hand, with transformers' own Llama layer, and what they write it out for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from tests.medusa_heads.formats.layouts import HIDDEN, LLAMA

T = 7
GENERATOR = torch.Generator().manual_seed(4)
EMBEDDINGS, FEATURES = (torch.randn(1, T, HIDDEN, generator=GENERATOR) for _ in range(2))
STATES = tuple(torch.randn(1, T, HIDDEN, generator=GENERATOR) for _ in range(3))
POSITIONS = torch.arange(T)[None]
IDS = torch.tensor([3, 7, 40, 61, 95])


def llama_layer(tensors: dict[str, Tensor], prefix: str, width: int, config: dict[str, Any] = LLAMA) -> Any:
    """transformers' layer with these weights; its attention may read a wider input."""
    made = LlamaConfig(**{k: v for k, v in config.items() if k != "architectures"}, attn_implementation="eager")
    layer: Any = LlamaDecoderLayer(made, 0)
    for name in ("q_proj", "k_proj", "v_proj"):
        old = getattr(layer.self_attn, name)
        setattr(layer.self_attn, name, nn.Linear(width, old.out_features, bias=old.bias is not None))
    layer.input_layernorm = nn.Identity()
    own = layer.state_dict()
    layer.load_state_dict({name: tensors[prefix + name] for name in own})
    return layer, LlamaRotaryEmbedding(made), made


def attend(layer: Any, rotary: Any, x: Tensor, residual: Tensor) -> Tensor:
    """The layer over the whole text, causal."""
    mask = torch.full((1, 1, T, T), torch.finfo(torch.float32).min).triu(1)
    out = layer.self_attn(x, position_embeddings=rotary(x, POSITIONS), attention_mask=mask)[0]
    middle = residual + out
    return middle + layer.mlp(layer.post_attention_layernorm(middle))


def norm(weight: Tensor, x: Tensor) -> Tensor:
    made = LlamaRMSNorm(len(weight), eps=LLAMA["rms_norm_eps"])
    made.weight.data = weight
    return made(x)
