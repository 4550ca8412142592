"""Heads written for others: what is read back is what was written, bit for bit, and what cannot be held is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from medusa_heads.base import Base
from medusa_heads.eagle import EagleHeads
from medusa_heads.errors import BaseNeeded, HeadsError
from medusa_heads.families import load_heads
from medusa_heads.formats import writing
from medusa_heads.formats.writing import WRITERS, write_foreign
from medusa_heads.hydra import HydraHeads
from medusa_heads.medusa import MedusaHeads
from tests.conftest import FAMILIES, tiny_base, tiny_tokenizer

IDS = torch.tensor([40, 3, 95, 7, 0])


def eight_layers(family: str = "llama") -> Base:
    """A base deep enough for EAGLE-3's default layers."""
    config = FAMILIES[family]()
    config.num_hidden_layers = 8
    config.layer_types = None if getattr(config, "layer_types", None) is None else ["full_attention"] * 8
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    return Base.from_model(model, tiny_tokenizer(), name=f"deep-{family}")


@pytest.fixture(scope="module")
def base() -> Base:
    return eight_layers()


def filled(heads: Any, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_()
    return heads.to(dtype).eval()


MAKERS: dict[str, Callable[[Base], Any]] = {
    "medusa": lambda base: MedusaHeads.for_base(base, 3, 1),
    "medusa-deep": lambda base: MedusaHeads.for_base(base, 3, 2),
    "medusa-own": lambda base: MedusaHeads.for_base(base, 3, 2, own_projection=True),
    "medusa-own-flat": lambda base: MedusaHeads.for_base(base, 3, 1, own_projection=True),
    "medusa-rows": lambda base: MedusaHeads.for_base(base, 3, 2, draft_ids=IDS),
    "medusa-own-rows": lambda base: MedusaHeads.for_base(base, 3, 2, own_projection=True, draft_ids=IDS),
    "eagle-1": lambda base: EagleHeads.for_base(base, version=1),
    "eagle-1-own": lambda base: EagleHeads.for_base(base, version=1, own_projection=True),
    "eagle-1-rows": lambda base: EagleHeads.for_base(base, version=1, draft_ids=IDS),
    "eagle-3": lambda base: EagleHeads.for_base(base, version=3),
    "eagle-3-rows": lambda base: EagleHeads.for_base(base, version=3, draft_ids=IDS),
    "eagle-3-own-rows": lambda base: EagleHeads.for_base(base, version=3, own_projection=True, draft_ids=IDS),
    "eagle-3-two": lambda base: EagleHeads.for_base(base, version=3, layers=(1, 6), draft_ids=IDS),
}
SAME = [
    ("medusa", "vllm"),
    ("medusa-deep", "vllm"),
    ("medusa-own", "vllm"),
    ("medusa-rows", "vllm"),
    ("medusa", "tgi"),
    ("medusa-own", "tgi"),
    ("medusa-own", "tensorrt-llm"),
    ("medusa", "medusa"),
    ("medusa-own-flat", "medusa"),
    ("eagle-1", "vllm"),
    ("eagle-1-own", "vllm"),
    ("eagle-1", "eagle"),
]


def state(heads: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in heads.state_dict().items()}


@pytest.mark.parametrize(("kind", "target"), SAME)
def test_a_round_trip_gives_the_same_bits(tmp_path: Path, base: Base, kind: str, target: str) -> None:
    heads = filled(MAKERS[kind](base))
    write_foreign(heads, target, tmp_path / "out", base)
    for at_hand in (base, None):
        back: Any = load_heads(tmp_path / "out", base=at_hand, dtype=torch.bfloat16)
        assert type(back) is type(heads)
        ours, theirs = state(heads), state(back)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        for name in ("hidden_size", "vocab_size", "own_projection", "draft_vocab_size", "base_model_name_or_path"):
            assert getattr(back.config, name) == getattr(heads.config, name), name


def logits_of(heads: Any, base: Base) -> Tensor:
    """Of the first positions of a text, by whichever family."""
    given = torch.tensor([[5, 9, 40, 3, 17]])
    heads = heads.to(base.dtype)
    with torch.no_grad():
        if heads.config.family == "medusa":
            return heads.head_logits(heads(base.forward(given).last_hidden_state), base)
        output = base.forward(given[:, :-1], layers=heads.layers)
        out = heads(base.embed(given[:, 1:]), heads.fuse(output), torch.arange(4)[None])
        return heads.head_logits(out, base)


def over_tokens(heads: Any, logits: Tensor, base: Base) -> Tensor:
    """Logits by token id, -inf for tokens that are not drafted, so that orders of rows compare."""
    if heads.draft_ids is None:
        return logits
    full = torch.full((*logits.shape[:-1], base.vocab_size), -torch.inf)
    full[..., heads.draft_ids] = logits
    return full


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("medusa-deep", "tgi"),
        ("medusa", "tensorrt-llm"),
        ("eagle-3", "vllm"),
        ("eagle-3-rows", "vllm"),
        ("eagle-3-own-rows", "vllm"),
        ("eagle-3-two", "vllm"),
        ("eagle-3", "eagle"),
        ("eagle-3-rows", "eagle"),
        ("eagle-3-rows", "speculators"),
        ("eagle-3-two", "speculators"),
    ],
)
def test_a_change_that_a_format_asks_for_is_exact(tmp_path: Path, base: Base, kind: str, target: str) -> None:
    heads = filled(MAKERS[kind](base), dtype=torch.float32)
    write_foreign(heads, target, tmp_path / "out", base)
    back: Any = load_heads(tmp_path / "out", base=base)
    assert back.config.own_projection
    ours, theirs = (over_tokens(h, logits_of(h, base), base) for h in (heads, back))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    again = tmp_path / "again"
    write_foreign(back, target, again, base)
    for file in (tmp_path / "out").iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes(), "from there on, bit for bit"


