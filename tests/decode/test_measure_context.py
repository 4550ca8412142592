"""The growth of a pass with the text before it: the script runs, and leaves the caches that it times as they were."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_heads.base import Base
from scripts.measure_context import growth, main, own_pass
from tests.conftest import tiny_model, tiny_tokenizer


def test_growth_is_beyond_the_shortest_text() -> None:
    rows = {128: {"a": (0.1, 0.020, 0.3)}, 512: {"a": (0.1, 0.023, 0.3)}}
    assert growth(rows) == {128: {"a": 0.0}, 512: {"a": pytest.approx(3.0)}}


def test_the_bases_own_pass_can_be_repeated(base: Base) -> None:
    job = own_pass(base, 12)
    first = job()
    assert torch.equal(first, job()) and torch.equal(first, job())  # type: ignore[arg-type]


def test_the_script_writes_every_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model: Any = tiny_model("llama")
    model.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    output = tmp_path / "context.json"
    given = ["--base", str(tmp_path / "base"), "--dtype", "float32", "--contexts", "8", "24", "--repeats", "2"]
    assert main([*given, "--nodes", "3", "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    assert set(report["seconds"]) == {"8", "24"} and set(report["seconds"]["8"]) == set(report["growth"]["24"])
    shown = capsys.readouterr().out
    assert "| 24 |" in shown and len(re.findall(r"\d \([+-]\d+\.\d\)", shown)) == 6, shown
    assert main([*given, "--nodes", "5000", "--output", str(output)]) == 2
    assert "has no room" in capsys.readouterr().err
