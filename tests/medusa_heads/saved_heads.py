"""Heads for tests of saving and sharing, and what is asked of files and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medusa_heads.base import Base
from medusa_heads.medusa import MedusaHeads

DRAFT_IDS = torch.tensor([40, 3, 95, 7, 0, 61])
FILES = {"config.json", "model.safetensors"}


def heads_for(base: Base, own: bool = False, draft_ids: Tensor | None = None, seed: int = 0) -> MedusaHeads:
    torch.manual_seed(seed)
    heads = MedusaHeads.for_base(base, 2, 1, own, draft_ids)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_()
    return heads.eval()


def same(ours: nn.Module, theirs: nn.Module) -> bool:
    a, b = ours.state_dict(), theirs.state_dict()
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def one_line(error: pytest.ExceptionInfo[Any], *parts: object) -> None:
    text = str(error.value)
    assert "\n" not in text and len(text) < 500
    for part in parts:
        assert str(part) in text, f"{part!r} is not in {text!r}"
