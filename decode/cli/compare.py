"""`medusa-decode compare`: the same prompts plainly and with heads, in turn, on one clock."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from decode.cli import common
from decode.cli.generate import gather, history
from decode.cli.rows import Row
from medusa_heads.embedded import DEFAULT_EMBEDDED
from medusa_heads.errors import UserError

if TYPE_CHECKING:
    from decode.benchmark.prompts import Prompt
    from decode.engine import Decoder
    from decode.paradigms import Plan
    from decode.settings import GenerationResult, GenerationSettings

PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Give me three tips for a job interview.",
    "Summarize the story of Romeo and Juliet.",
)


@dataclass(frozen=True)
class Comparison:
    """One answered turn, decoded both ways from the same prompt."""

    id: str | int
    turn: int
    plain: GenerationResult
    heads: GenerationResult

    @property
    def first_difference(self) -> int | None:
        """Index of the first new token in which the two differ; None where they are the same."""
        from decode.benchmark.identity import first_difference

        return first_difference(self.heads.token_ids, self.plain.token_ids)

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "turn": self.turn,
            "same": self.first_difference is None,
            "first_difference": self.first_difference,
            "plain": {"text": self.plain.text, "stats": self.plain.stats.as_dict()},
            "heads": {"text": self.heads.text, "stats": self.heads.stats.as_dict()},
        }


def compare(
    prompt: Annotated[str | None, typer.Argument(help="One user turn; default: four prompts of its own.")] = None,
    input_path: Annotated[
        str | None,
        typer.Option(
            "--input",
            metavar="IN.jsonl",
            help="Rows as of generate; - is standard input. With --all the first turn of each, by `category`.",
        ),
    ] = None,
    base: common.BaseOption = None,
    heads: common.HeadsOption = None,
    drafter: common.DrafterOption = None,
    dtype: common.DtypeOption = common.Dtype.auto,
    device: common.DeviceOption = None,
    temperature: common.TemperatureOption = 0.0,
    top_k: common.TopKOption = 0,
    top_p: common.TopPOption = 1.0,
    acceptance: common.AcceptanceOption = common.Acceptance.exact,
    typical_epsilon: common.EpsilonOption = None,
    typical_alpha: common.AlphaOption = None,
    max_new_tokens: common.MaxNewTokensOption = 128,
    seed: common.SeedOption = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="The first rows only.")] = None,
    compare_all: Annotated[
        bool, typer.Option("--all", help="Every way of drafting that the base has, or those of --way, in one table.")
    ] = False,
    way: Annotated[
        list[str] | None, typer.Option("--way", metavar="SPEC", help="With --all: as for --drafter; may be repeated.")
    ] = None,
    output_path: Annotated[
        str | None,
        typer.Option("--output", metavar="DIR", help="With --all: tables, JSON and a picture; a cut run is continued."),
    ] = None,
    json_report: common.JsonOption = False,
    debug: common.DebugOption = False,
) -> None:
    """Decode the same prompts plainly and with heads: tokens/s, acceptance length, and whether the text is the same.

    Both ways use one engine, one loaded base and one clock, take turns in going first, and are warmed up before the
    clock runs. A later turn of a row sees the plain answers before it, in both ways.

    With --all, each way of drafting against plain decoding on the first turn of each row: what it adds, what its drafts
    cost and how many are kept, tokens/s, and the speed-up that the formula predicts.
    """
    if compare_all:
        approximate = (
            acceptance is not common.Acceptance.exact or typical_epsilon is not None or typical_alpha is not None
        )
        if drafter is not None or approximate or (top_k, top_p) != (0, 1.0):
            raise UserError(
                "--all compares exact ways over the whole law: leave --drafter, --acceptance, --typical-…, --top-… out"
            )
        asked = first_turns(rows_of(prompt, input_path)[:limit])
        from decode.paradigms import Plan
        from decode.paradigms_report import text

        plan = Plan(asked, (temperature,), max_new_tokens, seed or 0)
        result = compare_ways(base, heads, way, plan, dtype, device, output_path)
        typer.echo(json.dumps(result, ensure_ascii=False) if json_report else text(result))
        return
    if way is not None or output_path is not None:
        raise UserError("--way and --output go with --all")

    rows = rows_of(prompt, input_path)
    settings = common.settings(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        acceptance=acceptance,
        epsilon=typical_epsilon,
        alpha=typical_alpha,
    )
    pair = common.load_pair(base, heads, plain=False, dtype=dtype, device=device, drafter=drafter)
    name = common.choose_drafter(base, heads, False, drafter)[2] or ""
    decoders = replace(pair, drafter=None).decoder(), pair.decoder()
    done = []
    for comparison in compared(*decoders, rows[:limit], settings):
        done.append(comparison)
        if not json_report:
            typer.echo(describe(comparison, name))
    report = totals(done) | {"base": pair.base.name, "dtype": dtype.value, "temperature": temperature}
    report |= {"drafter": name}
    report |= {"acceptance": settings.acceptance, "exact": settings.acceptance == "exact"}
    if json_report:
        typer.echo(json.dumps(report | {"rows": [c.as_dict() for c in done]}, ensure_ascii=False))
    else:
        typer.echo(conclusion(report))


def rows_of(prompt: str | None, input_path: str | None) -> list[Row]:
    """The rows to compare on: the prompt, the input's, or else those of this command."""
    if prompt is None and input_path is None:
        return [Row.of_prompt(number, text) for number, text in enumerate(PROMPTS)]
    return gather(prompt, input_path, None)


