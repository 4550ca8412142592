"""`model.generate(…, custom_generate=speculate(…))` gives what `generate` gives alone, for all that it can be asked."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
    WatermarkingConfig,
)

from decode import speculate
from decode.certify import BLOCK, BlockLaw, chi_square_tail, g_statistic
from decode.engine import Prefix
from decode.hf import SpeculativeOutput
from decode.sampling import SamplingParams
from decode.tree import Tree
from medusa_heads.base import Base
from medusa_heads.errors import ConfigError, UserError
from medusa_heads.medusa import MedusaHeads
from tests.conftest import VOCAB, tiny_model, tiny_tokenizer
from tests.decode.oracle import Oracle

PROMPT = [5, 17, 40, 8, 61, 33, 12, 70, 21]
PROMPTS = [PROMPT, PROMPT[:3], [44, 9, 9, 71, 30, 6]]
LENGTH = 24
PAD = 2
Options = dict[str, Any]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def truth(model: Any) -> list[int]:
    """The new tokens of plain greedy decoding, from which the cases take their words and ends."""
    ids = torch.tensor([PROMPT])
    return model.generate(ids, max_new_tokens=40, eos_token_id=None, pad_token_id=PAD)[0, len(PROMPT) :].tolist()


def padded(prompts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    width = max(map(len, prompts))
    ids = [[PAD] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


class InOrder(LogitsProcessor):
    """Grammar-like: keeps a position and rules tokens out by it. Fails where it is not called once for each token."""

    def __init__(self) -> None:
        self.length: int | None = None

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        length = input_ids.shape[1]
        assert self.length is None or length == self.length + 1, "called out of order"
        self.length = length
        return scores.index_fill(1, torch.arange(length % 3, VOCAB, 3), -torch.inf)


class ByRow(LogitsProcessor):
    """Does something else to each row of the batch."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores = scores.clone()
        for row in range(len(scores)):
            scores[row, row::4] -= 5.0 + 0.1 * float(input_ids[row, -1])
        return scores


