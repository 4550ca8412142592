"""The benchmark of batches, on a tiny pair."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.tree import Tree
from medusa_heads import Base, MedusaHeads
from scripts.benchmark_batches import length, main, table
from tests.conftest import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("pair")
    tiny_model().save_pretrained(root / "base")
    tiny_tokenizer().save_pretrained(root / "base")
    heads = MedusaHeads.for_base(Base.load(str(root / "base"), dtype="float32"), 2)
    tree = Tree.from_rank_paths([(0,), (1,), (0, 0)]).to_dict()
    heads.save_pretrained(root / "heads", extras={"tree.json": json.dumps({"tree": tree})})
    rows = [{"question_id": i, "category": "ab"[i % 2], "turns": ["tell me " + "more " * i]} for i in range(4)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pair = ["--base", str(root / "base"), "--heads", str(root / "heads"), "--prompts", str(root / "prompts.jsonl")]
    return [*pair, "--dtype", "float32", "--max-new-tokens", "7", "--limit", "4"]


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_all_methods_answer_all_prompts_at_each_size(given: list[str], temperature: str, tmp_path: Path) -> None:
    assert main([*given, "--sizes", "1", "3", "--temperature", temperature, "--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    found: dict[tuple[int, str], Any] = {(e["batch_size"], e["method"]): e for e in result["batches"]}
    assert set(found) == {(size, name) for size in (1, 3) for name in ("plain", "heads", "generate")}
    if temperature == "0":
        assert len({entry["new_tokens"] for entry in found.values()}) == 1, "one text, one counter"
    for entry in found.values():
        assert math.isclose(entry["tokens_per_second"], entry["new_tokens"] / entry["seconds"], rel_tol=0.02)
    assert found[1, "plain"]["acceptance_length"] == found[3, "plain"]["acceptance_length"] == 1.0
    assert found[1, "generate"]["acceptance_length"] is None
    assert result["versions"]["torch"] == torch.__version__ and result["config"]["sizes"] == [1, 3]
    assert (tmp_path / "result.md").read_text() == table(result["batches"]) + "\n"


def test_a_row_is_counted_up_to_its_eos() -> None:
    assert length([5, 6, 2, 2, 2], {2}) == 3 and length([5, 6], {2}) == 2 and length([2, 2], {2}) == 1


def test_too_few_prompts_are_refused(given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*given, "--sizes", "8", "--output", str(tmp_path)]) == 2
    assert "do not fill a batch of 8" in capsys.readouterr().err
