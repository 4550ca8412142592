"""`medusa-decode chat` on a tiny random base and heads that lie in directories."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decode.engine import Decoder
from tests.decode.commands import run, write_rows
from tests.decode.tiny_pair import CONTEXT


@pytest.fixture
def chat(base_dir: Path, heads_dir: Path) -> Any:
    def talk(*lines: str, options: tuple[object, ...] = ()) -> Any:
        fixed = ("--base", base_dir, "--heads", heads_dir, "--dtype", "float32", "--max-new-tokens", 6)
        return run("chat", *fixed, *options, text="\n".join(lines) + "\n")

    return talk


def test_chat_answers_with_the_history_and_saves_it(chat: Any, tmp_path: Path, base_dir: Path) -> None:
    saved = tmp_path / "talk.json"
    result = chat("hello", "and then?", "/stats", f"/save {saved}", "/quit", "never", options=("--system", "be"))
    assert result.exit_code == 0, result.output
    messages = json.loads(saved.read_text())["messages"]
    roles = ["system", "user", "assistant", "user", "assistant"]
    assert [message["role"] for message in messages] == roles
    assert f"{messages[2]['content']}\n{messages[4]['content']}\n2 answers, " in result.stdout
    assert "never" not in result.stdout

    source = write_rows(tmp_path / "in.jsonl", [{"id": 0, "messages": messages[:4]}])
    alone = run("generate", "--input", source, "--base", base_dir, "--plain", "--dtype", "float32",
                "--max-new-tokens", 6)  # fmt: skip
    assert json.loads(alone.stdout)["text"] == messages[4]["content"]


def test_chat_forgets_on_reset(chat: Any, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    result = chat("hello", "/reset", "hello", f"/save {saved}")
    first = result.stdout.split("\nforgotten\n")[0]
    assert json.loads(saved.read_text())["messages"] == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first},
    ]


def test_chat_goes_on_after_a_mistake(chat: Any) -> None:
    result = chat("/help", "/nonsense", "/save", "x" * CONTEXT, "/stats")
    assert result.exit_code == 0
    assert "/reset" in result.stdout and "no answer yet" in result.stdout
    errors = result.stderr.splitlines()
    assert len(errors) == 3 and all(line.startswith("error: ") for line in errors)


def test_ctrl_c_stops_one_answer_and_keeps_what_was_said(
    chat: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Decoder.stream

    def interrupted(self: Decoder, *arguments: Any, **options: Any) -> Iterator[Any]:
        monkeypatch.setattr(Decoder, "stream", stream)
        yield next(iter(stream(self, *arguments, **options)))
        raise KeyboardInterrupt

    monkeypatch.setattr(Decoder, "stream", interrupted)
    saved = tmp_path / "talk.json"
    result = chat("hello", "again", f"/save {saved}")
    assert result.exit_code == 0, result.output
    assert "[stopped]" in result.stderr
    messages = json.loads(saved.read_text())["messages"]
    assert saved.read_text().count("\n") == 1 and json.loads(saved.read_text())["id"] == "talk"
    assert len(messages) == 4
    assert len(messages[1]["content"]) <= 1  # one round, one byte
