"""Limits for a machine: replayed drafts are those of decoding, walks have its rounds, the choice is the best tried."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from decode.cli import app
from decode.drafters.eagle import EagleDrafter
from decode.drafters.hydra import HydraDrafter
from decode.dynamic import DynamicTree, TreeChoice
from decode.dynamic_costs import DynamicCost, limited, measure_dynamic_costs
from decode.dynamic_tuning import accepted_tokens, choose_limits, drawn_accuracy, record, replay, value
from decode.engine import Decoder
from decode.profiles import read_profile, write_profile
from decode.sampling import SamplingParams
from decode.settings import GenerationSettings
from decode.tree import Tree
from medusa_heads.base import Base
from tests.conftest import tiny_base
from tests.decode.eagle_heads import random_heads

PROMPT = [5, 17, 40, 8, 61, 33, 12, 70, 21]
COST = DynamicCost({1: 1.0, 64: 1.0 + 0.02 * 63}, 0.1, {1: 0.05, 3: 0.06})


def drafter_of(base: Base, kind: str, rule: DynamicTree) -> Any:
    made = EagleDrafter if kind.startswith("eagle") else HydraDrafter
    return made(random_heads(base, kind, scale=0.05), base, rule)


@pytest.fixture(scope="module")
def answered() -> tuple[Base, list[int]]:
    base = tiny_base()
    base.eos_token_ids = ()
    return base, Decoder(base).generate(PROMPT, GenerationSettings(max_new_tokens=40)).token_ids


RULES = [
    DynamicTree(4, 3, 9),
    DynamicTree(3, 1, 4),
    DynamicTree(4, 3, 30, node_floor=0.02),
    DynamicTree(4, 3, 6, step_floor=0.5),
]


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "hydra", "hydra-prefix"])
def test_a_walk_over_recordings_has_the_rounds_of_decoding(answered: tuple[Base, list[int]], kind: str) -> None:
    base, answer = answered
    drafter = drafter_of(base, kind, DynamicTree(4, 3, 9))
    recorded = record(base, drafter, PROMPT, answer, depth=4, widths=(1, 3))
    for rule in RULES:
        found = value(rule, [recorded], COST)
        settings = GenerationSettings(max_new_tokens=len(answer))
        stats = Decoder(base, limited(drafter, rule), guard=None).generate(PROMPT, settings).stats
        assert found.tokens == pytest.approx((stats.new_tokens - 1) / stats.rounds)
        assert found.nodes == pytest.approx(stats.tree_nodes / stats.rounds)
    assert len(recorded.recordings) == len(answer) - 1


def test_steps_and_seconds_of_a_walk(answered: tuple[Base, list[int]]) -> None:
    base, answer = answered
    recorded = record(base, drafter_of(base, "eagle3", RULES[0]), PROMPT, answer[:12], depth=4, widths=(3,))
    found = value(DynamicTree(1, 3, 4), [recorded], COST)
    assert found.steps == 1.0 and found.nodes == 4.0
    assert found.seconds == pytest.approx(1.0 + 0.02 * 3 + 0.1)
    deeper = value(DynamicTree(4, 3, 64), [recorded], COST)
    assert deeper.steps == 4.0
    assert deeper.seconds == pytest.approx(1.0 + 0.02 * (deeper.nodes - 1) + 0.1 + 3 * 0.06)


def test_a_replay_stops_where_a_node_is_missing_loudly() -> None:
    with pytest.raises(KeyError):
        replay({(): ([1, 2], [-0.1, -3.0])}, 0, DynamicTree(2, 2, 5))


def test_accepted_tokens_are_the_longest_path_that_the_text_takes() -> None:
    tree = Tree.from_rank_paths([(0,), (1,), (1, 0), (1, 0, 0)])
    drafted = [9, 4, 5, 6, 7]
    expected = {(4,): 1, (5, 6, 7, 1): 3, (5, 6): 2, (5, 7): 1, (8, 4): 0, (): 0}
    for text, length in expected.items():
        assert accepted_tokens(tree, drafted, text) == length


def test_the_choice_is_no_slower_than_any_neighbour(answered: tuple[Base, list[int]]) -> None:
    base, answer = answered
    recorded = [record(base, drafter_of(base, "eagle3", RULES[0]), PROMPT, answer[:14], depth=3, widths=(1, 3))]
    options = choose_limits(recorded, COST, deepest=3)
    best = options[0]
    assert all(best.tokens_per_second >= option.tokens_per_second for option in options)
    for change in ({"depth": 1}, {"depth": 3}, {"width": 1}, {"width": 3}, {"nodes": 2}, {"nodes": 64}):
        other = value(replace(best.rule, **change), recorded, COST)
        assert best.tokens_per_second >= other.tokens_per_second
    dear = DynamicCost({1: 1.0, 64: 1.0 + 5.0 * 63}, 0.1, {1: 5.0, 3: 5.0})
    assert choose_limits(recorded, dear, deepest=3)[0].nodes <= 2.0


def test_drawn_children_of_the_bases_own_law_are_certain_to_be_kept() -> None:
    base = tiny_base()
    base.eos_token_ids = ()
    settings = GenerationSettings(max_new_tokens=30, sampling=SamplingParams(temperature=1.0), seed=1)
    answer = Decoder(base).generate(PROMPT, settings).token_ids
    drafter = drafter_of(base, "eagle1", RULES[0])
    found, places = drawn_accuracy(base, drafter, PROMPT, answer, temperature=1.0, depth=2, stride=4)
    assert found.shape == (2, 4) and places == 7
    assert (found >= 0.0).all() and (found.sum(dim=1) <= places).all() and found[0, 0] > 0.0

    class Perfect:
        """Knows the base's law."""

        layers: tuple[int, ...] = ()
        draft_ids = None

        def start(self, rows: object) -> Any:
            return session

    class Session:
        def __init__(self) -> None:
            self.prefix: list[int] = []

        def observe(self, output: object, tokens: torch.Tensor, paths: object) -> None:
            self.prefix = [*self.prefix, *tokens[0].tolist()]

        def lead(self, tokens: list[int]) -> torch.Tensor:
            return base.model(torch.tensor([[*self.prefix, *tokens]])).logits[0, -len(tokens) :]

    session = Session()
    found, places = drawn_accuracy(base, Perfect(), PROMPT, answer, temperature=1.0, depth=2, stride=4)  # type: ignore[arg-type]
    assert torch.allclose(found[:, 0], torch.full((2,), float(places), dtype=torch.float64), atol=1e-3)


