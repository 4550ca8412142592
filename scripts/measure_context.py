"""What a pass costs as the text before it grows: this engine's, of one token and of a tree, and the base's own.

    python scripts/measure_context.py --output context.json

The base's own is one token through the model as transformers loads it, with its own cache: the growth that no engine on
top of it need exceed. Everything takes turns within each repetition; medians, quartiles beside them; `growth` is the
milliseconds that a pass takes beyond the same pass behind the shortest text.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medusa_heads.base import Base

CONTEXTS = (128, 256, 512, 1024, 2048, 4096)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--base", default="smollm2-135m", help="as for medusa-decode")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--device", help="default: the GPU if there is one")
    parser.add_argument("--threads", type=int, help="of the CPU; default: torch's choice")
    parser.add_argument("--contexts", nargs="+", type=int, default=list(CONTEXTS))
    parser.add_argument("--nodes", type=int, default=8, help="of the tree")
    parser.add_argument("--repeats", type=int, default=15)
    return parser.parse_args(given)


def own_pass(base: Base, context: int) -> Callable[[], object]:
    """A job: one token through the model of `base`, which must not be packed, behind `context` tokens of its own cache,
    which is cut back to them."""
    import torch
    from transformers import DynamicCache

    generator = torch.Generator().manual_seed(context)
    ids = torch.randint(base.vocab_size, (1, context + 1), generator=generator).to(base.device)
    positions = torch.arange(context + 1, device=base.device)[None]
    cache = DynamicCache(config=base.config)
    base.forward(ids[:, :context], position_ids=positions[:, :context], cache=cache)

    def job() -> object:
        output = base.forward(ids[:, context:], position_ids=positions[:, context:], cache=cache)
        choice = base.project(output.last_hidden_state).argmax(-1).to("cpu")
        cache.crop(-1)
        return choice

    return job


def growth(rows: dict[int, dict[str, tuple[float, float, float]]]) -> dict[int, dict[str, float]]:
    """Milliseconds beyond the shortest context, by context and pass."""
    shortest = rows[min(rows)]
    return {
        context: {name: 1e3 * (spread[1] - shortest[name][1]) for name, spread in at.items()}
        for context, at in rows.items()
    }


def measure(
    base: Base, untouched: Base, options: argparse.Namespace
) -> dict[int, dict[str, tuple[float, float, float]]]:
    """[context][pass]: quartiles of seconds."""
    import random

    from decode.measure import pass_over, time_in_turns

    order = random.Random(0)
    rows = {}
    for context in options.contexts:
        jobs: dict[str, Callable[[], object]] = {
            "one token": pass_over(base, context, 1),
            f"tree of {options.nodes}": pass_over(base, context, options.nodes),
            "base's own, one token": own_pass(untouched, context),
        }
        rows[context] = time_in_turns(jobs, options.repeats, order)
    return rows


def main(given: Sequence[str] | None = None) -> int:
    import torch

    from decode.benchmark.methods import untouched_base
    from decode.cli.common import quiet_transformers
    from decode.machine import describe_machine, load_average, versions
    from medusa_heads.base import Base
    from medusa_heads.errors import ConfigError, UserError

    options = arguments(given)
    quiet_transformers()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        base = Base.load(options.base, dtype=options.dtype, device=options.device)
        longest = max(options.contexts) + options.nodes
        if base.max_positions is not None and longest > base.max_positions:
            raise ConfigError(f"the base's context of {base.max_positions} has no room for {longest} tokens")
        untouched = untouched_base(options.base, options.dtype, options.device)
        rows = measure(base, untouched, options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report: dict[str, Any] = {
        "base": options.base,
        "dtype": options.dtype,
        "repeats": options.repeats,
        "versions": versions(),
        "machine": describe_machine(base.device),
        "load_average": load_average(),
        "seconds": rows,
        "growth": growth(rows),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    names = list(rows[min(rows)])
    print("| tokens before | " + " | ".join(f"{name}, ms" for name in names) + " |\n|---|" + "---|" * len(names))
    for context, at in rows.items():
        cells = [f"{1e3 * at[name][1]:.1f} ({report['growth'][context][name]:+.1f})" for name in names]
        print(f"| {context} | " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
