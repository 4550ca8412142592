"""`medusa-decode verify`: certify that a base with heads writes the base's own text, on this machine."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from decode.cli import common
from decode.cli.generate import check_writable, gather, history
from decode.cli.rows import Row, output_file
from medusa_heads import __version__
from medusa_heads.errors import UserError

if TYPE_CHECKING:
    from decode.certify import Certificate
    from medusa_heads.base import Base

PROMPTS = (
    "Why is the sky blue?",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Translate into French: The library opens at nine and closes at half past five.",
    "A train covers 180 km in two hours and a quarter. How fast is it on average?",
    "List five fruits, one a line, in alphabetical order.",
    "Tell a very short story about a lighthouse keeper and a gull.",
    "Summarize in one sentence: The committee met twice, heard six witnesses and could not agree on a report.",
    "Count from 1 to 30, separated by commas.",
)
SAMPLED_PROMPTS = 2
"""How many of the prompts are sampled as well."""


def verify(
    prompts: Annotated[
        str | None,
        typer.Option(
            "--prompts", metavar="IN.jsonl", help="Rows as of generate, each up to its first unanswered turn."
        ),
    ] = None,
    output_path: Annotated[
        str | None, typer.Option("--output", metavar="OUT.json", help="Write the certificate to this file.")
    ] = None,
    base: common.BaseOption = None,
    heads: common.HeadsOption = None,
    drafter: common.DrafterOption = None,
    dtype: common.DtypeOption = common.Dtype.float32,
    device: common.DeviceOption = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="The first prompts only.")] = None,
    max_new_tokens: common.MaxNewTokensOption = 64,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="Of the sampling check; 0 leaves it out.")
    ] = 1.0,
    top_k: common.TopKOption = 0,
    top_p: common.TopPOption = 1.0,
    draws: Annotated[int, typer.Option("--draws", min=50, help="Of each of the two prompts that are sampled.")] = 500,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same draws.")] = 0,
    json_report: common.JsonOption = False,
    debug: common.DebugOption = False,
) -> None:
    """Certify base and heads: greedy text is the base's own, token for token, and sampled text has its law.

    Exit code 0 where all checks pass, 1 where one fails. In half precision a text may leave plain decoding's where two
    tokens are nearly tied: each first divergence is reported with the base's gap there, and counts as rounding only
    within the rounding measured on the base alone.
    """
    rows = [Row.of_prompt(number, text) for number, text in enumerate(PROMPTS)]
    if prompts is not None:
        rows = gather(None, prompts, output_path)
    check_writable(output_path)
    params = common.settings(max_new_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p).sampling
    pair = common.load_pair(base, heads, plain=False, dtype=dtype, device=device, drafter=drafter)
    from decode.certify import certify

    certificate = certify(
        pair.decoder(guarded=False),
        [(row.id, render(pair.base, row)) for row in rows[:limit]],
        max_new_tokens=max_new_tokens,
        params=params,
        draws=draws,
        sampled_prompts=SAMPLED_PROMPTS,
        seed=seed,
        after_check=lambda so_far: typer.echo(last_check(so_far), err=json_report),
    )
    _, heads_name, way = common.choose_drafter(base, heads, False, drafter)
    report = certificate.as_dict() | {"base": pair.base.fingerprint(), "heads": heads_name}
    report["drafter"] = way
    report["options"] = {"prompts": prompts, "limit": limit, "max_new_tokens": max_new_tokens, "seed": seed}
    report["versions"] = versions(pair.base)
    if output_path not in (None, "-"):
        with output_file(Path(str(output_path))) as sink:
            json.dump(report, sink, ensure_ascii=False, indent=2)
            sink.write("\n")
    if json_report or output_path == "-":
        typer.echo(json.dumps(report, ensure_ascii=False))
    else:
        typer.echo(verdict(certificate))
    if not certificate.passed:
        raise typer.Exit(1)


def render(base: Base, row: Row) -> list[int]:
    """Token ids of a row's conversation up to the first turn that is to be answered."""
    _, position = next(row.to_answer())
    try:
        return common.render(base, history(row, position, {}))
    except UserError as error:
        raise UserError(f"row {row.id!r}: {error}") from error


def last_check(certificate: Certificate) -> str:
    """A line on the check that has just been made."""
    if certificate.sampling:
        sampled = certificate.sampling[-1]
        line = f"sampled {sampled.id}: {sampled.draws} draws, G {sampled.g:.1f}, {sampled.degrees_of_freedom} df"
        if sampled.impossible or sampled.malformed:
            line += f"; {sampled.impossible} draws of probability 0, {sampled.malformed} that end wrongly"
        return line
    check = certificate.greedy[-1]
    tau = check.new_tokens / check.base_forwards
    line = f"greedy {check.id}: {check.new_tokens} tokens, acceptance length {tau:.2f}, "
    if check.identical and check.passed:
        return line + "identical"
    if check.divergence is None:
        return line + f"{check.wrong_choices} tokens are not the base's choice"
    where = check.divergence
    gap = "a text ends there" if where.gap is None else f"the base's gap between the two is {where.gap:.3g}"
    return line + (
        f"differs from token {where.position} on: {gap} (of its likeliest two: {where.top2_gap:.3g}), rounding allows "
        f"{check.rounding:.3g}: {'a near-tie' if check.passed else 'WRONG'}"
    )


def verdict(certificate: Certificate) -> str:
    """The conclusion for people."""
    same = sum(check.identical for check in certificate.greedy)
    lines = [
        f"greedy, {certificate.dtype}: {same} of {len(certificate.greedy)} texts identical to plain decoding, "
        f"{'all' if certificate.greedy_passed else 'NOT all'} within the base's own rounding"
    ]
    p = certificate.p_value
    if p is not None:
        lines.append(f"sampling: p = {p:.3g}, required at least {certificate.level:g}")
    if certificate.accepted_drafts == 0:
        lines.append("no drafted token was accepted: this says nothing about accepted drafts")
    lines.append("PASSED" if certificate.passed else "FAILED")
    return "\n".join(lines)


def versions(base: Base) -> dict[str, Any]:
    """What the certificate holds for."""
    import torch
    import transformers

    return {
        "medusa-heads": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": str(base.device),
    }
