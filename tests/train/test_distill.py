"""The run over the prompts: rows, resuming, failures, limits. The answerer here is scripted; it needs no model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from medusa_heads.errors import ConfigError
from tests.train.scripted import SETTINGS, ScriptedAnswerer, run, some_prompts
from train.answerers import Answer, AnswererError, RowError
from train.distill import DistillSettings, order_prompts, row_temperature
from train.pool import FAILURES_IN_A_ROW, run_workers
from train.prompts import Prompt
from train.shards import read_rows, shard_paths


def stored(directory: Path) -> dict[str, dict[str, Any]]:
    rows = list(read_rows(directory))
    assert len({row["id"] for row in rows}) == len(rows), "an id is there twice"
    return {row["id"]: row for row in rows}


def failed(directory: Path) -> dict[str, str]:
    rows = [json.loads(line) for line in (directory / "failed.jsonl").read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows), "a failure is listed twice"
    return {row["id"]: row["error"] for row in rows}


def test_a_conversation_is_answered_turn_by_turn(tmp_path: Path) -> None:
    answerer = ScriptedAnswerer(lambda text: Answer(f"<{text[-1]}>", 5, True))
    tally = run([Prompt("x", ("a", "b"), "sys", "s")], answerer, tmp_path)
    assert answerer.asked == ["s:sys|u:a", "s:sys|u:a|a:<a>|u:b"]
    assert len({request.seed for request in answerer.requests}) == 2
    temperature = row_temperature(SETTINGS, "x")
    assert {(request.temperature, request.max_new_tokens) for request in answerer.requests} == {(temperature, 9)}
    roles = ["system", "user", "assistant", "user", "assistant"]
    messages = [{"role": r, "content": c} for r, c in zip(roles, ["sys", "a", "<a>", "b", "<b>"], strict=True)]
    row = {"id": "x", "source": "s", "temperature": temperature, "finished": True, "tokens": 10, "messages": messages}
    assert stored(tmp_path) == {"x": row}
    assert (tally.rows, tally.answers, tally.new_tokens, tally.cut) == (1, 2, 10, 0)


def test_a_cut_answer_is_recorded_and_ends_its_conversation(tmp_path: Path) -> None:
    answerer = ScriptedAnswerer(lambda text: Answer("half", 9, not text.endswith("b")))
    tally = run([Prompt("x", ("a", "b", "c"))], answerer, tmp_path)
    row = stored(tmp_path)["x"]
    assert (row["finished"], row["tokens"]) == (False, 18)
    assert [m["content"] for m in row["messages"]] == ["a", "half", "b", "half"]
    assert tally.cut == 1
    assert json.loads((tmp_path / "summary.json").read_text())["total"] == {
        "rows": 1, "tokens": 18, "cut": 1, "failed": 0,
    }  # fmt: skip


def test_temperature_and_seed_go_by_id_whatever_the_order(tmp_path: Path) -> None:
    prompts = some_prompts(300)
    runs = []
    for name, order in (("a", prompts), ("b", prompts[::-1])):
        answerer = ScriptedAnswerer()
        run(order, answerer, tmp_path / name, concurrency=len(name) + 7)
        law = {
            text: (request.temperature, request.seed)
            for text, request in zip(answerer.asked, answerer.requests, strict=True)
        }
        runs.append((law, {key: row["temperature"] for key, row in stored(tmp_path / name).items()}))
    assert runs[0] == runs[1]
    share = Counter(runs[0][1].values())
    assert set(share) == {0.0, 0.7} and 60 < share[0.7] < 140, share
    assert len({seed for _, seed in runs[0][0].values()}) == 300


def test_no_more_rows_than_asked_for_are_under_way(tmp_path: Path) -> None:
    answerer = ScriptedAnswerer()
    run(some_prompts(30), answerer, tmp_path, concurrency=5)
    assert answerer.most == 5


def test_a_finished_run_does_nothing_and_more_prompts_are_added(tmp_path: Path) -> None:
    run(some_prompts(5), ScriptedAnswerer(), tmp_path)
    before = shard_paths(tmp_path)[0].read_text()
    answerer = ScriptedAnswerer()
    tally = run(some_prompts(8), answerer, tmp_path)
    assert sorted(answerer.asked) == ["u:question 5", "u:question 6", "u:question 7"]
    assert (tally.rows, tally.resumed) == (3, 5)
    assert shard_paths(tmp_path)[0].read_text().startswith(before)


def test_duplicates_are_answered_once(tmp_path: Path) -> None:
    tally = run([*some_prompts(3), Prompt("again", ("QUESTION 1",))], ScriptedAnswerer(), tmp_path)
    assert (tally.rows, tally.duplicates) == (3, 1)


def test_max_tokens_stops_and_a_later_run_with_more_goes_on(tmp_path: Path) -> None:
    prompts = some_prompts(50)
    first = run(prompts, ScriptedAnswerer(), tmp_path, max_tokens=30)
    assert 30 <= first.new_tokens <= 30 + 3 * 4, "rows under way are finished, no more are begun"
    assert run(prompts, ScriptedAnswerer(), tmp_path, max_tokens=30).rows == 0
    second = run(prompts, ScriptedAnswerer(), tmp_path, max_tokens=60)
    assert 60 <= first.new_tokens + second.new_tokens <= 60 + 3 * 4
    taken = [p.id for p in order_prompts(prompts, SETTINGS.seed)][: first.rows + second.rows]
    assert set(stored(tmp_path)) == set(taken), "a part of the run takes the first of the shuffled prompts"


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    run(some_prompts(2), ScriptedAnswerer(), tmp_path)
    with pytest.raises(ConfigError, match=r"max_new_tokens 9 \(now 10\)") as caught:
        run(some_prompts(2), ScriptedAnswerer(), tmp_path, DistillSettings("base", (0.0, 0.0, 0.7), 10, 1))
    assert "temperatures" not in str(caught.value)
    (tmp_path / "distill.json").write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        run(some_prompts(2), ScriptedAnswerer(), tmp_path)


@pytest.mark.parametrize("temperatures", [(), (0.5, -1.0)])
def test_settings_that_make_no_sense(temperatures: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="temperatures"):
        DistillSettings("base", temperatures)


def test_failed_rows_are_listed_and_tried_again(tmp_path: Path) -> None:
    bad = {"u:question 3", "u:question 5", "u:question 7"}

    def reply(text: str) -> Answer | Exception:
        return ValueError("no\nsecond line") if text in bad else Answer("ok", 1, True)

    tally = run(some_prompts(10), ScriptedAnswerer(reply), tmp_path)
    assert (tally.rows, tally.failed) == (7, 3)
    assert failed(tmp_path) == dict.fromkeys(("p3", "p5", "p7"), "ValueError: no")
    assert not {"p3", "p5", "p7"} & set(stored(tmp_path))

    bad.remove("u:question 5")
    answerer = ScriptedAnswerer(reply)
    tally = run(some_prompts(10), answerer, tmp_path)
    assert sorted(answerer.asked) == ["u:question 3", "u:question 5", "u:question 7"]
    assert (tally.rows, tally.failed, tally.resumed) == (1, 2, 7)
    assert set(failed(tmp_path)) == {"p3", "p7"}

    run(some_prompts(10), ScriptedAnswerer(), tmp_path, max_tokens=1)
    assert set(failed(tmp_path)) == {"p3", "p7"}, "rows that were not tried again stay listed"
    run(some_prompts(10), ScriptedAnswerer(), tmp_path)
    assert failed(tmp_path) == {} and len(stored(tmp_path)) == 10


def test_an_answerer_that_dies_stops_the_run_instead_of_failing_every_row(tmp_path: Path) -> None:
    answerer = ScriptedAnswerer(
        lambda text: Answer("ok", 1, True) if len(answerer.requests) <= 40 else ConnectionError("gone")
    )
    with pytest.raises(AnswererError, match="rows failed one after another, the last with ConnectionError: gone"):
        run(some_prompts(500), answerer, tmp_path)
    assert len(answerer.requests) < 40 + FAILURES_IN_A_ROW + 10
    assert FAILURES_IN_A_ROW <= len(failed(tmp_path)) < FAILURES_IN_A_ROW + 4
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["total"]["rows"] == len(stored(tmp_path)) == summary["run"]["rows"] > 30
    run(some_prompts(500), ScriptedAnswerer(), tmp_path)
    assert len(stored(tmp_path)) == 500 and failed(tmp_path) == {}


def test_rows_that_are_bad_by_themselves_do_not_stop_a_run_that_works(tmp_path: Path) -> None:
    def reply(text: str) -> Answer | Exception:
        return RowError("too long") if len(text) > 40 else Answer("ok", 1, True)

    long = [Prompt(f"long{i}", (f"long {i} " + "x" * 40,)) for i in range(3 * FAILURES_IN_A_ROW)]
    tally = run([*long, *some_prompts(30)], ScriptedAnswerer(reply), tmp_path)
    assert (tally.rows, tally.failed) == (30, len(long))
    assert run([*long, *some_prompts(30)], ScriptedAnswerer(reply), tmp_path).failed == len(long)


def test_refusing_every_row_from_the_start_stops_the_run(tmp_path: Path) -> None:
    answerer = ScriptedAnswerer(lambda text: RowError("unknown field top_k"))
    with pytest.raises(AnswererError, match="unknown field top_k"):
        run(some_prompts(500), answerer, tmp_path)
    assert len(answerer.requests) < FAILURES_IN_A_ROW + 10


def test_an_answerer_error_ends_the_run_at_once_and_cancels_what_is_under_way(tmp_path: Path) -> None:
    answerer = ScriptedAnswerer(
        lambda text: AnswererError("wrong key") if text.endswith("3") else Answer("ok", 1, True)
    )
    with pytest.raises(AnswererError, match="wrong key"):
        run(some_prompts(100), answerer, tmp_path)
    assert answerer.running == 0
    assert failed(tmp_path) == {}


def test_workers_are_done_when_run_workers_raises() -> None:
    ended: list[int] = []

    async def work(item: int) -> None:
        if item == 2:
            raise ValueError("two")
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(item)

    async def main() -> None:
        with pytest.raises(ValueError, match="two"):
            await run_workers(range(10), work, 4)
        assert sorted(ended) == [0, 1, 3]

    asyncio.run(main())


def test_a_full_disk_ends_the_run_and_leaves_whole_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from train import shards

    append = shards.ShardWriter.append

    def full(self: shards.ShardWriter, row: dict[str, Any]) -> None:
        if self._file.rows == 6:
            raise OSError(28, "No space left on device")
        append(self, row)

    monkeypatch.setattr(shards.ShardWriter, "append", full)
    with pytest.raises(OSError, match="No space left"):
        run(some_prompts(30), ScriptedAnswerer(), tmp_path)
    assert len(stored(tmp_path)) == 6
    monkeypatch.undo()
    assert run(some_prompts(30), ScriptedAnswerer(), tmp_path).rows == 24


KILLED = """
import sys
from pathlib import Path
from tests.train.scripted import ScriptedAnswerer, run, some_prompts
run(some_prompts(2000), ScriptedAnswerer(), Path(sys.argv[1]), rows_per_shard=50)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_goes_on_without_repeating_or_skipping(tmp_path: Path, how: signal.Signals) -> None:
    script = [sys.executable, "-c", KILLED, str(tmp_path)]
    root = Path(__file__).parents[2]
    process = subprocess.Popen(script, stderr=subprocess.PIPE, text=True, cwd=root)
    try:
        deadline = time.monotonic() + 60
        while len(shard_paths(tmp_path)) < 4 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
    finally:
        os.kill(process.pid, how)
        _, errors = process.communicate()
    assert process.returncode == -how, errors
    before = stored(tmp_path)
    assert 150 <= len(before) < 2000
    with shard_paths(tmp_path)[-1].open("a") as file:
        file.write('{"id": "p1999", "source": "te')  # what a kill in the middle of a write leaves
    answerer = ScriptedAnswerer()
    tally = run(some_prompts(2000), answerer, tmp_path, concurrency=500, rows_per_shard=50)
    after = stored(tmp_path)
    assert set(after) == {f"p{i}" for i in range(2000)}
    assert {key: after[key] for key in before} == before
    assert (tally.resumed, tally.rows, len(answerer.requests)) == (len(before), 2000 - len(before), 2000 - len(before))


def test_datasets_loads_the_result(tmp_path: Path) -> None:
    """Also where the first shard's columns would be all null, or whole numbers, if rows were stored as they come."""
    import datasets

    prompts = [Prompt(f"p{i}", (f"question {i}",)) for i in range(4)]
    settings = DistillSettings("base", (0, 0.7))
    run(prompts, ScriptedAnswerer(), tmp_path, settings, rows_per_shard=2)
    more = [Prompt("m", ("a", "b"), "sys", "elsewhere"), *prompts]
    run(more, ScriptedAnswerer(), tmp_path, settings, rows_per_shard=2)
    files = str(tmp_path / "shard-*.jsonl")
    loaded = datasets.load_dataset("json", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded.to_list() == list(read_rows(tmp_path)) and len(loaded) == 5
