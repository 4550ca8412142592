"""The comparison from beginning to end, for the command and the script alike."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode.benchmark.log import Log
from decode.measure import CONTEXTS, SIZES
from decode.paradigms import PLAIN, Paradigm, Plan, costs_of, footprint, run
from decode.paradigms_picture import draw
from decode.paradigms_report import markdown, summarize
from medusa_heads.base import Base


@dataclass(frozen=True)
class CostPlan:
    """How the cost of a pass is measured."""

    sizes: Sequence[int] = SIZES
    contexts: Sequence[int] = CONTEXTS
    repeats: int = 15


def matrix(
    base: Base,
    paradigms: Sequence[Paradigm],
    plan: Plan,
    *,
    config: Mapping[str, Any],
    directory: Path | None = None,
    cost_plan: CostPlan | None = None,
    figures: bool = True,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Runs what is not run yet, and reports: the figures, and in `directory` result.json, result.md and result.png.

    Args:
        config: what the figures belong to, kept with them; a directory of another configuration is refused.
        directory: of the run, an existing one is continued; None: nothing is kept.
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
    }
    log = Log(directory / "rows.jsonl", asked)
    how = cost_plan or CostPlan()
    if not (directory / "costs.json").is_file():
        progress("first, what a pass of the base costs by its nodes: some hundred passes")
    costs = costs_of(base, directory / "costs.json", sizes=how.sizes, contexts=how.contexts, repeats=how.repeats)
    run(base, paradigms, plan, log, progress)
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
