"""Enumeration of random procedures, for proofs that draw nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable

import pytest
import torch
from torch import Tensor

from decode.verify import Chooser
from tests.decode.tiny_pair import base_dir, heads_dir  # noqa: F401


class Replay:
    """A `Chooser` that follows a script, then takes the first option of each decision and notes the untried ones."""

    def __init__(self, script: tuple[int, ...]) -> None:
        self.script = script
        self.taken: tuple[int, ...] = ()
        self.probability = 1.0
        self.untried: list[tuple[int, ...]] = []

    def _decide(self, options: list[tuple[int, float]]) -> int:
        position = len(self.taken)
        index = self.script[position] if position < len(self.script) else 0
        if position >= len(self.script):
            self.untried += [(*self.taken, other) for other in range(1, len(options))]
        self.taken += (index,)
        value, probability = options[index]
        self.probability *= probability
        return value

    def accept(self, probability: float) -> bool:
        assert 0.0 <= probability <= 1.0
        options = [(1, probability), (0, 1.0 - probability)]
        return bool(self._decide([option for option in options if option[1] > 0.0]))

    def draw(self, weights: Tensor) -> int:
        assert weights.dtype == torch.float64 and weights.min() >= 0.0 and weights.sum() > 0.0
        total = weights.sum().item()
        return self._decide([(i, w / total) for i, w in enumerate(weights.tolist()) if w > 0.0])


def enumerate_law(procedure: Callable[[Chooser], Hashable]) -> dict[Hashable, float]:
    """Outcome -> probability over all random decisions of `procedure`."""
    law: dict[Hashable, float] = defaultdict(float)
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        chooser = Replay(scripts.pop())
        outcome = procedure(chooser)
        law[outcome] += chooser.probability
        scripts += chooser.untried
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    return law


@pytest.fixture(scope="session", name="enumerate_law")
def enumerate_law_fixture() -> Callable[[Callable[[Chooser], Hashable]], dict[Hashable, float]]:
    return enumerate_law
