"""Who answers the prompts: the base in this process, or a server that serves the same base.

Both speak through the base's own chat template, rendered here (`render`), so that data are made in exactly the
form in which the heads will later be used.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, str]


@dataclass(frozen=True)
class Answer:
    """One answer of the base. `finished` is False where `max_new_tokens` cut it."""

    text: str
    tokens: int
    finished: bool


@dataclass(frozen=True)
class Request:
    """What to answer: the conversation so far, ending in a user turn, and how to sample."""

    messages: tuple[Message, ...]
    temperature: float
    max_new_tokens: int
    seed: int


def request_seed(seed: int, identity: str, turn: int) -> int:
    """A seed that depends on the row alone, not on the order in which rows happen to be answered."""
    return zlib.crc32(f"{seed}:{identity}:{turn}".encode())


def render(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation that ends where the assistant is to speak."""
    encoded = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return list(encoded["input_ids"])


class AnswererError(RuntimeError):
    """The server cannot be used at all: no retry helps."""


class Answerer(Protocol):
    async def answer(self, request: Request) -> Answer: ...

    async def close(self) -> None: ...


@dataclass
class ServerAnswerer:
    """An OpenAI-compatible completions endpoint (vLLM, SGLang) that serves the same base.

    The prompt travels as token ids of the base's own template: the server's template, and whether it adds a BOS
    of its own, cannot make a difference. Failures that may pass (connection, 408, 409, 429, 5xx) are retried by
    the client with exponential back-off. No seed is sent: a server batches requests as they come, so a seed does
    not reproduce its samples, and the CPU build of vLLM 0.32 stops at seeded requests.
    """

    base_url: str
    model: str
    tokenizer: Any
    api_key: str = "none"
    retries: int = 6
    timeout_s: float = 600.0
    _client: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            import openai
        except ImportError:
            raise AnswererError("answering by a server needs the extra: pip install 'medusa-heads[server]'") from None
        self._client = openai.AsyncOpenAI(
            base_url=self.base_url, api_key=self.api_key, max_retries=self.retries, timeout=self.timeout_s
        )

    async def check(self) -> None:
        """Raises unless the server answers and serves `model`."""
        import openai

        try:
            served = [m.id async for m in self._client.models.list()]
        except openai.OpenAIError as error:
            raise AnswererError(f"no OpenAI-compatible server answers at {self.base_url}: {error}") from None
        if self.model not in served:
            raise AnswererError(f"the server at {self.base_url} serves {served}, not {self.model!r}")

    async def answer(self, request: Request) -> Answer:
        completion = await self._client.completions.create(
            model=self.model,
            prompt=render(self.tokenizer, request.messages),
            temperature=request.temperature,
            max_tokens=request.max_new_tokens,
        )
        choice = completion.choices[0]
        if choice.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"the server ended with finish_reason {choice.finish_reason!r}")
        return Answer(choice.text, completion.usage.completion_tokens, choice.finish_reason == "stop")

    async def close(self) -> None:
        await self._client.close()


Generate = Callable[[list[list[int]], float, int, int], list[list[int]]]


class LocalAnswerer:
    """The base in this process. Requests that wait at the same time are answered in one batch.

    `generate(prompts, temperature, max_new_tokens, seed)` returns the new token ids of each prompt, up to and
    with the end-of-sequence token where one was reached.
    """

    def __init__(self, generate: Generate, tokenizer: Any, eos_token_ids: Sequence[int], batch_size: int):
        self._generate = generate
        self._tokenizer = tokenizer
        self._eos = set(eos_token_ids)
        self._batch_size = batch_size
        self._waiting: list[tuple[Request, list[int], asyncio.Future[Answer]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def answer(self, request: Request) -> Answer:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, render(self._tokenizer, request.messages), future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)  # lets every row that is ready put its request in before a batch is cut
            batch = self._next_batch()
            try:
                answers = await asyncio.to_thread(self._answer_batch, [(r, ids) for r, ids, _ in batch])
            except Exception as error:
                for _, _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, _, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)

    def _next_batch(self) -> list[tuple[Request, list[int], asyncio.Future[Answer]]]:
        """Requests of one temperature and limit, of like length so that little is padding."""
        first = self._waiting[0][0]
        alike = [w for w in self._waiting if _batch_key(w[0]) == _batch_key(first)]
        alike.sort(key=lambda w: len(w[1]))
        batch = alike[: self._batch_size]
        for entry in batch:
            self._waiting.remove(entry)
        return batch

    def _answer_batch(self, batch: list[tuple[Request, list[int]]]) -> list[Answer]:
        request = batch[0][0]
        rows = self._generate(
            [ids for _, ids in batch], request.temperature, request.max_new_tokens, batch[0][0].seed
        )
        answers = []
        for ids in rows:
            finished = bool(ids) and ids[-1] in self._eos
            kept = ids[:-1] if finished else ids
            answers.append(Answer(self._tokenizer.decode(kept, skip_special_tokens=True), len(ids), finished))
        return answers

    async def close(self) -> None:
        if self._worker is not None:
            await self._worker


def _batch_key(request: Request) -> tuple[float, int]:
    return request.temperature, request.max_new_tokens


Factory = Callable[[], Awaitable[Answerer]]
