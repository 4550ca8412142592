"""Rows of the machine interface: what is read, what is answered, and a file that is whole or not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from decode.cli.generate import history
from decode.cli.rows import Row, RowError, output_file, parse_row, read_rows, write_line


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("record", "identity", "script"),
    [
        ({"id": "a", "prompt": "x"}, "a", [user("x")]),
        ({"question_id": 7, "category": "qa", "turns": ["x", "y"]}, 7, [user("x"), user("y")]),
        ({"id": 0, "question_id": 9, "messages": [user("x")]}, 0, [user("x")]),
    ],
)
def test_each_kind_of_row_is_read(record: dict[str, Any], identity: str | int, script: list[dict[str, str]]) -> None:
    row = parse_row(record)
    assert (row.id, list(row.script), row.category) == (identity, script, record.get("category"))


@pytest.mark.parametrize(
    ("script", "answered"),
    [
        ([user("a"), user("b")], [(0, 0), (1, 1)]),
        ([user("a"), assistant("A"), user("b")], [(1, 2)]),
        ([{"role": "system", "content": "s"}, user("a")], [(0, 1)]),
        ([user("a"), assistant("A"), user("b"), user("c"), assistant("C"), user("d")], [(1, 2), (3, 5)]),
    ],
)
def test_user_turns_without_an_answer_are_answered(
    script: list[dict[str, str]], answered: list[tuple[int, int]]
) -> None:
    assert list(Row("r", tuple(script)).to_answer()) == answered


def test_history_holds_given_and_made_answers_in_their_places() -> None:
    row = Row("r", (user("a"), assistant("A"), user("b"), user("c")))
    assert history(row, 2, {}) == [user("a"), assistant("A"), user("b")]
    assert history(row, 3, {2: "B"}) == [user("a"), assistant("A"), user("b"), assistant("B"), user("c")]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([], "not a JSON object"),
        ({"prompt": "x"}, "needs 'id'"),
        ({"id": 1.5, "prompt": "x"}, "needs 'id'"),
        ({"id": True, "prompt": "x"}, "needs 'id'"),
        ({"id": 1}, "has none"),
        ({"id": 1, "prompt": "x", "turns": ["x"]}, "has prompt and turns"),
        ({"id": 1, "prompt": ""}, "'prompt' must be text"),
        ({"id": 1, "prompt": ["x"]}, "'prompt' must be text"),
        ({"id": 1, "turns": "x"}, "must be a list"),
        ({"id": 1, "turns": []}, "must be a list"),
        ({"id": 1, "turns": ["x", 3]}, "'turns' must be text"),
        ({"id": 1, "messages": ["x"]}, "'role' and 'content'"),
        ({"id": 1, "messages": [{"role": "user"}]}, "'role' and 'content'"),
        ({"id": 1, "messages": [{"role": "user", "content": "x"}, assistant("y")]}, "no user turn without an answer"),
    ],
)
def test_a_row_that_does_not_follow_the_interface_says_why(record: Any, reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        parse_row(record)


def test_a_bad_line_is_named_by_file_and_number() -> None:
    good = json.dumps({"id": 1, "prompt": "x"})
    assert len(read_rows([good, "", "  \n", good], "in.jsonl")) == 2
    with pytest.raises(RowError, match=r"in\.jsonl, line 3: not JSON"):
        read_rows([good, "", "{"], "in.jsonl")
    with pytest.raises(RowError, match=r"in\.jsonl, line 2: needs 'id'"):
        read_rows([good, "{}"], "in.jsonl")
    with pytest.raises(RowError, match=r"in\.jsonl has no rows"):
        read_rows(["\n"], "in.jsonl")


def test_seeds_depend_on_row_and_turn_and_on_nothing_else() -> None:
    lines = [json.dumps({"id": name, "prompt": "x"}) for name in ("a", "b", "a")]
    a, b, again = read_rows(lines, "in")
    (alone,) = read_rows(lines[1:2], "in")
    assert b.turn_seed(0, 0) == alone.turn_seed(0, 0)
    seeds = {row.turn_seed(seed, turn) for row in (a, b, again) for seed in (0, 1) for turn in (0, 1)}
    assert len(seeds) == 12
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)
    assert a.turn_seed(None, 0) is None


def test_an_output_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    path.write_text("old\n")
    with output_file(path) as sink:
        write_line(sink, {"text": "é"})
        assert partial.read_text(encoding="utf-8") == '{"text": "é"}\n'  # can be watched
        assert path.read_text() == "old\n"
    assert path.read_text(encoding="utf-8") == '{"text": "é"}\n'
    assert not partial.exists()


def test_an_output_that_fails_leaves_the_old_file_and_what_was_made(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("old\n")
    with pytest.raises(KeyboardInterrupt), output_file(path) as sink:
        write_line(sink, {"n": 1})
        raise KeyboardInterrupt
    assert path.read_text() == "old\n"
    assert (tmp_path / "out.jsonl.partial").read_text() == '{"n": 1}\n'


def test_a_device_is_written_directly(tmp_path: Path) -> None:
    with output_file(Path("/dev/null")) as sink:
        write_line(sink, {})
    assert not Path("/dev/null.partial").exists()
