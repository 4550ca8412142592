"""A small OpenAI-compatible server on loopback, for tests, which answers and fails as it is told."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def completion(text: str = "yes", reason: str = "stop", tokens: int = 2) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": reason, "logprobs": None}
    usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": 1 + tokens}
    return {
        "id": "c", "object": "text_completion", "created": 0, "model": "tiny", "choices": [choice], "usage": usage,
    }  # fmt: skip


Reply = tuple[int, Any]


class QuietServer(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of clients that leave early: they are stopped in the middle of requests here, and what the
        server writes to standard error would stand among what the command under test writes."""


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

        self.http = QuietServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()
