"""EAGLE heads: built from any family of bases, the same step by step as at once, saved and loaded whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from medusa_heads import load_heads
from medusa_heads.base import Base
from medusa_heads.config import EagleConfig
from medusa_heads.eagle import EagleHeads
from medusa_heads.errors import ConfigError, HeadsError
from medusa_heads.medusa import MedusaHeads
from tests.conftest import FAMILIES, VOCAB, tiny_base

IDS = torch.tensor([[7, 8, 9, 10, 11, 12]])


def features(heads: EagleHeads, base: Base) -> torch.Tensor:
    return heads.fuse(base.forward(IDS, layers=heads.layers))


def shaken(heads: EagleHeads, seed: int = 0) -> EagleHeads:
    """Weights with no zeros, so that every part counts."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=source))
    return heads


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_head_passes_the_last_fused_state_on(family: str, version: int) -> None:
    base = tiny_base(family)
    heads = EagleHeads.for_base(base, version=version)
    output = base.forward(IDS, layers=heads.layers)
    expected = output.last_hidden_state if version == 1 else output.layer_states[-1]
    out = heads(base.embed(IDS), heads.fuse(output), torch.arange(6)[None])
    assert torch.allclose(out, expected, atol=1e-5)
    logits = heads.head_logits(out, base)
    assert logits.shape == (1, 6, VOCAB)
    if version == 3:
        assert base.final_norm is not None
        assert torch.allclose(logits, base.project(base.final_norm(expected)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_step_by_step_equals_at_once(family: str, version: int) -> None:
    base = tiny_base(family)
    heads = shaken(EagleHeads.for_base(base, version=version))
    states, embeddings = features(heads, base), base.embed(IDS)
    whole = heads(embeddings, states, torch.arange(6)[None])
    cache = DynamicCache()
    for t in range(6):
        visible = torch.ones(1, 1, t + 1, dtype=torch.bool)
        step = heads(embeddings[:, t : t + 1], states[:, t : t + 1], torch.tensor([[t]]), visible, cache)
        assert torch.allclose(step, whole[:, t : t + 1], rtol=1e-4, atol=1e-4)


def test_attention_depends_on_the_distance_alone() -> None:
    base = tiny_base()
    heads = shaken(EagleHeads.for_base(base))
    states, embeddings = features(heads, base), base.embed(IDS)
    near, far = (heads(embeddings, states, start + torch.arange(6)[None]) for start in (0, 50))
    assert torch.allclose(near, far, rtol=1e-3, atol=1e-3)
    apart = heads(embeddings, states, 3 * torch.arange(6)[None])
    assert not torch.allclose(near, apart, rtol=1e-2, atol=1e-2)


def test_the_shape_is_the_bases_own() -> None:
    shapes = {family: EagleHeads.for_base(tiny_base(family)).config.shape for family in FAMILIES}
    assert shapes["llama-untied-biased"].attention_bias and shapes["llama-untied-biased"].output_bias
    assert shapes["llama-untied-biased"].mlp_bias and not shapes["llama"].attention_bias
    assert shapes["qwen2"].attention_bias and not shapes["qwen2"].output_bias
    assert shapes["qwen3"].qk_norm and shapes["qwen3"].head_dim == 16 and not shapes["qwen2"].qk_norm
    assert shapes["gpt_neox"].partial_rotary_factor == 0.5 and shapes["phi"].partial_rotary_factor == 0.5
    assert shapes["gpt_neox"].norm == "layer" and shapes["llama"].norm == "rms"
    assert not shapes["gpt2"].gated_mlp and shapes["gpt2"].attention_bias and shapes["gpt2"].intermediate_size == 128
    assert shapes["llama"].num_key_value_heads == 2 and shapes["gemma"].gated_mlp


@pytest.mark.parametrize("version", [1, 3])
def test_saved_heads_come_back(tmp_path: Path, version: int) -> None:
    base = tiny_base()
    ids = torch.tensor([5, 3, 9, 11])
    heads = shaken(EagleHeads.for_base(base, version=version, draft_ids=ids, own_projection=version == 3))
    heads.save_pretrained(tmp_path / "heads", dtype=None)
    again = load_heads(tmp_path / "heads", base=base)
    assert isinstance(again, EagleHeads) and again.config == heads.config
    assert {k: v.tolist() for k, v in again.state_dict().items()} == {
        k: v.tolist() for k, v in heads.state_dict().items()
    }
    states = features(heads, base)
    assert torch.equal(again.head_logits(states, base), heads.head_logits(states, base))
    assert heads.head_logits(states, base).shape == (1, 6, 4)
    with pytest.raises(HeadsError, match="holds eagle heads, which MedusaHeads does not read"):
        MedusaHeads.from_pretrained(tmp_path / "heads")


def test_the_draft_vocabulary_is_rows_of_the_projection() -> None:
    base = tiny_base()
    ids = torch.tensor([5, 3, 9])
    states = features(EagleHeads.for_base(base, version=1), base)
    some = EagleHeads.for_base(base, version=1, draft_ids=ids).head_logits(states, base)
    assert torch.allclose(some, base.project(states)[..., ids], atol=1e-5)


def test_configs_that_contradict_themselves_are_refused() -> None:
    config = EagleHeads.for_base(tiny_base()).config.to_dict()
    for change, message in (
        ({"version": 2}, "version must be 1 or 3"),
        ({"version": 1}, "does not go with layers"),
        ({"layers": []}, "does not go with layers"),
        ({"layers": [-1]}, "numbers of layers"),
        ({"layer": {}}, "missing"),
        ({"layer": {**config["layer"], "colour": 1}}, "colour"),
        ({"fc_bias": True}, "belongs to version 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            EagleConfig.from_dict({**config, **change})
    with pytest.raises(ConfigError, match="do not lie within the base's 2"):
        EagleHeads.for_base(tiny_base(), layers=(0, 7))


def test_positions_are_the_same_in_bfloat16() -> None:
    """Angles are of float32 frequencies, as in training, whatever the dtype that the heads are given."""
    heads = EagleHeads.for_base(tiny_base(), version=1)
    positions = torch.arange(200)[None]
    wanted = heads.layer.rotary.tables(torch.zeros(1), positions)
    found = heads.to(torch.bfloat16).layer.rotary.tables(torch.zeros(1), positions)
    assert heads.layer.self_attn.q_proj.weight.dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
