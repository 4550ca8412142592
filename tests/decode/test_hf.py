"""`model.generate(…, custom_generate=speculate(…))` gives what `generate` gives alone, for all that it can be asked."""

from __future__ import annotations

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
from tests.conftest import VOCAB, tiny_model, tiny_tokenizer
from tests.decode.hf_calls import LENGTH, PAD, PROMPT, PROMPTS, Options, accepted, allowed, padded
from tests.decode.oracle import Oracle


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def truth(model: Any) -> list[int]:
    """The new tokens of plain greedy decoding, from which the cases take their words and ends."""
    ids = torch.tensor([PROMPT])
    return model.generate(ids, max_new_tokens=40, eos_token_id=None, pad_token_id=PAD)[0, len(PROMPT) :].tolist()


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