class Frequency(LogitsProcessor):
    """The frequency penalty of serving APIs, which transformers leaves to its users."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        counts = torch.zeros_like(scores).scatter_add_(1, input_ids, torch.ones_like(input_ids, dtype=scores.dtype))
        return scores - 1.5 * counts


class AfterCalls(StoppingCriteria):
    """Ends a text by the number of its own calls."""

    def __init__(self, calls: int):
        self.left = calls

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.left -= 1
        return torch.full((len(input_ids),), self.left == 0)


class ByRowAndScores(StoppingCriteria):
    """Ends each row at a length of its own, and reads the scores."""

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        assert torch.equal(scores[-1].argmax(-1), input_ids[:, -1]) or input_ids.shape[1] > len(PROMPT) + 14
        return torch.tensor([input_ids.shape[1] >= len(PROMPT) + 14 + 3 * row for row in range(len(input_ids))])


def allowed(batch_id: int, ids: Tensor) -> list[int]:
    """A third of the vocabulary, by the row and the length and the last token."""
    return list(range((batch_id + len(ids) + int(ids[-1])) % 3, VOCAB, 3))


CASES: dict[str, Callable[[list[int]], Options]] = {
    "nothing": lambda t: {},
    "sampling, top_k 1": lambda t: {"do_sample": True, "top_k": 1, "temperature": 1.7},
    "repetition_penalty": lambda t: {"repetition_penalty": 1.4},
    "frequency penalty": lambda t: {"logits_processor": LogitsProcessorList([Frequency()])},
    "encoder_repetition_penalty": lambda t: {"encoder_repetition_penalty": 0.6},
    "no_repeat_ngram_size": lambda t: {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": lambda t: {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": lambda t: {"bad_words_ids": [[t[3]], [t[6], t[7]]]},
    "sequence_bias": lambda t: {"sequence_bias": {(t[4],): -9.0, (t[0], t[1]): -4.0, (11,): 2.0}},
    "several EOS": lambda t: {"eos_token_id": [t[9], t[14], 1]},
    "min_new_tokens": lambda t: {"eos_token_id": [t[2], 1], "min_new_tokens": 9},
    "min_length": lambda t: {"eos_token_id": t[2], "min_length": len(PROMPT) + 7},
    "forced_eos_token_id": lambda t: {"forced_eos_token_id": 44, "eos_token_id": 44},
    "exponential_decay_length_penalty": lambda t: {
        "exponential_decay_length_penalty": (6, 1.4),
        "eos_token_id": t[1],
        "min_new_tokens": 4,
    },
    "prefix_allowed_tokens_fn": lambda t: {"prefix_allowed_tokens_fn": allowed},
    "suppress_tokens": lambda t: {"suppress_tokens": [t[1], t[5]], "begin_suppress_tokens": [t[0]]},
    "remove_invalid_values": lambda t: {"remove_invalid_values": True, "renormalize_logits": True},
    "watermark": lambda t: {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="lefthash")},
    "processor by row": lambda t: {"logits_processor": LogitsProcessorList([ByRow()])},
    "criterion by row": lambda t: {"stopping_criteria": [ByRowAndScores()], "eos_token_id": 95},
    "max length criterion": lambda t: {"stopping_criteria": [MaxLengthCriteria(len(PROMPT) + 11)]},
    "max_time": lambda t: {"max_time": 0.0},
    "stop_strings": lambda t: {
        "stop_strings": [tiny_tokenizer().decode(t[7:9]), tiny_tokenizer().decode(t[12:15])],
        "tokenizer": tiny_tokenizer(),
        "eos_token_id": 95,
    },
    "all at once": lambda t: {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[t[3]]],
        "sequence_bias": {(11,): 1.0},
        "min_new_tokens": 12,
        "eos_token_id": [t[2], 7],
        "prefix_allowed_tokens_fn": allowed,
        "suppress_tokens": [13],
        "logits_processor": LogitsProcessorList([ByRow()]),
        "stopping_criteria": [ByRowAndScores()],
        "renormalize_logits": True,
    },
}
ONE_PROMPT_ALONE: dict[str, Callable[[list[int]], Options]] = {
    "guidance_scale": lambda t: {"guidance_scale": 1.6},
    "a processor with state": lambda t: {"logits_processor": LogitsProcessorList([InOrder()])},
    "a processor with state, and an EOS": lambda t: {
        "logits_processor": LogitsProcessorList([InOrder()]),
        "eos_token_id": list(range(40, 48)),
        "min_new_tokens": 6,
    },
    "a criterion with state": lambda t: {"stopping_criteria": [AfterCalls(11)]},
    "forced_bos_token_id": lambda t: {"forced_bos_token_id": 33, "inputs": torch.tensor([[5]])},
}


def hold(options: Options, **more: Any) -> Options:
    """Options with what all cases share; those of the case win."""
    own = dict(options)
    if isinstance(own.get("stopping_criteria"), list):
        own["stopping_criteria"] = StoppingCriteriaList(own["stopping_criteria"])
    return {
        "max_new_tokens": LENGTH,
        "pad_token_id": PAD,
        "eos_token_id": None,
        "output_scores": True,
        "output_logits": True,
        "return_dict_in_generate": True,
        **more,
        **own,
    }


def texts(sequences: Tensor, inputs: dict[str, Tensor]) -> list[list[int]]:
    """Rows without the padding on their left."""
    mask = inputs.get("attention_mask", torch.ones_like(sequences))
    return [row[int((m == 0).sum()) :].tolist() for row, m in zip(sequences, mask, strict=True)]


def accepted(output: SpeculativeOutput) -> int:
    assert output.stats is not None
    return sum(sum(n * rounds for n, rounds in enumerate(stats.acceptance_histogram)) for stats in output.stats)


def same_steps(ours: Any, theirs: Any, lengths: Sequence[int]) -> None:
    """Scores are the same where a row has not ended; at -inf and float32's smallest too."""
    assert len(ours) == len(theirs)
    for row, length in enumerate(lengths):
        for step in range(length):
            a, b = ours[step][row], theirs[step][row]
            assert torch.equal(a.isinf(), b.isinf())
            finite = ~b.isinf()
            torch.testing.assert_close(a[finite], b[finite], atol=2e-4, rtol=1e-4)


def both_ways(model: Any, inputs: dict[str, Tensor], options: Callable[[], Options]) -> tuple[Any, Any]:
    """`generate` plainly, then with drafts that are often right, each with options of its own making."""
    plain = model.generate(**inputs, **options())
    prompt = {k: v for k, v in inputs.items() if k == "attention_mask"}
    loop = speculate(Oracle(texts(plain.sequences, prompt)), tokenizer=tiny_tokenizer())
    return plain, model.generate(**inputs, custom_generate=loop, **options())


@pytest.mark.parametrize("name", [*CASES, *ONE_PROMPT_ALONE])
def test_one_prompt(model: Any, truth: list[int], name: str) -> None:
    case = {**CASES, **ONE_PROMPT_ALONE}[name]
    inputs = {} if "inputs" in case(truth) else {"input_ids": torch.tensor([PROMPT])}
    plain, ours = both_ways(model, inputs, lambda: hold(case(truth)))
    assert ours.sequences.tolist() == plain.sequences.tolist()
    same_steps(ours.scores, plain.scores, [len(plain.scores)])
    same_steps(ours.logits, plain.logits, [len(plain.scores)])
    assert accepted(ours) >= 3 or name == "max_time"


@pytest.mark.parametrize("name", CASES)
def test_a_padded_batch(model: Any, truth: list[int], name: str) -> None:
    inputs = padded(PROMPTS)
    plain, ours = both_ways(model, inputs, lambda: hold(CASES[name](truth)))
    assert ours.sequences.tolist() == plain.sequences.tolist()
    lengths = [stats.new_tokens for stats in ours.stats]
    same_steps(ours.scores, plain.scores, lengths)
    same_steps(ours.logits, plain.logits, lengths)
    assert accepted(ours) >= 9 or name == "max_time"


