"""A prefix kept between calls, with a drafter whose session has state of its own: turns, failures, calls left early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from decode.certify import plain_greedy
from decode.drafters.medusa import MedusaDrafter
from decode.engine import Decoder
from decode.prefix import Prefix
from decode.sampling import SamplingParams
from decode.settings import GenerationSettings
from decode.tree import Tree
from medusa_heads.base import Base
from medusa_heads.errors import ConfigError
from medusa_heads.medusa import MedusaHeads
from tests.conftest import tiny_base
from tests.decode.oracle import Oracle, OracleSession

PROMPT, NEXT = [5, 17, 40, 8, 61, 33, 12, 70, 21], [9, 10, 11, 50]
SETTINGS = GenerationSettings(max_new_tokens=16)


@pytest.fixture
def base() -> Base:
    base = tiny_base()
    base.eos_token_ids = ()
    return base


def greedy(base: Base, prompt: list[int]) -> list[int]:
    return plain_greedy(base, prompt, 16)[0]


@pytest.fixture
def turns(base: Base) -> tuple[list[int], list[int], list[int]]:
    """The first answer, the second prompt, the second answer."""
    first = greedy(base, PROMPT)
    second = PROMPT + first + NEXT
    return first, second, greedy(base, second)


@pytest.fixture
def decoder(base: Base, turns: tuple[list[int], list[int], list[int]]) -> Decoder:
    first, second, answer = turns
    return Decoder(base, Oracle([PROMPT + first, second + answer]))


def seen(prefix: Prefix) -> list[int]:
    return cast(OracleSession, prefix.session).seen[0]


def accepted(result: Any) -> int:
    return sum(n * rounds for n, rounds in enumerate(result.stats.acceptance_histogram))


def test_the_second_turn_reads_its_own_tokens_alone(
    base: Base, decoder: Decoder, turns: tuple[list[int], list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, answer = turns
    prefix = Prefix()
    assert decoder.generate(PROMPT, SETTINGS, prefix=prefix).token_ids == first
    assert prefix.ids == seen(prefix) == (PROMPT + first)[: len(prefix.ids or ())]
    read: list[int] = []
    forward = base.forward

    def watched(ids: torch.Tensor, **options: Any) -> Any:
        read.append(ids.shape[1])
        return forward(ids, **options)

    monkeypatch.setattr(base, "forward", watched)
    kept = len(prefix.ids or ())
    result = decoder.generate(second, SETTINGS, prefix=prefix)
    assert result.token_ids == answer
    assert result.stats.reused_tokens == kept >= len(PROMPT) + len(first) - 1
    assert read[0] == len(second) - kept
    assert accepted(result) >= 8, "the session knows where the text is"
    assert prefix.ids == seen(prefix)
    third = decoder.generate(PROMPT[:4] + NEXT, SETTINGS, prefix=prefix)
    assert third.stats.reused_tokens == 4 and third.token_ids == greedy(base, PROMPT[:4] + NEXT)


def broken_forward(base: Base, decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, calls = base.forward, iter(range(99))

    def failing(ids: torch.Tensor, **options: Any) -> Any:
        output = forward(ids, **options)  # its keys are in the cache already
        if next(calls) == 2:
            raise RuntimeError("out of memory")
        return output

    monkeypatch.setattr(base, "forward", failing)


def broken_draft(base: Base, decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    draft, calls = OracleSession.draft, iter(range(99))

    def failing(self: OracleSession, *given: Any) -> Any:
        if next(calls) == 2:
            self.seen[0] += [1, 2, 3]  # left in disorder
            raise RuntimeError("out of memory")
        return draft(self, *given)

    monkeypatch.setattr(OracleSession, "draft", failing)


@pytest.mark.parametrize(
    ("fault", "whole"), [(broken_forward, True), (broken_draft, False)], ids=["in the base", "in the drafter"]
)
def test_after_a_failed_call_nothing_wrong_is_kept(
    fault: Callable[..., None],
    whole: bool,
    base: Base,
    decoder: Decoder,
    turns: tuple[list[int], list[int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was committed before the fault is kept where the session was not at work; else all is read again."""
    first, second, answer = turns
    prefix = Prefix()
    with monkeypatch.context() as patch:
        fault(base, decoder, patch)
        with pytest.raises(RuntimeError, match="out of memory"):
            decoder.generate(PROMPT, SETTINGS, prefix=prefix)
    text = PROMPT + first
    if whole:
        assert prefix.ids == seen(prefix) == text[: len(prefix.ids or ())] and len(prefix.ids or ()) > len(PROMPT)
    else:
        assert prefix.ids is None
    kept = len(prefix.ids or ())
    result = decoder.generate(second, SETTINGS, prefix=prefix)
    assert result.token_ids == answer and result.stats.reused_tokens == kept
    assert accepted(result) >= 8 and prefix.ids == seen(prefix)


