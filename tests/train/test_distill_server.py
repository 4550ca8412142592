"""Answers from a server: a small OpenAI-compatible one on loopback, which fails in the ways that servers do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from train.answerers import AnswererError, Request, RowError, ServerAnswerer, Stop
from train.distill_cli import KEY_VARIABLE, app
from train.shards import read_rows


@pytest.fixture(scope="module")
def tokenizer(byte_tokenizer: Callable[..., Any]) -> Any:
    return byte_tokenizer()


def completion(text: str = "yes", reason: str = "stop", tokens: int = 2) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": reason, "logprobs": None}
    usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": 1 + tokens}
    return {
        "id": "c", "object": "text_completion", "created": 0, "model": "tiny", "choices": [choice], "usage": usage,
    }  # fmt: skip


Reply = tuple[int, Any]


class LoopbackServer:
    """`reply(number of the request, its body)` gives status and body; text is sent as it is, the rest as JSON."""

    def __init__(self) -> None:
        self.reply: Callable[[int, dict[str, Any]], Reply] = lambda number, body: (200, completion())
        self.served: Any = {"object": "list", "data": [{"id": "tiny", "object": "model"}]}
        self.key: str | None = None
        self.bodies: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.running = 0
        self.most = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.send(200, outer.served)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with outer._lock:
                    outer.bodies.append(body)
                    outer.times.append(time.monotonic())
                    number = len(outer.bodies)
                    outer.running += 1
                    outer.most = max(outer.most, outer.running)
                try:
                    allowed = outer.key is None or self.headers["authorization"] == f"Bearer {outer.key}"
                    status, reply = outer.reply(number, body) if allowed else (401, {"error": {"message": "key"}})
                finally:
                    with outer._lock:
                        outer.running -= 1
                self.send(status, reply)

            def send(self, status: int, reply: Any) -> None:
                data = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
                with contextlib.suppress(ConnectionError):
                    self.send_response(status)
                    self.send_header("content-type", "text/html" if isinstance(reply, str) else "application/json")
                    self.send_header("content-length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, *arguments: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server() -> Iterator[LoopbackServer]:
    server = LoopbackServer()
    yield server
    server.stop()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's back-off, a hundred times faster."""
    from openai import _base_client

    monkeypatch.setattr(_base_client, "INITIAL_RETRY_DELAY", 0.005)
    monkeypatch.setattr(_base_client, "MAX_RETRY_DELAY", 0.08)


REQUEST = Request((1, 2, 3), 0.7, 9, seed=5)


def ask(url: str, tokenizer: Any, request: Request = REQUEST, model: str | None = "tiny", **options: Any) -> Any:
    async def once() -> Any:
        answerer = ServerAnswerer(url, model, tokenizer, **options)
        try:
            return await answerer.complete(request)
        finally:
            await answerer.close()

    return asyncio.run(once())


def check(url: str, model: str | None) -> str | None:
    async def once() -> str | None:
        answerer = ServerAnswerer(url, model, None)
        try:
            await answerer.check()
            return answerer.model
        finally:
            await answerer.close()

    return asyncio.run(once())


def test_the_request_names_ids_and_the_whole_sampling_law(server: LoopbackServer, tokenizer: Any) -> None:
    answer = ask(server.url, tokenizer)
    assert (answer.text, answer.tokens, answer.finished) == ("yes", 2, True)
    assert server.bodies == [
        {
            "model": "tiny", "prompt": [1, 2, 3], "temperature": 0.7, "top_p": 1.0, "max_tokens": 9,
            "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
        }
    ]  # fmt: skip
    ask(server.url, tokenizer, Request((1,), 0.0, 9, 0, Stop((7,), ("[/INST]",))))
    assert (server.bodies[1]["stop_token_ids"], server.bodies[1]["stop"]) == ([7], ["[/INST]"])


