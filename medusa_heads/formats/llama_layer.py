"""The decoder layer that EAGLE checkpoints of all projects hold: Llama's names, and a Llama config beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_heads.config import EagleConfig, LayerShape
from medusa_heads.errors import HeadsError
from medusa_heads.formats.adapting import State
from medusa_heads.formats.reading import expect_shape

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
HEAD_NORMS = ("q_norm", "k_norm")


def layer_names(prefix: str, present: frozenset[str]) -> dict[str, str]:
    """Their names of the layer's tensors → ours, for `prefix` such as `layers.0.`; biases where there are any.

    What is missing of the weights is missing here too; the module's loading names it.
    """
    names = {}
    for part, modules in (("self_attn", ATTENTION + HEAD_NORMS), ("mlp", MLP)):
        for module in modules:
            for kind in ("weight", "bias"):
                name = f"{prefix}{part}.{module}.{kind}"
                if name in present:
                    names[name] = f"layer.{part}.{module}.{kind}"
    norm = f"{prefix}post_attention_layernorm.weight"
    return names | ({norm: "layer.post_attention_layernorm.weight"} if norm in present else {})


def read_shape(config: Mapping[str, Any], tensors: Mapping[str, Tensor], input_size: int, where: Path) -> LayerShape:
    """The layer's shape by its config, checked against its tensors (by our names); biases and norms by the tensors."""
    hidden = _number(config, "hidden_size", where)
    heads = _number(config, "num_attention_heads", where)
    groups = _number(config, "num_key_value_heads", where, heads)
    size = _number(config, "head_dim", where, hidden // heads)
    inner = _number(config, "intermediate_size", where)
    expected = {
        "self_attn.q_proj": (heads * size, input_size),
        "self_attn.k_proj": (groups * size, input_size),
        "self_attn.v_proj": (groups * size, input_size),
        "self_attn.o_proj": (hidden, heads * size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for name, shape in expected.items():
        if f"layer.{name}.weight" not in tensors:
            raise HeadsError(f"{where}: the draft layer has no {name}.weight")
        expect_shape(tensors, f"layer.{name}.weight", shape, where)
    biased = {name for name in expected if f"layer.{name}.bias" in tensors}
    kinds = {tuple(name in biased for name in group) for group in (list(expected)[:3], list(expected)[4:])}
    if any(len(set(kind)) > 1 for kind in kinds):
        raise HeadsError(f"{where}: biases of the draft layer are there for {', '.join(sorted(biased))} alone")
    return LayerShape(
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=size,
        intermediate_size=inner,
        hidden_act=str(config.get("hidden_act") or "silu"),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_parameters=rope_parameters(config, where),
        partial_rotary_factor=float(config.get("partial_rotary_factor") or 1.0),
        attention_bias="self_attn.q_proj" in biased,
        output_bias="self_attn.o_proj" in biased,
        mlp_bias="mlp.up_proj" in biased,
        qk_norm="layer.self_attn.q_norm.weight" in tensors,
        max_position_embeddings=_number(config, "max_position_embeddings", where, 2048),
    )


def _number(config: Mapping[str, Any], name: str, where: Path, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise HeadsError(f"{where}: the config's {name} is {value!r}, not a positive integer")
    return value


def rope_parameters(config: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Rotary parameters as transformers has them now, from where its releases and other projects put them.

    `rope_theta` stands alone, `rope_parameters` holds all, `rope_scaling` the rest. Raises HeadsError where two of them
    disagree.
    """
    parts: list[dict[str, Any]] = []
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if value is not None and not isinstance(value, dict):
            raise HeadsError(f"{where}: the config's {key} is {value!r}, not an object")
        if value:
            part = dict(value)
            kind = part.pop("type", None)
            part.setdefault("rope_type", kind or "default")
            parts.append(part)
    if config.get("rope_theta") is not None:
        parts.append({"rope_theta": float(config["rope_theta"])})
    found: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if found.setdefault(key, value) != value:
                raise HeadsError(f"{where}: the config gives two values of {key}: {found[key]!r} and {value!r}")
    return {"rope_type": "default", "rope_theta": 10000.0, **found}


def llama_config(shape: LayerShape, hidden_size: int, vocab_size: int, format: str) -> dict[str, Any]:
    """The config of a Llama of one such layer, rotary parameters at the places of old and new releases.

    Raises HeadsError for what a Llama layer cannot be.
    """
    for odd, what in (
        (shape.norm != "rms", "layer norms"),
        (not shape.gated_mlp, "an MLP without a gate"),
        (shape.partial_rotary_factor != 1.0, "partly rotated heads"),
        (shape.qk_norm, "norms of queries and keys"),
    ):
        if odd:
            raise HeadsError(f"{format} holds Llama layers alone; the draft layer of these heads has {what}")
    rope = dict(shape.rope_parameters)
    scaling = {("type" if key == "rope_type" else key): rope[key] for key in rope if key != "rope_theta"}
    return {
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": shape.hidden_act,
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "rope_parameters": rope,
        "attention_bias": shape.attention_bias or shape.output_bias,
        "mlp_bias": shape.mlp_bias,
        "vocab_size": vocab_size,
        "tie_word_embeddings": False,
    }


def llama_state(state: State) -> State:
    """The head with biases in all of attention or none, as Llama has it: zeros stand for the missing."""
    config = state.config
    assert isinstance(config, EagleConfig)
    shape = config.shape
    if shape.attention_bias == shape.output_bias:
        return state
    tensors = dict(state.tensors)
    for module in ATTENTION:
        weight = tensors[f"layer.self_attn.{module}.weight"]
        tensors.setdefault(f"layer.self_attn.{module}.bias", torch.zeros(len(weight), dtype=weight.dtype))
    full = replace(shape, attention_bias=True, output_bias=True)
    return state.changed(tensors, layer=asdict(full))
