"""The base in this process as an answerer: batches through transformers' own `generate`.

Notable here: every row samples from a random stream of its own, seeded by the row. What a row says therefore depends
neither on which rows share its batch nor on the global random state, except where the arithmetic of a batch of another
shape tips a near-tie (in float32 rarely, in bfloat16 now and then).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from medusa_heads.base import Base
from train.answerers import Answer, Request, RowError, check_template


@dataclass(frozen=True, eq=False)
class _Waiting:
    request: Request
    answer: asyncio.Future[Answer]


class LocalAnswerer:
    """Requests that wait at the same time are answered together, up to `batch_size` of about the same length."""

    def __init__(self, base: Base, batch_size: int):
        check_template(base.tokenizer, base.name)
        self.tokenizer = base.tokenizer
        self._base = base
        self._batch_size = batch_size
        self._waiting: list[_Waiting] = []
        self._dispatcher: asyncio.Task[None] | None = None
        self._closing = threading.Event()

    async def complete(self, request: Request) -> Answer:
        need = len(request.prompt_ids) + request.max_new_tokens
        limit = self._base.max_positions
        if limit is not None and need > limit:
            raise RowError(
                f"{len(request.prompt_ids)} prompt tokens and {request.max_new_tokens} new ones "
                f"do not fit into the base's context of {limit}"
            )
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._dispatcher is None or self._dispatcher.done():
            self._dispatcher = asyncio.create_task(self._dispatch())
        return await waiting.answer

    async def _dispatch(self) -> None:
        """Answers batch after batch in a thread, until nobody waits."""
        while True:
            await asyncio.sleep(0)  # rows that were just answered put their next request in before a batch is formed
            self._waiting = [w for w in self._waiting if not w.answer.done()]
            if not self._waiting or self._closing.is_set():
                return
            batch = take_batch(self._waiting, self._batch_size)
            try:
                answers = await asyncio.to_thread(self._answer, [w.request for w in batch])
            except Exception as error:
                for waiting in batch:
                    if not waiting.answer.done():
                        waiting.answer.set_exception(error)
                continue
            for waiting, answer in zip(batch, answers, strict=True):
                if not waiting.answer.done():
                    waiting.answer.set_result(answer)

    def _answer(self, requests: Sequence[Request]) -> list[Answer]:
        rows = generate(self._base, requests, self._closing)
        return [read_answer(self._base, request, ids) for request, ids in zip(requests, rows, strict=True)]

    async def close(self) -> None:
        """Breaks off a batch that is being answered: it ends at its next token and is thrown away."""
        self._closing.set()
        if self._dispatcher is not None:
            await asyncio.gather(self._dispatcher, return_exceptions=True)


def take_batch(waiting: list[_Waiting], size: int) -> list[_Waiting]:
    """Takes from `waiting` the one that waits longest and those most like it in length, so that little is padding."""
    oldest = waiting[0].request
    alike = [w for w in waiting if (w.request.max_new_tokens, w.request.stop) == (oldest.max_new_tokens, oldest.stop)]
    alike.sort(key=lambda w: abs(len(w.request.prompt_ids) - len(oldest.prompt_ids)))
    batch = alike[:size]
    for taken in batch:
        waiting.remove(taken)
    return batch


def generate(base: Base, requests: Sequence[Request], closing: threading.Event | None = None) -> list[list[int]]:
    """New token ids of each request, up to and with the token that ends it.

    The requests share `max_new_tokens` and `stop`; prompts of different length are padded on the left and masked.
    """
    limit, stop = requests[0].max_new_tokens, requests[0].stop
    ends = sorted({*base.eos_token_ids, *stop.token_ids})
    pad = ends[0] if ends else 0
    width = max(len(r.prompt_ids) for r in requests)
    input_ids = torch.full((len(requests), width), pad, dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    for row, request in enumerate(requests):
        begin = width - len(request.prompt_ids)
        input_ids[row, begin:] = torch.tensor(request.prompt_ids)
        mask[row, begin:] = 1
    config = GenerationConfig(max_new_tokens=limit, do_sample=False, eos_token_id=ends or None, pad_token_id=pad)
    strings: dict[str, Any] = {"tokenizer": base.tokenizer, "stop_strings": list(stop.strings)} if stop.strings else {}
    with own_generation_config(base.model, config):
        out = base.model.generate(
            input_ids=input_ids.to(base.device),
            attention_mask=mask.to(base.device),
            logits_processor=LogitsProcessorList([RowSampler(requests, base.device)]),
            stopping_criteria=StoppingCriteriaList([Closing(closing or threading.Event())]),
            **strings,
        )
    return [cut_at_end(ids, ends) for ids in out[:, width:].tolist()]


def cut_at_end(ids: list[int], ends: Sequence[int]) -> list[int]:
    """`ids` up to and with the first of `ends`."""
    for index, token in enumerate(ids):
        if token in ends:
            return ids[: index + 1]
    return ids


def read_answer(base: Base, request: Request, ids: list[int]) -> Answer:
    """The text of the new tokens `ids`, without what ended it."""
    finished = bool(ids) and ids[-1] in (*base.eos_token_ids, *request.stop.token_ids)
    text = base.tokenizer.decode(ids[:-1] if finished else ids, skip_special_tokens=True)
    for string in request.stop.strings:
        before, found, _ = text.partition(string)
        text, finished = before, finished or bool(found)
    return Answer(text, len(ids), finished)


class RowSampler(LogitsProcessor):
    """Makes the argmax of a row a sample of softmax(logits ÷ temperature), from the row's own random stream.

    With E of law Exp(1) for every token, argmax(logits ÷ T - log E) has exactly that law (the Gumbel-max identity).
    Rows of temperature 0 stay as they are: greedy.
    """

    def __init__(self, requests: Sequence[Request], device: torch.device):
        self.temperatures = [r.temperature for r in requests]
        self.generators = [torch.Generator(device).manual_seed(r.seed) for r in requests]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores: (B, V) float32 → (B, V)."""
        drawn = scores.clone()
        for row, (temperature, generator) in enumerate(zip(self.temperatures, self.generators, strict=True)):
            if temperature > 0:
                noise = torch.empty_like(scores[row]).exponential_(generator=generator)
                noise.clamp_min_(torch.finfo(noise.dtype).tiny)
                drawn[row] = scores[row] / temperature - noise.log()
        return drawn


class Closing(StoppingCriteria):
    """Ends all rows once the event is set."""

    def __init__(self, event: threading.Event):
        self.event = event

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), self.event.is_set(), device=input_ids.device)


@contextmanager
def own_generation_config(model: Any, config: GenerationConfig) -> Iterator[None]:
    """`config` in the place of the model's own, whose penalties and filters `generate` would mix in otherwise."""
    before = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = before
