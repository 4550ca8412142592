"""The commands take heads of any family: same text as without them, a certificate, a description."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from decode.cli import app
from decode.dynamic import DynamicTree
from medusa_heads.base import Base
from tests.conftest import tiny_model, tiny_tokenizer
from tests.decode.eagle_heads import KINDS, random_heads

LIMITS = {"dynamic": DynamicTree(3, 2, 6).to_dict()}


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    tiny_model("llama").save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(params=KINDS)
def heads(request: pytest.FixtureRequest, base_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("decode.profiles.cache_dir", lambda: tmp_path / "cache")
    base = Base.load(str(base_dir), dtype="float32")
    random_heads(base, request.param).save_pretrained(tmp_path / "heads", extras={"tree.json": json.dumps(LIMITS)})
    return tmp_path / "heads"


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_generate_writes_what_plain_decoding_does(heads: Path, base_dir: Path) -> None:
    options = ["--base", base_dir, "--dtype", "float32", "--max-new-tokens", "14", "--json"]
    drafted = json.loads(run("generate", "Say it.", "--heads", heads, *options))
    plain = json.loads(run("generate", "Say it.", "--plain", *options))
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["stats"]["tree_nodes"] > drafted["stats"]["rounds"]


def test_verify_certifies_the_pair(heads: Path, base_dir: Path) -> None:
    options = ["--limit", "1", "--max-new-tokens", "6", "--draws", "50", "--dtype", "float32", "--json"]
    report = json.loads(run("verify", "--heads", heads, "--base", base_dir, *options))
    assert report["passed"]


def test_inspect_says_which_family_and_how_trees_grow(
    heads: Path, base_dir: Path, request: pytest.FixtureRequest
) -> None:
    kind = request.node.callspec.params["heads"]
    report = json.loads(run("inspect", heads, "--base", base_dir, "--json"))
    assert report["family"] == ("eagle" if kind.startswith("eagle") else "hydra")
    assert report["tree"] == LIMITS
    shown = " ".join(run("inspect", heads, "--base", base_dir).split())
    expected = {
        "eagle1": "eagle: version 1",
        "eagle3": "eagle: version 3, one layer on the states entering",
        "hydra": "hydra: 4 heads of 2 layers",
        "hydra-prefix": "hydra: 4 heads of 1 layers behind a prefix attention",
    }
    assert expected[kind] in shown and "at most 6 nodes, depth 3, width 2" in shown
