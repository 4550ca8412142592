"""Other programs as methods of the benchmark: each a process in an environment of its own, asked over pipes.

A worker (scripts/peers/*_worker.*) says `{"ready": true, "versions": {…}}` when its model is loaded, then answers each
line `{"prompt_ids", "max_new_tokens", "temperature", "seed", "eos_token_ids"}` with `{"token_ids", "forwards"}`;
`forwards` is null where the program does not say how often it ran the model. The seed is not passed on to vLLM, which
draws from its own. A peer is timed like every method, from request to answer; the pipe takes about 0.1 ms of that.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from decode.benchmark.methods import Answer, Request
from medusa_heads.embedded import is_embedded, resolve_embedded
from medusa_heads.errors import ConfigError

PEERS = ("llama.cpp", "vllm", "vllm-ngram")
NGRAM_TOKENS = 5
WORKERS = Path(__file__).parents[2] / "scripts" / "peers"


def peer_command(name: str, directory: Path, base: str, threads: int, dtype: str) -> list[str]:
    """How a peer's worker is started.

    Args:
        directory: what scripts/peers/setup.py made.
        base: the embedded base, of which llama.cpp has the GGUF file that setup made; for vLLM also a directory or id.
    """
    environment = directory / ("llama.cpp" if name == "llama.cpp" else "vllm")
    program = environment / ("node_modules/node-llama-cpp" if name == "llama.cpp" else "bin/python")
    if not program.exists():
        raise ConfigError(
            f"{directory} has no environment for {name}: run scripts/peers/setup.py --directory {directory}"
        )
    if name == "llama.cpp":
        return llama_command(environment, directory / f"{base}.bf16.gguf", base, threads, dtype)
    model = str(resolve_embedded(base)) if is_embedded(base) else base
    command = [str(program), str(WORKERS / "vllm_worker.py"), "--model", model, "--threads", str(threads)]
    return [*command, "--dtype", dtype, *(["--ngram", str(NGRAM_TOKENS)] if name == "vllm-ngram" else [])]


def llama_command(environment: Path, weights: Path, base: str, threads: int, dtype: str) -> list[str]:
    node = shutil.which("node")
    if node is None:
        raise ConfigError("llama.cpp needs Node 20 or newer, and node was not found")
    if dtype != "bfloat16":
        raise ConfigError(f"llama.cpp has the base in bfloat16, not in {dtype}")
    if not is_embedded(base) or not weights.exists():
        raise ConfigError(f"llama.cpp needs {weights}, and scripts/peers/setup.py makes it of the embedded base alone")
    command = [node, str(WORKERS / "llama_cpp_worker.mjs"), "--environment", str(environment)]
    return [*command, "--model", str(weights), "--threads", str(threads)]


class Peer:
    """A running worker. A context manager: the process ends with it."""

    def __init__(self, name: str, command: Sequence[str], eos_token_ids: Sequence[int]):
        self.name = name
        self.eos_token_ids = list(eos_token_ids)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, encoding="utf-8"
        )
        try:
            ready = self._read()
            if ready.get("ready") is not True:
                raise ConfigError(f"{name} has not begun with its readiness but with {ready}")
        except BaseException:
            self.close()
            raise
        self.versions: dict[str, str] = ready["versions"]

    def __call__(self, request: Request) -> Answer:
        """A `Method`."""
        message = {
            "prompt_ids": list(request.prompt_ids),
            "max_new_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "eos_token_ids": self.eos_token_ids,
        }
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ConfigError(self._ended()) from None
        answer = self._read()
        return Answer(list(answer["token_ids"]), answer["forwards"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise ConfigError(self._ended())
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            found = None
        if not isinstance(found, dict):
            raise ConfigError(f"{self.name} has said {line.strip()!r}, which is no answer")
        return found

    def _ended(self) -> str:
        """What to say of a worker that has gone: its code, and the last line that it has written about it."""
        code = self._process.wait()
        self._log.seek(0)
        said = self._log.read().decode("utf-8", "replace").strip().splitlines()
        return f"{self.name} has ended with code {code}: {said[-1] if said else 'without a word'}"

    def close(self) -> None:
        """Ends the worker: by closing its input, or by force where it does not listen."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
