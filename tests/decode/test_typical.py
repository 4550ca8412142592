"""Typical acceptance in the engine: approximate, named so, and never the default."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from decode.certify import plain_greedy
from decode.engine import Decoder
from decode.guard import GuardSettings
from decode.sampling import SamplingParams
from decode.settings import GenerationSettings
from decode.tree import Tree
from decode.verify import Verdict, verify_typical
from medusa_heads.base import Base
from medusa_heads.errors import ConfigError
from tests.conftest import tiny_base
from tests.decode.oracle import Oracle

PROMPTS = [[5, 17, 40, 8, 61, 33, 12, 70, 21], [44, 9], [30, 6, 71, 3]]
SETTINGS = GenerationSettings(
    max_new_tokens=30, seed=3, sampling=SamplingParams(temperature=1.0), acceptance="approximate-typical"
)
EAGER = replace(SETTINGS, typical_epsilon=1e-6)
"""Accepts nearly every draft."""


@pytest.fixture(scope="module")
def base() -> Base:
    base = tiny_base()
    base.eos_token_ids = ()
    return base


def oracle(base: Base, right: float = 1.0) -> Decoder:
    """Drafts the greedy text, which sampling would soon leave."""
    return Decoder(base, Oracle([prompt + plain_greedy(base, prompt, 40)[0] for prompt in PROMPTS], right=right))


def drafted(result: Any) -> int:
    return sum(n * rounds for n, rounds in enumerate(result.stats.acceptance_histogram))


def test_it_is_named_approximate_and_exact_is_the_default(base: Base) -> None:
    approximate, exact = oracle(base).generate(PROMPTS[0], SETTINGS), oracle(base).generate(PROMPTS[0])
    assert not approximate.stats.exact and exact.stats.exact
    assert approximate.stats.as_dict()["exact"] is False
    assert approximate.stats.as_dict()["acceptance"] == "approximate-typical"
    assert exact.stats.as_dict()["acceptance"] == "exact" and GenerationSettings().acceptance == "exact"


def test_it_keeps_plausible_drafts_where_exact_acceptance_would_not(base: Base) -> None:
    exact = oracle(base).generate(PROMPTS[0], replace(SETTINGS, acceptance="exact", drafting="likeliest"))
    eager = oracle(base).generate(PROMPTS[0], EAGER)
    assert drafted(eager) > drafted(exact)
    assert eager.token_ids != exact.token_ids


def test_epsilon_and_alpha_reach_the_rule(base: Base) -> None:
    strict = replace(SETTINGS, typical_epsilon=1.0, typical_alpha=1e9)
    assert drafted(oracle(base).generate(PROMPTS[0], strict)) == 0, "no probability exceeds 1"
    by_alpha = replace(strict, typical_alpha=1e-6)
    assert drafted(oracle(base).generate(PROMPTS[0], by_alpha)) > 8


def test_a_text_ends_at_its_end(base: Base) -> None:
    """EOS and length inside a kept path; nothing is kept behind them."""
    text = oracle(base).generate(PROMPTS[0], EAGER).token_ids
    end = next(place for place in range(6, 30) if text[place] not in text[:place])
    result = oracle(base).generate(PROMPTS[0], replace(EAGER, eos_token_ids=(text[end],)))
    assert result.finish_reason == "eos" and result.token_ids == text[: end + 1]
    for count in (1, 2, 3, 5):
        assert len(oracle(base).generate(PROMPTS[0], replace(EAGER, max_new_tokens=count)).token_ids) == count


def test_nothing_is_kept_below_a_node_that_ends_the_text() -> None:
    asked: list[int] = []

    def law(node: int) -> torch.Tensor:
        asked.append(node)
        return torch.full((4,), 0.25)

    tokens, generator = torch.tensor([0, 1, 2, 3]), torch.Generator().manual_seed(0)
    assert verify_typical(Tree.chain(4), tokens, law, generator).path == [0, 1, 2, 3]
    asked.clear()
    assert verify_typical(Tree.chain(4), tokens, law, generator, lambda node: node == 2).path == [0, 1, 2]
    assert asked == [0, 1, 2], "the last for the token that follows"
    assert isinstance(verify_typical(Tree.chain(1), tokens[:1], law, generator, lambda node: True), Verdict)


def test_rows_of_a_batch_may_differ_in_their_rule_and_seeds_reproduce(base: Base) -> None:
    own = [EAGER, replace(SETTINGS, acceptance="exact"), GenerationSettings(max_new_tokens=20)]
    first, second = (oracle(base).generate_batch(PROMPTS, own) for _ in range(2))
    assert [r.token_ids for r in first] == [r.token_ids for r in second]
    assert [r.stats.exact for r in first] == [False, True, True]
    assert first[1].token_ids == oracle(base, 0.0).generate(PROMPTS[1], own[1]).token_ids
    assert first[2].token_ids == plain_greedy(base, PROMPTS[2], 20)[0]


def test_a_guard_goes_by_the_clock_so_a_seeded_call_has_none(base: Base) -> None:
    decoder = Decoder(base, Oracle([]), guard=GuardSettings())
    assert decoder._guard_for([SETTINGS]) is None
    assert decoder._guard_for([replace(SETTINGS, seed=None)]) is not None
    assert decoder._guard_for([replace(SETTINGS, acceptance="exact", drafting="likeliest")]) is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"acceptance": "typical"}, "acceptance must be exact or approximate-typical, not 'typical'"),
        ({"acceptance": "approximate-typical"}, "is for sampling"),
        ({"typical_epsilon": 0.0}, "0 < typical_epsilon <= 1"),
        ({"typical_alpha": float("nan")}, "typical_alpha > 0"),
    ],
)
def test_wrong_settings_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GenerationSettings(**options)