def first_turns(rows: list[Row]) -> list[Prompt]:
    """What --all asks: of each row the first turn without an answer, with what was said before it. A row whose id an
    earlier one has gets another."""
    from decode.benchmark.prompts import Prompt

    prompts, seen = [], Counter[str]()
    for row in rows:
        _, position = next(row.to_answer())
        script = row.script[: position + 1]
        question = script[-1]["content"]
        alone = len(script) == 1 and isinstance(question, str)
        name = str(row.id)
        seen[name] += 1
        name = name if seen[name] == 1 else f"{name} ({seen[name]})"
        prompts.append(Prompt(name, row.category or "any", str(question), () if alone else script))
    return prompts


def compare_ways(
    base: str | None,
    heads: str | None,
    ways: list[str] | None,
    plan: Plan,
    dtype: common.Dtype,
    device: str | None,
    output: str | None,
) -> dict[str, Any]:
    """Every way of drafting on the same prompts; see `decode.paradigms`."""
    from decode.drafters.specs import parse_all
    from decode.paradigms import default_specs, load_paradigms
    from decode.paradigms_matrix import drafting_of, matrix

    for name in ways or ():
        parse_all(name)  # a name that is none is refused before the base is loaded
    without = heads is None and base not in (None, DEFAULT_EMBEDDED)
    named = common.choose(base, heads, without)[1]
    loaded = common.load_pair(base, heads, plain=without, dtype=dtype, device=device).base
    paradigms = load_paradigms(loaded, ways or default_specs(loaded, named is not None), named)
    return matrix(
        loaded,
        paradigms,
        plan,
        config={"base": loaded.name, "dtype": dtype.value, **drafting_of(loaded, paradigms, named)},
        directory=None if output is None else Path(output),
        progress=lambda line: typer.echo(line, err=True),
    )


def compared(plain: Decoder, heads: Decoder, rows: list[Row], settings: GenerationSettings) -> Iterator[Comparison]:
    """Every turn of the rows both ways, alternating which goes first."""
    warm_up = common.render(plain.base, [{"role": "user", "content": PROMPTS[0]}])
    for decoder in (plain, heads):
        decoder.generate(warm_up, replace(settings, max_new_tokens=min(16, settings.max_new_tokens)))
    heads_first = False
    for row in rows:
        given: dict[int, str] = {}
        for turn, position in row.to_answer():
            own = {heads: replace(settings, seed=row.turn_seed(settings.seed, turn))}
            own[plain] = replace(own[heads], acceptance="exact")
            try:
                prompt_ids = common.render(plain.base, history(row, position, given))
                order = (heads, plain) if heads_first else (plain, heads)
                results = {decoder: decoder.generate(prompt_ids, own[decoder]) for decoder in order}
            except UserError as error:
                raise UserError(f"row {row.id!r}, turn {turn}: {error}") from error
            heads_first = not heads_first
            given[position] = results[plain].text or ""
            yield Comparison(row.id, turn, results[plain], results[heads])


def totals(comparisons: list[Comparison]) -> dict[str, Any]:
    """Sums over all turns; a speed is all tokens by all seconds, an acceptance length all tokens by all forwards."""
    report: dict[str, Any] = {"turns": len(comparisons)}
    for way in ("plain", "heads"):
        stats = [getattr(comparison, way).stats for comparison in comparisons]
        tokens, seconds = sum(s.new_tokens for s in stats), sum(s.seconds for s in stats)
        forwards = sum(s.base_forwards for s in stats)
        report[way] = {
            "new_tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "base_forwards": forwards,
            "acceptance_length": tokens / forwards,
        }
    report["speedup"] = report["heads"]["tokens_per_second"] / report["plain"]["tokens_per_second"]
    report["same"] = sum(comparison.first_difference is None for comparison in comparisons)
    return report


def describe(comparison: Comparison, drafter: str) -> str:
    difference = comparison.first_difference
    verdict = "same text" if difference is None else f"texts differ from token {difference} on"
    return "\n".join(
        [
            f"--- {comparison.id}, turn {comparison.turn}: {verdict}",
            comparison.heads.text or "",
            f"plain: {common.summary(comparison.plain.stats)}",
            f"{drafter}: {common.summary(comparison.heads.stats)}",
        ]
    )


def conclusion(report: dict[str, Any]) -> str:
    lines = [
        f"{name}: {report[way]['new_tokens']} tokens, {report[way]['tokens_per_second']:.1f} tokens/s, "
        f"acceptance length {report[way]['acceptance_length']:.2f}"
        for way, name in (("plain", "plain"), ("heads", report["drafter"]))
    ]
    lines.append(f"{report['speedup']:.2f} times as fast; same text in {report['same']} of {report['turns']} answers")
    if report["same"] < report["turns"]:
        lines.append(why_texts_differ(report))
    return "\n".join(["=== all", *lines])


def why_texts_differ(report: dict[str, Any]) -> str:
    """What a difference means depends on how the text was chosen."""
    if not report["exact"]:
        return f"With {report['acceptance']} acceptance the text with heads does not have the base's law."
    if report["temperature"] > 0:
        return "Sampled texts differ from run to run; their law is the base's in both."
    if report["dtype"] == "float32":
        return "In float32 greedy texts must be the same: please report this."
    return (
        "A pass over several tokens and a pass over one round differently, so that half precision may choose "
        "differently where two tokens are nearly tied; --dtype float32 gives the same text."
    )