@pytest.mark.parametrize("family", ["qwen2", "llama-untied-biased"])
def test_biases_of_attention_that_llama_has_in_all_of_it_or_none(tmp_path: Path, family: str) -> None:
    base = eight_layers(family)
    for version in (1, 3):
        heads = filled(EagleHeads.for_base(base, version=version), dtype=torch.float32)
        write_foreign(heads, "vllm", tmp_path / "out", base)
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config["attention_bias"] is True
        back: Any = load_heads(tmp_path / "out", base=base)
        torch.testing.assert_close(logits_of(back, base), logits_of(heads, base), atol=1e-5, rtol=1e-5)


def test_options_of_other_projects_travel_through_those_that_have_them(tmp_path: Path, base: Base) -> None:
    from dataclasses import replace

    for norm in ("joined", "each"):
        config = replace(EagleHeads.for_base(base).config, state_norm=norm, norm_before_residual=True)
        heads = filled(EagleHeads(config), dtype=torch.float32)
        for target in ("vllm", "speculators"):
            write_foreign(heads, target, tmp_path / target, base)
            back: Any = load_heads(tmp_path / target, base=base)
            assert (back.config.state_norm, back.config.norm_before_residual) == (norm, True)
            torch.testing.assert_close(logits_of(back, base), logits_of(heads, base), atol=1e-5, rtol=1e-5)
        with pytest.raises(HeadsError, match="no place for norm_before_residual"):
            write_foreign(heads, "eagle", tmp_path / "eagle", base)


# What engines need to find


def test_vllm_finds_what_it_reads(tmp_path: Path, base: Base) -> None:
    write_foreign(filled(MAKERS["medusa-rows"](base)), "vllm", tmp_path / "m", base)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    assert config["model_type"] == "medusa" and config["architectures"] == ["MedusaModel"]
    assert config["medusa_fc_bias"] is True and config["original_lm_head"] is True
    assert config["truncated_vocab_size"] == 5 and torch.equal(tensors["token_map"], IDS)
    assert torch.equal(tensors["lm_head.weight"], base.projection_weight[IDS])
    assert [key for key in config if "num" in key] == ["num_heads", "num_hidden_layers"], "others would overwrite them"
    write_foreign(filled(MAKERS["eagle-3-rows"](base)), "vllm", tmp_path / "e", base)
    config = json.loads((tmp_path / "e" / "config.json").read_text())
    tensors = load_file(tmp_path / "e" / "model.safetensors")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    ids = tensors["d2t"] + torch.arange(5)
    assert ids.tolist() == sorted(IDS.tolist()), "in the order of ids, as t2d has them"
    assert torch.equal(tensors["t2d"].nonzero().flatten(), ids)
    assert torch.equal(tensors["lm_head.weight"], base.projection_weight[ids])


def test_a_head_that_reads_the_last_state_is_not_written_for_engines(tmp_path: Path, base: Base) -> None:
    heads = EagleHeads.for_base(base, layers=(2, base.num_layers))
    for target in ("vllm", "speculators"):
        with pytest.raises(HeadsError, match="also reads the base's last state"):
            write_foreign(heads, target, tmp_path / target, base)


def test_the_first_projects_defaults_are_not_contradicted(tmp_path: Path, base: Base) -> None:
    """A number of a fused layer means two things to engines; without one all of them take the same default."""
    write_foreign(filled(MAKERS["eagle-3-rows"](base)), "eagle", tmp_path / "e", base)
    assert "eagle_aux_hidden_state_layer_ids" not in (tmp_path / "e" / "config.json").read_text()
    write_foreign(filled(MAKERS["eagle-1"](base)), "eagle", tmp_path / "e1", base)
    tensors = load_file(tmp_path / "e1" / "model.safetensors")
    assert torch.equal(tensors["embed_tokens.weight"], base.model.get_input_embeddings().weight)


def test_files_are_readable_by_the_server_that_runs_as_somebody_else(tmp_path: Path, base: Base) -> None:
    write_foreign(filled(MAKERS["medusa"](base)), "tgi", tmp_path / "out", base)
    assert {oct(file.stat().st_mode & 0o777) for file in (tmp_path / "out").iterdir()} == {"0o644"}
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"config.json", "medusa_lm_head.safetensors"}