def test_a_call_left_early_leaves_what_it_had_read(
    decoder: Decoder, turns: tuple[list[int], list[int], list[int]]
) -> None:
    _, second, answer = turns
    prefix = Prefix()
    stream = decoder.stream(PROMPT, SETTINGS, prefix=prefix)
    said = [*next(stream).token_ids, *next(stream).token_ids]
    stream.close()
    assert prefix.ids == seen(prefix) == PROMPT + said[:-1]
    result = decoder.generate(second, SETTINGS, prefix=prefix)
    assert result.token_ids == answer and result.stats.reused_tokens == len(PROMPT) + len(said) - 1


def test_another_drafter_begins_anew(
    base: Base, decoder: Decoder, turns: tuple[list[int], list[int], list[int]]
) -> None:
    _, second, answer = turns
    prefix = Prefix()
    decoder.generate(PROMPT, SETTINGS, prefix=prefix)
    for other in (Decoder(base), Decoder(base, Oracle([second + answer]))):
        result = other.generate(second, SETTINGS, prefix=prefix)
        assert result.token_ids == answer and result.stats.reused_tokens == 0


def test_a_prefix_serves_one_prompt(decoder: Decoder) -> None:
    with pytest.raises(ConfigError, match="one prompt at a time, not 2"):
        list(decoder.stream_batch([PROMPT, NEXT], SETTINGS, prefix=Prefix()))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_heads_draft_by_each_calls_own_settings(base: Base, temperature: float) -> None:
    """Greedy and drawn turns in one prefix: temperature and seed are the new call's."""
    heads = MedusaHeads.for_base(base, 2, 1)
    torch.manual_seed(0)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    decoder = Decoder(base, MedusaDrafter(heads, base, Tree.from_rank_paths([(0,), (1,), (0, 0)])))
    prefix = Prefix()
    for seed, heat in ((1, 1.0 - temperature), (2, temperature), (3, temperature)):
        settings = GenerationSettings(max_new_tokens=12, seed=seed, sampling=SamplingParams(temperature=heat))
        kept = decoder.generate(PROMPT, settings, prefix=prefix)
        assert kept.token_ids == decoder.generate(PROMPT, settings).token_ids
    assert kept.stats.reused_tokens == len(PROMPT) - 1


def test_a_prefix_of_another_base_is_not_read(base: Base) -> None:
    other, prefix = tiny_base(seed=1), Prefix()
    other.eos_token_ids = ()
    assert greedy(other, PROMPT) != greedy(base, PROMPT)
    for now in (base, other, base):
        kept = Decoder(now).generate(PROMPT, SETTINGS, prefix=prefix)
        assert kept.token_ids == greedy(now, PROMPT) and kept.stats.reused_tokens == 0
    assert Decoder(base).generate(PROMPT, SETTINGS, prefix=prefix).stats.reused_tokens == len(PROMPT) - 1
