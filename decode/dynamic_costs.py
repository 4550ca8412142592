"""What rounds with dynamic trees cost, by the clock in the midst of decoding: nodes, the first step, further steps."""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from decode.drafters import Draft, DraftRow
from decode.dynamic import DynamicTree, TreeChoice
from decode.engine import Decoder
from decode.tuning import interpolate
from medusa_heads.errors import ConfigError

if TYPE_CHECKING:
    from decode.drafters.eagle import EagleDrafter
    from decode.drafters.hydra import HydraDrafter
    from decode.settings import GenerationSettings
    from medusa_heads.base import Base

    Growing = EagleDrafter | HydraDrafter

WIDTHS = (1, 2, 3, 4, 6, 8)
SIZES = (2, 4, 8, 12, 16, 24, 32)
DEPTH = 4
"""Of the drafts whose steps are timed."""


@dataclass(frozen=True)
class DynamicCost:
    """Seconds of a round, by what it does."""

    forward: Mapping[int, float]
    """By number of nodes, from 1 on: all of a round but its draft. Between two measured sizes a straight line is
    assumed."""
    read: float
    """Of a draft's first step, which reads what the base has kept."""
    step: Mapping[int, float]
    """By width: of each further one."""

    def seconds(self, nodes: int, steps: int, width: int) -> float:
        draft = self.read + (steps - 1) * self.step[width] if steps else 0.0
        return interpolate(self.forward, nodes) + draft

    def as_dict(self) -> dict[str, Any]:
        return {"forward": dict(self.forward), "read": self.read, "step": dict(self.step)}


def limited(drafter: Growing, rule: DynamicTree) -> Growing:
    """The same heads within other limits; weights are shared."""
    other = copy.copy(drafter)
    other.choice = TreeChoice.of(rule)
    return other


class Timed:
    """A drafter whose drafts are timed: (steps, seconds) of each."""

    def __init__(self, drafter: Growing):
        self.drafter = drafter
        self.layers = drafter.layers
        self.drafts: list[tuple[int, float]] = []

    def start(self, rows: Sequence[DraftRow]) -> Any:
        session: Any = self.drafter.start(rows)
        draft = session.draft

        def timed(roots: Sequence[int], nodes: int | None = None) -> Draft:
            begin = time.perf_counter()
            made = draft(roots, nodes)
            self.drafts.append((session.steps, time.perf_counter() - begin))
            return made

        session.draft = timed
        return session


def measure_dynamic_costs(
    base: Base,
    drafter: Growing,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    *,
    deepest: int,
    sizes: Sequence[int] = SIZES,
    widths: Sequence[int] = WIDTHS,
    repeats: int = 8,
) -> DynamicCost:
    """Answers prompts with trees of each size and with drafts of each width, in turns; medians are kept.

    Args:
        sizes: of trees, from 2 nodes on; plain decoding gives that of 1.
    """
    depth = min(DEPTH, deepest)
    rules: dict[tuple[str, int], DynamicTree | None] = {("nodes", 1): None, ("read", 1): DynamicTree(1, 1, 2)}
    rules |= {("nodes", n): DynamicTree(min(2, deepest), min(8, n - 1), n) for n in sizes if n > 1}
    rules |= {("width", w): DynamicTree(depth, w, depth * w + 1) for w in widths}
    forward: dict[int, list[float]] = {}
    reads: list[float] = []
    drafts: dict[int, list[tuple[int, float]]] = {}
    order = random.Random(0)
    for repetition in range(repeats + 1):
        for key in order.sample(list(rules), len(rules)):
            kind, number = key
            rule = rules[key]
            timed = None if rule is None else Timed(limited(drafter, rule))
            decoder = Decoder(base) if timed is None else Decoder(base, timed, guard=None)
            stats = decoder.generate(prompts[repetition % len(prompts)], settings).stats
            if repetition == 0 or not stats.rounds:
                continue  # the first warms up
            if kind == "nodes":
                rest = stats.seconds - stats.stage_seconds["prefill"] - stats.stage_seconds["draft"]
                forward.setdefault(number, []).append(rest / stats.rounds)
                continue
            assert timed is not None
            # The first draft of a call reads the whole prompt.
            if kind == "read":
                reads += [seconds for _, seconds in timed.drafts[1:]]
            else:
                drafts.setdefault(number, []).extend(timed.drafts[1:])
    if not forward or not reads:
        raise ConfigError("no rounds to measure: the base ends its answers at once")
    read = statistics.median(reads)
    return DynamicCost(
        {number: statistics.median(values) for number, values in forward.items()},
        read,
        {width: _per_step(drafts.get(width, ()), read) for width in widths},
    )


def _per_step(drafts: Iterable[tuple[int, float]], read: float) -> float:
    """Seconds of one step behind the first; 0 where none was taken (heads of depth 1)."""
    found = [(seconds - read) / (steps - 1) for steps, seconds in drafts if steps > 1]
    return max(0.0, statistics.median(found)) if found else 0.0
