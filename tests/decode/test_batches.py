"""Rows of a batch: each with settings of its own, ending on its own, as if it were alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from decode.certify import plain_greedy, whole_logits
from decode.drafters.medusa import MedusaDrafter
from decode.engine import Decoder, per_row
from decode.sampling import SamplingParams
from decode.settings import GenerationSettings
from decode.tree import Tree
from medusa_heads.base import Base
from medusa_heads.errors import ConfigError
from medusa_heads.medusa import MedusaHeads
from tests.conftest import tiny_base
from tests.decode.oracle import Oracle

PROMPTS = [[5, 17, 40, 8, 61, 33, 12, 70, 21], [44, 9], [30, 6, 71, 3], [50, 51, 52, 53, 54, 55]]


@pytest.fixture(scope="module")
def base() -> Base:
    base = tiny_base()
    base.eos_token_ids = ()
    return base


@pytest.fixture
def decoder(base: Base) -> Decoder:
    """Drafts the greedy text of each prompt, often right: rows accept different lengths in the same round."""
    return Decoder(base, Oracle([prompt + plain_greedy(base, prompt, 40)[0] for prompt in PROMPTS], right=0.7))


def mixed(base: Base) -> list[GenerationSettings]:
    """Greedy and sampled, ended by length, EOS, stop string and criterion."""
    text = plain_greedy(base, PROMPTS[1], 30)[0]
    eos = next(token for position, token in enumerate(text) if position > 6 and token not in text[:position])
    stop = base.tokenizer.decode(plain_greedy(base, PROMPTS[2], 30)[0][12:15])
    long = StoppingCriteriaList([lambda ids, scores: torch.tensor([ids.shape[1] >= 20])])
    return [
        GenerationSettings(max_new_tokens=25, seed=3, sampling=SamplingParams(temperature=0.9)),
        GenerationSettings(max_new_tokens=30, eos_token_ids=(eos,)),
        GenerationSettings(max_new_tokens=30, stop=(stop,)),
        GenerationSettings(
            max_new_tokens=30, seed=9, stopping_criteria=long, sampling=SamplingParams(temperature=1.2, top_p=0.9)
        ),
    ]


def test_rows_with_settings_of_their_own_equal_the_rows_alone(base: Base, decoder: Decoder) -> None:
    settings = mixed(base)
    together = decoder.generate_batch(PROMPTS, settings)
    alone = [decoder.generate(prompt, own) for prompt, own in zip(PROMPTS, settings, strict=True)]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert [r.finish_reason for r in together] == ["length", "eos", "stop", "criteria"]
    assert [r.text for r in together] == [r.text for r in alone]
    assert sum(n * rounds for r in together for n, rounds in enumerate(r.stats.acceptance_histogram)) >= 10
    assert all(r.stats.new_tokens == len(r.token_ids) for r in together)


@pytest.mark.parametrize("order", [[3, 1, 0, 2], [2, 2, 0, 0]])
def test_neither_order_nor_neighbours_change_a_sampled_row(decoder: Decoder, order: list[int]) -> None:
    own = [
        GenerationSettings(max_new_tokens=12 + 6 * i, seed=20 + i, sampling=SamplingParams(temperature=1.1))
        for i in range(4)
    ]
    alone = [decoder.generate(prompt, settings).token_ids for prompt, settings in zip(PROMPTS, own, strict=True)]
    together = decoder.generate_batch([PROMPTS[i] for i in order], [own[i] for i in order])
    assert [r.token_ids for r in together] == [alone[i] for i in order]


def test_a_row_costs_no_pass_once_it_has_ended(base: Base, decoder: Decoder) -> None:
    short, long = GenerationSettings(max_new_tokens=2), GenerationSettings(max_new_tokens=30)
    first, second = decoder.generate_batch(PROMPTS[:2], [short, long])
    assert first.stats.base_forwards == 2 and len(first.token_ids) == 2
    assert second.stats.base_forwards > 5 and len(second.token_ids) == 30


def test_a_stream_of_a_batch_is_its_rows(base: Base, decoder: Decoder) -> None:
    settings = mixed(base)
    expected = decoder.generate_batch(PROMPTS, settings)
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    texts = [""] * len(PROMPTS)
    ended: list[int] = []
    for chunk in decoder.stream_batch(PROMPTS, settings):
        assert chunk.row not in ended
        tokens[chunk.row] += chunk.token_ids
        texts[chunk.row] += chunk.text
        if chunk.result is not None:
            ended.append(chunk.row)
            assert chunk.result.token_ids == tokens[chunk.row]
    assert tokens == [r.token_ids for r in expected] and texts == [r.text for r in expected]
    assert sorted(ended) == [0, 1, 2, 3] and ended != sorted(ended)


def test_one_setting_for_all_seeds_its_rows_apart(decoder: Decoder) -> None:
    settings = GenerationSettings(max_new_tokens=15, seed=5, sampling=SamplingParams(temperature=1.2))
    rows = decoder.generate_batch([PROMPTS[0]] * 3, settings)
    assert len({tuple(row.token_ids) for row in rows}) == 3
    assert rows[2].token_ids == decoder.generate(PROMPTS[0], replace(settings, seed=7)).token_ids
    assert [own.seed for own in per_row(settings, 3)] == [5, 6, 7]
    with pytest.raises(ConfigError, match="2 settings are given for 3 prompts"):
        decoder.generate_batch(PROMPTS[:3], [settings] * 2)


def test_logits_and_scores_are_of_the_kept_tokens(base: Base, decoder: Decoder) -> None:
    penalty = SamplingParams(repetition_penalty=1.5)
    settings = [
        GenerationSettings(max_new_tokens=9, output_logits=True, output_scores=True, sampling=own)
        for own in (SamplingParams(), penalty, SamplingParams(temperature=0.5, top_k=4))
    ]
    results = decoder.generate_batch(PROMPTS[:3], settings)
    for prompt, result in zip(PROMPTS[:3], results, strict=True):
        assert result.logits is not None and result.scores is not None
        whole = whole_logits(base, prompt, result.token_ids)
        torch.testing.assert_close(result.logits, whole, atol=1e-4, rtol=1e-4)
    plain, penalised, warm = results
    assert plain.scores is not None and penalised.scores is not None and warm.scores is not None
    assert torch.equal(plain.scores, plain.logits)
    assert penalised.scores.argmax(-1).tolist() == penalised.token_ids
    assert (warm.scores.isfinite().sum(-1) == 4).all()
    assert warm.scores.gather(1, torch.tensor(warm.token_ids)[:, None]).isfinite().all()
    without = decoder.generate(PROMPTS[0], GenerationSettings(max_new_tokens=2))
    assert without.logits is None and without.scores is None


class Watching(LogitsProcessor):
    """Notes the texts that it is asked about."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.texts.append(input_ids[0].tolist())
        return scores


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_processors_are_asked_once_a_token_in_order_and_never_behind_the_end(
    base: Base, decoder: Decoder, temperature: float
) -> None:
    """Also where an accepted draft ends the text, with more accepted drafts behind it."""
    text = plain_greedy(base, PROMPTS[0], 30)[0]
    for end in range(2, 12):
        watching = Watching()
        settings = GenerationSettings(
            max_new_tokens=end + 3,
            eos_token_ids=(text[end],),
            seed=end,
            sampling=SamplingParams(temperature=temperature),
            logits_processor=LogitsProcessorList([watching]),
        )
        result = decoder.generate(PROMPTS[0], settings)
        whole = PROMPTS[0] + result.token_ids
        assert watching.texts == [whole[:length] for length in range(len(PROMPTS[0]), len(whole))]


def test_a_row_near_the_context_limit_does_not_hold_the_others_back() -> None:
    base = tiny_base("gpt2")
    base.eos_token_ids = ()
    heads = MedusaHeads.for_base(base, 2, 1)
    decoder = Decoder(base, MedusaDrafter(heads, base, Tree.from_rank_paths([(0,), (1,), (0, 0)])))
    assert base.max_positions is not None
    prompts = [(PROMPTS[0] * 40)[: base.max_positions - 5], PROMPTS[1]]
    for temperature in (0.0, 1.0):
        settings = [
            GenerationSettings(max_new_tokens=20, seed=seed, sampling=SamplingParams(temperature=temperature))
            for seed in (1, 2)
        ]
        alone = [decoder.generate(prompt, own) for prompt, own in zip(prompts, settings, strict=True)]
        together = decoder.generate_batch(prompts, settings)
        assert [r.token_ids for r in together] == [r.token_ids for r in alone]
        assert together[0].finish_reason == "context" and len(together[0].token_ids) == 5
        assert [r.stats.tree_nodes for r in together] == [r.stats.tree_nodes for r in alone]
        assert alone[0].stats.tree_nodes < 4 * alone[0].stats.rounds, "its last rounds had no room for a tree"
