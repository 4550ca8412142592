"""`medusa-decode generate`: an argument or standard input to text, or a JSONL file to a JSONL file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from decode.cli import common
from decode.cli.rows import Row, output_file, output_line, read_rows, write_line
from medusa_heads.errors import UserError

if TYPE_CHECKING:
    from decode.engine import Decoder
    from decode.settings import GenerationSettings


def generate(
    prompt: Annotated[str | None, typer.Argument(help="One user turn; default: all of standard input.")] = None,
    input_path: Annotated[
        str | None, typer.Option("--input", metavar="IN.jsonl", help="Rows to answer; - is standard input.")
    ] = None,
    output_path: Annotated[
        str | None,
        typer.Option("--output", metavar="OUT.jsonl", help="One line for each answered turn; default: on stdout."),
    ] = None,
    base: common.BaseOption = None,
    heads: common.HeadsOption = None,
    drafter: common.DrafterOption = None,
    plain: common.PlainOption = False,
    dtype: common.DtypeOption = common.Dtype.auto,
    device: common.DeviceOption = None,
    temperature: common.TemperatureOption = 0.0,
    top_k: common.TopKOption = 0,
    top_p: common.TopPOption = 1.0,
    acceptance: common.AcceptanceOption = common.Acceptance.exact,
    typical_epsilon: common.EpsilonOption = None,
    typical_alpha: common.AlphaOption = None,
    max_new_tokens: common.MaxNewTokensOption = 256,
    seed: common.SeedOption = None,
    no_guard: common.NoGuardOption = False,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End before this text; may be repeated.")] = None,
    json_lines: common.JsonOption = False,
    debug: common.DebugOption = False,
) -> None:
    """Answer a prompt, or every row of a JSONL file.

    An input row has `id` (or `question_id`) and `prompt`, `turns` or `messages`. Each answered turn gives one line {id,
    turn, token_ids, text, finish_reason, exact, stats}, in input order. OUT.jsonl.partial grows line by line and takes
    its name OUT.jsonl when all rows are answered.
    """
    rows = gather(prompt, input_path, output_path)
    as_rows = input_path is not None or output_path is not None or json_lines
    settings = common.settings(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop or ()),
        acceptance=acceptance,
        epsilon=typical_epsilon,
        alpha=typical_alpha,
        plain=plain,
    )
    check_writable(output_path)
    pair = common.load_pair(base, heads, plain=plain, dtype=dtype, device=device, drafter=drafter)
    decoder = pair.decoder(guarded=not no_guard)
    if not as_rows:
        stream_answer(decoder, rows[0], settings)
        return
    sink: AbstractContextManager[IO[str]] = (
        nullcontext(sys.stdout) if output_path in (None, "-") else output_file(Path(str(output_path)))
    )
    with sink as stream:
        for line in answers(decoder, rows, settings):
            write_line(stream, line)


def gather(prompt: str | None, input_path: str | None, output_path: str | None) -> list[Row]:
    """The rows to answer: of the argument, of the JSONL input, or one of standard input."""
    if prompt is not None and input_path is not None:
        raise UserError("a prompt and --input are both given: leave one out")
    if input_path == "-":
        return read_rows(sys.stdin, "standard input")
    if input_path is not None:
        if output_path not in (None, "-") and Path(str(output_path)).absolute() == Path(input_path).absolute():
            raise UserError(f"--input and --output are the same file: {input_path}")
        try:
            with Path(input_path).open(encoding="utf-8") as source:
                return read_rows(source, input_path)
        except UnicodeDecodeError as error:
            raise UserError(f"{input_path} is not UTF-8: {error}") from error
    if prompt is None:
        if sys.stdin.isatty():
            raise UserError("nothing to answer: give a prompt, --input IN.jsonl, or text on standard input")
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise UserError("the prompt is empty")
    return [Row.of_prompt("prompt", prompt)]


def check_writable(output_path: str | None) -> None:
    """Say that the output's directory is missing before minutes of work, not after."""
    if output_path in (None, "-"):
        return
    path = Path(str(output_path))
    if path.is_dir():
        raise UserError(f"--output {path} is a directory")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--output {path}: there is no directory {path.absolute().parent}")


def answers(decoder: Decoder, rows: list[Row], settings: GenerationSettings) -> Iterator[dict[str, Any]]:
    """The output lines, each as soon as it is made; a later turn of a row sees the answers before it."""
    for row in rows:
        given: dict[int, str] = {}
        for turn, position in row.to_answer():
            messages = history(row, position, given)
            try:
                prompt_ids = common.render(decoder.base, messages)
                result = decoder.generate(prompt_ids, replace(settings, seed=row.turn_seed(settings.seed, turn)))
            except UserError as error:
                raise UserError(f"row {row.id!r}, turn {turn}: {error}") from error
            given[position] = result.text or ""
            yield output_line(row, turn, result)


def history(row: Row, position: int, given: dict[int, str]) -> list[dict[str, Any]]:
    """The messages up to a user turn, with the answers that were made after earlier ones."""
    messages: list[dict[str, Any]] = []
    for earlier, message in enumerate(row.script[: position + 1]):
        messages.append(message)
        if earlier in given:
            messages.append({"role": "assistant", "content": given[earlier]})
    return messages


def stream_answer(decoder: Decoder, row: Row, settings: GenerationSettings) -> None:
    """One answer, its text on standard output as it is made, its figures on standard error."""
    prompt_ids = common.render(decoder.base, list(row.script))
    for chunk in decoder.stream(prompt_ids, settings):
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
        if chunk.result is not None:
            sys.stdout.write("\n")
            typer.echo(f"[{common.summary(chunk.result.stats)}]", err=True)
