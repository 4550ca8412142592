"""Every way of drafting on one base, one set of prompts, one clock.

    python scripts/compare_paradigms.py --prompts spec_bench.jsonl --output results/paradigms --per-category 8

The output directory gets rows.jsonl (each answer as it is made: a run that was cut goes on where it stopped),
costs.json (a pass of the base by its nodes), result.json, result.md and result.png. A way is a name of
`medusa-decode --drafter`; plain decoding is always among them, and with --generate transformers' own loop, plain and
with its prompt lookup. docs/paradigms.md says how to read the figures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decode.benchmark.prompts import Prompt


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL rows {question_id, category, turns}")
    parser.add_argument("--output", type=Path, required=True, help="directory of the run; an existing one is continued")
    parser.add_argument("--base", default="smollm2-135m", help="as for medusa-decode")
    parser.add_argument("--heads", help="what 'heads' in a way stands for; default: the embedded heads of the base")
    parser.add_argument("--ways", nargs="+", metavar="SPEC", help="as for --drafter; default: what the base has")
    parser.add_argument("--generate", action="store_true", help="transformers' generate too, on an unpacked base")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--device", help="default: the GPU if there is one")
    parser.add_argument("--threads", type=int, help="of the CPU; default: torch's choice")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0], help="0 is greedy")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-category", type=int, help="at most so many prompts of each category")
    parser.add_argument("--limit", type=int, help="so many prompts, each category keeping its share")
    parser.add_argument("--slow-limit", type=int, help="so many of those prompts for --generate")
    parser.add_argument("--sampled-limit", type=int, help="so many of those prompts above temperature 0")
    parser.add_argument("--guard", action="store_true", help="with the engine's guard; default: each way by itself")
    parser.add_argument("--cost-repeats", type=int, default=15)
    parser.add_argument("--cost-sizes", nargs="+", type=int, help="nodes of a pass; 1 among them")
    parser.add_argument("--cost-contexts", nargs="+", type=int, help="tokens before the nodes")
    parser.add_argument("--report-only", action="store_true", help="figures of what rows.jsonl has, nothing is asked")
    parser.add_argument("--no-figures", action="store_true")
    return parser.parse_args(given)


def part(prompts: Sequence[Prompt], limit: int | None) -> frozenset[str] | None:
    """Ids of so many prompts, each category keeping its share; None without a limit."""
    from decode.benchmark.prompts import stratified

    return None if limit is None else frozenset(prompt.id for prompt in stratified(prompts, limit))


def main(given: Sequence[str] | None = None) -> int:
    import torch

    from decode.benchmark.methods import untouched_base
    from decode.benchmark.prompts import file_hash, per_category, read_prompts, shuffled, stratified
    from decode.cli.common import notices_on_stderr, quiet_transformers
    from decode.drafters.specs import parse_all
    from decode.measure import CONTEXTS, SIZES
    from decode.paradigms import Plan, default_specs, generate_paradigms, load_paradigms
    from decode.paradigms_matrix import CostPlan, drafting_of, matrix
    from decode.paradigms_report import text
    from medusa_heads.base import Base
    from medusa_heads.embedded import DEFAULT_EMBEDDED
    from medusa_heads.errors import UserError

    options = arguments(given)
    quiet_transformers()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        prompts = read_prompts(options.prompts)
        if options.per_category is not None:
            prompts = per_category(prompts, options.per_category)
        if options.limit is not None:
            prompts = stratified(prompts, options.limit)
        plan = Plan(
            shuffled(prompts, options.seed),
            options.temperatures,
            options.max_new_tokens,
            options.seed,
            options.guard,
            part(prompts, options.slow_limit),
            part(prompts, options.sampled_limit),
        )
        for way in options.ways or ():
            parse_all(way)  # a name that is none is refused before the base is loaded
        with notices_on_stderr():
            base = Base.load(options.base, dtype=options.dtype, device=options.device)
        has_heads = options.heads is not None or options.base == DEFAULT_EMBEDDED
        ways = options.ways or default_specs(base, has_heads)
        paradigms = load_paradigms(base, ways, options.heads)
        if options.generate:
            paradigms += generate_paradigms(untouched_base(options.base, options.dtype, options.device))
        config = {
            "base": options.base,
            **drafting_of(base, paradigms, options.heads),
            "dtype": options.dtype,
            "threads": torch.get_num_threads(),
            "prompt_file": {"name": options.prompts.name, "sha256": file_hash(options.prompts)},
        }
        result = matrix(
            base,
            paradigms,
            plan,
            config=config,
            directory=options.output,
            cost_plan=CostPlan(options.cost_sizes or SIZES, options.cost_contexts or CONTEXTS, options.cost_repeats),
            figures=not options.no_figures,
            ask=not options.report_only,
            progress=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(text(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
