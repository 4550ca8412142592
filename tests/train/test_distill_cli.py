"""`python -m train.distill` from end to end, with a server that answers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.train.loopback import LoopbackServer, Reply, completion
from train.distill_cli import KEY_VARIABLE, app
from train.shards import read_rows


@pytest.fixture(scope="module")
def tokenizer(byte_tokenizer: Callable[..., Any]) -> Any:
    return byte_tokenizer()


@pytest.fixture
def base(tmp_path: Path, tokenizer: Any) -> Path:
    """A directory with the tokenizer of a base, all that is needed here where a server answers."""
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": i, "turns": [f"q{i}", "and?"]}) + "\n" for i in range(40)))
    return path


def distil(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_the_command_asks_in_the_bases_template(
    server: LoopbackServer, base: Path, prompts: Path, tmp_path: Path, tokenizer: Any
) -> None:
    eight = threading.Barrier(8)

    def reply(number: int, body: dict[str, Any]) -> Reply:
        if number <= 8:
            eight.wait(60)  # nobody is answered before eight have asked
        return 200, completion("A", tokens=2)

    server.reply = reply
    options = ["--temperature", 0, "--temperature", 0.5, "--max-new-tokens", 7, "--concurrency", 8]
    result = distil("--prompts", prompts, "--base", base, "--out", tmp_path / "out", "--server", server.url, *options)
    assert result.exit_code == 0, result.output
    assert "40 rows with 80 answers, 160 tokens" in result.output
    texts = sorted(tokenizer.decode(body["prompt"]) for body in server.bodies)
    first = "<|im_start|>user\nq0<|im_end|>\n<|im_start|>assistant\n"
    assert texts[0] == first
    assert texts[1] == first + "A<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    assert {body["temperature"] for body in server.bodies} == {0.0, 0.5}
    assert {body["max_tokens"] for body in server.bodies} == {7}
    assert server.most == 8
    rows = {row["id"]: row for row in read_rows(tmp_path / "out")}
    assert set(rows) == {str(i) for i in range(40)} and rows["0"]["source"] == "prompts.jsonl"


def test_the_command_needs_the_key(
    server: LoopbackServer, base: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.key = "secret"
    arguments = ["--prompts", prompts, "--base", base, "--out", tmp_path / "out", "--server", server.url]
    result = distil(*arguments)
    assert result.exit_code == 2 and "refuses" in result.stderr
    assert list(read_rows(tmp_path / "out")) == []
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    assert distil(*arguments).exit_code == 0


def test_a_server_that_dies_ends_the_command_in_one_line_and_the_next_goes_on(
    server: LoopbackServer, base: Path, prompts: Path, tmp_path: Path
) -> None:
    server.reply = lambda number, body: (200, completion()) if number <= 20 else (200, "<html>bye</html>")
    arguments = ["--prompts", prompts, "--base", base, "--out", tmp_path / "out", "--server", server.url]
    arguments += ["--concurrency", 2]
    result = distil(*arguments)
    assert result.exit_code == 2
    line = "error: 20 rows failed one after another, the last with ValueError: the server's reply is not a completion"
    assert result.stderr.startswith(line) and result.stderr.count("\n") == 1
    kept = [row["id"] for row in read_rows(tmp_path / "out")]
    assert 8 <= len(kept) <= 10
    server.reply = lambda number, body: (200, completion())
    assert distil(*arguments).exit_code == 0
    rows = [row["id"] for row in read_rows(tmp_path / "out")]
    assert rows[: len(kept)] == kept and sorted(rows) == sorted(str(i) for i in range(40))


def test_ctrl_c_leaves_whole_rows_and_says_how_to_go_on(
    server: LoopbackServer, base: Path, prompts: Path, tmp_path: Path
) -> None:
    arguments = ["--prompts", prompts, "--base", base, "--out", tmp_path / "out", "--server", server.url]
    command = [sys.executable, "-m", "train.distill", *map(str, arguments), "--concurrency", "2"]
    started = threading.Event()

    def reply(number: int, body: dict[str, Any]) -> Reply:
        if number == 30:
            started.wait(60)
            process.send_signal(signal.SIGINT)
        return 200, completion()

    server.reply = reply
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        # Where the tests run in the background of a shell, they and their children ignore the signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    started.set()
    complaint = process.communicate(timeout=300)[1]
    assert process.returncode == 130 and "the same command goes on from there" in complaint
    kept = [row["id"] for row in read_rows(tmp_path / "out")]
    assert 10 <= len(kept) < 40
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["total"]["rows"] == len(kept)
    assert distil(*arguments).exit_code == 0
    assert len(list(read_rows(tmp_path / "out"))) == 40


def test_options_that_clash_are_named(base: Path, prompts: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    source, out = ["--prompts", prompts], ["--base", base, "--out", tmp_path / "out"]
    cases = [
        ([], "--prompts, --dataset, --self-prompts; given: none"),
        ([*source, "--self-prompts", 3], "given: --prompts, --self-prompts"),
        ([*source, "--split", "test"], "--split goes with --dataset"),
        ([*source, "--concurrency", 3], "--concurrency goes with --server"),
        ([*source, "--server-model", "m"], "--server-model goes with --server"),
        ([*source, "--server", "http://x/v1", "--batch-size", 3], "--batch-size goes only without --server"),
        ([*source, "--server", "http://x/v1", "--dtype", "float32"], "--dtype goes only without --server"),
        ([*source, "--temperature", -1], "temperatures must be"),
        (["--prompts", tmp_path / "none.jsonl"], "cannot read the prompts"),
        (["--prompts", empty], "there is no prompt in"),
    ]
    for arguments, message in cases:
        result = distil(*arguments, *out)
        assert result.exit_code == 2 and message in result.stderr, (arguments, result.output)
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_command_that_could_not_begin_leaves_no_settings_behind(
    server: LoopbackServer, base: Path, prompts: Path, tmp_path: Path
) -> None:
    arguments = ["--prompts", prompts, "--out", tmp_path / "out", "--server", server.url]
    result = distil(*arguments, "--base", tmp_path / "missing")
    assert result.exit_code == 2 and "cannot load the tokenizer" in result.stderr
    assert distil(*arguments, "--base", base).exit_code == 0


def test_another_directory_is_asked_for_when_settings_differ(
    server: LoopbackServer, base: Path, prompts: Path, tmp_path: Path
) -> None:
    arguments = ["--prompts", prompts, "--base", base, "--out", tmp_path / "out", "--server", server.url]
    assert distil(*arguments).exit_code == 0
    asked = len(server.bodies)
    result = distil(*arguments, "--seed", 1)
    assert result.exit_code == 2 and "seed 0 (now 1)" in result.stderr, result.output
    assert len(server.bodies) == asked
