"""What every drafter must do: leave the base's text as it is, alone and in batches, in chats, streams and `generate`.

Without a guard, so that every round drafts: what is drafted and kept does not hang on the clock."""

from __future__ import annotations

import pytest
import torch

from decode.engine import Decoder
from decode.hf import speculate
from decode.prefix import Prefix
from decode.sampling import SamplingParams
from decode.settings import GenerationSettings
from tests.conftest import tiny_base
from tests.decode.drafters import DRAFTERS, PROMPT, REPETITIVE, greedy_by_hand

ALL = pytest.mark.parametrize("name", DRAFTERS)


FAMILIES = ("llama", "qwen2", "gpt_neox", "gpt2", "gemma", "gemma3", "mistral-window")
RUN_BY_THE_BASE = ("lookup", "model-tree", "exit-chain", "exit-tree")
"""Of which every family is tried: what a drafter does with the base's own modules or cache depends on it."""
PAIRS = [(n, f) for n in DRAFTERS for f in FAMILIES if n in RUN_BY_THE_BASE or f in ("llama", "gemma3")]


@pytest.mark.parametrize(("name", "family"), PAIRS)
def test_greedy_text_is_the_bases_own(name: str, family: str) -> None:
    base = tiny_base(family)
    decoder = Decoder(base, DRAFTERS[name](base), guard=None)
    for prompt in (PROMPT, REPETITIVE):
        result = decoder.generate(prompt, GenerationSettings(max_new_tokens=20, eos_token_ids=()))
        assert result.token_ids == greedy_by_hand(base, prompt, 20)
        assert result.stats.tree_nodes > result.stats.rounds, "something was drafted"


@ALL
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_a_batch_of_unequal_prompts_equals_the_rows_one_by_one(name: str, temperature: float) -> None:
    base = tiny_base("qwen2")
    decoder = Decoder(base, DRAFTERS[name](base), guard=None)
    prompts = [PROMPT, PROMPT[:3], REPETITIVE * 4, [7]]
    sampling = SamplingParams(temperature=temperature)
    lengths = [20, 6, 13, 17]
    settings = [
        GenerationSettings(max_new_tokens=n, seed=11 + i, sampling=sampling, eos_token_ids=())
        for i, n in enumerate(lengths)
    ]
    together = decoder.generate_batch(prompts, settings)
    for prompt, own, result in zip(prompts, settings, together, strict=True):
        assert result.token_ids == decoder.generate(prompt, own).token_ids


@ALL
def test_a_chat_goes_on_from_its_prefix(name: str) -> None:
    base = tiny_base()
    decoder = Decoder(base, DRAFTERS[name](base), guard=None)
    settings = GenerationSettings(max_new_tokens=11, eos_token_ids=())
    prefix, turn = Prefix(), list(REPETITIVE)
    for following in ([9, 10, 11], [40, 8], [33, 5, 17]):
        result = decoder.generate(turn, settings, prefix=prefix)
        assert result.token_ids == greedy_by_hand(base, turn, 11)
        turn = [*turn, *result.token_ids, *following]
    assert result.stats.reused_tokens > len(REPETITIVE)
    edited = [*turn[:15], 50, *turn[16:]]
    assert decoder.generate(edited, settings, prefix=prefix).token_ids == greedy_by_hand(base, edited, 11)


@ALL
def test_a_stream_adds_up_to_the_text(name: str) -> None:
    base = tiny_base()
    decoder = Decoder(base, DRAFTERS[name](base), guard=None)
    chunks = list(decoder.stream(REPETITIVE, GenerationSettings(max_new_tokens=20, eos_token_ids=())))
    result = chunks[-1].result
    assert result is not None and result.token_ids == greedy_by_hand(base, REPETITIVE, 20)
    assert [token for chunk in chunks for token in chunk.token_ids] == result.token_ids
    assert "".join(chunk.text for chunk in chunks) == result.text


@ALL
def test_generate_gives_the_same_with_it(name: str) -> None:
    base = tiny_base("llama")
    ids = torch.tensor([PROMPT, PROMPT[::-1]])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    expected = base.model.generate(ids, **options)
    own = speculate(DRAFTERS[name](base))
    assert torch.equal(base.model.generate(ids, custom_generate=own, **options), expected)


@ALL
def test_the_context_limit_ends_the_text(name: str) -> None:
    base = tiny_base("gpt2")
    prompt = (REPETITIVE * 40)[: base.max_positions - 9]
    decoder = Decoder(base, DRAFTERS[name](base), guard=None)
    result = decoder.generate(prompt, GenerationSettings(max_new_tokens=50, eos_token_ids=()))
    assert result.finish_reason == "context" and result.token_ids == greedy_by_hand(base, prompt, 9)


@ALL
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_node_budget_is_kept(name: str, temperature: float) -> None:
    base = tiny_base()
    decoder = Decoder(base, DRAFTERS[name](base), guard=None)
    sizes = []

    class Budgeted:
        layers = decoder.drafter.layers

        def start(self, rows: object) -> object:
            session = DRAFTERS[name](base).start(rows)
            draft = session.draft

            def limited(roots: list[int], nodes: int | None = None) -> object:
                drafted = draft(roots, 1 + len(sizes) % 4)
                sizes.append([tree.size for tree in drafted.trees])
                assert max(sizes[-1]) <= 1 + (len(sizes) - 1) % 4
                return drafted

            session.draft = limited
            return session

    settings = GenerationSettings(
        max_new_tokens=20, eos_token_ids=(), seed=3, sampling=SamplingParams(temperature=temperature)
    )
    result = Decoder(base, Budgeted(), guard=None).generate(REPETITIVE, settings)
    assert len(result.token_ids) == 20 and max(max(s) for s in sizes) > 1
    if temperature == 0.0:
        assert result.token_ids == greedy_by_hand(base, REPETITIVE, 20)


def test_generate_takes_a_drafter_by_name() -> None:
    base = tiny_base()
    ids = torch.tensor([REPETITIVE])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = base.model.generate(ids, **options)
    for name in ("lookup", "exit:1,width=2", "exit:1+lookup"):
        assert torch.equal(base.model.generate(ids, custom_generate=speculate(name), **options), expected)
