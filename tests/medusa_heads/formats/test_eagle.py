"""EAGLE heads of other projects against the same function written out with transformers' own Llama layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from medusa_heads.base import Base
from medusa_heads.eagle import EagleHeads
from medusa_heads.errors import BaseNeeded, HeadsError
from medusa_heads.families import load_heads
from medusa_heads.formats import read_foreign
from medusa_heads.formats.llama_layer import rope_parameters
from medusa_heads.hub import base_of
from tests.conftest import tiny_base
from tests.medusa_heads.formats.layouts import (
    HIDDEN,
    LLAMA,
    VOCAB,
    eagle1_shapes,
    eagle3_shapes,
    random_tensors,
    store,
    vocabulary_maps,
)
from tests.medusa_heads.formats.written_out import (
    EMBEDDINGS,
    FEATURES,
    IDS,
    POSITIONS,
    STATES,
    attend,
    llama_layer,
    norm,
)

AUX = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def base() -> Base:
    return tiny_base()


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
