"""Ways of answering a prompt, each behind one call: ids in, new ids and counts out.

`plain` and heads run in this project's engine on a base with packed linears. `generate` and `prompt_lookup` are
transformers' own `model.generate` on a model as `from_pretrained` gives it: what a user has without this project.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from decode.engine import Decoder
from decode.sampling import SamplingParams
from decode.settings import GenerationSettings
from medusa_heads.attention import FOLDED
from medusa_heads.base import Base

PROMPT_LOOKUP_TOKENS = 10


def untouched_base(name: str, dtype: str, device: str | None) -> Base:
    """A base whose model is as `from_pretrained` gives it: nothing packed, attention by transformers' own choice."""
    base = Base.load(name, dtype=dtype, device=device, prepack=False)
    if base.config._attn_implementation == FOLDED:
        base.model.set_attn_implementation("sdpa")
    return base


@dataclass(frozen=True)
class Answer:
    """New tokens, the EOS token that ended them included, and how they came."""

    token_ids: list[int]
    forwards: int | None
    """Forward passes of the base, the prompt's among them; None where a method does not say."""
    histogram: list[int] = field(default_factory=list)
    """[n] = rounds that kept n drafted tokens; empty where a method does not say."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds by stage of the engine."""


@dataclass(frozen=True)
class Request:
    """What every method is asked."""

    prompt_ids: Sequence[int]
    max_new_tokens: int
    temperature: float
    seed: int


Method = Callable[[Request], Answer]


Asked = TypeVar("Asked")
Given = TypeVar("Given")


def timed(method: Callable[[Asked], Given], request: Asked, device: torch.device) -> tuple[Given, float]:
    """The answer and the wall time of the whole call, reading the prompt included: the one clock for all methods."""
    _finish(device)
    begin = time.perf_counter()
    answer = method(request)
    _finish(device)
    return answer, time.perf_counter() - begin


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def engine_method(decoder: Decoder) -> Method:
    """This project's engine, plain or with a drafter."""

    def answer(request: Request) -> Answer:
        settings = GenerationSettings(
            max_new_tokens=request.max_new_tokens,
            sampling=SamplingParams(temperature=request.temperature),
            seed=request.seed,
        )
        result = decoder.generate(request.prompt_ids, settings)
        stats = result.stats
        return Answer(result.token_ids, stats.base_forwards, stats.acceptance_histogram, stats.stage_seconds)

    return answer


def generate_method(base: Base, prompt_lookup: bool = False) -> Method:
    """transformers' `generate` on the model of `base`, which must not be packed; with prompt lookup it drafts from the
    text so far."""
    model: Any = base.model
    extra: dict[str, Any] = {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS} if prompt_lookup else {}
    eos = list(base.eos_token_ids)

    def answer(request: Request) -> Answer:
        sampled = request.temperature > 0.0
        options: dict[str, Any] = {"temperature": request.temperature, "top_k": 0, "top_p": 1.0} if sampled else {}
        if eos:
            options |= {"eos_token_id": eos, "pad_token_id": eos[0]}
        ids = torch.tensor([list(request.prompt_ids)], device=base.device)
        torch.manual_seed(request.seed)
        with _CountedForwards(model) as counted, torch.no_grad():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request.max_new_tokens,
                do_sample=sampled,
                **options,
                **extra,
            )
        return Answer(output[0, ids.shape[1] :].tolist(), counted.count)

    return answer


class _CountedForwards:
    """Counts a model's forward passes, through a hook that is removed at the end."""

    def __init__(self, model: Any):
        self.model = model
        self.count = 0

    def __enter__(self) -> _CountedForwards:
        self.handle = self.model.register_forward_pre_hook(self._step)
        return self

    def _step(self, *_: Any) -> None:
        self.count += 1

    def __exit__(self, *_: Any) -> None:
        self.handle.remove()
