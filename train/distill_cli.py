"""The command line `python -m train.distill`."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from medusa_heads.errors import ConfigError, UserError
from train.answerers import Answerer, ServerAnswerer, load_tokenizer
from train.distill import DistillSettings, Tally, check_settings, compare_settings, distill, progress_bar
from train.prompts import Prompt, PromptError, read_dataset, read_jsonl
from train.selfprompts import write_prompts
from train.shards import sole_writer

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

DEFAULT_CONCURRENCY = 64
DEFAULT_BATCH_SIZE = 32
KEY_VARIABLE = "MEDUSA_SERVER_KEY"
ROWS_PER_PLACE = 4
"""Rows under way for each place in a local batch: enough that a batch can be formed of like lengths."""


@dataclass(frozen=True)
class Options:
    """What the command line said, with nothing decided yet."""

    prompts: Path | None
    dataset: str | None
    split: str | None
    self_prompts: int | None
    max_tokens: int | None
    out: Path
    server: str | None
    server_model: str | None
    concurrency: int | None
    batch_size: int | None
    dtype: str | None

    def check(self) -> None:
        """Raises `ConfigError` for options that clash, naming them."""
        sources = {"--prompts": self.prompts, "--dataset": self.dataset, "--self-prompts": self.self_prompts}
        given = [name for name, value in sources.items() if value is not None]
        if len(given) != 1:
            named = ", ".join(given) or "none"
            raise ConfigError(f"say where the prompts come from by one of {', '.join(sources)}; given: {named}")
        if self.split is not None and self.dataset is None:
            raise ConfigError("--split goes with --dataset")
        remote = {"--server-model": self.server_model, "--concurrency": self.concurrency}
        local = {"--batch-size": self.batch_size, "--dtype": self.dtype}
        for name, value in (local if self.server is not None else remote).items():
            if value is not None:
                raise ConfigError(f"{name} goes {'only without' if self.server is not None else 'with'} --server")

    @property
    def places(self) -> int:
        """Rows under way at once."""
        if self.server is not None:
            return self.concurrency or DEFAULT_CONCURRENCY
        return ROWS_PER_PLACE * (self.batch_size or DEFAULT_BATCH_SIZE)


@app.command()
def command(
    out: Annotated[Path, typer.Option(help="Directory of the shards; one that exists is gone on with.")],
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL file (or .jsonl.gz) of turns, messages or prompt.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Prompts from a dataset: Hub id or local directory.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of --dataset.  [default: train]")] = None,
    self_prompts: Annotated[int | None, typer.Option(min=1, help="Let the base write this many prompts.")] = None,
    base: Annotated[str, typer.Option(help="Embedded name, local directory, Hub id or .gguf file.")] = "smollm2-135m",
    temperature: Annotated[
        list[float] | None, typer.Option(help="Give it several times for a mixture over the rows.  [default: 0]")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Limit of each answer.")] = 384,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Stop when there are so many new tokens.")] = None,
    server: Annotated[
        str | None,
        typer.Option(help=f"OpenAI-compatible server of the same base, http://…/v1. Its key, if any: ${KEY_VARIABLE}."),
    ] = None,
    server_model: Annotated[str | None, typer.Option(help="The base's name there.  [default: the only one]")] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help=f"Requests at once, with --server.  [default: {DEFAULT_CONCURRENCY}]")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help=f"Rows at once, without --server.  [default: {DEFAULT_BATCH_SIZE}]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the order, the temperatures and the samples.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.  [default: auto]")] = None,
) -> None:
    """Let the base answer prompts: the data that its heads are trained on.

    Rows stream to disk; the same command goes on where a run was stopped and tries failed rows again.
    """
    options = Options(
        prompts, dataset, split, self_prompts, max_tokens, out, server, server_model, concurrency, batch_size, dtype
    )
    console = Console()
    try:
        options.check()
        settings = DistillSettings(base, tuple(temperature or [0.0]), max_new_tokens, seed)
        compare_settings(out, settings)
        tally = asyncio.run(run(options, settings))
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print(f"Stopped. The rows in {out} are whole; the same command goes on from there.", file=sys.stderr)
        raise typer.Exit(130) from None
    console.print(summary(tally, out), highlight=False, markup=False, soft_wrap=True)


async def run(options: Options, settings: DistillSettings) -> Tally:
    """Reads or makes the prompts and has them answered."""
    prompts: list[Prompt] = []
    if options.prompts is not None:
        prompts = list(read_jsonl(options.prompts))
    elif options.dataset is not None:
        prompts = list(read_dataset(options.dataset, options.split or "train"))
    if not prompts and options.self_prompts is None:
        raise PromptError(f"there is no prompt in {options.prompts or options.dataset}")
    answerer = await open_answerer(options, settings)
    try:
        with sole_writer(options.out):
            check_settings(options.out, settings)
        with progress_bar() as progress:
            dropped = 0
            if options.self_prompts is not None:
                prompts, dropped = await write_prompts(
                    options.self_prompts,
                    answerer,
                    settings.seed,
                    options.out,
                    concurrency=options.places,
                    progress=progress,
                )
            tally = await distill(
                prompts,
                answerer,
                settings,
                options.out,
                concurrency=options.places,
                max_tokens=options.max_tokens,
                progress=progress,
            )
            tally.duplicates += dropped
            return tally
    finally:
        await answerer.close()


async def open_answerer(options: Options, settings: DistillSettings) -> Answerer:
    """The server, checked, or the base loaded into this process."""
    if options.server is not None:
        server = ServerAnswerer(
            options.server,
            options.server_model,
            load_tokenizer(settings.base),
            api_key=os.environ.get(KEY_VARIABLE) or "none",
        )
        await server.check()
        return server
    from medusa_heads.base import Base
    from train.local import LocalAnswerer

    base = Base.load(settings.base, dtype=options.dtype or "auto")
    return LocalAnswerer(base, options.batch_size or DEFAULT_BATCH_SIZE)


def summary(tally: Tally, out: Path) -> str:
    """The run in a few lines."""
    lines = [
        f"{tally.rows} rows with {tally.answers} answers, {tally.new_tokens} tokens in {tally.seconds:.0f} s "
        f"({tally.tokens_per_second:.0f} tokens/s), in {out}",
        f"{tally.resumed} rows were there before; {tally.duplicates} prompts were duplicates or unusable; "
        f"{tally.cut} rows end in an answer that was cut",
    ]
    if tally.failed:
        lines.append(f"{tally.failed} rows failed: see {out / 'failed.jsonl'}; the same command tries them again")
    return "\n".join(lines)


def main() -> None:
    app(prog_name="python -m train.distill")