# Refusals


@pytest.mark.parametrize(
    ("kind", "target", "message"),
    [
        ("medusa-rows", "tgi", "TGI has no draft vocabulary, and these heads draft from 5 rows of 96: --all-rows"),
        ("medusa-own-rows", "tgi", "projections have 5 rows alone"),
        ("medusa-own-rows", "vllm", "vLLM does not load heads with projections of their own over a draft vocabulary"),
        ("medusa-deep", "medusa", "repeats one block in each head; these heads have 2 different ones"),
        ("medusa", "eagle", "eagle serves EAGLE-1 and EAGLE-3 heads; these are Medusa heads"),
        ("eagle-1", "speculators", "speculators serves EAGLE-3 heads; these are EAGLE-1 heads"),
        ("eagle-1-rows", "vllm", "vLLM's EAGLE-1 has no draft vocabulary"),
        ("eagle-1-own", "eagle", "uses the base's projection; this head has one of its own"),
        ("eagle-3-two", "eagle", "entering layers 2, 4, 5 of a base of 8; this head fuses those of 1, 6"),
        ("medusa", "onnx", "no format is called 'onnx'; there are vllm, speculators, tgi, tensorrt-llm, eagle, medusa"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(tmp_path: Path, base: Base, kind: str, target: str, message: str) -> None:
    with pytest.raises(HeadsError, match=message) as error:
        write_foreign(filled(MAKERS[kind](base)), target, tmp_path / "out", base)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_heads_may_draft_from_all_rows_if_the_caller_agrees(tmp_path: Path, base: Base) -> None:
    heads = filled(MAKERS["medusa-rows"](base), dtype=torch.float32)
    notes = write_foreign(heads, "tgi", tmp_path / "out", base, all_rows=True)
    assert "drafts from all 96 tokens, not from the 5 that the heads were trained on" in notes
    back: Any = load_heads(tmp_path / "out", base=base)
    assert back.draft_ids is None
    torch.testing.assert_close(logits_of(back, base)[..., IDS], logits_of(heads, base))


@pytest.mark.parametrize(
    ("kind", "target"),
    [("medusa-rows", "vllm"), ("eagle-3-rows", "vllm"), ("eagle-1", "eagle"), ("eagle-3", "speculators")],
)
def test_a_base_that_is_needed_is_asked_for(tmp_path: Path, base: Base, kind: str, target: str) -> None:
    with pytest.raises(BaseNeeded, match=r"name the base \(--base\)"):
        write_foreign(filled(MAKERS[kind](base)), target, tmp_path / "out")
    other = tiny_base("gpt2")
    with pytest.raises(HeadsError, match="another base"):
        write_foreign(filled(MAKERS[kind](base)), target, tmp_path / "out", other)


def test_a_projection_with_a_bias_cannot_be_copied(tmp_path: Path) -> None:
    base = tiny_base("phi")
    assert base.projection_bias is not None
    with pytest.raises(HeadsError, match="no place for the bias of the projection of 'tiny-phi'"):
        write_foreign(filled(MedusaHeads.for_base(base, 2, 2)), "vllm", tmp_path / "out", base)
    with pytest.raises(HeadsError, match="holds Llama layers alone; the draft layer of these heads has layer norms"):
        write_foreign(filled(EagleHeads.for_base(base, version=1)), "vllm", tmp_path / "out", base)


def test_a_base_that_rescales_its_logits_is_named(tmp_path: Path) -> None:
    base = tiny_base("gemma2")
    notes = write_foreign(filled(MedusaHeads.for_base(base, 2, 2)), "vllm", tmp_path / "out", base)
    assert any("rescales its logits" in note for note in notes)


def test_hydra_heads_are_served_by_nobody(tmp_path: Path, base: Base) -> None:
    heads = filled(HydraHeads.for_base(base, num_heads=2))
    for target in WRITERS:
        with pytest.raises(HeadsError, match="these are Hydra heads"):
            write_foreign(heads, target, tmp_path / "out", base)


def test_other_files_are_never_replaced_and_failures_leave_nothing(
    tmp_path: Path, base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = filled(MAKERS["medusa"](base))
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").write_text("years")
    with pytest.raises(HeadsError, match="holds other files"):
        write_foreign(heads, "tgi", tmp_path / "work", base)
    write_foreign(heads, "tgi", tmp_path / "out", base)
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}

    def spoiled(tensors: dict[str, Tensor], path: Path) -> None:
        save(dict(tensors, **{"0.0.linear.bias": tensors["0.0.linear.bias"] + 1}), path)

    save = writing._save
    monkeypatch.setattr(writing, "_save", spoiled)
    with pytest.raises(RuntimeError, match=r"written heads read with another heads\.0\.0\.linear\.bias"):
        write_foreign(heads, "tgi", tmp_path / "out", base)
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "work"]
