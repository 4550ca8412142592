"""The guard's measurement: its cases are what they say, its ratios are paired, and a cut run goes on."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

from decode.benchmark.guarding import (
    ADVERSARIAL,
    FRIENDLY,
    WAYS,
    Case,
    OneOf,
    drafter_of_noise,
    figures,
    markdown,
    measure,
    order,
    random_tokens,
    with_noise,
)
from decode.drafters import Drafter, DraftRow, load_drafter
from decode.drafters.combined import CombinedDrafter
from decode.drafters.lookup import LookupDrafter
from decode.sampling import node_law
from medusa_heads.base import Base
from medusa_heads.errors import ConfigError
from medusa_heads.medusa import MedusaHeads
from scripts import measure_guard
from tests.conftest import VOCAB, tiny_base
from tests.decode.eagle_heads import noisy, random_heads

TREE = '{"tree": {"parents": [-1, 0, 0, 1], "ranks": [0, 0, 1, 0]}}'


def saved(heads: Any, directory: Path, tree: str) -> str:
    heads.save_pretrained(directory, extras={"tree.json": tree}, dtype=None)
    return str(directory)


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base, directory = tiny_base(), tmp_path_factory.mktemp("base")
    base.model.save_pretrained(directory)
    base.tokenizer.save_pretrained(directory)
    return directory


def drafted(drafter: Drafter, base: Base) -> list[int]:
    """What is drafted behind a text."""
    text = [5, 17, 40, 8, 61, 33, 12]
    session = drafter.start([DraftRow(text, 0.0, torch.Generator())])
    session.observe(base.forward(torch.tensor([text]), layers=tuple(drafter.layers)), torch.tensor([text]), [range(7)])
    return session.draft([70]).tokens[0].tolist()


def test_six_repetitions_see_every_order_once() -> None:
    orders = [tuple(order(repetition)) for repetition in range(6)]
    assert set(orders) == set(itertools.permutations(WAYS)) and order(6) == order(0)


def test_words_are_equally_likely_and_nothing_else_follows() -> None:
    logits = torch.randn(10, generator=torch.Generator().manual_seed(0))
    law = node_law(logits, [1, 2], LogitsProcessorList([OneOf([7, 2, 4])]))
    assert law[[2, 4, 7]].tolist() == pytest.approx([1 / 3] * 3) and law.sum() == pytest.approx(1.0)


def test_random_tokens_end_no_text_and_none_comes_twice(base: Base) -> None:
    drawn = random_tokens(base, VOCAB, 0)
    assert sorted(drawn) == sorted(set(range(VOCAB)) - set(base.eos_token_ids))
    assert random_tokens(base, 5, 0) == drawn[:5] != random_tokens(base, 5, 1)


def test_noise_has_the_parameters_own_shape_mean_and_deviation() -> None:
    module = torch.nn.Linear(200, 300)
    torch.nn.init.uniform_(module.weight, 1.0, 3.0)
    before = module.weight.detach().clone()
    with_noise(module, 0)
    after = module.weight.detach()
    assert float(after.mean()) == pytest.approx(2.0, abs=0.02)
    assert float(after.std()) == pytest.approx(float(before.std()), rel=0.02)
    both = torch.stack((before.flatten(), after.flatten()))
    assert abs(torch.corrcoef(both)[0, 1]) < 0.02


@pytest.mark.parametrize("family", ["medusa", "eagle3", "hydra"])
@pytest.mark.parametrize("name", ["heads", "heads+lookup"])
def test_heads_of_noise_have_the_same_trees(base: Base, tmp_path: Path, family: str, name: str) -> None:
    heads = noisy(MedusaHeads.for_base(base, 2, 1), 0.5) if family == "medusa" else random_heads(base, family)
    tree = TREE if family == "medusa" else '{"dynamic": {"depth": 2, "width": 2, "nodes": 5}}'
    directory = saved(heads, tmp_path / "heads", tree)
    drafter: Any = load_drafter(name, base, heads=directory)
    other: Any = drafter_of_noise(drafter, name, base, directory, 1)
    if name != "heads":
        assert isinstance(other, CombinedDrafter) and isinstance(other.drafters[1], LookupDrafter)
        assert (other.nodes, other.least) == (drafter.nodes, drafter.least)
        drafter, other = drafter.drafters[0], other.drafters[0]
    assert type(other) is type(drafter)
    assert other.tree == drafter.tree if family == "medusa" else other.choice == drafter.choice
    again = load_drafter("heads", base, heads=directory)
    assert drafted(drafter, base) == drafted(again, base) != drafted(other, base)


def test_a_way_without_heads_has_none_of_noise(base: Base) -> None:
    assert drafter_of_noise(LookupDrafter(base), "lookup", base, None, 0) is None


def test_a_repetition_has_the_same_text_three_ways_and_its_full_length(base: Base) -> None:
    words = random_tokens(base, 8, 0)
    greedy, drawn = (Case("a", [[5, 17], [40]], LookupDrafter(base), words=w) for w in (None, words))
    for case in (greedy, drawn):
        row = measure(base, case, 1, 40, 0)
        assert row["prompt"] == 1 and row["case"] == "a"
        assert {row[way]["new_tokens"] for way in WAYS} == {40} and len({row[way]["digest"] for way in WAYS}) == 1
        assert all(row[way]["seconds"] > 0.0 for way in WAYS)
        assert row["plain"]["rounds"] == 39 and row["unguarded"]["guarded_rounds"] == 0


def test_a_text_without_room_is_refused(base: Base) -> None:
    case = Case("a", [list(range(3, 60)) * 4], LookupDrafter(base))
    with pytest.raises(ConfigError, match="ended after 28 tokens"):
        measure(base, case, 0, 40, 0)


def timing(plain: float, guarded: float, unguarded: float) -> dict[str, Any]:
    rest = {"new_tokens": 100, "rounds": 50, "guarded_rounds": 10, "digest": "same"}
    return {way: {"seconds": s, **rest} for way, s in zip(WAYS, (plain, guarded, unguarded), strict=True)}


def test_ratios_are_of_times_within_a_repetition() -> None:
    """The machine is three times as slow in the second repetition: the ratios do not see it."""
    rows = [timing(1.0, 1.02, 1.2), timing(3.0, 3.06, 3.6), timing(1.0, 1.05, 1.2)]
    found = figures(rows, ADVERSARIAL)
    assert found["ratios"]["guarded/plain"] == pytest.approx((1.02, 1.02, 1.035))
    assert found["ratios"]["unguarded/plain"] == pytest.approx((1.2, 1.2, 1.2))
    assert found["tokens_per_second"]["plain"][1] == 100.0 and found["kept"] is True
    assert found["tokens_per_round"] == 2.0 and found["held_back"] == 0.2 and found["same_text"] == 3
    assert figures([timing(1.0, 1.04, 1.2)], ADVERSARIAL)["kept"] is False
    assert figures([timing(1.0, 0.60, 0.59)], FRIENDLY)["kept"] is True
    assert figures([timing(1.0, 0.62, 0.59)], FRIENDLY)["kept"] is False


def test_the_table_has_a_line_for_each_case() -> None:
    table = markdown({"bad": figures([timing(1.0, 1.04, 1.2)], ADVERSARIAL)})
    assert table.splitlines()[2] == (
        "| bad | 100.0 | 96.2 | 83.3 | 2.00 | 20% | 1.200 (1.200–1.200) | 1.040 (1.040–1.040) | 0.867 (0.867–0.867) "
        "| guarded ÷ plain ≤ 1.03 | no |"
    )


def test_a_cut_run_goes_on_and_more_repeats_add_to_it(
    base_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    given = ["--base", str(base_dir), "--dtype", "float32", "--drafter", "exit:1+lookup", "--max-new-tokens", "12"]
    assert measure_guard.main([*given, "--output", str(output), "--repeats", "1"]) == 0
    first = (output / "rows.jsonl").read_text()
    result = json.loads((output / "result.json").read_text())
    assert list(result["cases"]) == ["random prompt", "another language", "random text", "friendly"]
    assert {found["repetitions"] for found in result["cases"].values()} == {1}
    assert "| friendly |" in capsys.readouterr().out and "| friendly |" in (output / "result.md").read_text()
    lines = first.splitlines(keepends=True)
    (output / "rows.jsonl").write_text("".join(lines[:-1]) + lines[-1][:20])  # cut within a line
    assert measure_guard.main([*given, "--output", str(output), "--repeats", "2"]) == 0
    rows = [json.loads(line) for line in (output / "rows.jsonl").read_text().splitlines()]
    measured = [(row["case"], row["repetition"]) for row in rows if "case" in row]
    assert len(measured) == len(set(measured)) == 8
    assert first.startswith("".join(json.dumps(row) + "\n" for row in rows[:2]))
    assert measure_guard.main([*given, "--output", str(output), "--seed", "1"]) == 2
    assert "another configuration" in capsys.readouterr().err


def test_a_run_that_cannot_be_is_one_line(base_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--base", str(base_dir), "--drafter", "lookup"]
    assert measure_guard.main([*given, "--output", str(tmp_path / "a"), "--cases", "noise for heads"]) == 2
    assert "no heads that noise could replace" in capsys.readouterr().err
    assert measure_guard.main(["--base", "nowhere", "--drafter", "lokup", "--output", str(tmp_path / "c")]) == 2
    assert "is it 'lookup'?" in capsys.readouterr().err and not (tmp_path / "c").exists()
    assert measure_guard.main([*given, "--output", str(tmp_path / "b")]) == 2
    assert "has no room for" in capsys.readouterr().err
