"""Other programs in the benchmark, played by small scripts that speak the workers' protocol."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.benchmark import peers
from decode.benchmark.methods import Request, timed
from decode.benchmark.peers import Peer, peer_command
from decode.benchmark.summary import markdown, summarize
from medusa_heads.errors import ConfigError

ECHO = """
import json, sys
print(json.dumps({"ready": True, "versions": {"echo": "1.0"}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    tokens = request["prompt_ids"][: request["max_new_tokens"]] + request["eos_token_ids"]
    print(json.dumps({"token_ids": tokens, "forwards": None if request["seed"] else len(tokens)}), flush=True)
"""
REQUEST = Request([7, 8, 9], 2, 0.0, 0)


def worker(tmp_path: Path, source: str) -> list[str]:
    path = tmp_path / "worker.py"
    path.write_text(textwrap.dedent(source))
    return [sys.executable, str(path)]


def test_a_peer_answers_as_a_method_does_and_ends_with_its_context(tmp_path: Path) -> None:
    with Peer("echo", worker(tmp_path, ECHO), (2,)) as peer:
        assert peer.versions == {"echo": "1.0"}
        answer, seconds = timed(peer, REQUEST, torch.device("cpu"))
        assert answer.token_ids == [7, 8, 2] and answer.forwards == 3 and seconds > 0.0
        assert peer(Request([4], 1, 0.5, 1)).forwards is None
        process = peer._process
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("source", "says"),
    (
        ("raise SystemExit('no such model')", "ended with code 1: no such model"),
        ("print('loading 50 %')", "'loading 50 %', which is no answer"),
        ("import json; print(json.dumps({'ready': False}))", "not begun with its readiness"),
        ("print('{\"ready\": tr', end='')", "ended with code 0: without a word"),
    ),
)
def test_a_worker_that_does_not_start_is_an_error_with_its_own_words(tmp_path: Path, source: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Peer("broken", worker(tmp_path, source), ())


def test_a_worker_that_dies_at_work_is_an_error(tmp_path: Path) -> None:
    dying = ECHO.replace("    request =", "    sys.exit('out of memory')\n    request =")
    with Peer("dying", worker(tmp_path, dying), ()) as peer:
        for _ in range(2):  # its input is still open the first time, and closed the second
            with pytest.raises(ConfigError, match="code 1: out of memory"):
                peer(REQUEST)


def test_commands_name_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.shutil, "which", lambda name: f"/bin/{name}")
    for name in ("llama.cpp", "vllm"):
        with pytest.raises(ConfigError, match=rf"no environment for {name}: run scripts/peers/setup.py"):
            peer_command(name, tmp_path, "smollm2-135m", 2, "bfloat16")
    (tmp_path / "llama.cpp" / "node_modules" / "node-llama-cpp").mkdir(parents=True)
    (tmp_path / "vllm" / "bin").mkdir(parents=True)
    (tmp_path / "vllm" / "bin" / "python").touch()
    with pytest.raises(ConfigError, match=r"llama.cpp needs .*smollm2-135m.bf16.gguf"):
        peer_command("llama.cpp", tmp_path, "smollm2-135m", 2, "bfloat16")
    (tmp_path / "smollm2-135m.bf16.gguf").touch()
    command = peer_command("llama.cpp", tmp_path, "smollm2-135m", 2, "bfloat16")
    assert command[0] == "/bin/node" and command[-2:] == ["--threads", "2"]
    assert command[command.index("--environment") + 1] == str(tmp_path / "llama.cpp")
    with pytest.raises(ConfigError, match="in bfloat16, not in float32"):
        peer_command("llama.cpp", tmp_path, "smollm2-135m", 2, "float32")
    with pytest.raises(ConfigError, match="of the embedded base alone"):
        peer_command("llama.cpp", tmp_path, "some/model", 2, "bfloat16")
    assert "--ngram" not in peer_command("vllm", tmp_path, "some/model", 2, "float32")
    assert "--ngram" in peer_command("vllm-ngram", tmp_path, "some/model", 2, "float32")
    monkeypatch.setattr(peers.shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match="needs Node 20 or newer"):
        peer_command("llama.cpp", tmp_path, "smollm2-135m", 2, "bfloat16")


def test_a_method_that_does_not_say_its_forwards_has_no_acceptance_length() -> None:
    def row(method: str, forwards: int | None) -> dict[str, Any]:
        common = {"kind": "answer", "temperature": 0.0, "id": "1", "category": "c", "new_tokens": 6, "seconds": 0.5}
        return common | {"method": method, "forwards": forwards, "histogram": [], "stages": {}, "digest": "d"}

    found = summarize([row("plain", 6), row("vllm-ngram", None)])
    methods = found["methods"]["0.0"]
    assert methods["plain"]["acceptance_length"] == 1.0
    assert methods["vllm-ngram"]["acceptance_length"] is None and methods["vllm-ngram"]["tokens_per_second"] == 12.0
    assert "| vllm-ngram | 1 | 12.0 | 12.0 / 12.0 / 12.0 | – |" in markdown(found)
