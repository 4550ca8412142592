"""Which way of drafting siblings keeps more: the heads' likeliest tokens, or tokens drawn from their law?

    python scripts/compare_drafting.py --prompts spec_bench.jsonl --heads DIR --output drafting.json

The base samples answers at each temperature T. At positions of those texts and for each head, p is the base's law and
q the head's, both at T, given that the drafts before were right. For k siblings the table has the probability that one
of them is kept: the k likeliest of q (`top`), k drawn from q without replacement (`drawn`), and the most that any
exact rule could keep of the drawn ones (`ceiling`, decode/coupling.py; estimated, so slightly low). Probabilities come
from the laws themselves, not from counting, so few positions give narrow errors.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from decode.benchmark.prompts import file_hash, read_prompts, stratified
from decode.coupling import coupling_ceiling, deterministic_acceptance, draw_many, sampled_acceptance
from decode.engine import Decoder
from decode.sampling import SamplingParams
from decode.settings import GenerationSettings
from medusa_heads.base import Base
from medusa_heads.medusa import MedusaHeads


def compare(p: Tensor, q: Tensor, widths: Sequence[int], samples: int, generator: torch.Generator) -> dict[str, float]:
    """Figures of one position; p, q (V,) float64."""
    likeliest = q.topk(max(widths)).indices
    draws = draw_many(q, samples, max(widths), generator)
    kept = sampled_acceptance(p, q, draws[: max(1, samples // 8)]).mean(0)
    figures = {}
    for width in widths:
        figures[f"top {width}"] = deterministic_acceptance(p, likeliest[:width])
        figures[f"drawn {width}"] = float(kept[width - 1])
        figures[f"ceiling {width}"] = coupling_ceiling(p, q, draws[:, :width])
    return figures


@torch.no_grad()
def positions(
    base: Base, heads: MedusaHeads, prompts: Sequence[Sequence[int]], options: argparse.Namespace, temperature: float
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(head, p, q) at every `stride`th token of answers that the base samples at `temperature`."""
    decoder = Decoder(base)
    for number, prompt in enumerate(prompts):
        settings = GenerationSettings(
            options.max_new_tokens, SamplingParams(temperature=temperature), seed=options.seed + number
        )
        ids = [*prompt, *decoder.generate(prompt, settings).token_ids]
        states = base.forward(torch.tensor([ids], device=base.device)).last_hidden_state[0]
        for at in range(len(prompt) - 1, len(ids) - 1 - heads.config.num_heads, options.stride):
            logits = heads.head_logits(heads(states[at]), base)
            for head in range(heads.config.num_heads):
                p = torch.softmax(base.project(states[at + 1 + head]).double().cpu() / temperature, dim=-1)
                q = torch.softmax(logits[head].double().cpu() / temperature, dim=-1)
                if heads.draft_ids is not None:
                    q = torch.zeros_like(p).index_copy_(0, heads.draft_ids.cpu(), q)
                yield head, p, q


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    tensor = torch.tensor(values, dtype=torch.float64)
    return float(tensor.mean()), float(tensor.std() / len(values) ** 0.5) if len(values) > 1 else 0.0


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL rows {question_id, category, turns}")
    parser.add_argument("--output", type=Path, required=True, help="JSON file of the figures")
    parser.add_argument("--base", default="smollm2-135m", help="as for medusa-decode")
    parser.add_argument("--heads", default="smollm2-135m-medusa", help="as for medusa-decode")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.3, 0.7, 1.0, 1.5])
    parser.add_argument("--widths", nargs="+", type=int, default=[1, 2, 4, 8], help="numbers of siblings k")
    parser.add_argument("--limit", type=int, default=24, help="so many prompts, each category keeping its share")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--stride", type=int, default=8, help="take every so many-th token of an answer")
    parser.add_argument(
        "--samples", type=int, default=512, help="draws a position for the ceiling; an eighth for drawn"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(given)

    base = Base.load(options.base, dtype=options.dtype)
    heads = MedusaHeads.from_pretrained(options.heads, base=base).to(base.device, base.dtype)
    chosen = stratified(read_prompts(options.prompts), options.limit)
    prompts = [base.render_chat([{"role": "user", "content": prompt.text}]) for prompt in chosen]
    generator = torch.Generator().manual_seed(options.seed)
    result: dict[str, object] = {
        "settings": {name: value for name, value in vars(options).items() if name not in ("prompts", "output")},
        "prompts": {"file": options.prompts.name, "sha256": file_hash(options.prompts)},
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()},
    }
    columns = [f"{kind} {width}" for width in options.widths for kind in ("top", "drawn", "ceiling")]
    print("T     head  " + "  ".join(f"{column:>9}" for column in columns))
    rows = []
    for temperature in options.temperatures:
        found: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for head, p, q in positions(base, heads, prompts, options, temperature):
            for name, value in compare(p, q, options.widths, options.samples, generator).items():
                found[head][name].append(value)
        for head, figures in sorted(found.items()):
            means = {name: mean_and_error(values) for name, values in figures.items()}
            count = len(figures[columns[0]])
            rows.append({"temperature": temperature, "head": head, "positions": count, "acceptance": means})
            print(
                f"{temperature:<5} {head:<5} " + "  ".join(f"{means[column][0]:9.3f}" for column in columns), flush=True
            )
    result["rows"] = rows
    options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
