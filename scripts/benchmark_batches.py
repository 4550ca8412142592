"""Throughput of batches: this engine plain and with heads, and transformers' own batched `generate`.

    python scripts/benchmark_batches.py --prompts spec_bench.jsonl --output docs/results/batches-cpu-bf16

The same prompts are answered in batches of 1, 2, 4, 8 and 16. All methods take turns on each batch, on one clock (wall
time of the call, reading the prompts included) and one counter (new tokens of each row up to its EOS, which counts).
`generate` runs on the model as `from_pretrained` gives it, padded on the left. Writes result.json and result.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch

from decode.benchmark.methods import timed, untouched_base
from decode.benchmark.prompts import file_hash, read_prompts, shuffled, stratified
from decode.cli.common import quiet_transformers
from decode.drafters import load_drafter
from decode.engine import Decoder
from decode.machine import describe_machine, load_average, versions
from decode.sampling import SamplingParams
from decode.settings import GenerationSettings
from medusa_heads.base import Base
from medusa_heads.errors import ConfigError, UserError

Prompts = Sequence[Sequence[int]]
Method = Callable[..., tuple[int, int]]
"""(prompts, seed of the first row) → new tokens, and forward passes summed over rows (0 where not counted)."""


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL rows {question_id, category, turns}")
    parser.add_argument("--output", type=Path, required=True, help="directory for result.json and result.md")
    parser.add_argument("--base", default="smollm2-135m", help="as for medusa-decode")
    parser.add_argument("--heads", default="smollm2-135m", help="as for medusa-decode")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--device", help="default: the GPU if there is one")
    parser.add_argument("--threads", type=int, help="of the CPU; default: torch's choice")
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--limit", type=int, default=16, help="so many prompts, each category keeping its share")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(given)


def engine_method(decoder: Decoder, options: argparse.Namespace) -> Method:
    def answer(prompts: Prompts, seed: int) -> tuple[int, int]:
        sampling = SamplingParams(temperature=options.temperature)
        results = decoder.generate_batch(prompts, GenerationSettings(options.max_new_tokens, sampling, seed))
        return sum(r.stats.new_tokens for r in results), sum(r.stats.base_forwards for r in results)

    return answer


def generate_method(base: Base, options: argparse.Namespace) -> Method:
    """transformers' own, on a model that must not be packed."""
    model: Any = base.model
    eos = set(base.eos_token_ids)
    settings: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "pad_token_id": min(eos, default=0)}
    settings |= {"eos_token_id": sorted(eos) or None, "do_sample": options.temperature > 0.0}
    if options.temperature > 0.0:
        settings |= {"temperature": options.temperature, "top_k": 0, "top_p": 1.0}

    def answer(prompts: Prompts, seed: int) -> tuple[int, int]:
        width = max(map(len, prompts))
        ids = [[settings["pad_token_id"]] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        torch.manual_seed(seed)
        with torch.no_grad():
            output = model.generate(
                torch.tensor(ids, device=base.device),
                attention_mask=torch.tensor(mask, device=base.device),
                **settings,
            )
        return sum(length(row, eos) for row in output[:, width:].tolist()), 0

    return answer


def length(row: Sequence[int], eos: set[int]) -> int:
    """New tokens of a padded row: up to its first EOS, which counts."""
    return next((place + 1 for place, token in enumerate(row) if token in eos), len(row))


def build_methods(options: argparse.Namespace) -> tuple[Base, dict[str, Method]]:
    base = Base.load(options.base, dtype=options.dtype, device=options.device)
    untouched = untouched_base(options.base, options.dtype, options.device)
    return base, {
        "plain": engine_method(Decoder(base), options),
        "heads": engine_method(Decoder(base, load_drafter(options.heads, base)), options),
        "generate": generate_method(untouched, options),
    }


def measure(
    base: Base, methods: dict[str, Method], prompts: Prompts, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One entry a batch size and method."""
    entries = []
    for size in options.sizes:
        totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for method in methods.values():  # warm-up at this size, outside the clock
            method([prompt[:32] for prompt in prompts[:size]], seed=options.seed)
        batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        for place, batch in enumerate(batches):
            names = list(methods)
            for name in names[place % len(names) :] + names[: place % len(names)]:
                ask = partial(methods[name], seed=options.seed + place * size)
                counts, seconds = timed(ask, batch, base.device)
                totals[name] = [sum(pair) for pair in zip(totals[name], (*counts, seconds), strict=True)]
        for name, (tokens, forwards, seconds) in totals.items():
            entry: dict[str, Any] = {"batch_size": size, "method": name, "new_tokens": int(tokens)}
            entry |= {"seconds": round(seconds, 4), "tokens_per_second": round(tokens / seconds, 2)}
            entry["acceptance_length"] = round(tokens / forwards, 4) if forwards else None
            entries.append(entry | {"load_average": load_average()})
            print(json.dumps(entries[-1]), file=sys.stderr, flush=True)
    return entries


def table(entries: Sequence[dict[str, Any]]) -> str:
    """Markdown: tokens a second over all rows, and heads against both others."""
    lines = ["| rows | plain | with heads | generate | heads / plain | heads / generate | acceptance length |"]
    lines.append("|" + "---|" * 7)
    for size in dict.fromkeys(entry["batch_size"] for entry in entries):
        of = {entry["method"]: entry for entry in entries if entry["batch_size"] == size}
        plain, heads, generate = (of[name]["tokens_per_second"] for name in ("plain", "heads", "generate"))
        lines.append(
            f"| {size} | {plain:.1f} | {heads:.1f} | {generate:.1f} | {heads / plain:.2f} | {heads / generate:.2f} | "
            f"{of['heads']['acceptance_length']:.2f} |"
        )
    return "\n".join(lines)


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    quiet_transformers()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        if min(options.sizes) < 1 or options.limit < max(options.sizes):
            raise ConfigError(f"--limit {options.limit} prompts do not fill a batch of {max(options.sizes)}")
        chosen = shuffled(stratified(read_prompts(options.prompts), options.limit), options.seed)
        base, methods = build_methods(options)
        prompts = [base.render_chat([{"role": "user", "content": prompt.text}]) for prompt in chosen]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    entries = measure(base, methods, prompts, options)
    config = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    config |= {"prompts": options.prompts.name, "prompts_sha256": file_hash(options.prompts)}
    result = {"config": config, "started": started, "versions": versions(), "machine": describe_machine(base.device)}
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "result.json").write_text(json.dumps(result | {"batches": entries}, indent=1) + "\n")
    (options.output / "result.md").write_text(table(entries) + "\n")
    print(table(entries))
    return 0


if __name__ == "__main__":
    sys.exit(main())
