"""The comparison of ways of drafting: its figures by hand, a run on a tiny base, a run that is cut and continued."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from decode.benchmark.log import Log
from decode.benchmark.prompts import Prompt
from decode.drafters.eagle import EagleDrafter
from decode.drafters.early_exit import EarlyExitDrafter
from decode.drafters.hydra import HydraDrafter
from decode.drafters.lookup import LookupDrafter
from decode.drafters.model import ModelDrafter
from decode.dynamic import DynamicTree
from decode.measure import SIZES, Costs
from decode.paradigms import (
    Paradigm,
    Plan,
    costs_of,
    default_specs,
    footprint,
    generate_paradigms,
    kv_values,
    load_paradigms,
    rule,
    run,
)
from decode.paradigms_matrix import CostPlan, matrix
from decode.paradigms_report import PARTS, acceptance_by_depth, cost_at, markdown, summarize, text
from decode.speedup import expected_tokens_by_depth
from medusa_heads.base import Base
from medusa_heads.eagle import EagleHeads
from medusa_heads.errors import ConfigError
from tests.conftest import tiny_base, tiny_model, tiny_tokenizer
from tests.decode.drafters import relative
from tests.decode.eagle_heads import random_heads

COSTS = Costs({64: {1: (1.0, 1.0, 1.0), 4: (1.3, 1.3, 1.3), 8: (2.1, 2.1, 2.1)}}, {}, 3)
PROMPTS = [Prompt("1", "qa", "why is it"), Prompt("2", "qa", "abc abc abc"), Prompt("3", "math", "1 2 1 2 1 2")]


def test_acceptance_by_depth_gives_back_the_mean_tokens_of_a_round() -> None:
    histogram = [5, 3, 2]
    rates = acceptance_by_depth(histogram)
    assert rates == pytest.approx([5 / 10, 2 / 5])
    mean = sum(n * rounds for n, rounds in enumerate(histogram)) / 10
    assert expected_tokens_by_depth(rates) == pytest.approx(1 + mean)
    assert acceptance_by_depth([7]) == [] and acceptance_by_depth([]) == []


def test_the_cost_of_a_pass_lies_between_those_measured() -> None:
    assert [cost_at(COSTS, nodes) for nodes in (1, 4, 8)] == pytest.approx([1.0, 1.3, 2.1])
    assert cost_at(COSTS, 2.5) == pytest.approx(1.15)
    assert cost_at(COSTS, 10) == pytest.approx(2.5), "the last line goes on"


def row(method: str, seconds: float, stages: dict[str, float], **counts: Any) -> dict[str, Any]:
    whole = {"prefill": 0.0, "draft": 0.0, "forward": 0.0, "verify": 0.0, "commit": 0.0} | stages
    base = {"id": "1", "category": "qa", "temperature": 0.0, "digest": "x", "rule": "greedy", "exact": True}
    return {"method": method, "seconds": seconds, "stages": whole, **base, **counts}


def test_prediction_and_gap_by_hand() -> None:
    """Plain: 10 tokens at 1 s a pass and 0.2 s beside it, a prompt of 2 s. Drafting keeps one of one token each round:
    5 rounds at 0.5 s of drafting and 1.4 s of verifying 4 nodes."""
    stages = {"prefill": 2.0, "forward": 10.0}
    plain = row("plain", 14.0, stages, new_tokens=10, forwards=11, rounds=10, nodes=10, histogram=[10])
    fast = row(
        "lookup",
        12.0,
        {"prefill": 2.0, "forward": 7.0, "draft": 2.5},
        new_tokens=10,
        forwards=6,
        rounds=5,
        nodes=20,
        histogram=[0, 5],
    )
    result = summarize([plain, fast], COSTS, {}, {})
    found = result["temperatures"]["0.0"]["lookup"]
    assert found["draft_cost"] == pytest.approx(0.5) and found["verify_cost"] == pytest.approx(1.3)
    assert found["tokens_per_round"] == pytest.approx(2.0)
    assert found["predicted_speedup"] == pytest.approx(2.0 / 1.8)
    assert found["against_plain"]["speedup"] == pytest.approx(14 / 12)
    parts = {part: found["gap"][part] for part in PARTS}
    assert sum(parts.values()) == pytest.approx(12 / 14 - 1.8 / 2.0)
    assert parts["prompt"] == pytest.approx(2 / 14) and parts["rest"] == pytest.approx(0.5 / 14)
    assert parts["forward"] == pytest.approx(7 / 14 - 1.3 / 2) and parts["draft"] == pytest.approx(2.5 / 14 - 0.5 / 2)
    alone = result["temperatures"]["0.0"]["plain"]
    assert alone["predicted_speedup"] == pytest.approx(1.0) and alone["against_plain"]["speedup"] == 1.0


def test_footprints_count_what_is_added() -> None:
    base = tiny_base()
    draft = relative(base)
    assert footprint(LookupDrafter(base), base).parameters == 0
    assert footprint(EarlyExitDrafter(base, 1), base).weight_bytes == 0
    added = footprint(ModelDrafter(draft, base), base)
    assert added.parameters == sum(p.numel() for p in draft.model.parameters())
    assert added.weight_bytes == 4 * added.parameters
    assert kv_values(draft) == 2 * 2 * 2 * 8 and added.cache_bytes_per_token == 4 * kv_values(draft)
    both = load_paradigms(base, ["exit:1+lookup"])[1].drafter
    assert both is not None and footprint(both, base).parameters == 0


def test_the_cache_of_heads_is_that_of_their_own_attention() -> None:
    """Of two key-value heads of eight each; EAGLE also keeps its feature of 32."""
    base, limits = tiny_base(), DynamicTree(2, 2, 4)
    kept = {
        kind: footprint(
            (EagleDrafter if kind == "eagle3" else HydraDrafter)(random_heads(base, kind), base, limits), base
        )
        for kind in ("eagle3", "hydra", "hydra-prefix")
    }
    assert {kind: added.cache_bytes_per_token for kind, added in kept.items()} == {
        "eagle3": 4 * (2 * 2 * 8 + 32),
        "hydra": 0,
        "hydra-prefix": 4 * 2 * 2 * 8,
    }


def test_a_footprint_counts_what_packing_hides() -> None:
    base = tiny_base()
    heads = EagleHeads.for_base(base)
    assert footprint(EagleDrafter(heads, base, DynamicTree(3, 2, 6)), base).parameters == heads.num_parameters > 10_000


def test_rules_are_named_by_temperature_and_drafter() -> None:
    base = tiny_base()
    plan = Plan(PROMPTS)
    exit_one, lookup = EarlyExitDrafter(base, 1), LookupDrafter(base)
    assert rule(None, plan.settings(0.0, 0)) == "none"
    assert rule(exit_one, plan.settings(0.0, 0)) == "greedy"
    assert rule(exit_one, plan.settings(1.0, 0)) == "rejection of draws"
    assert rule(exit_one, plan.settings(0.5, 0)) == "point mass" == rule(lookup, plan.settings(1.0, 0))


def tiny_matrix(directory: Path | None, base: Base, **options: Any) -> dict[str, Any]:
    paradigms = load_paradigms(base, ["lookup", "exit:1", "exit:1+lookup"])
    unpacked = Base.from_model(tiny_model(), tiny_tokenizer(), name="unpacked")
    plan = Plan(PROMPTS, (0.0, 1.0), 10)
    return matrix(
        base,
        [*paradigms, *generate_paradigms(unpacked)],
        plan,
        config={"base": "tiny"},
        directory=directory,
        cost_plan=CostPlan((1, 4), (16,), 1),
        **options,
    )


def test_a_run_on_a_tiny_base_is_reported_in_all_forms(tmp_path: Path) -> None:
    result = tiny_matrix(tmp_path, tiny_base())
    stored = json.loads((tmp_path / "result.json").read_text())
    assert stored == json.loads(json.dumps(result))
    greedy = result["temperatures"]["0.0"]
    assert list(greedy) == ["plain", "lookup", "exit:1", "exit:1+lookup", "generate", "generate, prompt lookup"]
    for name, found in greedy.items():
        assert found["against_plain"]["same_text"] == 3, name
        assert set(found["categories"]) == {"qa", "math"}
    engine = [found for found in result["temperatures"]["1.0"].values() if "rule" in found]
    assert len(engine) == 4 and all(found["exact"] for found in engine)
    for found in engine[1:]:
        difference = 1 / found["against_plain"]["speedup"] - 1 / found["predicted_speedup"]
        assert sum(found["gap"][part] for part in PARTS) == pytest.approx(difference)
    assert (tmp_path / "result.png").stat().st_size > 1000
    for report in (markdown(result), text(result)):
        assert all(name in report for name in greedy) and "Sampling at T = 1" in report


def test_a_run_that_was_cut_goes_on_where_it_stopped(tmp_path: Path) -> None:
    base = tiny_base()
    tiny_matrix(tmp_path, base, figures=False)
    path = tmp_path / "rows.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:9]))
    again = tiny_matrix(tmp_path, base, figures=False)
    answers = [json.loads(line) for line in path.read_text().splitlines() if "method" in line and "config" not in line]
    keys = [(a["method"], a["id"], a["temperature"]) for a in answers if "method" in a]
    assert len(keys) == len(set(keys)) == 6 * 3 * 2
    assert len(again["sessions"]) == 2
    with pytest.raises(ConfigError, match="another configuration"):
        Log(path, {"base": "other"})


def test_a_plan_asks_fewer_prompts_of_slow_loops_and_of_sampling(tmp_path: Path) -> None:
    base = tiny_base()
    plan = Plan(PROMPTS, (0.0, 1.0), 4, slow=frozenset({"3"}), sampled=frozenset({"1", "3"}))
    ways = [*load_paradigms(base, ["lookup"]), *generate_paradigms(base)]
    log = Log(tmp_path / "rows.jsonl", {})
    run(base, ways, plan, log)
    asked: dict[tuple[str, float], set[str]] = defaultdict(set)
    for found in log.rows:
        asked[found["method"], found["temperature"]].add(found["id"])
    own, slow = {"plain", "lookup"}, {"generate", "generate, prompt lookup"}
    expected = {(name, 0.0): {"1", "2", "3"} for name in own} | {(name, 1.0): {"1", "3"} for name in own}
    assert asked == expected | {(name, t): {"3"} for name in slow for t in (0.0, 1.0)}
    figures = summarize(log.rows, COSTS, {}, {})["temperatures"]["0.0"]
    assert figures["generate"]["against_plain"]["prompts"] == 1 and figures["lookup"]["against_plain"]["prompts"] == 3


def test_a_cut_run_is_reported_without_asking(tmp_path: Path) -> None:
    base = tiny_base()
    tiny_matrix(tmp_path, base, figures=False)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-7]))
    before = path.read_text()
    result = tiny_matrix(tmp_path, base, figures=False, ask=False)
    assert path.read_text() == before
    assert sum(way["against_plain"]["prompts"] for t in result["temperatures"].values() for way in t.values()) < 36


def answers(seconds: float, nodes: int, count: int = 1) -> list[dict[str, Any]]:
    """Of plain decoding and of a way with trees of `nodes`, a second a pass."""
    counts = {"rounds": 10, "new_tokens": 20, "forwards": 11, "histogram": [10]}
    one = row("plain", seconds, {"forward": 10.0}, nodes=10, **counts)
    return [one, row("lookup", seconds, {"forward": 10.0}, nodes=10 * nodes, **counts)] * count


def test_costs_are_measured_in_proportion_to_the_answers() -> None:
    """A quarter of the answers' time, a second a pass: 25, 60 and 600 passes, of which two repetitions warm up."""
    assert CostPlan.within(answers(50.0, 5)) == CostPlan([1, 2, 4, 6], (128,), 4)
    assert CostPlan.within(answers(50.0, 4)) == CostPlan([1, 2, 4], (128,), 6)
    assert CostPlan.within(answers(120.0, 4)) == CostPlan([1, 2, 4], (128, 512), 8)
    assert CostPlan.within(answers(120.0, 4, 10)) == CostPlan([1, 2, 4], (128, 512), 15)
    assert CostPlan.within(answers(11.0, 60)).repeats == 3, "never fewer"
    assert CostPlan.within(answers(11.0, 200)).sizes == list(SIZES)
    assert CostPlan([1, 2, 4], (128, 512), 8).passes == 60
    only_generate = [row("generate", 1.0, {}, rounds=None, nodes=None)]
    assert CostPlan.within(only_generate).passes == 5


def test_nothing_is_run_where_all_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_base()
    plan, log = Plan(PROMPTS[:1], (0.0,), 4), Log(tmp_path / "rows.jsonl", {})
    run(base, load_paradigms(base, ["lookup"]), plan, log)
    monkeypatch.setattr("decode.paradigms._measure", lambda *_: pytest.fail("measured again"))
    run(base, load_paradigms(base, ["lookup"]), plan, log)
    run(base, [Paradigm("plain", None)], plan, log)
    costs = costs_of(base, tmp_path / "costs.json", sizes=(1, 2), contexts=(8,), repeats=1)
    monkeypatch.setattr("decode.paradigms.measure_costs", lambda *_, **__: pytest.fail("measured again"))
    assert costs_of(base, tmp_path / "costs.json", sizes=(1, 2), contexts=(8,), repeats=1) == costs


def test_what_there_is_to_compare_by_default() -> None:
    assert default_specs(tiny_base(), heads=True) == ["heads", "lookup", "exit:1", "heads+lookup"]
    assert default_specs(tiny_base(), heads=False) == ["lookup", "exit:1"]
    with pytest.raises(ConfigError, match="named twice"):
        load_paradigms(tiny_base(), ["lookup", "lookup"])
