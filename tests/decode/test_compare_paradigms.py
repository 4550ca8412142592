"""scripts/compare_paradigms.py and what its run directory is tied to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from decode.benchmark.drafting import weights_digest
from decode.benchmark.methods import untouched_base
from medusa_heads.attention import FOLDED
from medusa_heads.base import Base
from scripts.compare_paradigms import main


@pytest.fixture
def command(base_dir: Path, heads_dir: Path, tmp_path: Path) -> list[str]:
    """On a copy of tiny heads, which a test may change."""
    shutil.copytree(heads_dir, tmp_path / "heads")
    rows = [{"question_id": i, "category": "ab"[i % 2], "turns": [f"tell me {i}"]} for i in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "run"), "--base", str(base_dir)]
    given += ["--ways", str(tmp_path / "heads"), "--dtype", "float32", "--max-new-tokens", "5", "--no-figures"]
    return [*given, "--cost-sizes", "1", "4", "--cost-contexts", "8", "--cost-repeats", "1"]


def test_the_script_compares_and_goes_on_only_with_the_same_heads(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--generate", "--slow-limit", "2", "--sampled-limit", "1"]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    counts = {
        t: {way: found["against_plain"]["prompts"] for way, found in ways.items()}
        for t, ways in result["temperatures"].items()
    }
    assert set(counts["0.0"].values()) == {4, 2} and counts["0.0"]["generate"] == 2
    assert counts["1.0"]["plain"] == 1
    weights = load_file(tmp_path / "heads" / "model.safetensors")
    save_file({name: tensor + 1.0 for name, tensor in weights.items()}, tmp_path / "heads" / "model.safetensors")
    assert main([*command, "--generate", "--slow-limit", "2", "--sampled-limit", "1"]) == 2
    assert "another configuration" in capsys.readouterr().err


def test_costs_without_a_single_node_are_refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--cost-sizes", "4", "8"]) == 2
    assert "must hold 1" in capsys.readouterr().err


def test_costs_of_other_sizes_are_measured_anew(command: list[str], tmp_path: Path) -> None:
    assert main(command) == 0
    assert main([*command, "--cost-sizes", "1", "2", "--report-only"]) == 0
    costs = json.loads((tmp_path / "run" / "costs.json").read_text())
    assert list(costs["forward"]["8"]) == ["1", "2"]


def test_the_base_of_generate_is_untouched(base_dir: Path) -> None:
    assert Base.load(str(base_dir), dtype="float32").config._attn_implementation == FOLDED
    plain = untouched_base(str(base_dir), "float32", None)
    assert plain.config._attn_implementation == "sdpa"
    assert all(type(module) is torch.nn.Linear for module in plain.model.modules() if hasattr(module, "in_features"))


def test_the_digest_of_a_way_follows_its_weights_and_tree(heads_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(heads_dir, tmp_path / "heads")
    way = f"{tmp_path / 'heads'}+lookup"
    first = weights_digest(way)
    assert weights_digest("heads+lookup", str(tmp_path / "heads")) == first
    assert weights_digest("lookup") != first
    tree = tmp_path / "heads" / "tree.json"
    tree.write_text(tree.read_text() + " ")
    assert weights_digest(way) != first
