"""The embedded model answers the same prompts plainly and with its heads and prompt lookup, side by side.

Run by scripts/quickstart.sh. In float32, the default here, greedy texts are the same token for token; bfloat16 is
faster, and there a near-tie may go either way.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

from decode.cli import common
from decode.cli.compare import PROMPTS, Comparison, compared, conclusion, totals
from decode.cli.rows import Row
from decode.drafters.specs import EMBEDDED_WAY
from medusa_heads.errors import UserError


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="*", default=PROMPTS, help="prompts of your own")
    parser.add_argument("--dtype", type=common.Dtype, choices=list(common.Dtype), default=common.Dtype.float32)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    return parser.parse_args()


def side_by_side(prompt: str, comparison: Comparison) -> Any:
    """A table with the plain answer left and the speculative one right, figures below."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(prompt, style="bold"), title_justify="left", expand=True, show_lines=True)
    ways = {"plain": comparison.plain, f"speculative ({EMBEDDED_WAY})": comparison.heads}
    for name in ways:
        table.add_column(name, ratio=1)
    table.add_row(*(Text(result.text or "") for result in ways.values()))
    table.add_row(*(Text(common.summary(result.stats)) for result in ways.values()))
    return table


def run(options: argparse.Namespace) -> None:
    from rich.console import Console

    console = Console()
    console.print("Loading SmolLM2-135M-Instruct and its heads (the first run fetches and converts the model).")
    pair = common.load_pair(None, None, plain=False, dtype=options.dtype, device=None)
    settings = common.settings(max_new_tokens=options.max_new_tokens, temperature=0.0)
    rows = [Row.of_prompt(number, prompt) for number, prompt in enumerate(options.prompts)]
    done = []
    for comparison in compared(replace(pair, drafter=None).decoder(), pair.decoder(), rows, settings):
        done.append(comparison)
        console.print(side_by_side(options.prompts[int(comparison.id)], comparison))
    report = totals(done) | {"dtype": options.dtype.value, "temperature": 0.0, "drafter": EMBEDDED_WAY}
    console.print(conclusion(report), markup=False, highlight=False)
    console.print("Next: medusa-decode chat (in .venv/bin), or train heads of your own: see README.md", markup=False)


def main() -> None:
    try:
        run(arguments())
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
