"""Hydra heads of other projects against the same function written out with transformers' own Llama layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_heads.errors import BaseNeeded, HeadsError
from medusa_heads.families import load_heads
from medusa_heads.formats import read_foreign
from medusa_heads.hydra import HydraHeads
from tests.conftest import tiny_base
from tests.medusa_heads.formats.layouts import HIDDEN, LLAMA, VOCAB, layer_shapes, random_tensors, store
from tests.medusa_heads.formats.written_out import FEATURES, GENERATOR, POSITIONS, T, attend, llama_layer, norm


def hydra_tensors(prefix: bool, layers: int = 3, heads: int = 2) -> dict[str, Tensor]:
    """Their names; with the prefix layer, dropouts shift the numbers of blocks and projections."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(heads):
        for j in range(layers):
            place = 2 * j + 1 if prefix else j
            width = (i + 2) * HIDDEN if j == 0 else HIDDEN
            for kind in ("linear", "res_connection") if j == 0 else ("linear",):
                shapes[f"hydra_mlp.{i}.{place}.{kind}.weight"] = (HIDDEN, width)
                shapes[f"hydra_mlp.{i}.{place}.{kind}.bias"] = (HIDDEN,)
        name = f"hydra_lm_head.{i}.1" if prefix else f"hydra_lm_head.{i}"
        shapes |= {f"{name}.weight": (VOCAB, HIDDEN), f"{name}.bias": (VOCAB,)}
    if prefix:
        shapes |= layer_shapes("prefix_embeding_layer.layers.0.")
        shapes["prefix_embeding_layer.layers.0.input_layernorm.weight"] = (HIDDEN,)
        shapes["prefix_embeding_layer.norm.weight"] = (HIDDEN,)
        shapes["prefix_embeding_layer.embed_tokens.weight"] = (VOCAB, HIDDEN)
    return random_tensors(shapes)


HYDRA: dict[str, Any] = {
    "hydra_num_heads": 2, "hydra_num_layers": 3, "hydra_head_arch": "mlp", "grounded_heads": True,
    "hidden_state_offset": 0, "base_model_name_or_path": "org/base",
}  # fmt: skip


@torch.no_grad()
def hydra(tensors: dict[str, Tensor], prefix: bool, ahead: Tensor, config: dict[str, Any]) -> Tensor:
    """(heads, 1, T, V) logits, from the embeddings (1, T, heads, h) of the tokens ahead."""
    states, logits = FEATURES, []
    if prefix:
        name = "prefix_embeding_layer.layers.0."
        layer, rotary, _ = llama_layer(tensors, name, HIDDEN, config)
        states = attend(layer, rotary, norm(tensors[f"{name}input_layernorm.weight"], states), states)
        states = norm(tensors["prefix_embeding_layer.norm.weight"], states)
    for i in range(2):
        x = torch.cat((states, ahead[:, :, : i + 1].flatten(2)), -1)
        for j in range(3):
            place = f"hydra_mlp.{i}.{2 * j + 1 if prefix else j}."
            step = x @ tensors[f"{place}linear.weight"].T + tensors[f"{place}linear.bias"]
            if j == 0:
                x = x @ tensors[f"{place}res_connection.weight"].T + tensors[f"{place}res_connection.bias"]
            x = x + torch.nn.functional.silu(step)
        name = f"hydra_lm_head.{i}.1" if prefix else f"hydra_lm_head.{i}"
        logits.append(x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"])
    return torch.stack(logits)


@pytest.mark.parametrize("prefix", [False, True])
def test_hydra(tmp_path: Path, prefix: bool) -> None:
    base = tiny_base()
    base.config.rms_norm_eps = LLAMA["rms_norm_eps"]
    base.config.intermediate_size = LLAMA["intermediate_size"]
    embedding = base.model.get_input_embeddings().weight.detach().clone()
    tensors = hydra_tensors(prefix) | {"input_embed_fn.weight": embedding}
    said = HYDRA | ({"hydra_head_arch": "prefix-mlp"} if prefix else {})
    store(tmp_path, said, "hydra_lm_head.pt", tensors | {"input_embed_fn.weight": embedding + 1})
    with pytest.raises(HeadsError, match="its embedding is not that of the base 'tiny-llama'"):
        load_heads(tmp_path, base=base)
    store(tmp_path, said, "hydra_lm_head.pt", tensors)
    heads: Any = load_heads(tmp_path, base=base)
    assert isinstance(heads, HydraHeads)
    ahead = torch.randn(1, T, 2, HIDDEN, generator=GENERATOR)
    with torch.no_grad():
        states = FEATURES if heads.prefix is None else heads.prefix(FEATURES, POSITIONS)
        found = heads.head_logits(heads(states, ahead), base)
    rope = {"rope_parameters": base.config.rope_parameters}
    config = {k: v for k, v in LLAMA.items() if k != "rope_theta"} | rope
    torch.testing.assert_close(found, hydra(tensors, prefix, ahead, config), atol=1e-5, rtol=1e-5)
    if prefix:
        assert "embed_tokens.weight, which their forward does not use, is left out" in str(read_foreign(tmp_path, base))
        with pytest.raises(BaseNeeded, match="the prefix layer has the shape of the base's layers"):
            load_heads(tmp_path)


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({"hydra_head_arch": "eagle-attn"}, None, "hydra_head_arch 'eagle-attn' does not go with these tensors"),
        ({"grounded_heads": False}, None, "do not read the tokens drafted before them"),
        ({"hidden_state_offset": 1}, None, "heads on an earlier state"),
        ({}, without("hydra_mlp.1.0.res_connection.bias"), r"heads\.1\.0\.res_connection\.bias is missing"),
        ({}, without("hydra_lm_head.0.bias"), r"lm_heads\.0\.bias is missing"),
        ({}, lambda t: t.update({"hydra_mlp.0.1.extra": torch.zeros(1)}), "unexpected tensors hydra_mlp.0.1.extra"),
        ({}, lambda t: t.update({"hydra_mlp.1.0.linear.weight": torch.zeros(HIDDEN, HIDDEN)}), r"should be \(32, 96\)"),
    ],
)
def test_hydra_heads_that_are_not_understood(
    tmp_path: Path, config: dict[str, Any], change: Callable[[dict[str, Tensor]], None] | None, message: str
) -> None:
    tensors = hydra_tensors(False)
    if change is not None:
        change(tensors)
    store(tmp_path, HYDRA | config, "hydra_lm_head.pt", tensors)
    with pytest.raises(HeadsError, match=message):
        load_heads(tmp_path)
