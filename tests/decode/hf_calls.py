"""Prompts for `generate`, padded as it takes them, and what its outputs are asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decode.hf import SpeculativeOutput
from tests.conftest import VOCAB

PROMPT = [5, 17, 40, 8, 61, 33, 12, 70, 21]
PROMPTS = [PROMPT, PROMPT[:3], [44, 9, 9, 71, 30, 6]]
LENGTH = 24
PAD = 2
Options = dict[str, Any]


def padded(prompts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    width = max(map(len, prompts))
    ids = [[PAD] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def allowed(batch_id: int, ids: Tensor) -> list[int]:
    """A third of the vocabulary, by the row and the length and the last token."""
    return list(range((batch_id + len(ids) + int(ids[-1])) % 3, VOCAB, 3))


def accepted(output: SpeculativeOutput) -> int:
    assert output.stats is not None
    return sum(sum(n * rounds for n, rounds in enumerate(stats.acceptance_histogram)) for stats in output.stats)
