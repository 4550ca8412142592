"""`custom_generate=speculate(…)` beside its text: laws and seeds of samples, prefixes, drafts, and what is refused."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from decode import speculate
from decode.certify import BLOCK, BlockLaw, chi_square_tail, g_statistic
from decode.prefix import Prefix
from decode.sampling import SamplingParams
from decode.tree import Tree
from medusa_heads.base import Base
from medusa_heads.errors import ConfigError, UserError
from medusa_heads.medusa import MedusaHeads
from tests.conftest import tiny_model, tiny_tokenizer
from tests.decode.hf_calls import PAD, PROMPT, PROMPTS, Options, accepted, allowed, padded
from tests.decode.oracle import Oracle


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def sample(model: Any, **options: Any) -> list[list[int]]:
    loop = speculate(Oracle([], right=0.0))
    inputs = padded(options.pop("prompts", [PROMPT]))
    return model.generate(
        **inputs,
        do_sample=True,
        max_new_tokens=20,
        eos_token_id=None,
        pad_token_id=PAD,
        custom_generate=loop,
        **options,
    ).tolist()


def test_the_global_seed_makes_samples_reproducible(model: Any) -> None:
    torch.manual_seed(4)
    first, second = sample(model), sample(model)
    torch.manual_seed(4)
    assert sample(model) == first and sample(model) == second
    assert first != second


def test_an_own_seed_leaves_the_global_state_alone(model: Any) -> None:
    before = torch.random.get_rng_state()
    assert sample(model, seed=3) == sample(model, seed=3) != sample(model, seed=4)
    model.generate(torch.tensor([PROMPT]), custom_generate=speculate(Oracle([])))
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_prefix_is_kept_from_turn_to_turn(model: Any) -> None:
    """With a drafter whose session has state of its own; a streamer in between; and refused in a batch."""
    options: Options = {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": PAD}
    first = model.generate(torch.tensor([PROMPT]), **options)
    turn = torch.cat((first, torch.tensor([[9, 10, 11]])), dim=1)
    second = model.generate(turn, **options)
    loop, prefix = speculate(Oracle(second.tolist(), right=1.0)), Prefix()
    options |= {"custom_generate": loop, "prefix": prefix}
    assert torch.equal(model.generate(torch.tensor([PROMPT]), **options), first)
    output = model.generate(turn, return_dict_in_generate=True, **options)
    assert torch.equal(output.sequences, second)
    assert output.stats[0].reused_tokens == first.shape[1] - 1 and accepted(output) >= 6
    streamed = Collected()
    model.generate(turn, streamer=streamed, **options)
    assert streamed.tokens == second[0].tolist() and prefix.ids == second[0, :-1].tolist()
    with pytest.raises(ConfigError, match="one prompt at a time, not 2"):
        model.generate(torch.cat((turn, turn)), **options)


class Collected:
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None: ...


@pytest.mark.parametrize(("temperature", "drawn"), [(None, 1.0), (1.4, 1.4), (0.6, 0.0)])
def test_drafts_are_as_warm_as_the_text(model: Any, temperature: float | None, drawn: float) -> None:
    told: list[float] = []

    class Listening(Oracle):
        def start(self, rows: Any) -> Any:
            told.extend(row.temperature for row in rows)
            return super().start(rows)

    options: Options = {} if temperature is None else {"temperature": temperature}
    loop = speculate(Listening([]))
    model.generate(torch.tensor([PROMPT]), do_sample=True, max_new_tokens=3, custom_generate=loop, **options)
    assert told == [drawn]


def test_heads_that_draw_have_the_law_of_generate(model: Any) -> None:
    """At temperature 1.2 with top-k, from a batch: the exact law of the first tokens, by a G-test."""
    draws = 900
    base = Base.from_model(tiny_model(), tiny_tokenizer())
    base.eos_token_ids = ()
    law = BlockLaw(base, PROMPT, SamplingParams(temperature=1.2, top_k=7), draws)
    loop = speculate(MedusaHeads.for_base(base, 2), tree=Tree.from_rank_paths([(0,), (1,), (2,), (0, 0), (0, 1)]))
    output = model.generate(
        torch.tensor([PROMPT]),
        do_sample=True,
        temperature=1.2,
        top_k=7,
        max_new_tokens=BLOCK,
        eos_token_id=None,
        num_return_sequences=draws,
        return_dict_in_generate=True,
        custom_generate=loop,
        seed=5,
    )
    observed = Counter(law.cell(row) for row in output.sequences[:, len(PROMPT) :].tolist())
    g, freedom = g_statistic([observed[cell] for cell in range(len(law.probabilities))], law.probabilities)
    assert accepted(output) > draws // 50 and freedom > 10
    assert chi_square_tail(g, freedom) > 0.001


def test_several_sequences_of_a_prompt_differ(model: Any) -> None:
    """And a constraint gets the number that `generate` gives it: of the prompt, in older releases of the row."""
    numbers: set[int] = set()

    def noting(batch_id: int, ids: Tensor) -> list[int]:
        numbers.add(batch_id)
        return allowed(batch_id, ids)

    options: Options = {"do_sample": True, "max_new_tokens": 1, "num_return_sequences": 3, "pad_token_id": PAD}
    model.generate(**padded(PROMPTS[:2]), **options, prefix_allowed_tokens_fn=noting)
    by_generate = set(numbers)
    numbers.clear()
    rows = sample(model, num_return_sequences=3, prefix_allowed_tokens_fn=noting, prompts=PROMPTS[:2], seed=1)
    assert len({tuple(row) for row in rows}) == len(rows) == 6
    assert numbers == by_generate
    for number, row in enumerate(rows):
        for end in range(len(PROMPT), len(row)):
            assert row[end] in allowed(number * len(numbers) // 6, torch.tensor(row[:end]))


def test_rows_of_a_sampled_batch_are_the_rows_alone(model: Any) -> None:
    together = sample(model, prompts=PROMPTS, seed=8, temperature=1.1, top_p=0.9, repetition_penalty=1.2)
    for number, prompt in enumerate(PROMPTS):
        alone = sample(model, prompts=[prompt], seed=8 + number, temperature=1.1, top_p=0.9, repetition_penalty=1.2)
        assert together[number][-20:] == alone[0][-20:]


def test_the_model_is_left_as_it_is() -> None:
    model = tiny_model()
    last = list(model.parameters())[-1].requires_grad_(False)
    names, configs = set(vars(model)), (model.config.to_dict(), model.generation_config.to_dict())
    modules = [(name, type(module), set(vars(module))) for name, module in model.named_modules()]
    model.generate(torch.tensor([PROMPT]), custom_generate=speculate(Oracle([])))
    assert set(vars(model)) == names and (model.config.to_dict(), model.generation_config.to_dict()) == configs
    assert [(name, type(module), set(vars(module))) for name, module in model.named_modules()] == modules
    assert not last.requires_grad and all(p.requires_grad for p in list(model.parameters())[:-1])
    assert all(p.grad is None for p in model.parameters())


def test_heads_in_memory_and_in_a_directory(model: Any, tmp_path: Any) -> None:
    base = Base.from_model(tiny_model(), tiny_tokenizer())
    heads = MedusaHeads.for_base(base, num_heads=2, num_layers=1)
    ids = torch.tensor([PROMPT])
    plain = model.generate(ids, max_new_tokens=12)
    assert torch.equal(
        model.generate(ids, max_new_tokens=12, custom_generate=speculate(heads, tree=Tree.chain(3))), plain
    )
    heads.save_pretrained(tmp_path)
    loop = speculate(tmp_path, tree=Tree.chain(2), tokenizer=tiny_tokenizer())
    assert torch.equal(model.generate(ids, max_new_tokens=12, custom_generate=loop), plain)
    with pytest.raises(ConfigError, match="tree"):
        speculate(heads)
    with pytest.raises(ConfigError, match="tree"):
        speculate(Oracle([]), tree=Tree.chain(2))


def test_one_object_serves_many_calls_of_one_model(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    wrap = Base.from_model
    monkeypatch.setattr(Base, "from_model", lambda *a, **k: made.append(1) or wrap(*a, **k))
    loop = speculate(Oracle([]))
    for _ in range(3):
        model.generate(torch.tensor([PROMPT]), custom_generate=loop)
    assert len(made) == 1
    with pytest.raises(ConfigError, match="another"):
        tiny_model(seed=1).generate(torch.tensor([PROMPT]), custom_generate=loop)


def test_the_end_of_the_context_is_said(model: Any) -> None:
    gpt2 = tiny_model("gpt2")
    ids = torch.tensor([(PROMPT * 30)[:250]])
    with pytest.warns(UserWarning, match="256"):
        output = gpt2.generate(ids, max_new_tokens=20, eos_token_id=None, custom_generate=speculate(Oracle([])))
    assert output.shape == (1, 256)


def filled_cache(model: Any) -> Any:
    out = model(torch.tensor([PROMPT[:4]]), use_cache=True)
    return out[next(name for name in ("cache", "past_key_values") if name in out)]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 2}, "beam"),
        ({"assistant_model": "model"}, "assistant_model"),
        ({"prompt_lookup_num_tokens": 3}, "assisted"),
        ({"synced_gpus": True}, "synced_gpus"),
        ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
        ({"stop_strings": ["a"]}, "tokenizer"),
        ({"past_key_values": "filled"}, "cache"),
        ({"position_ids": torch.arange(3, 3 + len(PROMPT))[None]}, "position_ids"),
        ({"inputs_embeds": torch.zeros(1, 4, 32)}, "inputs_embeds"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1]])}, "left"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 0]])}, "left"),
        ({"attention_mask": torch.tensor([[0] * 9])}, "token"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused(model: Any, options: Options, named: str) -> None:
    made = {"model": model, "filled": filled_cache(model)}
    options = {k: made[v] if isinstance(v, str) and v in made else v for k, v in options.items()}
    with pytest.raises(UserError, match=named):
        model.generate(torch.tensor([PROMPT]), max_new_tokens=8, custom_generate=speculate(Oracle([])), **options)


def test_what_a_batch_cannot_do_is_refused(model: Any) -> None:
    inputs, loop = padded(PROMPTS), speculate(Oracle([]))
    with pytest.raises(ConfigError, match="one prompt at a time"):
        model.generate(**inputs, guidance_scale=1.5, pad_token_id=PAD, custom_generate=loop)


def test_a_model_in_training_is_refused() -> None:
    with pytest.raises(ConfigError, match="eval"):
        tiny_model().train().generate(torch.tensor([PROMPT]), custom_generate=speculate(Oracle([])))


def test_max_time_ends_a_text_on_the_way(model: Any) -> None:
    class Slow(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            time.sleep(0.01)
            return scores

    loop = speculate(Oracle([]))
    model.generate(torch.tensor([PROMPT]), max_new_tokens=1, custom_generate=loop)
    text = model.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=240,
        eos_token_id=None,
        max_time=0.5,
        logits_processor=LogitsProcessorList([Slow()]),
        custom_generate=loop,
    )
    assert len(PROMPT) + 1 <= text.shape[1] <= len(PROMPT) + 51


def test_samples_have_the_law_of_generate(model: Any) -> None:
    """The first tokens of many texts against their exact law under the same processors, by a G-test. The drafts follow
    the greedy text, so that a good part of them is accepted."""
    ids, draws = torch.tensor([PROMPT]), 900
    base = Base.from_model(tiny_model(), tiny_tokenizer())
    base.eos_token_ids = ()
    law = BlockLaw(base, PROMPT, SamplingParams(temperature=0.9, top_k=7, repetition_penalty=1.2), draws)
    loop = speculate(Oracle(model.generate(ids, max_new_tokens=8, repetition_penalty=1.2).tolist(), right=1.0))
    torch.manual_seed(1)
    observed: Counter[int] = Counter()
    drafts = 0
    for _ in range(3):
        output = model.generate(
            ids,
            do_sample=True,
            temperature=0.9,
            top_k=7,
            repetition_penalty=1.2,
            max_new_tokens=BLOCK,
            eos_token_id=None,
            num_return_sequences=draws // 3,
            return_dict_in_generate=True,
            custom_generate=loop,
        )
        observed.update(law.cell(row) for row in output.sequences[:, len(PROMPT) :].tolist())
        drafts += accepted(output)
    g, freedom = g_statistic([observed[cell] for cell in range(len(law.probabilities))], law.probabilities)
    assert drafts > draws // 8 and freedom > 10
    assert chi_square_tail(g, freedom) > 0.001
