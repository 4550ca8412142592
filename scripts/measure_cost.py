"""What a pass of a base over T nodes costs on this machine, and what drafting costs.

    python scripts/measure_cost.py --output costs.json --heads smollm2-135m-medusa

Medians over alternating repetitions, quartiles beside them; see `decode.measure`. scripts/benchmark.py --costs draws
the file, and `decode.tuning` chooses a tree by it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    from decode.measure import CONTEXTS, SIZES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--base", default="smollm2-135m", help="as for medusa-decode")
    parser.add_argument("--heads", help="measure drafting with these too")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--device", help="default: the GPU if there is one")
    parser.add_argument("--threads", type=int, help="of the CPU; default: torch's choice")
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), help="nodes of a pass; 1 among them")
    parser.add_argument("--contexts", nargs="+", type=int, default=list(CONTEXTS), help="tokens before the nodes")
    parser.add_argument("--repeats", type=int, default=15)
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    import torch

    from decode.cli.common import quiet_transformers
    from decode.machine import describe_machine, load_average, versions
    from decode.measure import measure_costs
    from medusa_heads.base import Base
    from medusa_heads.errors import UserError
    from medusa_heads.medusa import MedusaHeads

    options = arguments(given)
    quiet_transformers()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        base = Base.load(options.base, dtype=options.dtype, device=options.device)
        heads = None if options.heads is None else MedusaHeads.from_pretrained(options.heads, base=base)
        costs = measure_costs(base, heads, sizes=options.sizes, contexts=options.contexts, repeats=options.repeats)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = {
        "base": options.base,
        "heads": options.heads,
        "dtype": options.dtype,
        "measured": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": describe_machine(base.device),
        "load_average": load_average(),
        "costs": costs.as_dict(),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    for context, at in costs.forward.items():
        cells = "  ".join(f"{size}: {1e3 * spread[1]:.1f}" for size, spread in at.items())
        print(f"behind {context} tokens, milliseconds by nodes  {cells}")
    if costs.draft:
        print("drafting ahead  " + "  ".join(f"{depth}: {1e3 * s[1]:.2f}" for depth, s in costs.draft.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
