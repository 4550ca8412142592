"""Data made by the base itself: it answers prompts, and heads learn what it says.

    python -m train.distill --prompts prompts.jsonl --out data/distilled
    python -m train.distill --self-prompts 10000 --out data/distilled          # no dataset at all
    python -m train.distill --prompts prompts.jsonl --out data/distilled --server http://127.0.0.1:8000/v1

Rows stream into shards as they finish. A run that was stopped goes on by the ids that are on disk; failed rows are
listed in `failed.jsonl` and tried again by the next run. `datasets.load_dataset("json", data_files="…/shard-*.jsonl")`
reads the result. The command line itself is in `train.distill_cli`, the format in `docs/data.md`.
"""

from __future__ import annotations

import json
import random
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from medusa_heads.errors import ConfigError
from train.answerers import Answerer, AnswererError, Request, render, request_seed
from train.pool import Failures, run_workers
from train.prompts import Prompt, drop_duplicates
from train.shards import ShardWriter, read_rows, sole_writer, write_beside

SETTINGS_FILE = "distill.json"


@dataclass(frozen=True)
class DistillSettings:
    """How the base answers. Written to the output directory; a later run must agree with it."""

    base: str
    temperatures: tuple[float, ...] = (0.0,)
    """Each row takes one of these, by its id: list a value twice to give it twice the share."""
    max_new_tokens: int = 384
    """For each answer."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperatures or min(self.temperatures) < 0:
            raise ConfigError(f"temperatures must be one or more numbers ≥ 0, not {list(self.temperatures)}")
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")


@dataclass
class Tally:
    """What a run did."""

    rows: int = 0
    resumed: int = 0
    """Rows that were on disk already."""
    failed: int = 0
    duplicates: int = 0
    """Prompts left out because another says the same."""
    answers: int = 0
    cut: int = 0
    """Rows whose last answer reached the limit of tokens."""
    new_tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds if self.seconds else 0.0


def row_temperature(settings: DistillSettings, identity: str) -> float:
    """The temperature of a row: fixed by its id, whatever the order or the number of runs."""
    choice = zlib.crc32(f"temperature:{settings.seed}:{identity}".encode())
    return float(settings.temperatures[choice % len(settings.temperatures)])


def compare_settings(directory: Path, settings: DistillSettings) -> None:
    """Raises `ConfigError` if the directory was begun with other settings, naming both sides."""
    path = directory / SETTINGS_FILE
    if not path.exists():
        return
    try:
        theirs = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is damaged: not JSON ({error})") from None
    ours = json.loads(json.dumps(asdict(settings)))
    changed = [f"{k} {theirs.get(k)} (now {ours.get(k)})" for k in {**theirs, **ours} if theirs.get(k) != ours.get(k)]
    if changed:
        raise ConfigError(f"{directory} was begun with other settings: {', '.join(changed)}; take another directory")


def check_settings(directory: Path, settings: DistillSettings) -> None:
    """As `compare_settings`, and writes them down on the first run."""
    compare_settings(directory, settings)
    path = directory / SETTINGS_FILE
    if not path.exists():
        write_beside(path, json.dumps(asdict(settings), indent=2) + "\n")


async def answer_prompt(prompt: Prompt, answerer: Answerer, settings: DistillSettings) -> dict[str, Any]:
    """Lets the base answer every turn of a prompt. Returns the row to store.

    A conversation whose answer was cut ends there: a later turn after half an answer is no conversation.
    """
    temperature = row_temperature(settings, prompt.id)
    messages = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
    tokens = 0
    finished = True
    for index, turn in enumerate(prompt.turns):
        messages.append({"role": "user", "content": turn})
        prompt_ids = render(answerer.tokenizer, messages)
        seed = request_seed(settings.seed, prompt.id, index)
        answer = await answerer.complete(Request(prompt_ids, temperature, settings.max_new_tokens, seed))
        messages.append({"role": "assistant", "content": answer.text})
        tokens += answer.tokens
        finished = answer.finished
        if not finished:
            break
    return {
        "id": prompt.id,
        "source": prompt.source,
        "temperature": temperature,
        "finished": finished,
        "tokens": tokens,
        "messages": messages,
    }


def order_prompts(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    """A fixed shuffle, so that a run stopped early has seen the whole mixture."""
    shuffled = list(prompts)
    random.Random(seed).shuffle(shuffled)
    return shuffled


async def distill(
    prompts: Sequence[Prompt],
    answerer: Answerer,
    settings: DistillSettings,
    directory: Path,
    *,
    concurrency: int = 64,
    max_tokens: int | None = None,
    rows_per_shard: int = 1000,
    progress: Progress | None = None,
) -> Tally:
    """Answers `prompts` into `directory`, skipping the ids that are there, `concurrency` rows at a time.

    Args:
        max_tokens: no new row is begun once the directory holds so many new tokens; rows under way are finished.

    Raises:
        ConfigError: the directory was begun with other settings.
        AnswererError: the answerer cannot be used; what is on disk stays.
        OSError: the disk takes no more; every row on it is whole.
    """
    with sole_writer(directory):
        check_settings(directory, settings)
        return await _distill(prompts, answerer, settings, directory, concurrency, max_tokens, rows_per_shard, progress)


async def _distill(
    prompts: Sequence[Prompt],
    answerer: Answerer,
    settings: DistillSettings,
    directory: Path,
    concurrency: int,
    max_tokens: int | None,
    rows_per_shard: int,
    progress: Progress | None,
) -> Tally:
    tally = Tally()
    prompts, tally.duplicates = drop_duplicates(prompts)
    done: set[str] = set()
    have_tokens = 0
    for row in read_rows(directory):
        done.add(row["id"])
        have_tokens += row["tokens"]
    todo = [p for p in order_prompts(prompts, settings.seed) if p.id not in done]
    tally.resumed = len(prompts) - len(todo)
    failures = Failures(directory / "failed.jsonl", done)
    start = time.perf_counter()
    unit, total = ("rows", len(prompts)) if max_tokens is None else ("tokens", max_tokens)

    def made() -> int:
        return tally.resumed + tally.rows if max_tokens is None else have_tokens + tally.new_tokens

    def until_enough() -> Iterator[Prompt]:
        for prompt in todo:
            if max_tokens is not None and have_tokens + tally.new_tokens >= max_tokens:
                return
            yield prompt

    bar = progress.add_task("answers", total=total, completed=made(), unit=unit, rate="") if progress else None

    with ShardWriter(directory, rows_per_shard) as writer:

        async def answer(prompt: Prompt) -> None:
            try:
                row = await answer_prompt(prompt, answerer, settings)
            except AnswererError:
                raise
            except Exception as error:
                tally.failed += 1
                failures.add(prompt.id, error)
                return
            writer.append(row)
            failures.answered(prompt.id)
            tally.rows += 1
            tally.new_tokens += row["tokens"]
            tally.answers += sum(m["role"] == "assistant" for m in row["messages"])
            tally.cut += not row["finished"]
            tally.seconds = time.perf_counter() - start
            if progress and bar is not None:
                progress.update(bar, completed=made(), rate=f"{tally.tokens_per_second:.0f} tokens/s")

        try:
            await run_workers(until_enough(), answer, concurrency)
        finally:
            tally.seconds = time.perf_counter() - start
            write_report(directory, tally, failures)
    return tally


def write_report(directory: Path, tally: Tally, failures: Failures) -> None:
    """`failed.jsonl` and `summary.json`: this run, and all that is on disk."""
    failures.save()
    total = {"rows": 0, "tokens": 0, "cut": 0, "failed": len(failures.errors)}
    for row in read_rows(directory):
        total["rows"] += 1
        total["tokens"] += row["tokens"]
        total["cut"] += not row["finished"]
    run = asdict(tally) | {"seconds": round(tally.seconds, 1), "tokens_per_second": round(tally.tokens_per_second, 1)}
    write_beside(directory / "summary.json", json.dumps({"run": run, "total": total}, indent=2) + "\n")


def progress_bar() -> Progress:
    """Done of all, tokens/s and time left; the estimate looks back far enough for rows that end in batches."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        speed_estimate_period=600,
    )


if __name__ == "__main__":
    from train.distill_cli import main

    main()