def test_the_cases_change_the_text(model: Any, truth: list[int]) -> None:
    """A setting that changes nothing would prove nothing."""
    changes_nothing = {"nothing", "sampling, top_k 1", "remove_invalid_values"}
    inputs = {"input_ids": torch.tensor([PROMPT])}
    reference = model.generate(**inputs, **hold({})).sequences[0].tolist()
    for name, case in CASES.items():
        text = model.generate(**inputs, **hold(case(truth))).sequences[0].tolist()
        assert (text == reference) == (name in changes_nothing), name


@pytest.mark.parametrize("family", ["mistral-window", "gpt2", "gemma3", "qwen3"])
def test_other_families_in_a_batch(family: str) -> None:
    model = tiny_model(family)
    plain, ours = both_ways(model, padded(PROMPTS), lambda: hold({"repetition_penalty": 1.3, "eos_token_id": 2}))
    assert ours.sequences.tolist() == plain.sequences.tolist()
    assert accepted(ours) >= 9


def test_without_a_dictionary_the_sequences_alone_are_returned(model: Any) -> None:
    ids = torch.tensor([PROMPT])
    plain = model.generate(ids, max_new_tokens=9)
    ours = model.generate(ids, max_new_tokens=9, custom_generate=speculate(Oracle(plain.tolist())))
    assert isinstance(ours, Tensor) and ours.dtype == plain.dtype and torch.equal(ours, plain)


def test_a_generation_config_and_a_default_length(model: Any) -> None:
    config = GenerationConfig(repetition_penalty=1.3, max_length=len(PROMPT) + 6, pad_token_id=PAD)
    ids = torch.tensor([PROMPT])
    plain = model.generate(ids, generation_config=config)
    ours = model.generate(ids, generation_config=config, custom_generate=speculate(Oracle(plain.tolist())))
    assert torch.equal(ours, plain)
    assert torch.equal(model.generate(ids, custom_generate=speculate(Oracle([]))), model.generate(ids))


def test_rows_that_ended_have_no_score_but_of_padding(model: Any, truth: list[int]) -> None:
    options = hold({"eos_token_id": truth[2]})
    _, ours = both_ways(model, padded(PROMPTS), lambda: options)
    assert len({stats.new_tokens for stats in ours.stats}) > 1
    transitions = model.compute_transition_scores(ours.sequences, ours.scores, normalize_logits=True)
    for row, stats in zip(transitions, ours.stats, strict=True):
        assert row[: stats.new_tokens].isfinite().all() and (row[stats.new_tokens :] == 0.0).all()


class Recorder:
    def __init__(self) -> None:
        self.put_values: list[Any] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        self.put_values.append(value.tolist())

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("prompts", [[PROMPT], PROMPTS], ids=["one prompt", "batch"])
def test_a_streamer_is_given_the_same_tokens(model: Any, truth: list[int], prompts: list[list[int]]) -> None:
    options: Options = {"max_new_tokens": LENGTH, "eos_token_id": truth[2], "pad_token_id": PAD}
    inputs = padded(prompts)
    plain, ours = Recorder(), Recorder()
    sequences = model.generate(**inputs, **options, streamer=plain)
    loop = speculate(Oracle(texts(sequences, inputs)))
    assert torch.equal(model.generate(**inputs, **options, streamer=ours, custom_generate=loop), sequences)
    assert ours.put_values == plain.put_values and ours.ends == 1
    assert len(ours.put_values) > 2


def test_a_text_streamer_prints_the_same(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ids = torch.tensor([PROMPT])
    sequences = model.generate(ids, max_new_tokens=20, streamer=TextStreamer(tiny_tokenizer()))
    plain = capsys.readouterr().out
    loop = speculate(Oracle(sequences.tolist()))
    model.generate(ids, max_new_tokens=20, streamer=TextStreamer(tiny_tokenizer()), custom_generate=loop)
    assert capsys.readouterr().out == plain and len(plain) > 10


def test_a_stream_comes_as_it_is_made(model: Any) -> None:
    """Tokens are handed out round by round, not at the end."""
    made: list[int] = []

    class Watching(Recorder):
        def put(self, value: Tensor) -> None:
            super().put(value)
            made.append(oracle.rounds)

    class Counting(Oracle):
        rounds = 0

        def fill(self, text: list[int]) -> list[int]:
            self.rounds += 1
            return super().fill(text)

    ids = torch.tensor([PROMPT])
    oracle = Counting(model.generate(ids, max_new_tokens=LENGTH, eos_token_id=None).tolist())
    model.generate(
        ids, max_new_tokens=LENGTH, eos_token_id=None, streamer=Watching(), custom_generate=speculate(oracle)
    )
    assert made[0] == 0 and made == sorted(made) and len(set(made)) > 4


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
