"""Checkpoints in the layouts of other projects, written by the rules of those projects and by nothing of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, VOCAB = 32, 96


def store(directory: Path, config: dict[str, Any], file: str, tensors: dict[str, Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, directory / file)
    else:
        torch.save(tensors, directory / file)
    return directory


def store_sharded(directory: Path, config: dict[str, Any], shards: dict[str, dict[str, Tensor]]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    for name, tensors in shards.items():
        save_file(tensors, directory / name)
    weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.1)).to(dtype)
        + (1.0 if "norm" in name else 0.0)
        for name, shape in shapes.items()
    }


def sequence_shapes(heads: int, layers: int, own: bool, prefix: str = "") -> dict[str, tuple[int, ...]]:
    """The first project's Medusa names."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(heads):
        for j in range(layers):
            shapes[f"{prefix}{i}.{j}.linear.weight"] = (HIDDEN, HIDDEN)
            shapes[f"{prefix}{i}.{j}.linear.bias"] = (HIDDEN,)
        if own:
            shapes[f"{prefix}{i}.{layers}.weight"] = (VOCAB, HIDDEN)
    return shapes


def vllm_shapes(heads: int, layers: int, projections: dict[str, int], bias: bool = True) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(heads):
        for j in range(layers):
            shapes[f"blocks.{i}.layers.{j}.weight"] = (HIDDEN, HIDDEN)
            if bias:
                shapes[f"blocks.{i}.layers.{j}.bias"] = (HIDDEN,)
    return shapes | {name: (rows, HIDDEN) for name, rows in projections.items()}


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 128,
    "vocab_size": VOCAB,
}


def layer_shapes(prefix: str, width: int = HIDDEN) -> dict[str, tuple[int, ...]]:
    head = HIDDEN // 4
    return {
        f"{prefix}self_attn.q_proj.weight": (4 * head, width),
        f"{prefix}self_attn.k_proj.weight": (2 * head, width),
        f"{prefix}self_attn.v_proj.weight": (2 * head, width),
        f"{prefix}self_attn.o_proj.weight": (HIDDEN, 4 * head),
        f"{prefix}mlp.gate_proj.weight": (48, HIDDEN),
        f"{prefix}mlp.up_proj.weight": (48, HIDDEN),
        f"{prefix}mlp.down_proj.weight": (HIDDEN, 48),
        f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
    }


def eagle1_shapes(bias: bool = True) -> dict[str, tuple[int, ...]]:
    shapes = layer_shapes("layers.0.") | {"fc.weight": (HIDDEN, 2 * HIDDEN)}
    return shapes | ({"fc.bias": (HIDDEN,)} if bias else {})


def eagle3_shapes(prefix: str, rows: int, layers: int = 3) -> dict[str, tuple[int, ...]]:
    return layer_shapes(prefix, 2 * HIDDEN) | {
        f"{prefix}hidden_norm.weight": (HIDDEN,),
        f"{prefix}input_layernorm.weight": (HIDDEN,),
        "fc.weight": (HIDDEN, layers * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (rows, HIDDEN),
    }


def vocabulary_maps(ids: Tensor) -> dict[str, Tensor]:
    """d2t and t2d of EAGLE-3 for the draft's token ids."""
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": mask}
