"""`medusa-decode convert` and `inspect` over heads of other projects, and decoding with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.drafters import load_drafter
from decode.engine import Decoder
from decode.settings import GenerationSettings
from medusa_heads.base import Base
from medusa_heads.families import load_heads
from medusa_heads.medusa import MedusaHeads
from tests.decode.commands import assert_one_line, run
from tests.medusa_heads.formats.layouts import LLAMA, eagle1_shapes, random_tensors


@pytest.fixture(scope="module")
def base(base_dir: Path) -> Base:
    return Base.load(str(base_dir), dtype="float32")


@pytest.fixture
def heads_dir(base: Base, tmp_path: Path) -> Path:
    heads = MedusaHeads.for_base(base, num_heads=2, num_layers=1, draft_ids=torch.tensor([7, 3, 90]))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.1)
    heads.save_pretrained(tmp_path / "heads", dtype=None, extras={"tree.json": '{"tree": {}}'})
    return tmp_path / "heads"


def test_there_and_back(heads_dir: Path, tmp_path: Path) -> None:
    """The base is loaded by itself where the format holds a copy of its projection."""
    out = tmp_path / "out"
    report = json.loads(run("convert", heads_dir, out, "--to", "vllm", "--json").stdout)
    assert report["taken_for"] == "medusa_heads" and report["target"] == "vllm" and report["path"] == str(out)
    assert any("tree stays behind" in note for note in report["notes"])
    assert {file.name for file in out.iterdir()} == {"config.json", "model.safetensors"}
    shown = run("convert", out, tmp_path / "back", "--to", "heads")
    assert shown.exit_code == 0 and "vLLM Medusa" in shown.stdout
    ours, back = (load_heads(path).state_dict() for path in (heads_dir, tmp_path / "back"))
    assert ours.keys() == back.keys() and all(torch.equal(ours[name], back[name]) for name in ours)


def test_what_cannot_be_is_said_in_one_line(heads_dir: Path, tmp_path: Path) -> None:
    assert_one_line(run("convert", heads_dir, tmp_path / "o", "--to", "tgi"), "TGI has no draft vocabulary.*--all-rows")
    assert_one_line(run("convert", heads_dir, tmp_path / "o", "--to", "onnx"), "onnx")
    assert_one_line(run("convert", heads_dir, heads_dir, "--to", "vllm"), "is where the heads lie")
    assert_one_line(run("convert", heads_dir, tmp_path, "--to", "vllm"), "holds other files")
    assert not (tmp_path / "o").exists()
    agreed = run("convert", heads_dir, tmp_path / "o", "--to", "tgi", "--all-rows")
    assert agreed.exit_code == 0 and "drafts from all" in agreed.stdout


def test_a_base_that_nobody_names_is_asked_for(tmp_path: Path) -> None:
    from tests.medusa_heads.formats.layouts import store

    store(tmp_path / "e", {**LLAMA}, "model.safetensors", random_tensors(eagle1_shapes(bias=False)))
    result = run("convert", tmp_path / "e", tmp_path / "out", "--to", "eagle")
    assert result.exit_code == 2 and "the heads do not name it: pass --base" in result.stderr


def test_inspect_says_what_foreign_heads_were_taken_for(heads_dir: Path, base_dir: Path, tmp_path: Path) -> None:
    run("convert", heads_dir, tmp_path / "v", "--to", "vllm")
    report = json.loads(run("inspect", tmp_path / "v", "--json").stdout)
    assert report["format"] == "vLLM Medusa" and report["family"] == "medusa" and report["tree"] is None
    assert report["base"] == str(base_dir) and 0 < report["share_of_base"] < 1
    text = run("inspect", tmp_path / "v").stdout
    assert "vLLM Medusa" in text and "2 heads of 1 blocks" in text and "none stored" in text


def test_inspect_asks_the_named_base_for_what_heads_do_not_say(base_dir: Path, tmp_path: Path) -> None:
    from tests.medusa_heads.formats.layouts import sequence_shapes, store

    store(tmp_path / "t", {}, "medusa_lm_head.safetensors", random_tensors(sequence_shapes(2, 1, own=False)))
    result = run("inspect", tmp_path / "t")
    assert result.exit_code == 2 and "load them with the base" in result.stderr
    report = json.loads(run("inspect", tmp_path / "t", "--base", base_dir, "--json").stdout)
    assert report["config"]["vocab_size"] == 260 and report["format"] == "Medusa, later trainer or TGI V2"


@pytest.mark.parametrize("target", ["vllm", "tgi"])
def test_heads_of_other_projects_decode_and_leave_the_text_as_it_is(
    heads_dir: Path, base: Base, tmp_path: Path, target: str
) -> None:
    run("convert", heads_dir, tmp_path / "out", "--to", target, "--all-rows")
    prompt, settings = [5, 9, 40, 3], GenerationSettings(max_new_tokens=20)
    drafter: Any = load_drafter(tmp_path / "out", base)
    assert drafter.tree.size == 8 and drafter.tree.depth <= 2
    plain = Decoder(base).generate(prompt, settings)
    assert list(Decoder(base, drafter).generate(prompt, settings).token_ids) == list(plain.token_ids)
