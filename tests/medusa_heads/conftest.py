"""Saved heads that tests of the Hub, on disk and online, begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from medusa_heads.base import Base
from medusa_heads.medusa import MedusaHeads
from tests.medusa_heads.saved_heads import heads_for


@pytest.fixture
def heads(base: Base) -> MedusaHeads:
    return heads_for(base)


@pytest.fixture
def saved(heads: MedusaHeads, tmp_path: Path) -> Path:
    heads.save_pretrained(tmp_path / "heads", extras={"tree.json": "old tree"})
    return tmp_path / "heads"
