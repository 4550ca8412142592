"""One counter and one clock."""

from __future__ import annotations

import json

import pytest

from decode.stats import STAGES, Clock, Stats


def test_acceptance_length_is_new_tokens_over_forward_passes() -> None:
    stats = Stats(prompt_tokens=9, new_tokens=21, base_forwards=6, seconds=0.5)
    assert stats.tau == 3.5 and stats.tokens_per_second == 42.0


def test_nothing_done_is_no_division_by_zero() -> None:
    assert Stats().tau == 0.0 and Stats().tokens_per_second == 0.0


def test_rounds_fill_the_histogram() -> None:
    stats = Stats()
    for kept in (0, 3, 1, 3):
        stats.count_round(kept, nodes=8)
    assert stats.acceptance_histogram == [1, 1, 0, 2]
    assert (stats.rounds, stats.tree_nodes) == (4, 32)
    assert sum(stats.acceptance_histogram) == stats.rounds


def test_two_calls_share_nothing() -> None:
    first, second = Stats(), Stats()
    first.count_round(0, 1)
    first.stage_seconds["draft"] = 1.0
    assert second.acceptance_histogram == [] and second.stage_seconds["draft"] == 0.0


def test_the_dictionary_is_for_machines() -> None:
    stats = Stats(prompt_tokens=9, new_tokens=7, base_forwards=3, seconds=0.25, reused_tokens=4)
    stats.count_round(2, 8, guarded=True)
    stats.stage_seconds["forward"] = 0.2
    data = json.loads(json.dumps(stats.as_dict()))
    assert data == {
        "exact": True,
        "acceptance": "exact",
        "prompt_tokens": 9,
        "new_tokens": 7,
        "base_forwards": 3,
        "rounds": 1,
        "tau": 2.3333,
        "seconds": 0.25,
        "tokens_per_second": 28.0,
        "acceptance_histogram": [0, 0, 1],
        "tree_nodes": 8,
        "guarded_rounds": 1,
        "reused_tokens": 4,
        "stage_seconds": {"prefill": 0.0, "draft": 0.0, "forward": 0.2, "verify": 0.0, "commit": 0.0},
    }


def test_the_clock_adds_up_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 101.0, 103.0, 104.0, 104.5, 110.0])
    monkeypatch.setattr("decode.stats.time.perf_counter", lambda: next(now))
    clock = Clock()
    with clock.stage("draft"):
        pass
    with pytest.raises(KeyError), clock.stage("draft"):
        raise KeyError
    assert clock.stages == dict.fromkeys(STAGES, 0.0) | {"draft": 2.5}, "also where a stage fails"
    assert clock.seconds == 10.0
