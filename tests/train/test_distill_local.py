"""Answers from the base in this process: batches that change nothing, samples that follow their row's seed."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from medusa_heads.base import Base
from medusa_heads.errors import ConfigError
from train import local
from train.answerers import Answer, Request, RowError, Stop, render
from train.distill_cli import app
from train.local import LocalAnswerer, RowSampler, generate
from train.shards import read_rows

ENDS = [257, *range(20, 30)]
"""Ends of sequence: so many that a random model meets one now and then."""


@pytest.fixture(scope="module")
def base(byte_tokenizer: Callable[..., Any]) -> Base:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3, eos_token_id=ENDS,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=ENDS)
    return Base.from_model(model, byte_tokenizer(), name="tiny")


def some_requests(count: int, temperature: float, new: int = 20) -> list[Request]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
    prompts = [tuple(torch.randint(30, 256, (n,), generator=generator).tolist()) for n in lengths]
    return [Request(ids, temperature, new, seed) for seed, ids in enumerate(prompts)]


def step_by_step(base: Base, request: Request) -> list[int]:
    """Greedy decoding without a batch, a cache or `generate`."""
    ids = list(request.prompt_ids)
    while len(ids) < len(request.prompt_ids) + request.max_new_tokens:
        with torch.no_grad():
            ids.append(int(base.model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in ENDS:
            break
    return ids[len(request.prompt_ids) :]


def test_a_padded_batch_says_what_each_row_says_alone(base: Base) -> None:
    requests = some_requests(12, 0.0)
    rows = generate(base, requests)
    assert rows == [step_by_step(base, request) for request in requests]
    ended = [row[-1] in ENDS for row in rows]
    assert any(ended) and not all(ended)
    assert all(len(row) == 20 for row, end in zip(rows, ended, strict=True) if not end)


def test_a_sample_depends_on_its_seed_alone(base: Base) -> None:
    requests = some_requests(12, 1.0)
    state = torch.get_rng_state()
    together = generate(base, requests)
    assert torch.equal(torch.get_rng_state(), state), "the global random state was used"
    torch.manual_seed(99)
    assert [generate(base, [request])[0] for request in requests] == together
    assert generate(base, requests[::-1]) == together[::-1]
    again = [Request(r.prompt_ids, r.temperature, r.max_new_tokens, r.seed + 100) for r in requests]
    assert sum(a != b for a, b in zip(generate(base, again), together, strict=True)) > 8


def test_rows_of_every_temperature_share_a_batch(base: Base) -> None:
    greedy, warm = some_requests(6, 0.0), some_requests(6, 0.8)
    mixed = generate(base, [r for pair in zip(greedy, warm, strict=True) for r in pair])
    assert mixed[::2] == generate(base, greedy) and mixed[1::2] == generate(base, warm)
    assert mixed[::2] != mixed[1::2]


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_law_of_a_sample_is_the_softmax_at_its_temperature(temperature: float) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -torch.inf]])
    sampler = RowSampler([Request((1,), temperature, 1, 7)], torch.device("cpu"))
    draws = 20_000
    counts = torch.zeros(5)
    for _ in range(draws):
        counts[sampler(torch.zeros(1, 1), logits).argmax()] += 1
    law = (logits[0] / temperature).softmax(-1)
    spread = (law * (1 - law) / draws).sqrt()
    assert counts[4] == 0
    assert ((counts / draws - law).abs() <= 4.5 * spread).all(), (counts / draws, law)


def test_penalties_and_filters_of_the_models_own_config_stay_out(base: Base) -> None:
    requests = some_requests(4, 0.0)
    plain = generate(base, requests)
    before = base.model.generation_config
    own = GenerationConfig(
        eos_token_id=ENDS, repetition_penalty=9.0, suppress_tokens=plain[0][:1], no_repeat_ngram_size=1,
        do_sample=True, top_k=1, num_beams=3,
    )  # fmt: skip
    base.model.generation_config = own
    try:
        assert generate(base, requests) == plain
        assert base.model.generation_config is own
        with pytest.raises(Exception, match=r".+"):
            generate(base, [Request((10**6,), 0.0, 4, 0)])
        assert base.model.generation_config is own
    finally:
        base.model.generation_config = before


def answer_all(answerer: LocalAnswerer, requests: list[Request]) -> list[Any]:
    async def main() -> list[Any]:
        try:
            return await asyncio.gather(*map(answerer.complete, requests), return_exceptions=True)
        finally:
            await answerer.close()

    return asyncio.run(main())


def test_what_waits_is_answered_in_full_batches_of_like_length(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[list[int]] = []

    def watched(base: Base, requests: list[Request], closing: Any) -> list[list[int]]:
        batches.append(sorted(len(r.prompt_ids) for r in requests))
        return generate(base, requests, closing)

    monkeypatch.setattr(local, "generate", watched)
    requests = some_requests(22, 0.6)
    answers = answer_all(LocalAnswerer(base, 8), requests)
    assert [len(batch) for batch in batches] == [8, 8, 6]
    lengths = sorted(len(r.prompt_ids) for r in requests)
    assert batches[0][-1] - batches[0][0] < (lengths[-1] - lengths[0]) / 2
    for answer, ids in zip(answers, generate(base, requests), strict=True):
        finished = ids[-1] in ENDS
        text = base.tokenizer.decode(ids[:-1] if finished else ids, skip_special_tokens=True)
        assert answer == Answer(text, len(ids), finished)


def test_a_row_that_does_not_fit_fails_alone(base: Base) -> None:
    fits, long = Request((40,) * 108, 0.0, 20, 0), Request((40,) * 109, 0.0, 20, 0)
    answers = answer_all(LocalAnswerer(base, 8), [long, fits])
    assert isinstance(answers[0], RowError) and "109 prompt tokens and 20 new" in str(answers[0])
    assert isinstance(answers[1], Answer)


def test_an_error_in_a_batch_reaches_its_rows_and_the_next_batch_is_answered(
    base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def out_of_memory_once(*arguments: Any) -> list[list[int]]:
        calls.append(arguments)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("tried to allocate")
        return generate(*arguments)

    monkeypatch.setattr(local, "generate", out_of_memory_once)
    answers = answer_all(LocalAnswerer(base, 3), some_requests(6, 0.0))
    assert sum(isinstance(a, torch.OutOfMemoryError) for a in answers) == 3
    assert sum(isinstance(a, Answer) for a in answers) == 3


def test_closing_breaks_off_the_batch_that_is_running(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = Base.from_model(base.model, base.tokenizer, name="tiny")
    endless.__dict__["eos_token_ids"] = ()
    monkeypatch.setattr(endless.config, "max_position_embeddings", 10**6)
    begun = threading.Event()
    made: list[int] = []

    class Sampler(RowSampler):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            begun.set()
            return super().__call__(input_ids, scores)

    def watched(*arguments: Any) -> list[list[int]]:
        rows = generate(*arguments)
        made.extend(map(len, rows))
        return rows

    monkeypatch.setattr(local, "RowSampler", Sampler)
    monkeypatch.setattr(local, "generate", watched)

    async def main() -> None:
        answerer = LocalAnswerer(endless, 4)
        task = asyncio.create_task(answerer.complete(Request((40,), 1.0, 100_000, 0)))
        await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        await answerer.close()

    asyncio.run(main())
    assert len(made) == 1 and 1 <= made[0] < 100_000


def answer_with_a_letter_inside(base: Base) -> tuple[Request, list[int], int]:
    """A request, the ids of its answer, and where in it an ASCII character comes for the first time, not at an end."""
    requests = some_requests(40, 0.0)
    for request, ids in zip(requests, generate(base, requests), strict=True):
        for where in range(2, len(ids) - 2):
            if base.tokenizer.decode(ids[where]).isalnum() and ids[where] not in ids[:where]:
                return request, ids, where
    raise AssertionError("no answer of this base has an ASCII character inside")


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(base: Base) -> None:
    request, ids, where = answer_with_a_letter_inside(base)
    stop = Stop(strings=(base.tokenizer.decode(ids[where]),))
    (answer,) = answer_all(LocalAnswerer(base, 1), [Request(request.prompt_ids, 0.0, 20, 0, stop)])
    assert (answer.text, answer.finished) == (base.tokenizer.decode(ids[:where]), True)
    assert answer.tokens < len(ids)


def test_a_stop_id_ends_the_answer_and_is_not_part_of_it(base: Base) -> None:
    request, ids, where = answer_with_a_letter_inside(base)
    stop = Stop(token_ids=(ids[where],))
    (answer,) = answer_all(LocalAnswerer(base, 1), [Request(request.prompt_ids, 0.0, 20, 0, stop)])
    assert answer == Answer(base.tokenizer.decode(ids[:where]), where + 1, True)


def test_a_conversation_is_rendered_as_the_decoder_renders_it(base: Base) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "é"}]
    assert list(render(base.tokenizer, messages)) == base.render_chat(messages)


def test_what_a_template_refuses_is_a_failed_row(byte_tokenizer: Callable[..., Any]) -> None:
    tokenizer = byte_tokenizer("{{ raise_exception('System role not supported') }}")
    with pytest.raises(RowError, match="System role not supported"):
        render(tokenizer, [{"role": "system", "content": "s"}])


def test_a_base_without_a_template_is_refused(base: Base, byte_tokenizer: Callable[..., Any]) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="'tiny' has no chat template"):
        LocalAnswerer(Base.from_model(base.model, tokenizer, name="tiny"), 4)


@pytest.fixture
def saved(base: Base, tmp_path: Path) -> Path:
    base.model.save_pretrained(tmp_path / "base")
    base.tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def distil(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_the_command_gives_the_same_rows_at_every_batch_size(saved: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": i, "turns": ["x" * (i + 1)]}) + "\n" for i in range(9)))
    options = ["--base", saved, "--prompts", prompts, "--max-new-tokens", 16, "--dtype", "float32"]
    options += ["--temperature", 0, "--temperature", 0.9]
    results = []
    for size in (2, 9):
        out = tmp_path / str(size)
        result = distil(*options, "--out", out, "--batch-size", size)
        assert result.exit_code == 0, result.output
        results.append({row["id"]: row for row in read_rows(out)})
    assert results[0] == results[1] and len(results[0]) == 9
    assert {row["temperature"] for row in results[0].values()} == {0.0, 0.9}
    assert {row["finished"] for row in results[0].values()} == {True, False}


def test_the_command_makes_data_from_the_base_alone(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = json.loads((saved / "config.json").read_text()) | {"max_position_embeddings": 1024}
    (saved / "config.json").write_text(json.dumps(config))
    options = ["--base", saved, "--out", out, "--max-new-tokens", 16, "--dtype", "float32", "--batch-size", 8]
    result = distil(*options, "--self-prompts", 6)
    assert result.exit_code == 0, result.output
    first = list(read_rows(out))
    assert len(first) == 6 and {row["source"] for row in first} == {"self"}
    assert all(row["messages"][0]["role"] == "user" and row["messages"][0]["content"].strip() for row in first)
    assert distil(*options, "--self-prompts", 9).exit_code == 0
    rows = list(read_rows(out))
    assert rows[:6] == first and len({row["id"] for row in rows}) == 9
