"""A decoder layer of the base's own kind, for heads that attend: grouped queries, rotary positions, gated or plain MLP.

Built from a `LayerShape`, so that one module serves every family of bases; no model file of transformers is copied or
touched. Its parts can be called one by one (`project`, `attend`, `merge`), which training's unrolled attention needs.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from medusa_heads.attention import fold_mask
from medusa_heads.config import LayerShape
from medusa_heads.errors import UnsupportedModelError

if TYPE_CHECKING:
    from medusa_heads.base import Base


class KeyValueStore(Protocol):
    """What the layer writes keys and values to: any cache of transformers, `decode.cache.TreeCache` among them."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]: ...


class Rotary(nn.Module):
    """Rotary positions with transformers' own scaling rules, over the first part of a head's dimensions."""

    def __init__(self, shape: LayerShape):
        super().__init__()
        self.size = 2 * (int(shape.head_dim * shape.partial_rotary_factor) // 2)
        parameters = {k: v for k, v in shape.rope_parameters.items() if k != "partial_rotary_factor"}
        config = LlamaConfig(
            hidden_size=self.size,
            num_attention_heads=1,
            head_dim=self.size,
            max_position_embeddings=shape.max_position_embeddings,
            rope_parameters=parameters,
        )
        self.angles = LlamaRotaryEmbedding(config)

    def _apply(self, fn: Any, recurse: bool = True) -> Rotary:
        """Moves with the module, but stays in float32: rounded to bfloat16, the frequencies turn keys by up to 0.09 too
        much at 64 tokens' distance, which training did not see."""
        before = dict(self.angles.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            setattr(self.angles, name, buffer.to(getattr(self.angles, name).device))
        return self

    def tables(self, like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin (B, 1, T, size) in the dtype of `like`, for positions (B, T)."""
        cos, sin = self.angles(like, position_ids)
        return cos[:, None], sin[:, None]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, H, T, d), turned."""
        turned, rest = x[..., : self.size], x[..., self.size :]
        half = self.size // 2
        swapped = torch.cat((-turned[..., half:], turned[..., :half]), dim=-1)
        turned = turned * cos + swapped * sin
        return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)


class GatedMLP(nn.Module):
    """down(act(gate x) · up x), or down(act(up x)) without a gate."""

    def __init__(self, hidden_size: int, shape: LayerShape):
        super().__init__()
        inner, bias = shape.intermediate_size, shape.mlp_bias
        self.gate_proj = nn.Linear(hidden_size, inner, bias=bias) if shape.gated_mlp else None
        self.up_proj = nn.Linear(hidden_size, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden_size, bias=bias)
        self.act = ACT2FN[shape.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        inner = self.act(self.up_proj(x)) if self.gate_proj is None else self.act(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(inner)


class SelfAttention(nn.Module):
    """The projections of grouped-query attention; queries, keys and values may read a wider input than h."""

    def __init__(self, input_size: int, hidden_size: int, shape: LayerShape):
        super().__init__()
        heads, groups, size = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        self.head_dim = size
        self.q_proj = nn.Linear(input_size, heads * size, bias=shape.attention_bias)
        self.k_proj = nn.Linear(input_size, groups * size, bias=shape.attention_bias)
        self.v_proj = nn.Linear(input_size, groups * size, bias=shape.attention_bias)
        self.o_proj = nn.Linear(heads * size, hidden_size, bias=shape.output_bias)
        if shape.qk_norm:
            self.q_norm = RMSNorm(size, shape.norm_eps)
            self.k_norm = RMSNorm(size, shape.norm_eps)
        self.qk_norm = shape.qk_norm

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, input) → q (B, H, T, d), k and v (B, H/g, T, d), not yet rotated."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return (self.q_norm(q), self.k_norm(k), v) if self.qk_norm else (q, k, v)


class RMSNorm(nn.RMSNorm):
    """In the dtype of its input: under autocast the weight is of another, which torch's fused kernel does not take."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def make_norm(size: int, shape: LayerShape) -> nn.Module:
    return RMSNorm(size, shape.norm_eps) if shape.norm == "rms" else nn.LayerNorm(size, shape.norm_eps)


class DraftLayer(nn.Module):
    """One decoder layer: x + attention(input), then y + MLP(norm(y)). What is normed before attention, and what the
    attention reads, is the caller's: families differ there."""

    def __init__(self, input_size: int, hidden_size: int, shape: LayerShape):
        super().__init__()
        self.self_attn = SelfAttention(input_size, hidden_size, shape)
        self.mlp = GatedMLP(hidden_size, shape)
        self.post_attention_layernorm = make_norm(hidden_size, shape)
        self.rotary = Rotary(shape)
        self.groups = shape.num_attention_heads // shape.num_key_value_heads
        for projection in (self.self_attn.o_proj, self.mlp.down_proj):  # a new layer passes its input on
            for parameter in projection.parameters():
                nn.init.zeros_(parameter)

    def project(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q (B, H, T, d), k and v (B, H/g, T, d) of inputs (B, T, input) at positions (B, T)."""
        q, k, v = self.self_attn.project(x)
        cos, sin = self.rotary.tables(q, position_ids)
        return self.rotary(q, cos, sin), self.rotary(k, cos, sin), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        """Attention of (B, H, T, d) over (B, H/g, S, d): → (B, T, H·d).

        Args:
            visible: boolean (B, T, S), the keys that each query sees; None: causal, for T = S.
        """
        batch, heads, length, size = q.shape
        if visible is None:
            out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.groups > 1)
        else:
            folded = q.reshape(batch, k.shape[1], self.groups * length, size)
            mask = fold_mask(visible[:, None], self.groups, q.dtype)
            out = nn.functional.scaled_dot_product_attention(folded, k, v, attn_mask=mask)
            out = out.reshape(batch, heads, length, size)
        return out.transpose(1, 2).flatten(2)

    def merge(self, attended: Tensor, residual: Tensor) -> Tensor:
        """(B, T, H·d) and (B, T, h) → (B, T, h)."""
        middle = residual + self.self_attn.o_proj(attended)
        return middle + self.mlp(self.post_attention_layernorm(middle))

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        position_ids: Tensor,
        visible: Tensor | None = None,
        cache: KeyValueStore | None = None,
    ) -> Tensor:
        """Attention input (B, T, input) and residual (B, T, h) → (B, T, h). With a cache, S counts its slots too."""
        q, k, v = self.project(x, position_ids)
        if cache is not None:
            k, v = cache.update(k, v, 0)
        return self.merge(self.attend(q, k, v, visible), residual)


def shape_of(base: Base) -> dict[str, Any]:
    """The shape of the base's own layers, as the fields of a `LayerShape`."""
    config, names = base.config, base.parameter_names
    heads = int(config.num_attention_heads)
    inner = _first(config, "intermediate_size", "n_inner", "ffn_dim") or 4 * base.hidden_size
    act = _first(config, "hidden_act", "hidden_activation", "activation_function")
    if act is None:
        raise UnsupportedModelError(f"the config of {base.name!r} names no activation for a draft layer to take over")
    rms = _first(config, "rms_norm_eps")
    rope = dict(_rope(config))
    partial = float(rope.pop("partial_rotary_factor", None) or 1.0)
    attention = [name for name in names if "attn" in name or "attention" in name]
    shape = LayerShape(
        num_attention_heads=heads,
        num_key_value_heads=int(_first(config, "num_key_value_heads") or heads),
        head_dim=int(_first(config, "head_dim") or base.hidden_size // heads),
        intermediate_size=int(inner),
        hidden_act=str(act),
        gated_mlp=any("gate_proj" in name or "gate_up_proj" in name for name in names),
        norm="layer" if rms is None else "rms",
        norm_eps=float(rms or _first(config, "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon") or 1e-5),
        rope_parameters=rope,
        partial_rotary_factor=partial,
        attention_bias=any(name.endswith(_ends("q_proj query_key_value c_attn qkv_proj query")) for name in attention),
        output_bias=any(name.endswith(_ends("o_proj out_proj dense c_proj")) for name in attention),
        mlp_bias=any(".mlp." in name and name.endswith(".bias") for name in names),
        qk_norm=any("q_norm" in name for name in names),
        max_position_embeddings=base.max_positions or 2048,
    )
    return asdict(shape)


def _ends(projections: str) -> tuple[str, ...]:
    return tuple(f"{name}.bias" for name in projections.split())


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _rope(config: Any) -> dict[str, Any]:
    """The base's rotary parameters; those of its full-attention layers where kinds differ; the plain rule for a base
    with other positions."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = parameters.get("full_attention") or next((v for v in parameters.values() if isinstance(v, dict)), None)
    return {"rope_type": "default", "rope_theta": 10000.0, **(nested or parameters)}
