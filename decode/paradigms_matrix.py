"""The comparison from beginning to end, for the command and the script alike."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode.benchmark.drafting import trees_of, weights_digest
from decode.benchmark.log import Log
from decode.measure import CONTEXTS, SIZES, WARM_UP
from decode.paradigms import PLAIN, Paradigm, Plan, costs_of, footprint, run
from decode.paradigms_picture import draw
from decode.paradigms_report import Row, markdown, summarize
from medusa_heads.base import Base
from medusa_heads.errors import ConfigError

COST_SHARE = 0.25
"""Of the time that the answers took, what measuring a pass may take where nothing else is asked."""
MOST_REPEATS, FAIR_REPEATS, LEAST_REPEATS = 15, 7, 3


@dataclass(frozen=True)
class CostPlan:
    """How the cost of a pass is measured."""

    sizes: Sequence[int] = SIZES
    contexts: Sequence[int] = CONTEXTS
    repeats: int = MOST_REPEATS

    def __post_init__(self) -> None:
        if 1 not in self.sizes:
            raise ConfigError("costs are told in passes over one node: their sizes must hold 1")

    @property
    def passes(self) -> int:
        return len(self.sizes) * len(self.contexts) * (self.repeats + WARM_UP)

    @classmethod
    def within(cls, rows: Sequence[Row]) -> CostPlan:
        """What `COST_SHARE` of the time of these answers has room for. A pass is taken to last as long as theirs did.

        Sizes are those up to the largest mean tree of a way, which is where the prediction reads the curve. Where two
        contexts would leave fewer than `FAIR_REPEATS`, the shorter one must do; `LEAST_REPEATS` are made in any case.
        """
        own = [row for row in rows if row["rounds"]]
        if not own:
            return cls(SIZES[:1], CONTEXTS[:1], LEAST_REPEATS)
        ways: dict[tuple[str, float], list[Row]] = {}
        for row in own:
            ways.setdefault((row["method"], row["temperature"]), []).append(row)
        largest = max(sum(r["nodes"] for r in way) / sum(r["rounds"] for r in way) for way in ways.values())
        sizes = [size for place, size in enumerate(SIZES) if place == 0 or SIZES[place - 1] < largest]
        a_pass = sum(row["stages"]["forward"] for row in own) / sum(row["rounds"] for row in own)
        passes = COST_SHARE * sum(row["seconds"] for row in rows) / a_pass
        contexts: Sequence[int] = CONTEXTS
        repeats = int(passes / len(sizes) / len(contexts)) - WARM_UP
        if repeats < FAIR_REPEATS:
            contexts = CONTEXTS[:1]
            repeats = int(passes / len(sizes)) - WARM_UP
        return cls(sizes, contexts, max(LEAST_REPEATS, min(MOST_REPEATS, repeats)))


def drafting_of(base: Base, paradigms: Sequence[Paradigm], heads: str | None) -> dict[str, Any]:
    """What ties a run's directory to its ways of drafting: their names, weights and trees, and the device.

    Args:
        heads: what 'heads' in a way stands for; None: the embedded heads of the default base.
    """
    drafters = {p.label: p.drafter for p in paradigms if p.drafter is not None}
    return {
        "heads": heads,
        "ways": [paradigm.label for paradigm in paradigms],
        "weights": {way: weights_digest(way, heads) for way in drafters},
        "trees": {way: trees_of(drafter) for way, drafter in drafters.items()},
        "device": str(base.device),
    }


def matrix(
    base: Base,
    paradigms: Sequence[Paradigm],
    plan: Plan,
    *,
    config: Mapping[str, Any],
    directory: Path | None = None,
    cost_plan: CostPlan | None = None,
    figures: bool = True,
    ask: bool = True,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Runs what is not run yet, and reports: the figures, and in `directory` result.json, result.md and result.png.

    Args:
        config: what the figures belong to, kept with them; a directory of another configuration is refused.
        directory: of the run, an existing one is continued; None: nothing is kept.
        ask: run what is not run yet; without, what the directory has is reported.
        cost_plan: None: as much as the answers' own time gives reason for (`CostPlan.within`).
    """
    if directory is None:
        with tempfile.TemporaryDirectory() as scratch:
            return matrix(
                base,
                paradigms,
                plan,
                config=config,
                directory=Path(scratch),
                cost_plan=cost_plan,
                figures=False,
                progress=progress,
            )
    asked = {
        **config,
        "prompts": [prompt.id for prompt in plan.prompts],
        "temperatures": list(plan.temperatures),
        "max_new_tokens": plan.max_new_tokens,
        "seed": plan.seed,
        "guarded": plan.guarded,
        # Named where they are used, so that runs from before they were there can be continued.
        **({} if plan.slow is None else {"slow": sorted(plan.slow)}),
        **({} if plan.sampled is None else {"sampled": sorted(plan.sampled)}),
    }
    log = Log(directory / "rows.jsonl", asked)
    if ask:
        run(base, paradigms, plan, log, progress)
    how = cost_plan or CostPlan.within(log.rows)
    if not (directory / "costs.json").is_file():
        progress(f"what a pass of the base costs by its nodes: {how.passes} passes")
    costs = costs_of(base, directory / "costs.json", sizes=how.sizes, contexts=how.contexts, repeats=how.repeats)
    added = {p.label: footprint(p.drafter, base) for p in paradigms if p.drafter is not None}
    result = summarize(log.rows, costs, added, asked)
    result["sessions"] = log.sessions
    result["base"] = base.fingerprint() | {"parameters": base.num_parameters}
    result["mismatches"] = mismatches(paradigms)
    (directory / "result.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (directory / "result.md").write_text(markdown(result), encoding="utf-8")
    if figures and result["temperatures"]:
        draw(result, directory / "result.png")
    return result


def mismatches(paradigms: Sequence[Paradigm]) -> dict[str, Any]:
    """What another tokenizer cost the draft models that have one, in this session."""
    from decode.drafters.crossmodel import SharedDrafter, TextDrafter

    return {
        p.label: p.drafter.mismatch.report()
        for p in paradigms
        if p.label != PLAIN and isinstance(p.drafter, SharedDrafter | TextDrafter)
    }
