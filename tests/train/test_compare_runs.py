from __future__ import annotations

import json
import shutil

import pytest

from scripts.compare_runs import differing, main, read_run
from tests.train.runs import make_place, run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three tiny runs: Medusa heads on all rows and on some, Hydra heads on all."""
    directory = tmp_path_factory.mktemp("runs")
    place = make_place(directory, positions="all")
    states = {"directory": str(place / "states"), "dtype": "float32", "positions": "all"}
    some = {"paths": [str(place / "rows.jsonl")], "held_out": 0.2, "max_positions": 60}
    run(place, directory / "all", max_steps=2, features=states)
    run(place, directory / "some", max_steps=2, features=states, data=some)
    run(place, directory / "hydra", max_steps=2, features=states, heads={"family": "hydra", "num_heads": 2})
    return directory


def test_runs_are_told_apart_by_what_differs_in_their_settings(runs, tmp_path, capsys):
    names = ["all", "some", "hydra"]
    assert main([*(str(runs / name) for name in names), "--output", str(tmp_path / "out")]) == 0
    table = (tmp_path / "out" / "result.md").read_text()
    assert table in capsys.readouterr().out
    head, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert head[:4] == ["run", "data.max_positions", "heads.family", "heads.num_heads"]
    expected = [["all", "–", "medusa"], ["some", "60", "medusa"], ["hydra", "–", "hydra"]]
    assert [line[:3] for line in lines] == [[str(runs / name), *more] for name, *more in expected]
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["differing"] == head[1:4] and not (tmp_path / "out" / "result.png").exists()
    for name, found in zip(names, result["runs"], strict=True):
        metrics = json.loads((runs / name / "metrics.json").read_text())
        assert found["parameters"] == metrics["parameters"] and found["steps"] == 2
        top = [ranks[0] for ranks in metrics["evaluation"]["greedy"]["top_accuracy"]]
        assert found["evaluation"]["greedy"]["top_1"] == top
    everything, some, _ = result["runs"]
    assert some["distinct_positions"] <= 60 < everything["distinct_positions"]


def test_the_drafter_is_walked_where_trees_are_dynamic(runs):
    metrics = json.loads((runs / "hydra" / "metrics.json").read_text())
    walked = read_run(runs / "hydra")["evaluation"]["greedy"]["acceptance_length_by_nodes"]
    assert walked == metrics["dynamic_acceptance_length_by_nodes"]["greedy"]


def test_equal_settings_do_not_differ(runs):
    assert differing([read_run(runs / "all"), read_run(runs / "all")]) == []


def test_the_curve_is_drawn(runs, tmp_path):
    pytest.importorskip("matplotlib")
    assert main([str(runs / "all"), str(runs / "some"), "--output", str(tmp_path), "--curve"]) == 0
    assert (tmp_path / "result.png").stat().st_size > 1000


def test_a_directory_without_heads_is_named(runs, tmp_path, capsys):
    assert main([str(runs / "all.run"), "--output", str(tmp_path / "out")]) == 2
    assert "all.run is not a directory of trained heads" in capsys.readouterr().err


def test_records_that_lack_something_are_named(runs, tmp_path, capsys):
    shutil.copytree(runs / "all", tmp_path / "old")
    metrics = json.loads((tmp_path / "old" / "metrics.json").read_text())
    del metrics["training"]["distinct_positions"]
    (tmp_path / "old" / "metrics.json").write_text(json.dumps(metrics))
    assert main([str(tmp_path / "old"), "--output", str(tmp_path / "out")]) == 2
    assert "its records lack 'distinct_positions'" in capsys.readouterr().err
