"""Data made by the base itself: it answers prompts, and heads learn what it says.

    python -m train.distill --prompts prompts.jsonl --out data/distilled
    python -m train.distill --self-prompts 10000 --out data/distilled          # no dataset at all
    python -m train.distill --prompts prompts.jsonl --out data/distilled --server http://127.0.0.1:8000/v1

Rows stream into shards as they finish. A run that was killed goes on by the ids that are on disk; failed rows are
listed in `failed.jsonl` and tried again by the next run. `datasets.load_dataset("json", data_files="…/shard-*")`
reads the result.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from train.answerers import Answerer, AnswererError, Message, Request, request_seed
from train.prompts import Prompt
from train.shards import ShardWriter, read_rows


@dataclass(frozen=True)
class DistillSettings:
    """How the base answers. Written to the output directory; a later run must agree with it."""

    base: str
    temperatures: tuple[float, ...] = (0.0,)
    """Each row takes one of these, by its id: list a value twice to give it twice the share."""
    max_new_tokens: int = 384
    seed: int = 0


@dataclass
class Tally:
    """What a run did."""

    rows: int = 0
    resumed: int = 0
    failed: int = 0
    duplicates: int = 0
    answers: int = 0
    cut: int = 0
    new_tokens: int = 0
    seconds: float = 0.0


def row_temperature(settings: DistillSettings, identity: str) -> float:
    """The temperature of a row: fixed by its id, whatever the order or the number of runs."""
    choice = zlib.crc32(f"temperature:{settings.seed}:{identity}".encode())
    return settings.temperatures[choice % len(settings.temperatures)]


def check_settings(directory: Path, settings: DistillSettings) -> None:
    """Writes `distill.json` on the first run; afterwards raises if the settings differ from it."""
    path = directory / "distill.json"
    ours = json.loads(json.dumps(asdict(settings)))
    if path.exists():
        theirs = json.loads(path.read_text())
        if theirs != ours:
            changed = {k: (theirs.get(k), ours[k]) for k in ours if theirs.get(k) != ours[k]}
            raise ValueError(f"{directory} was begun with other settings (there, here): {changed}")
        return
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(ours, indent=2) + "\n")


async def answer_prompt(prompt: Prompt, answerer: Answerer, settings: DistillSettings) -> dict[str, Any]:
    """Lets the base answer every turn of a prompt. Returns the row to store.

    A conversation whose answer was cut ends there: a later turn after half an answer is no conversation.
    """
    temperature = row_temperature(settings, prompt.id)
    messages: list[Message] = []
    if prompt.system is not None:
        messages.append({"role": "system", "content": prompt.system})
    tokens: list[int] = []
    finished = True
    for index, turn in enumerate(prompt.turns):
        messages.append({"role": "user", "content": turn})
        seed = request_seed(settings.seed, prompt.id, index)
        answer = await answerer.answer(Request(tuple(messages), temperature, settings.max_new_tokens, seed))
        messages.append({"role": "assistant", "content": answer.text})
        tokens.append(answer.tokens)
        if not answer.finished:
            finished = False
            break
    return {
        "id": prompt.id,
        "source": prompt.source,
        "temperature": temperature,
        "finished": finished,
        "tokens": sum(tokens),
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
    """Answers `prompts` into `directory`, skipping the ids that are there, until done or `max_tokens` are made."""
    check_settings(directory, settings)
    tally = Tally()
    done: set[str] = set()
    have_tokens = 0
    for row in read_rows(directory):
        done.add(row["id"])
        have_tokens += row["tokens"]
    todo = [p for p in order_prompts(prompts, settings.seed) if p.id not in done]
    tally.resumed = len(prompts) - len(todo)
    failures: list[dict[str, str]] = []
    queue = iter(todo)
    start = time.perf_counter()
    bar = None
    if progress is not None:
        bar = progress.add_task("distil", total=max_tokens or len(prompts), rate="")

    with ShardWriter(directory, rows_per_shard) as writer:

        async def worker() -> None:
            for prompt in queue:
                if max_tokens is not None and have_tokens + tally.new_tokens >= max_tokens:
                    return
                try:
                    row = await answer_prompt(prompt, answerer, settings)
                except AnswererError:
                    raise
                except Exception as error:
                    failures.append({"id": prompt.id, "error": f"{type(error).__name__}: {error}"})
                    tally.failed += 1
                    continue
                writer.append(row)
                tally.rows += 1
                tally.new_tokens += row["tokens"]
                tally.answers += sum(m["role"] == "assistant" for m in row["messages"])
                tally.cut += not row["finished"]
                if progress is not None and bar is not None:
                    rate = tally.new_tokens / (time.perf_counter() - start)
                    made = have_tokens + tally.new_tokens if max_tokens else tally.resumed + tally.rows
                    progress.update(bar, completed=made, rate=f"{rate:.0f} tokens/s")

        workers = [asyncio.create_task(worker()) for _ in range(concurrency)]
        try:
            await asyncio.gather(*workers)
        finally:
            for task in workers:
                task.cancel()
            tally.seconds = time.perf_counter() - start
            write_report(directory, tally, failures)
    return tally


def write_report(directory: Path, tally: Tally, failures: list[dict[str, str]]) -> None:
    """`failed.jsonl` and `summary.json`: this run, and all that is on disk."""
    with (directory / "failed.jsonl").open("w", encoding="utf-8") as file:
        for failure in failures:
            file.write(json.dumps(failure) + "\n")
    total = {"rows": 0, "tokens": 0, "cut": 0}
    for row in read_rows(directory):
        total["rows"] += 1
        total["tokens"] += row["tokens"]
        total["cut"] += not row["finished"]
    rate = tally.new_tokens / tally.seconds if tally.seconds else 0.0
    summary = {"run": {**asdict(tally), "tokens_per_second": round(rate, 1)}, "total": total}
    (directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


def progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
