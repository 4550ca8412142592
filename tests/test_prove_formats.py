"""The script that proves formats: its comparison passes what is equal and fails what is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from scripts.foreign_formats.common import ids, plain_base
from scripts.prove_formats import compare, main
from tests.medusa_heads.formats.layouts import random_tensors, sequence_shapes, store


@pytest.mark.parametrize("error", [0.0, 1e-3])
def test_heads_are_compared_by_what_they_compute(tmp_path: Path, error: float) -> None:
    base = plain_base(tmp_path)
    tensors = random_tensors(sequence_shapes(2, 1, own=True))
    store(tmp_path / "heads", {}, "medusa_lm_head.pt", tensors)
    with torch.no_grad():
        states = base.model(input_ids=ids())[0]
        logits = []
        for i in range(2):
            step = states @ tensors[f"{i}.0.linear.weight"].T + tensors[f"{i}.0.linear.bias"]
            logits.append((states + torch.nn.functional.silu(step)) @ tensors[f"{i}.1.weight"].T + error)
    torch.save({"input_ids": ids(), "logits": torch.stack(logits)}, tmp_path / "io.pt")
    report = compare(tmp_path)
    assert report["taken_for"] == "Medusa v0.1" and report["family"] == "medusa"
    assert report["passed"] is (error == 0.0)
    assert report["greatest_difference"]["logits"] == pytest.approx(error, abs=1e-5)


def test_what_cannot_be_built_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    arguments = ["--checkouts", str(tmp_path), "--output", str(tmp_path / "r.json"), "--only", "medusa-v0.1"]
    assert main(arguments) == 1
    proof = json.loads((tmp_path / "r.json").read_text())["proofs"]["medusa-v0.1"]
    assert proof["passed"] is False and "No module named 'medusa'" in proof["error"]
