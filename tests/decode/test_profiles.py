"""A tuned tree is found by the heads, base, dtype and machine that it was tuned for, and by no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from decode import calibration
from decode.cli.app import app
from decode.drafters.medusa import MedusaDrafter
from decode.profiles import (
    DynamicTree,
    profile_key,
    profile_path,
    read_profile,
    tuned_tree,
    write_profile,
)
from decode.tree import Tree
from medusa_heads.base import Base
from medusa_heads.errors import HeadsError
from medusa_heads.medusa import MedusaHeads
from tests.conftest import tiny_base, tiny_model, tiny_tokenizer

OWN = Tree.chain(3)
TUNED = Tree.from_rank_paths([(0,), (1,), (2,)])
PATHS = [[[0], 0.6], [[1], 0.25], [[0, 0], 0.4], [[0, 1], 0.1], [[1, 0], 0.1]]
METRICS = {"evaluation": {"greedy": {"paths": PATHS}}}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDUSA_HEADS_CACHE", str(tmp_path / "cache"))


def saved_heads(base: Base, directory: Path, scale: float = 0.02) -> Path:
    torch.manual_seed(0)
    heads = MedusaHeads.for_base(base, num_heads=2, num_layers=1)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=scale)
    extras = {"tree.json": json.dumps({"tree": OWN.to_dict()}), "metrics.json": json.dumps(METRICS)}
    heads.save_pretrained(directory, extras=extras)
    return directory


def test_a_tuned_tree_is_taken_by_default_and_a_given_one_wins(base: Base, tmp_path: Path) -> None:
    heads = saved_heads(base, tmp_path / "heads")
    assert MedusaDrafter.from_pretrained(heads, base).tree == OWN
    path = write_profile(heads, base, TUNED, {"nodes": 4})
    assert json.loads(path.read_text())["nodes"] == 4 and [p.name for p in path.parent.iterdir()] == [path.name]
    assert MedusaDrafter.from_pretrained(heads, base).tree == TUNED
    assert MedusaDrafter.from_pretrained(heads, base, tree=Tree.chain(2)).tree == Tree.chain(2)


def test_limits_of_a_dynamic_tree_are_kept_alike(base: Base, tmp_path: Path) -> None:
    heads, limits = saved_heads(base, tmp_path / "heads"), DynamicTree(depth=5, width=4, nodes=16)
    assert read_profile(heads, base) is None and tuned_tree(heads, base) is None
    path = write_profile(heads, base, limits, {"measured": 1.5})
    assert json.loads(path.read_text())["dynamic"] == limits.to_dict()
    assert read_profile(heads, base) == limits
    with pytest.raises(HeadsError, match="limits of a dynamic one"):
        tuned_tree(heads, base)


@pytest.mark.parametrize("wrong", ({"depth": 0}, {"width": True}, {"nodes": 2.5}, {"deep": 3}))
def test_wrong_limits_are_refused(base: Base, tmp_path: Path, wrong: dict[str, Any]) -> None:
    heads = saved_heads(base, tmp_path / "heads")
    path = write_profile(heads, base, DynamicTree(2, 2, 4), {})
    profile = json.loads(path.read_text())
    profile["dynamic"] |= wrong
    path.write_text(json.dumps(profile))
    with pytest.raises(HeadsError, match="damaged"):
        read_profile(heads, base)


def test_other_heads_another_dtype_and_other_threads_have_profiles_of_their_own(tmp_path: Path) -> None:
    base, half = tiny_base(), Base.from_model(tiny_model("llama").bfloat16(), tiny_tokenizer())
    heads, other = saved_heads(base, tmp_path / "heads"), saved_heads(base, tmp_path / "other", scale=0.05)
    write_profile(heads, base, TUNED, {})
    assert tuned_tree(heads, base) == TUNED
    assert tuned_tree(other, base) is None and tuned_tree(heads, half) is None
    torch.set_num_threads(2)
    assert tuned_tree(heads, base) is None


def test_a_damaged_profile_is_an_error_that_says_what_to_do(base: Base, tmp_path: Path) -> None:
    heads = saved_heads(base, tmp_path / "heads")
    path = write_profile(heads, base, TUNED, {})
    for content in ("{", "{}", '{"tree": {"parents": [0], "ranks": [0]}}'):
        path.write_text(content)
        with pytest.raises(HeadsError, match="tune again"):
            tuned_tree(heads, base)


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for name in ("CALIBRATION", "HELD_OUT"):
        monkeypatch.setattr(f"decode.calibration.{name}", getattr(calibration, name)[:3])
    monkeypatch.setattr("decode.cli.tune.NEW_TOKENS", 16)
    model: Any = tiny_model("llama")
    model.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    base = Base.load(str(tmp_path / "base"), dtype="float32")
    heads = saved_heads(base, tmp_path / "heads")
    return ["--base", str(tmp_path / "base"), "--heads", str(heads), "--dtype", "float32"]


def test_tune_chooses_stores_and_generate_picks_it_up(pair: list[str], tmp_path: Path) -> None:
    short = ["--context", "8", "--max-nodes", "5", "--repeats", "9"]
    result = CliRunner().invoke(app, ["tune", *pair, *short, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    tree = Tree.from_dict(report["tree"])
    assert 1 <= tree.size <= 5 and report["predicted"]["tokens_per_second"] > 0.0
    assert tree.size == 1 or set(tree.rank_paths()) <= {tuple(path) for path, _ in PATHS}
    assert report["predicted_held_out"]["tokens_per_round"] == pytest.approx(report["measured"]["tokens_per_round"])
    for name, error in report["error"].items():
        if name in report["measured"]:
            assert report["predicted"][name] == pytest.approx((1.0 + error) * report["measured"][name])
    assert set(report["rounds"]) == {"1", "2", "4", "5"}
    assert set(report["costs"]["forward"]) == {"8"} and report["measured"]["speedup"] > 0.0
    base = Base.load(pair[1], dtype="float32")
    assert report["path"] == str(profile_path(profile_key(Path(pair[3]), base)))
    assert MedusaDrafter.from_pretrained(pair[3], base).tree == tree


def test_a_dry_run_stores_nothing_and_says_so(pair: list[str], tmp_path: Path) -> None:
    short = ["--context", "8", "--max-nodes", "3", "--repeats", "1"]
    result = CliRunner().invoke(app, ["tune", *pair, *short, "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "not stored" in result.stdout and "<- chosen" in result.stdout
    assert not (tmp_path / "cache" / "profiles").exists()


def test_heads_without_sampled_figures_are_refused_in_one_line(pair: list[str]) -> None:
    result = CliRunner().invoke(app, ["tune", *pair, "--sampled"])
    assert result.exit_code == 2 and "no rank paths of sampled text" in result.stderr
