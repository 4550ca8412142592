"""The guard by the clock: what text that resists drafting costs with it, and what text that suits drafting loses by it.

    python scripts/measure_guard.py --output results/guard

Cases: `random prompt` (greedy text behind random tokens), `another language` (greedy text behind openings in German,
French, Spanish and Polish), `random text` (every token drawn from 64, so that no draft fits but by chance), `noise for
heads` (their parameters replaced by noise of the same shape; friendly prompts) and `friendly`. Each is decoded plainly,
guarded and unguarded in turn, always to the full number of tokens. Asked for are, as medians of ratios within a
repetition, at most 1.03 of plain decoding's time in all but the last, and there at most 1.02 of the unguarded time. The
output directory gets rows.jsonl (a line a repetition; a run that was cut goes on where it stopped, and one with more
--repeats adds to what is there), result.json and result.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decode.benchmark.guarding import Case
    from decode.benchmark.log import Log
    from medusa_heads.base import Base

CASES = ("random prompt", "another language", "random text", "noise for heads", "friendly")
PROMPT_TOKENS = 64
"""Of a random prompt."""
WARM_UP_TOKENS = 8
FRIENDLY_PROMPTS = (
    "Count from one to one hundred in words, one number a line.",
    "Write a Python class for a bank account with methods to deposit, withdraw and show the balance.",
    "Explain step by step how to make a cup of tea.",
    "Tell the story of a little girl who finds a lost dog in the park.",
)
OTHER_LANGUAGES = (
    "Am frühen Morgen lag noch Nebel über dem Fluss, und die Fischer zogen schweigend ihre Netze ein. Auf dem Markt",
    "La vieille horloge de la gare ne marchait plus depuis des années, mais chaque voyageur la regardait encore et",
    "Cuando terminó la lluvia, los niños salieron corriendo a la plaza para ver si el puente seguía en pie, porque",
    "Stary ogrodnik codziennie podlewał drzewa, chociaż nikt już nie pamiętał, kto je kiedyś zasadził przed domem, a",
)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory of the run; an existing one is continued")
    parser.add_argument("--base", default="smollm2-135m", help="as for medusa-decode")
    parser.add_argument("--heads", help="what 'heads' in --drafter stands for; default: the embedded heads of the base")
    parser.add_argument("--drafter", default="heads", metavar="SPEC", help="as for medusa-decode")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--prompts", type=Path, help="friendly ones: JSONL rows {question_id, category, turns}")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--device", help="default: the GPU if there is one")
    parser.add_argument("--threads", type=int, help="of the CPU; default: torch's choice")
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=6, help="six see the ways in every order")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(given)
    if options.repeats < 1:
        parser.error("--repeats is at least 1")
    return options


def configuration(options: argparse.Namespace) -> dict[str, Any]:
    """What must be the same for measurements to belong together."""
    from decode.benchmark.prompts import file_hash

    kept = ("base", "heads", "drafter", "dtype", "max_new_tokens", "seed")
    prompts = options.prompts and {"name": options.prompts.name, "sha256": file_hash(options.prompts)}
    return {**{name: getattr(options, name) for name in kept}, "prompts": prompts}


def encode(base: Base, texts: Sequence[str]) -> list[list[int]]:
    """As they are, to be continued."""
    from medusa_heads.errors import ConfigError

    if base.tokenizer is None:
        raise ConfigError(f"the base {base.name!r} has no tokenizer to read texts with")
    return [list(base.tokenizer.encode(text)) for text in texts]


def build_cases(base: Base, options: argparse.Namespace) -> list[Case]:
    """The cases asked for; a way of drafting without heads has none of noise."""
    from decode.benchmark.guarding import FRIENDLY, RANDOM_WORDS, Case, drafter_of_noise, random_tokens
    from decode.benchmark.prompts import Prompt, read_prompts
    from decode.drafters import load_drafter
    from decode.paradigms import render

    drafter = load_drafter(options.drafter, base, heads=options.heads)
    noisy = drafter_of_noise(drafter, options.drafter, base, options.heads, options.seed)
    asked = (
        [Prompt(str(number), "own", text) for number, text in enumerate(FRIENDLY_PROMPTS)]
        if options.prompts is None
        else read_prompts(options.prompts)
    )
    friendly = [render(base, prompt) for prompt in asked]
    drawn = [random_tokens(base, PROMPT_TOKENS, options.seed + number) for number in range(4)]
    words = random_tokens(base, RANDOM_WORDS, options.seed)
    cases = [
        Case("random prompt", drawn, drafter),
        Case("another language", encode(base, OTHER_LANGUAGES), drafter),
        Case("random text", [words], drafter, words=words),
        *([] if noisy is None else [Case("noise for heads", friendly, noisy)]),
        Case("friendly", friendly, drafter, FRIENDLY),
    ]
    return [case for case in cases if case.name in options.cases]


def check_room(base: Base, cases: Sequence[Case], tokens: int) -> None:
    from medusa_heads.errors import ConfigError

    longest = max(len(prompt) for case in cases for prompt in case.prompts) + tokens
    if base.max_positions is not None and longest > base.max_positions:
        raise ConfigError(f"the base's context of {base.max_positions} has no room for {longest} tokens")


def run(base: Base, cases: Sequence[Case], options: argparse.Namespace, log: Log) -> None:
    """Measures what the log does not have yet. Cases take turns too, so that a cut run has some of each."""
    from decode.benchmark.guarding import measure
    from decode.machine import describe_machine, load_average, versions

    done = {(row["case"], row["repetition"]) for row in log.rows}
    todo = [(case, n) for n in range(options.repeats) for case in cases if (case.name, n) not in done]
    if not todo:
        return
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    log.add_session({"started": started, "machine": describe_machine(base.device), "versions": versions()})
    for case in cases:
        measure(base, case, 0, min(WARM_UP_TOKENS, options.max_new_tokens), options.seed)
    begin = time.monotonic()
    for number, (case, repetition) in enumerate(todo, 1):
        row = measure(base, case, repetition, options.max_new_tokens, options.seed)
        log.add(row | {"load_average": load_average()})
        minutes = (time.monotonic() - begin) / 60
        print(f"{number}/{len(todo)} repetitions, {minutes:.1f} min", file=sys.stderr, flush=True)


def report(cases: Sequence[Case], log: Log, directory: Path) -> str:
    """Writes result.json and result.md; returns the table."""
    from decode.benchmark.guarding import figures, markdown

    found = {case.name: [row for row in log.rows if row["case"] == case.name] for case in cases}
    result = {
        "config": log.config,
        "sessions": log.sessions,
        "cases": {case.name: figures(found[case.name], case.asked) for case in cases},
    }
    table = markdown(result["cases"])
    (directory / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (directory / "result.md").write_text(table + "\n", encoding="utf-8")
    return table


def main(given: Sequence[str] | None = None) -> int:
    import torch

    from decode.benchmark.log import Log
    from decode.cli.common import quiet_transformers
    from decode.drafters.specs import parse_all
    from medusa_heads.base import Base
    from medusa_heads.errors import ConfigError, UserError

    options = arguments(given)
    quiet_transformers()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        parse_all(options.drafter)  # a name that is none is refused before the base is loaded
        log = Log(options.output / "rows.jsonl", configuration(options))
        base = Base.load(options.base, dtype=options.dtype, device=options.device)
        cases = build_cases(base, options)
        if not cases:
            raise ConfigError(f"{options.drafter} has no heads that noise could replace")
        check_room(base, cases, options.max_new_tokens)
        run(base, cases, options, log)
        table = report(cases, log, options.output)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
