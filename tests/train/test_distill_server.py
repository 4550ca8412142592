"""Answers from a server, which fails in the ways that servers do."""

from __future__ import annotations

import asyncio
import socket
import threading
from itertools import pairwise
from typing import Any

import pytest

from tests.train.loopback import LoopbackServer, completion
from train.answerers import AnswererError, Request, RowError, ServerAnswerer, Stop


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's back-off, a hundred times faster."""
    from openai import _base_client

    monkeypatch.setattr(_base_client, "INITIAL_RETRY_DELAY", 0.005)
    monkeypatch.setattr(_base_client, "MAX_RETRY_DELAY", 0.08)


REQUEST = Request((1, 2, 3), 0.7, 9, seed=5)


def ask(url: str, request: Request = REQUEST, model: str | None = "tiny", **options: Any) -> Any:
    async def once() -> Any:
        answerer = ServerAnswerer(url, model, None, **options)
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


def test_the_request_names_ids_and_the_whole_sampling_law(server: LoopbackServer) -> None:
    answer = ask(server.url)
    assert (answer.text, answer.tokens, answer.finished) == ("yes", 2, True)
    assert server.bodies == [
        {
            "model": "tiny", "prompt": [1, 2, 3], "temperature": 0.7, "top_p": 1.0, "max_tokens": 9,
            "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
        }
    ]  # fmt: skip
    ask(server.url, Request((1,), 0.0, 9, 0, Stop((7,), ("[/INST]",))))
    assert (server.bodies[1]["stop_token_ids"], server.bodies[1]["stop"]) == ([7], ["[/INST]"])


def test_a_cut_answer_says_so(server: LoopbackServer) -> None:
    server.reply = lambda number, body: (200, completion("ye", "length", 9))
    assert ask(server.url).finished is False


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503])
@pytest.mark.usefixtures("quick")
def test_what_may_pass_is_retried_with_growing_pauses(server: LoopbackServer, status: int) -> None:
    server.reply = lambda number, body: (status, {"error": {}}) if number < 5 else (200, completion())
    assert ask(server.url).text == "yes"
    pauses = [after - before for before, after in pairwise(server.times)]
    assert len(pauses) == 4
    assert all(pause >= 0.75 * 0.005 * 2**i for i, pause in enumerate(pauses)), pauses


@pytest.mark.usefixtures("quick")
def test_after_the_last_retry_the_failure_stands(server: LoopbackServer) -> None:
    import openai

    server.reply = lambda number, body: (500, {"error": {}})
    with pytest.raises(openai.InternalServerError):
        ask(server.url, retries=2)
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, RowError), (422, RowError), (401, AnswererError), (403, AnswererError), (404, AnswererError)],
)
def test_what_cannot_pass_is_not_retried(server: LoopbackServer, status: int, kind: type[Exception]) -> None:
    server.reply = lambda number, body: (status, {"error": {"message": "because"}})
    with pytest.raises(kind, match="because"):
        ask(server.url)
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
def test_a_reply_that_is_no_answer_is_an_error(server: LoopbackServer, reply: Any) -> None:
    server.reply = lambda number, body: (200, reply)
    with pytest.raises(ValueError, match="server"):
        ask(server.url)


@pytest.mark.usefixtures("quick")
def test_a_slow_server_is_a_failed_attempt(server: LoopbackServer) -> None:
    import openai

    released = threading.Event()
    server.reply = lambda number, body: (200, completion(str(number == 1 and released.wait(60))))
    assert ask(server.url, timeout_s=1.0).text == "False"
    assert len(server.bodies) >= 2
    server.reply = lambda number, body: (200, completion(str(released.wait(60))))
    with pytest.raises(openai.APITimeoutError):
        ask(server.url, timeout_s=0.1, retries=1)
    released.set()


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