def test_a_cut_answer_says_so(server: LoopbackServer, tokenizer: Any) -> None:
    server.reply = lambda number, body: (200, completion("ye", "length", 9))
    assert ask(server.url, tokenizer).finished is False


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503])
@pytest.mark.usefixtures("quick")
def test_what_may_pass_is_retried_with_growing_pauses(server: LoopbackServer, tokenizer: Any, status: int) -> None:
    server.reply = lambda number, body: (status, {"error": {}}) if number < 5 else (200, completion())
    assert ask(server.url, tokenizer).text == "yes"
    pauses = [b - a for a, b in zip(server.times, server.times[1:], strict=False)]
    assert len(pauses) == 4 and pauses[3] > pauses[0] and pauses[3] >= 0.03 * 0.75, pauses


@pytest.mark.usefixtures("quick")
def test_after_the_last_retry_the_failure_stands(server: LoopbackServer, tokenizer: Any) -> None:
    import openai

    server.reply = lambda number, body: (500, {"error": {}})
    with pytest.raises(openai.InternalServerError):
        ask(server.url, tokenizer, retries=2)
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, RowError), (422, RowError), (401, AnswererError), (403, AnswererError), (404, AnswererError)],
)
def test_what_cannot_pass_is_not_retried(
    server: LoopbackServer, tokenizer: Any, status: int, kind: type[Exception]
) -> None:
    server.reply = lambda number, body: (status, {"error": {"message": "because"}})
    with pytest.raises(kind, match="because"):
        ask(server.url, tokenizer)
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    "reply",
    [
        "<html>sign in</html>",
        {},
        [],
        {"choices": []},
        {"choices": [{"text": None, "finish_reason": "stop"}], "usage": {"completion_tokens": 1}},
        completion() | {"usage": None},
        completion(reason="abort"),
    ],
)
def test_a_reply_that_is_no_answer_is_an_error(server: LoopbackServer, tokenizer: Any, reply: Any) -> None:
    server.reply = lambda number, body: (200, reply)
    with pytest.raises(ValueError, match="server"):
        ask(server.url, tokenizer)


@pytest.mark.usefixtures("quick")
def test_a_slow_server_is_a_failed_attempt(server: LoopbackServer, tokenizer: Any) -> None:
    import openai

    released = threading.Event()
    server.reply = lambda number, body: (200, completion(str(released.wait(0.5 if number == 1 else 0))))
    assert ask(server.url, tokenizer, timeout_s=0.15).text == "False"
    assert len(server.bodies) == 2
    server.reply = lambda number, body: (200, completion(str(released.wait(0.5))))
    with pytest.raises(openai.APITimeoutError):
        ask(server.url, tokenizer, timeout_s=0.1, retries=1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.usefixtures("quick")
def test_check_finds_the_model_or_says_what_is_wrong(server: LoopbackServer) -> None:
    assert check(server.url, "tiny") == check(server.url, None) == "tiny"
    with pytest.raises(AnswererError, match="serves tiny: not 'other'"):
        check(server.url, "other")
    server.served = {"object": "list", "data": [{"id": "a"}, {"id": "b"}]}
    with pytest.raises(AnswererError, match="serves a, b: name one"):
        check(server.url, None)
    for garbage in ("<html>sign in</html>", {}, [], {"data": 3}, {"data": [{}]}):
        server.served = garbage
        with pytest.raises(AnswererError, match=server.url):
            check(server.url, "tiny")
    nobody = f"http://127.0.0.1:{free_port()}/v1"
    with pytest.raises(AnswererError, match=f"no OpenAI-compatible server answers at {nobody}"):
        check(nobody, "tiny")


# The command line, end to end.


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
    server.reply = lambda number, body: (time.sleep(0.02), (200, completion("A", tokens=2)))[1]
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
    def reply(number: int, body: dict[str, Any]) -> Reply:
        if number == 30:
            signal.raise_signal(signal.SIGINT)
        return 200, completion()

    server.reply = reply
    arguments = ["--prompts", prompts, "--base", base, "--out", tmp_path / "out", "--server", server.url]
    result = distil(*arguments, "--concurrency", 2)
    assert result.exit_code == 130 and "the same command goes on from there" in result.stderr
    kept = [row["id"] for row in read_rows(tmp_path / "out")]
    assert 10 <= len(kept) < 40
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["total"]["rows"] == len(kept)
    assert distil(*arguments).exit_code == 0
    assert len(list(read_rows(tmp_path / "out"))) == 40


def test_options_that_clash_are_named(base: Path, prompts: Path, tmp_path: Path) -> None:
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
