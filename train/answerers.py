"""Who answers the prompts: a server that serves the base, or the base in this process (`train.local`).

Both continue token ids that were rendered here through the base's own chat template, so that data are made in exactly
the form in which the heads will later be used.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from medusa_heads.chat import Message, render_chat
from medusa_heads.errors import BaseLoadError, ConfigError, UserError


@dataclass(frozen=True)
class Stop:
    """What ends an answer besides the base's own end-of-sequence ids. It is not part of the answer's text."""

    token_ids: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """Token ids to continue, and how: temperature 0 is greedy, otherwise softmax(logits ÷ temperature) unfiltered."""

    prompt_ids: tuple[int, ...]
    temperature: float
    max_new_tokens: int
    seed: int
    stop: Stop = Stop()


@dataclass(frozen=True)
class Answer:
    """What the base said. `tokens` counts the end-of-sequence token; `finished` is False where the limit cut it."""

    text: str
    tokens: int
    finished: bool


class AnswererError(UserError):
    """The answerer cannot be used, or has stopped working: going on would fail for every row."""


class RowError(Exception):
    """This row cannot be answered, whatever the state of the answerer: its prompt is too long, or not allowed."""


class Answerer(Protocol):
    """`complete` may be awaited many times at once. It raises `RowError` or `AnswererError` as they say; any other
    exception is one failed attempt."""

    tokenizer: Any

    async def complete(self, request: Request) -> Answer: ...

    async def close(self) -> None: ...


def request_seed(seed: int, identity: str, turn: int) -> int:
    """A seed that depends on the row alone, not on the order in which rows happen to be answered."""
    return zlib.crc32(f"{seed}:{identity}:{turn}".encode())


def render(tokenizer: Any, messages: Sequence[Message]) -> tuple[int, ...]:
    """Token ids of a conversation up to where the assistant is to speak.

    Raises:
        RowError: the template refuses these messages (a system turn where it knows none, for example).
    """
    from jinja2 import TemplateError

    try:
        return tuple(render_chat(tokenizer, messages))
    except TemplateError as error:
        raise RowError(f"the chat template refuses the conversation: {error}") from error


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a base, with its chat template, without the base's weights.

    Args:
        name: as for `Base.load`: an embedded name, a local directory, a Hub id or the path of a `.gguf` file.
    """
    from transformers import AutoTokenizer

    from medusa_heads.embedded import EMBEDDED, resolve_embedded

    path = Path(name)
    source, options = name, {}
    if name in EMBEDDED:
        source = str(resolve_embedded(name))
    elif path.suffix == ".gguf":
        source, options = str(path.parent), {"gguf_file": path.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except (OSError, ValueError) as error:
        raise BaseLoadError(f"cannot load the tokenizer of {name!r}: {first_line(error)}") from error
    check_template(tokenizer, name)
    return tokenizer


def check_template(tokenizer: Any, name: str) -> None:
    """Raises `ConfigError` for a base that is not a chat model: without a template there is no way to ask it."""
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(f"the tokenizer of {name!r} has no chat template, so the base cannot be asked anything")


def first_line(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class ServerAnswerer:
    """An OpenAI-compatible completions endpoint (vLLM, SGLang) that serves the same base.

    The prompt travels as token ids: the server's own template, and whether it would add a BOS, make no difference.
    The sampling law is sent in full, since servers otherwise take what is missing from the model's generation config.
    Failures that may pass (no connection, time-out, 408, 409, 429, 5xx) are retried by the client with exponential
    back-off. No seed is sent: the server forms its batches from what happens to arrive, so a seed would not reproduce
    a sample, and not every server accepts one.

    Args:
        base_url: with the version path, `http://127.0.0.1:8000/v1`.
        model: the name under which the base is served; None for the only one there is (`check` finds it).
        tokenizer: the base's.
        timeout_s: for one attempt, waiting in the server's queue included.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None,
        tokenizer: Any,
        api_key: str = "none",
        retries: int = 6,
        timeout_s: float = 600.0,
    ):
        try:
            import openai
        except ImportError:
            raise AnswererError("answers from a server need an extra: pip install 'medusa-heads[server]'") from None
        self.base_url = base_url
        self.model = model
        self.tokenizer = tokenizer
        self._client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=retries, timeout=timeout_s)

    async def check(self) -> None:
        """Raises `AnswererError` unless the server answers and serves `model`."""
        client = self._client.with_options(max_retries=1, timeout=30.0)
        try:
            served = [str(model.id) async for model in client.models.list()]
        except Exception as error:  # openai's own errors, and whatever its parser meets in a foreign reply
            raise AnswererError(
                f"no OpenAI-compatible server answers at {self.base_url} ({first_line(error)})"
            ) from error
        if self.model is None and len(served) == 1:
            self.model = served[0]
        elif self.model not in served:
            wanted = "name one with --server-model" if self.model is None else f"not {self.model!r}"
            raise AnswererError(f"the server at {self.base_url} serves {', '.join(served) or 'nothing'}: {wanted}")

    async def complete(self, request: Request) -> Answer:
        import openai

        law: dict[str, Any] = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        if request.stop.token_ids:
            law["stop_token_ids"] = list(request.stop.token_ids)
        if request.stop.strings:
            law["stop"] = list(request.stop.strings)
        try:
            completion = await self._client.completions.create(
                model=self.model or "",
                prompt=list(request.prompt_ids),
                temperature=request.temperature,
                top_p=1.0,
                max_tokens=request.max_new_tokens,
                extra_body=law,
            )
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            raise RowError(f"the server refuses the request: {first_line(error)}") from error
        except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
            raise AnswererError(f"the server at {self.base_url} refuses: {first_line(error)}") from error
        return read_completion(completion)

    async def close(self) -> None:
        await self._client.close()


def read_completion(completion: Any) -> Answer:
    """The answer in a server's reply. Raises `ValueError` for one that is no completion, or was broken off."""
    try:
        choice = completion.choices[0]
        text, reason, tokens = choice.text, choice.finish_reason, completion.usage.completion_tokens
    except (AttributeError, IndexError, TypeError):
        raise ValueError(f"the server's reply is not a completion: {str(completion)[:200]!r}") from None
    if reason not in ("stop", "length"):
        raise ValueError(f"the server broke the answer off: finish_reason {reason!r}")
    if not isinstance(text, str) or not isinstance(tokens, int):
        raise ValueError(f"the server's reply has no text or no token count: {str(completion)[:200]!r}")
    return Answer(text, tokens, reason == "stop")
