"""Prompts that the base writes itself, so that data can be made from the base alone.

The base is given its chat template's opening of a user turn and goes on until the template's end of that turn. Both
are found by rendering a mark through the template, so any chat model will do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from medusa_heads.errors import ConfigError
from train.answerers import Answerer, AnswererError, Request, RowError, Stop, request_seed
from train.pool import Failures, run_workers
from train.prompts import Prompt, drop_duplicates
from train.shards import LineWriter, read_lines, sole_writer

FILE = "self-prompts.jsonl"
SOURCE = "self"
TEMPERATURE = 0.8
"""At 1.0 half of what SmolLM2-135M writes runs on without end or sense; at 0.8 one in ten does."""
MAX_NEW_TOKENS = 256
MAX_ATTEMPTS = 5
"""Samples for each prompt that is wanted, after which the base is taken to be unable to write more."""
MARK = "zqmarkqz"


@dataclass(frozen=True)
class UserTurn:
    """How a chat template opens a user turn, as token ids, and what ends it."""

    opening_ids: tuple[int, ...]
    stop: Stop


def user_turn(tokenizer: Any) -> UserTurn:
    """Finds the opening of a first user turn, default system turn included, and its end.

    Raises:
        ConfigError: the template changes a user's text, or puts nothing after it.
    """
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": MARK}], add_generation_prompt=False, tokenize=False
    )
    opening, found, closing = text.partition(MARK)
    if not found or MARK in closing:
        raise ConfigError("the chat template does not show a user turn as it is: the base cannot write prompts with it")
    opening_ids = tokenizer(opening.rstrip(" "), add_special_tokens=False)["input_ids"]
    closing_ids = tokenizer(closing.strip(), add_special_tokens=False)["input_ids"]
    if not opening_ids or not closing_ids:
        raise ConfigError("the chat template does not mark where a user turn begins and ends")
    if closing_ids[0] in tokenizer.all_special_ids or closing_ids[0] in tokenizer.added_tokens_decoder:
        return UserTurn(tuple(opening_ids), Stop(token_ids=(closing_ids[0],)))
    return UserTurn(tuple(opening_ids), Stop(strings=(closing.strip(),)))


def usable(samples: Mapping[int, str | None], seed: int) -> tuple[list[Prompt], int]:
    """The prompts among samples, in the order of their numbers, and how many were duplicates.

    A sample is None where it did not come to an end.
    """
    said = ((index, (samples[index] or "").strip()) for index in sorted(samples))
    return drop_duplicates(Prompt(f"self-{seed}-{index}", (text,), source=SOURCE) for index, text in said if text)


async def write_prompts(
    count: int,
    answerer: Answerer,
    seed: int,
    directory: Path,
    *,
    concurrency: int = 64,
    progress: Progress | None = None,
) -> tuple[list[Prompt], int]:
    """Lets the base write `count` different prompts. Returns them and how many samples were dropped.

    Sample i has the id `self-{seed}-{i}`. All samples are kept in `directory`, so a later call makes only what is
    missing, and asking for more prompts keeps the first ones.
    """
    turn = user_turn(answerer.tokenizer)
    path = directory / FILE
    with sole_writer(directory), LineWriter(path) as writer:
        samples: dict[int, str | None] = {row["sample"]: row["text"] for row in read_lines(path)}
        failures = Failures(directory / "failed-prompts.jsonl", {str(index) for index in samples})
        bar = progress.add_task("prompts", total=count, unit="prompts", rate="") if progress else None

        async def sample(index: int) -> None:
            seed_here = request_seed(seed, f"prompt {index}", 0)
            try:
                answer = await answerer.complete(
                    Request(turn.opening_ids, TEMPERATURE, MAX_NEW_TOKENS, seed_here, turn.stop)
                )
            except AnswererError:
                raise
            except RowError as error:  # what is asked is the same for every sample
                raise AnswererError(f"the base cannot write prompts: {error}") from error
            except Exception as error:
                failures.add(str(index), error)
                return
            samples[index] = answer.text if answer.finished else None
            writer.append({"sample": index, "text": samples[index]})
            failures.answered(str(index))
            if progress and bar is not None and samples[index]:
                progress.advance(bar)

        try:
            prompts, duplicates = usable(samples, seed)
            if progress and bar is not None:
                progress.update(bar, completed=len(prompts))
            while len(prompts) < count:
                missing = next_samples(samples, count - len(prompts))
                if len(samples) + len(missing) > MAX_ATTEMPTS * (count + 10):
                    raise AnswererError(
                        f"of {len(samples)} prompts that the base wrote only {len(prompts)} came to an end, were not "
                        f"empty and differ from each other: {count} cannot be had"
                    )
                await run_workers(missing, sample, concurrency)
                prompts, duplicates = usable(samples, seed)
        finally:
            failures.save()
    empty = sum(not (text or "").strip() for text in samples.values())
    return prompts[:count], duplicates + empty


def next_samples(samples: Mapping[int, str | None], count: int) -> list[int]:
    """The numbers to sample next: those that a killed run or a failure left out, or else `count` new ones.

    Which prompts a directory ends up with thus does not depend on where it was interrupted.
    """
    begun = max(samples, default=-1) + 1
    left_out = [index for index in range(begun) if index not in samples]
    return left_out or list(range(begun, begun + count))
