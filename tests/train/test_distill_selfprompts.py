"""Prompts that the base writes: the template's user turn, what is dropped, ids that stay."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from medusa_heads.errors import ConfigError
from train.answerers import Answer, AnswererError, Request, RowError, Stop
from train.prompts import Prompt
from train.selfprompts import FILE, MAX_ATTEMPTS, next_samples, user_turn, write_prompts

LLAMA2 = "{{ bos_token }}{% for m in messages %}[INST] {{ m['content'] | trim }} [/INST]{% endfor %}"
GEMMA = (
    "{% for m in messages %}<start_of_turn>{{ m['role'] }}\n{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)


def test_a_user_turn_opens_after_the_default_system_turn(byte_tokenizer: Callable[..., Any]) -> None:
    tokenizer = byte_tokenizer(DEFAULT_SYSTEM)
    turn = user_turn(tokenizer)
    wanted = "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\n"
    assert tokenizer.decode(turn.opening_ids) == wanted
    assert turn.stop == Stop(token_ids=(tokenizer.convert_tokens_to_ids("<|im_end|>"),))


def test_a_mark_that_is_not_the_end_of_sequence_ends_a_turn(byte_tokenizer: Callable[..., Any]) -> None:
    tokenizer = byte_tokenizer(GEMMA, ("<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>")
    turn = user_turn(tokenizer)
    assert tokenizer.decode(turn.opening_ids) == "<start_of_turn>user\n"
    assert turn.stop == Stop(token_ids=(258,))


def test_a_turn_that_ends_in_plain_text_is_ended_by_that_text(byte_tokenizer: Callable[..., Any]) -> None:
    tokenizer = byte_tokenizer(LLAMA2, ("<s>", "</s>"), "</s>")
    tokenizer.bos_token = "<s>"
    turn = user_turn(tokenizer)
    assert tokenizer.decode(turn.opening_ids) == "<s>[INST]", "the space before the text belongs to its first word"
    assert turn.stop == Stop(strings=("[/INST]",))


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0]['content'] | upper }}<|im_end|>",
        "{{ messages[0]['content'] }}",
        "a",
        "{{ messages[0]['content'] * 2 }}",
    ],
)
def test_a_template_without_a_plain_user_turn_is_refused(byte_tokenizer: Callable[..., Any], template: str) -> None:
    with pytest.raises(ConfigError, match="chat template"):
        user_turn(byte_tokenizer(template))


class Writer:
    """Writes `write(seed)` as a sample: a text, None for one without an end, or an exception to raise."""

    def __init__(self, tokenizer: Any, write: Callable[[int], str | Exception | None]):
        self.tokenizer = tokenizer
        self.write = write
        self.seeds: list[int] = []

    async def complete(self, request: Request) -> Answer:
        self.seeds.append(request.seed)
        await asyncio.sleep(0)
        text = self.write(request.seed)
        if isinstance(text, Exception):
            raise text
        return Answer("unending" if text is None else text, 3, text is not None)

    async def close(self) -> None: ...


def text_of(seed: int) -> str | None:
    """Of ten samples about one is empty, one does not end, and two say the same as another."""
    return {0: "", 1: None, 2: "Same.", 3: "same. "}.get(seed % 10, f"Prompt {seed}?\n")


def write(count: int, writer: Writer, directory: Path, seed: int = 0, concurrency: int = 5) -> tuple[list[Prompt], int]:
    return asyncio.run(write_prompts(count, writer, seed, directory, concurrency=concurrency))


@pytest.fixture
def tokenizer(byte_tokenizer: Callable[..., Any]) -> Any:
    return byte_tokenizer()


def test_prompts_differ_end_and_are_not_empty(tokenizer: Any, tmp_path: Path) -> None:
    writer = Writer(tokenizer, text_of)
    prompts, dropped = write(50, writer, tmp_path)
    texts = [p.turns[0] for p in prompts]
    assert len(prompts) == 50 and len({t.lower() for t in texts}) == 50
    assert all(t == t.strip() != "" and t != "unending" for t in texts)
    assert dropped == len(writer.seeds) - 50 > 5
    assert len({p.id for p in prompts}) == 50 and prompts[0].id.startswith("self-0-")
    assert len(set(writer.seeds)) == len(writer.seeds)


def test_the_same_prompts_come_whatever_the_concurrency_and_more_keep_the_first(tokenizer: Any, tmp_path: Path) -> None:
    few, _ = write(20, Writer(tokenizer, text_of), tmp_path / "a", concurrency=1)
    again = Writer(tokenizer, text_of)
    assert write(20, again, tmp_path / "a")[0] == few and again.seeds == []
    many, _ = write(40, Writer(tokenizer, text_of), tmp_path / "a", concurrency=7)
    assert many[:20] == few
    assert write(40, Writer(tokenizer, text_of), tmp_path / "b", concurrency=13)[0] == many
    other, _ = write(20, Writer(tokenizer, text_of), tmp_path / "c", seed=1)
    assert {p.turns for p in other} != {p.turns for p in few} and not {p.id for p in other} & {p.id for p in few}


def test_an_interrupted_run_ends_with_the_prompts_of_an_uninterrupted_one(tokenizer: Any, tmp_path: Path) -> None:
    whole, _ = write(40, Writer(tokenizer, text_of), tmp_path / "whole")
    broken = Writer(tokenizer, lambda seed: text_of(seed) if len(broken.seeds) < 17 else AnswererError("gone"))
    with pytest.raises(AnswererError, match="gone"):
        write(40, broken, tmp_path / "broken")
    path = tmp_path / "broken" / FILE
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3] + lines[4:]) + '{"sample": 39, "te')  # one is lost, one is torn
    rest = Writer(tokenizer, text_of)
    assert write(40, rest, tmp_path / "broken")[0] == whole
    samples = [json.loads(line)["sample"] for line in path.read_text().splitlines()]
    assert sorted(samples) == list(range(len(samples)))
    assert len(rest.seeds) == len(samples) - len(lines) + 1


def test_a_sample_that_failed_is_sampled_again(tokenizer: Any, tmp_path: Path) -> None:
    whole, _ = write(10, Writer(tokenizer, text_of), tmp_path / "whole")
    first: list[int] = []

    def sometimes(seed: int) -> str | Exception | None:
        if seed % 3 == 0 and seed not in first:
            first.append(seed)
            return ValueError("once")
        return text_of(seed)

    assert write(10, Writer(tokenizer, sometimes), tmp_path / "flaky")[0] == whole and first


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Always the same.", "only 1 came to an end"),
        (None, "only 0 came to an end"),
        ("", "only 0 came to an end"),
        (ValueError("broken"), "ValueError: broken"),
        (RowError("does not fit"), "cannot write prompts: does not fit"),
    ],
)
def test_a_base_that_cannot_write_so_many_is_an_error(
    tokenizer: Any, tmp_path: Path, text: str | Exception | None, message: str
) -> None:
    writer = Writer(tokenizer, lambda seed: text)
    with pytest.raises(AnswererError, match=message):
        write(10, writer, tmp_path)
    assert len(writer.seeds) <= MAX_ATTEMPTS * 20


def test_next_samples_fill_the_gaps_first() -> None:
    assert next_samples({}, 3) == [0, 1, 2]
    assert next_samples({0: "a", 3: None}, 5) == [1, 2]
    assert next_samples({0: "a", 1: None}, 2) == [2, 3]
