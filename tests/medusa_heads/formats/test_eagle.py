"""EAGLE and Hydra heads of other projects against the same function written out with transformers' own Llama layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from medusa_heads.base import Base
from medusa_heads.eagle import EagleHeads
from medusa_heads.errors import BaseNeeded, HeadsError
from medusa_heads.families import load_heads
from medusa_heads.formats import read_foreign
from medusa_heads.formats.llama_layer import rope_parameters
from medusa_heads.hub import base_of
from medusa_heads.hydra import HydraHeads
from tests.conftest import tiny_base
from tests.medusa_heads.formats.layouts import (
    HIDDEN,
    LLAMA,
    VOCAB,
    eagle1_shapes,
    eagle3_shapes,
    layer_shapes,
    random_tensors,
    store,
    vocabulary_maps,
)

T = 7
GENERATOR = torch.Generator().manual_seed(4)
EMBEDDINGS, FEATURES = (torch.randn(1, T, HIDDEN, generator=GENERATOR) for _ in range(2))
STATES = tuple(torch.randn(1, T, HIDDEN, generator=GENERATOR) for _ in range(3))
POSITIONS = torch.arange(T)[None]
IDS = torch.tensor([3, 7, 40, 61, 95])
AUX = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def base() -> Base:
    return tiny_base()


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


@torch.no_grad()
def eagle1(tensors: dict[str, Tensor], config: dict[str, Any] = LLAMA) -> Tensor:
    layer, rotary, _ = llama_layer(tensors, "layers.0.", HIDDEN, config)
    joined = torch.nn.functional.linear(
        torch.cat((EMBEDDINGS, FEATURES), -1), tensors["fc.weight"], tensors.get("fc.bias")
    )
    return attend(layer, rotary, joined, joined)


@torch.no_grad()
def eagle3(tensors: dict[str, Tensor], prefix: str, before_residual: bool = False) -> tuple[Tensor, Tensor]:
    """Output features and draft logits."""
    layer, rotary, _ = llama_layer(tensors, prefix, 2 * HIDDEN)
    fused = torch.cat(STATES, -1)
    if "input_norm.weight" in tensors:
        fused = norm(tensors["input_norm.weight"], fused)
    if "fc_norm.0.weight" in tensors:
        fused = torch.cat([norm(tensors[f"fc_norm.{i}.weight"], STATES[i]) for i in range(3)], -1)
    features = fused @ tensors["fc.weight"].T
    normed = norm(tensors[f"{prefix}hidden_norm.weight"], features)
    x = torch.cat((norm(tensors[f"{prefix}input_layernorm.weight"], EMBEDDINGS), normed), -1)
    out = attend(layer, rotary, x, normed if before_residual else features)
    return out, norm(tensors["norm.weight"], out) @ tensors["lm_head.weight"].T


@torch.no_grad()
def ours3(heads: EagleHeads, base: Base) -> tuple[Tensor, Tensor]:
    from medusa_heads.base import BaseOutput

    out = heads(EMBEDDINGS, heads.fuse(BaseOutput(STATES[0], STATES)), POSITIONS)
    return out, heads.head_logits(out, base)


# EAGLE-1 and EAGLE-2


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_eagle1(tmp_path: Path, base: Base, bias: bool, file: str) -> None:
    tensors = random_tensors(eagle1_shapes(bias))
    embedding = base.model.get_input_embeddings().weight.detach().clone()
    store(tmp_path, LLAMA | {"bias": bias}, file, tensors | {"embed_tokens.weight": embedding})
    reading = read_foreign(tmp_path, base)
    assert reading.format == "EAGLE-1 or EAGLE-2"
    assert reading.notes == ("its embedding is a copy of the base's",)
    heads = load_heads(tmp_path, base=base)
    with torch.no_grad():
        out = heads(EMBEDDINGS, FEATURES, POSITIONS)
        assert torch.equal(heads.head_logits(out, base), base.project(out))
    torch.testing.assert_close(out, eagle1(tensors), atol=1e-5, rtol=1e-5)


def test_an_embedding_of_another_base_is_refused(tmp_path: Path, base: Base) -> None:
    tensors = random_tensors(eagle1_shapes() | {"embed_tokens.weight": (VOCAB, HIDDEN)})
    store(tmp_path, LLAMA, "model.safetensors", tensors)
    with pytest.raises(HeadsError, match="its embedding is not that of the base 'tiny-llama'"):
        load_heads(tmp_path, base=base)
    assert "not at hand to compare" in str(read_foreign(tmp_path))


def test_an_embedding_rounded_to_half_precision_is_the_same(tmp_path: Path, base: Base) -> None:
    embedding = base.model.get_input_embeddings().weight.detach()
    for dtype in (torch.float16, torch.bfloat16):
        tensors = random_tensors(eagle1_shapes()) | {"embed_tokens.weight": embedding.to(dtype)}
        store(tmp_path, LLAMA, "model.safetensors", tensors)
        load_heads(tmp_path, base=base)


@pytest.mark.parametrize("prefix", ["", "model.", "model.model."])
def test_vllms_eagle1_nests_its_config(tmp_path: Path, base: Base, prefix: str) -> None:
    tensors = random_tensors(eagle1_shapes(bias=False))
    named = {name if name.startswith("fc") else prefix + name: tensor for name, tensor in tensors.items()}
    store(tmp_path, {"model_type": "eagle", "model": LLAMA, "eagle_fc_bias": False}, "model.safetensors", named)
    assert read_foreign(tmp_path).format == "EAGLE-1, vLLM"
    with torch.no_grad():
        out = load_heads(tmp_path)(EMBEDDINGS, FEATURES, POSITIONS)
    torch.testing.assert_close(out, eagle1(tensors), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 100000.0},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
        {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {
            "rope_theta": 5000.0,
            "rope_scaling": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ],
)  # fmt: skip
def test_rotary_positions_from_every_place_of_the_config(tmp_path: Path, rope: dict[str, Any]) -> None:
    config = {k: v for k, v in (LLAMA | rope).items() if v is not None}
    tensors = random_tensors(eagle1_shapes())
    store(tmp_path, config, "model.safetensors", tensors)
    with torch.no_grad():
        out = load_heads(tmp_path)(EMBEDDINGS, FEATURES, POSITIONS)
    as_now = config | {"rope_parameters": rope_parameters(config, tmp_path)}
    for old in ("rope_theta", "rope_scaling"):
        as_now.pop(old, None)
    torch.testing.assert_close(out, eagle1(tensors, as_now), atol=1e-5, rtol=1e-5)
    other = eagle1(tensors, {**as_now, "rope_parameters": {"rope_type": "default", "rope_theta": 10.0}})
    assert (out - other).abs().max() > 1e-3


def test_rotary_parameters_that_disagree(tmp_path: Path) -> None:
    config = LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}}
    store(tmp_path, config, "model.safetensors", random_tensors(eagle1_shapes()))
    with pytest.raises(HeadsError, match=r"two values of rope_theta: 100000\.0 and 5000\.0"):
        load_heads(tmp_path)


# EAGLE-3


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "LlamaForCausalLMEagle3"])
def test_eagle3_of_the_first_project_and_of_specforge(tmp_path: Path, base: Base, architecture: str) -> None:
    tensors = random_tensors(eagle3_shapes("midlayer.", len(IDS)))
    config = LLAMA | {"architectures": [architecture], "draft_vocab_size": len(IDS), AUX: [0, 1, 2]}
    store(tmp_path, config, "pytorch_model.bin", tensors | vocabulary_maps(IDS))
    heads = load_heads(tmp_path, base=base)
    out, logits = ours3(heads, base)
    wanted = eagle3(tensors, "midlayer.")
    torch.testing.assert_close(out, wanted[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits, wanted[1], atol=1e-5, rtol=1e-5)
    assert torch.equal(heads.draft_ids, IDS) and heads.layers == (0, 1, 2)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    "norms", [{}, {"input_norm.weight": (3 * HIDDEN,)}, {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)}]
)
def test_speculators(tmp_path: Path, base: Base, before: bool, norms: dict[str, tuple[int, ...]]) -> None:
    tensors = random_tensors(eagle3_shapes("layers.0.", len(IDS)) | norms)
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"verifier": {"name_or_path": "org/base"}},
        "transformer_layer_config": LLAMA,
        "draft_vocab_size": len(IDS),
        "norm_before_residual": before,
        AUX: [0, 1, 2],
    }
    embedding = base.model.get_input_embeddings().weight.detach().clone()
    maps = vocabulary_maps(IDS) | {"embed_tokens.weight": embedding}
    store(tmp_path, config, "model.safetensors", tensors | maps)
    assert base_of(tmp_path) == ("org/base", None)
    heads = load_heads(tmp_path, base=base)
    out, logits = ours3(heads, base)
    wanted = eagle3(tensors, "layers.0.", before)
    torch.testing.assert_close(out, wanted[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits, wanted[1], atol=1e-5, rtol=1e-5)
    for change, message in (
        ({"speculators_model_type": "dflash"}, "speculators of type 'dflash' are not read"),
        ({"norm_output": True}, "norm_output is set"),
        ({"norm_before_residual": None}, "vLLM takes true and speculators false"),
        ({"target_hidden_size": 64}, "a draft of 32 features on a base of 64"),
    ):
        store(tmp_path, config | change, "model.safetensors", tensors | maps)
        with pytest.raises(HeadsError, match=message):
            load_heads(tmp_path, base=base)


@pytest.mark.parametrize(
    ("config", "layers", "note"),
    [
        ({}, (2, 4, 5), "which is the default"),
        ({"eagle_config": {AUX: [1, 3, 4]}}, (2, 4, 5), "leaving layers 1, 3, 4"),
        ({"eagle_config": {AUX: [2, 4, 5]}}, (2, 4, 5), "entering layers 2, 4, 5"),
        ({AUX: [1, 3, 4]}, (1, 3, 4), "entering layers 1, 3, 4"),
        ({"states_entering_layers": [0, 5, 6]}, (0, 5, 6), "entering layers 0, 5, 6"),
    ],
)
def test_which_states_are_fused(
    tmp_path: Path, base: Base, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], layers: Any, note: str
) -> None:
    monkeypatch.setattr(base, "num_layers", 8)
    store(tmp_path, LLAMA | config, "model.safetensors", random_tensors(eagle3_shapes("midlayer.", VOCAB)))
    reading = read_foreign(tmp_path, base)
    assert reading.config.layers == layers and note in str(reading)  # type: ignore[attr-defined]


def test_numbers_of_states_that_may_mean_two_things_are_refused(
    tmp_path: Path, base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "num_layers", 8)
    tensors = random_tensors(eagle3_shapes("midlayer.", VOCAB))
    store(tmp_path, LLAMA | {"eagle_config": {AUX: [0, 3, 6]}}, "model.safetensors", tensors)
    with pytest.raises(
        HeadsError, match="ambiguous: states that enter these layers to vLLM, that leave them to SGLang"
    ):
        load_heads(tmp_path, base=base)
    store(tmp_path, LLAMA, "model.safetensors", tensors)
    with pytest.raises(BaseNeeded, match="load the head with its base"):
        load_heads(tmp_path)


def changed(tensors: dict[str, Tensor], **change: Tensor | None) -> dict[str, Tensor]:
    return {name: t for name, t in {**tensors, **change}.items() if t is not None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm.weight": None}, "has no tensor norm.weight"),
        ({"midlayer.mlp.up_proj.weight": None}, r"has no mlp\.up_proj\.weight"),
        ({"midlayer.self_attn.q_proj.bias": torch.zeros(HIDDEN)}, r"biases .* are there for self_attn\.q_proj alone"),
        ({"midlayer.self_attn.q_proj.weight": torch.zeros(HIDDEN, HIDDEN)}, r"should be \(32, 64\)"),
        ({"fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN)}, r"should be \(32, 96\)"),
        ({"mystery": torch.zeros(1)}, "unexpected tensors mystery"),
        ({"d2t": None}, "holds t2d without d2t"),
        ({"d2t": torch.zeros(len(IDS))}, "d2t is torch.float32"),
        ({"d2t": torch.full((len(IDS),), 95)}, "leads outside the vocabulary of 96"),
        ({"d2t": torch.tensor([1, 0, 0, 0, 0])}, "or twice to one token"),
        ({"t2d": torch.ones(VOCAB, dtype=torch.bool)}, "name different tokens"),
        ({"t2d": torch.ones(50, dtype=torch.bool)}, "t2d is over 50 tokens, the base's vocabulary has 96"),
        ({"lm_head.weight": torch.zeros(3, HIDDEN)}, r"should be \(5, 32\)"),
    ],
)
def test_eagle3_tensors_that_do_not_fit(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    tensors = changed(random_tensors(eagle3_shapes("midlayer.", len(IDS))) | vocabulary_maps(IDS), **change)
    store(tmp_path, LLAMA | {AUX: [0, 1, 2]}, "model.safetensors", tensors)
    with pytest.raises(HeadsError, match=message) as error:
        load_heads(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 2}, "a draft of 2 layers"),
        ({"norm_output": False}, "norm_output is off"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is off"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "draft several tokens in parallel"),
        ({"num_attention_heads": "x"}, "num_attention_heads is 'x', not a positive integer"),
        ({"intermediate_size": 47}, r"should be \(47, 32\)"),
        ({AUX: "all"}, "'all' is no list of layers"),
    ],
)
def test_eagle3_configs_that_are_not_understood(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    tensors = random_tensors(eagle3_shapes("midlayer.", VOCAB))
    store(tmp_path, LLAMA | {AUX: [0, 1, 2]} | config, "model.safetensors", tensors)
    with pytest.raises(HeadsError, match=message):
        load_heads(tmp_path)


# Hydra


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
