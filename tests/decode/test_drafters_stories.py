"""Drafters on a real model at test size: the base's own text, its law when sampling, another tokenizer included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from decode.drafters.adaptive import Reach
from decode.drafters.combined import CombinedDrafter
from decode.drafters.crossmodel import SharedDrafter, TextDrafter, drafter_for
from decode.drafters.early_exit import EarlyExitDrafter
from decode.drafters.lookup import LookupDrafter
from decode.engine import Decoder
from decode.sampling import SamplingParams
from decode.settings import GenerationSettings
from medusa_heads.base import Base
from tests.decode.drafters import greedy_by_hand
from tests.decode.stories import WEIGHTS, respelled, stories
from tests.decode.test_sampling_law import LEVEL, p_values

pytestmark = pytest.mark.skipif(
    not WEIGHTS.is_file(), reason="no stories260K.bin in ../shared/data/fixtures, nor where STORIES260K says"
)

REACH = Reach(depth=4, pass_cost=0.0)
BUSHY = Reach(depth=3, width=3, nodes=8, pass_cost=0.0)
WAYS: dict[str, Callable[[Base], Any]] = {
    "shared": lambda base: SharedDrafter(respelled(), base, reach=REACH),
    "shared, tree": lambda base: SharedDrafter(respelled(), base, reach=BUSHY),
    "text": lambda base: TextDrafter(respelled(), base, reach=BUSHY),
    "exit": lambda base: EarlyExitDrafter(base, 4, reach=REACH),
    "text+lookup": lambda base: CombinedDrafter(
        [TextDrafter(respelled(), base, reach=REACH), LookupDrafter(base)], base.device
    ),
}


@pytest.fixture(scope="module")
def base() -> Base:
    return stories()


def opening(base: Base, text: str = "Once upon a time, there was a little girl") -> list[int]:
    return [1, *base.tokenizer.encode(text, add_special_tokens=False)]


def test_the_model_tells_a_story(base: Base) -> None:
    prompt = opening(base)
    told = base.tokenizer.decode([*prompt, *greedy_by_hand(base, prompt, 30)], skip_special_tokens=True)
    assert told.startswith("Once upon a time, there was a little girl named") and "\ufffd" not in told


@pytest.mark.parametrize("name", WAYS)
def test_greedy_text_is_the_bases_own_and_drafts_are_kept(base: Base, name: str) -> None:
    drafter = WAYS[name](base)
    prompt = opening(base)
    result = Decoder(base, drafter, guard=None).generate(prompt, GenerationSettings(80, eos_token_ids=()))
    assert result.token_ids == greedy_by_hand(base, prompt, 80)
    assert result.stats.tau > 1.3, result.stats.acceptance_histogram


def test_what_another_tokenizer_costs_is_reported(base: Base) -> None:
    draft = respelled()
    chosen = drafter_for(draft, base, reach=REACH)
    assert isinstance(chosen, SharedDrafter)
    for drafter in (chosen, TextDrafter(draft, base, reach=REACH)):
        Decoder(base, drafter, guard=None).generate(opening(base), GenerationSettings(80, eos_token_ids=()))
        report = drafter.mismatch.report()
        assert "'respelled' has another tokenizer than 'stories260K': token 3 is" in report["difference"]
        assert report["rounds"] > 10 and 0.0 <= report["lost_share"] <= 1.0
    assert chosen.mismatch.by_mismatch > 0, "pieces that the draft model does not have end drafts"


@pytest.mark.parametrize("name", ["shared", "text", "exit", "text+lookup"])
def test_sampled_text_has_the_law_of_the_base(base: Base, name: str) -> None:
    """The probability integral transform of 4,800 tokens; see test_sampling_law."""
    prompt, length = opening(base), 60
    decoder = Decoder(base, WAYS[name](base), guard=None)
    texts: list[list[int]] = []
    for first in (0, 40):
        settings = [
            GenerationSettings(length, SamplingParams(temperature=1.0), seed=7 + first + i, eos_token_ids=())
            for i in range(40)
        ]
        results = decoder.generate_batch([prompt] * 40, settings)
        assert sum(sum(n * c for n, c in enumerate(r.stats.acceptance_histogram)) for r in results) > 300
        texts += [result.token_ids for result in results]
    ids = torch.tensor([prompt + text for text in texts])
    with torch.no_grad():
        law = base.model(ids).logits[:, len(prompt) - 1 : -1].double().softmax(-1)
    ordered, order = law.reshape(-1, law.shape[-1]).sort(dim=-1, descending=True)
    place = (order == ids[:, len(prompt) :].reshape(-1, 1)).int().argmax(-1, keepdim=True)
    own = ordered.gather(-1, place).squeeze(-1).numpy()
    before = ordered.cumsum(-1).gather(-1, place).squeeze(-1).numpy() - own
    u = (before + np.random.default_rng(4).random(len(own)) * own).clip(0.0, 1.0 - 1e-12)
    assert min(p_values(u.reshape(len(texts), length))) > LEVEL