def test_costs_are_positive_and_of_every_size_and_width(answered: tuple[Base, list[int]]) -> None:
    base, _ = answered
    drafter = drafter_of(base, "eagle3", RULES[0])
    before = drafter.choice
    settings = GenerationSettings(max_new_tokens=8)
    cost = measure_dynamic_costs(base, drafter, [PROMPT], settings, deepest=3, sizes=(2, 5), widths=(1, 2), repeats=1)
    assert set(cost.forward) == {1, 2, 5} and set(cost.step) == {1, 2}
    assert min(cost.forward.values()) > 0.0 and cost.read > 0.0 and min(cost.step.values()) >= 0.0
    assert drafter.choice is before
    assert limited(drafter, RULES[1]).choice == TreeChoice.of(RULES[1])


@pytest.mark.parametrize("sampled", [False, True])
def test_tune_keeps_what_decoding_then_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampled: bool) -> None:
    monkeypatch.setattr("decode.profiles.cache_dir", lambda: tmp_path / "cache")
    base = tiny_base()
    base.eos_token_ids = ()
    heads = random_heads(base, "eagle3")
    heads.save_pretrained(tmp_path / "heads")
    monkeypatch.setattr("medusa_heads.base.Base.load", lambda *_, **__: base)
    for name in ("CALIBRATION", "HELD_OUT"):
        monkeypatch.setattr(f"decode.calibration.{name}", ("Hi.", "No?"))
    monkeypatch.setattr("decode.cli.tune.NEW_TOKENS", 16)
    monkeypatch.setattr("decode.cli.tune_dynamic.ROUND_TOKENS", 6)
    monkeypatch.setattr("decode.dynamic_tuning.STEP_FLOORS", (0.0, 0.3))
    monkeypatch.setattr("decode.dynamic_tuning.NODE_FLOORS", (0.0, 0.05))
    arguments = ["tune", "--base", "tiny", "--heads", str(tmp_path / "heads"), "--repeats", "1", "--max-nodes", "6"]
    result = CliRunner().invoke(app, [*arguments, "--json", *(["--sampled"] if sampled else [])])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    stored = read_profile(tmp_path / "heads", base, drawn=sampled)
    assert report["measured"]["tokens_per_round"] >= 1.0 and Path(report["path"]).is_file()
    choice = EagleDrafter.from_pretrained(tmp_path / "heads", base).choice
    if sampled:
        assert stored == choice.drawn == Tree.from_dict(report["tree"]) and choice.drawn.size <= 6
        limits = DynamicTree(2, 2, 3)
        write_profile(tmp_path / "heads", base, limits, {})
        choice = EagleDrafter.from_pretrained(tmp_path / "heads", base).choice
        assert choice == TreeChoice(limits, stored), "each keeps its own"
    else:
        assert stored == choice.likeliest == DynamicTree.from_dict(report["dynamic"])
        assert choice.drawn.size <= stored.nodes, "a node costs as much when it is drawn"
    refused = CliRunner().invoke(app, [*arguments, "--context", "64"])
    assert refused.exit_code != 0 and "static trees" in refused.output
