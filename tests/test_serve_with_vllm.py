"""The script that serves heads with vLLM, with a stand-in for the server."""

from __future__ import annotations

import argparse
import doctest
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

STAND_IN = '''#!{python}
"""Takes vLLM's arguments and answers as far as the script asks."""
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

arguments = sys.argv[1:]
if "float16" in arguments:
    sys.exit("no such dtype")
drafts = 0
METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of drafts.
vllm:spec_decode_num_drafts_total{{engine="0"}} {rounds}
vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {drafted}
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {second}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {first}
vllm:num_requests_running{{engine="0"}} 0.0
"""

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): ...

    def answer(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        counts = dict(rounds=float(drafts), drafted=2.0 * drafts, accepted=1.5 * drafts)
        counts |= dict(first=drafts, second=drafts // 2)
        self.answer(METRICS.format(**counts).encode() if self.path == "/metrics" else b"")

    def do_POST(self):
        global drafts
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert asked["temperature"] == 0 and asked["return_token_ids"]
        drafts += 4
        ids = asked["prompt"][::-1][: asked["max_tokens"]]
        self.answer(json.dumps({"choices": [{"token_ids": ids}]}).encode())

print(json.dumps(arguments), flush=True)
HTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Handler).serve_forever()
'''


@pytest.fixture(scope="module")
def script() -> Any:
    path = Path(__file__).parent.parent / "scripts" / "serve_with_vllm.py"
    spec = importlib.util.spec_from_file_location("serve_with_vllm", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["serve_with_vllm"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def command(tmp_path: Path) -> Path:
    path = tmp_path / "bin" / "vllm"
    path.parent.mkdir()
    source = STAND_IN.replace("{python}", sys.executable)
    path.write_text(source)
    path.chmod(0o755)
    return path


def test_metrics_are_read_as_documented(script: Any) -> None:
    assert doctest.testmod(script).failed == 0


def test_a_server_is_asked_counted_and_stopped(script: Any, command: Path, tmp_path: Path) -> None:
    options = argparse.Namespace(dtype="float32")
    heads = {"speculative": {"method": "medusa", "model": "x", "num_speculative_tokens": 2}, "loader": {"a": False}}
    log = tmp_path / "out" / "log"
    with script.served(command, tmp_path, options, heads, log) as url:
        before = script.draft_counts(url)
        assert script.completion(url, [1, 2, 3], 2) == [3, 2]
        assert script.completion(url, [4, 5], 9) == [5, 4]
        counts = script.difference(script.draft_counts(url), before)
    assert counts == {"rounds": 8, "drafted": 16, "accepted": 12, "accepted_by_position": [8, 4]}
    rates = script.rates(counts)
    assert rates["mean_acceptance_length"] == 2.5 and rates["acceptance_by_position"] == [1.0, 0.5]
    with pytest.raises(OSError):
        script.draft_counts(url)
    given = log.read_text()
    assert "--speculative-config" in given and "--model-loader-extra-config" in given


def test_a_server_that_ends_is_named_with_its_log(script: Any, command: Path, tmp_path: Path) -> None:
    options = argparse.Namespace(dtype="float16")
    with (
        pytest.raises(RuntimeError, match=f"vLLM ended with 1: see {tmp_path / 'log'}"),
        script.served(command, tmp_path, options, None, tmp_path / "log"),
    ):
        pytest.fail("must not be served")
    assert "no such dtype" in (tmp_path / "log").read_text()


def test_vllm_is_told_of_each_family(script: Any, tmp_path: Path) -> None:
    from medusa_heads.config import MedusaConfig

    config = MedusaConfig(hidden_size=8, vocab_size=96, draft_vocab_size=9)
    told = script.vllm_options(tmp_path, config, "medusa", 4)
    assert told["speculative"] == {"method": "medusa", "model": str(tmp_path), "num_speculative_tokens": 4}
    assert told["loader"] == {"enable_weights_track": False}
    assert script.vllm_options(tmp_path, config, "eagle-3", 3)["speculative"]["method"] == "eagle3"
    assert "loader" not in script.vllm_options(tmp_path, MedusaConfig(hidden_size=8, vocab_size=96), "medusa", 4)
