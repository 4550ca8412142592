"""The sampling law: the same processors, in the same order, with the same numbers as `model.generate` prepares."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import asdict
from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopPLogitsWarper,
)

from decode import sampling
from decode.sampling import SamplingParams, build_processors, node_law, node_scores
from decode.tree import Tree
from decode.verify import Chooser, draw_siblings, verify_point_mass, verify_sampled
from medusa_heads.errors import ConfigError

VOCABULARY, EOS, PROMPT = 40, [3, 5], [7, 9, 7, 11, 2]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def generates_processors(
    model: LlamaForCausalLM,
    params: SamplingParams,
    custom: list[LogitsProcessor] | None = None,
    prompt: list[int] = PROMPT,
    eos: int | list[int] = EOS,
) -> LogitsProcessorList:
    """What `generate` prepares for these settings, handed over by its own entry for custom decoding."""
    found: list[LogitsProcessorList] = []

    def keep(model: Any, input_ids: torch.Tensor, logits_processor: LogitsProcessorList, **_: Any) -> torch.Tensor:
        found.append(logits_processor)
        return input_ids

    values: dict[str, Any] = asdict(params)
    for name, off in {"min_p": 0.0, "bad_words_ids": (), "min_new_tokens": 0, "suppress_tokens": ()}.items():
        if values[name] == off:
            values[name] = None
    values["bad_words_ids"] = values["bad_words_ids"] and [list(word) for word in values["bad_words_ids"]]
    values["suppress_tokens"] = values["suppress_tokens"] and list(values["suppress_tokens"])
    if params.greedy:
        values = {name: value for name, value in values.items() if name not in WARPING} | {"do_sample": False}
    else:
        values["do_sample"] = True
    model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        eos_token_id=eos,
        logits_processor=LogitsProcessorList(custom or []),
        max_new_tokens=20,
        custom_generate=keep,
        **values,
    )
    return found[0]


def types(processors: LogitsProcessorList) -> list[type]:
    """`generate` turns min_new_tokens into min_length as well, which bans the same tokens once more."""
    return [type(processor) for processor in processors if not isinstance(processor, MinLengthLogitsProcessor)]


WARPING = {"temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
EVERYTHING: dict[str, Any] = {
    "temperature": 0.8,
    "top_h": 0.9,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.01,
    "typical_p": 0.95,
    "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.01,
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 2,
    "bad_words_ids": ((8,), (7, 11), (3,)),
    "min_new_tokens": 3,
    "suppress_tokens": (4, 6),
}
CASES = {
    "plain": {"temperature": 1.0},
    **{name: {"temperature": 1.0, name: value} for name, value in EVERYTHING.items() if name != "temperature"},
    "temperature": {"temperature": 0.3},
    "hot": {"temperature": 1.7},
    "top_k = 1": {"temperature": 0.7, "top_k": 1},
    "usual": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1},
    "everything": EVERYTHING,
    "greedy": {},
    "greedy, shaped": EVERYTHING | {"temperature": 0.0},
}


def prefixes() -> list[list[int]]:
    source = torch.Generator().manual_seed(1)
    drafted = [torch.randint(VOCABULARY, (n,), generator=source).tolist() for n in (0, 1, 2, 3, 4, 30)]
    return [PROMPT + tokens for tokens in drafted] + [[*PROMPT, 9, 7]]


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_law_is_that_of_generate(model: LlamaForCausalLM, name: str, dtype: torch.dtype) -> None:
    params = SamplingParams(**CASES[name])
    theirs = generates_processors(model, params)
    ours = build_processors(params, prompt_length=len(PROMPT), eos_token_ids=EOS)
    assert [type(processor) for processor in ours] == types(theirs)
    source = torch.Generator().manual_seed(2)
    for prefix in prefixes():
        logits = (3.0 * torch.randn(VOCABULARY, generator=source)).to(dtype)
        kept = logits.clone()
        scores = theirs(torch.tensor([prefix]), logits.to(torch.float32, copy=True)[None])[0]
        assert torch.equal(node_scores(logits, prefix, ours), scores)
        assert torch.equal(node_scores(logits, torch.tensor(prefix), ours), scores)
        law = node_law(logits, prefix, ours)
        assert law.dtype == torch.float32
        assert torch.equal(law, scores.softmax(-1))
        assert torch.equal(logits, kept)


@pytest.mark.parametrize("name", sorted(set(EVERYTHING) - {"temperature"}))
def test_every_setting_changes_the_law(name: str) -> None:
    """So that the comparison above compares something."""
    off = build_processors(SamplingParams(temperature=1.0), prompt_length=len(PROMPT), eos_token_ids=EOS)
    on = build_processors(SamplingParams(**CASES[name]), prompt_length=len(PROMPT), eos_token_ids=EOS)
    logits = 3.0 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(2))
    assert any(not torch.equal(node_law(logits, prefix, on), node_law(logits, prefix, off)) for prefix in prefixes())


class Bonus(LogitsProcessor):
    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores[:, 12] += 2.0  # in place, as some do
        return scores


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_own_processors_take_the_place_that_generate_gives_them(model: LlamaForCausalLM, temperature: float) -> None:
    custom = [Bonus(), RepetitionPenaltyLogitsProcessor(2.0)]
    params = SamplingParams(temperature=temperature, repetition_penalty=1.3, no_repeat_ngram_size=2)
    theirs = generates_processors(model, params, custom)
    ours = build_processors(params, prompt_length=len(PROMPT), eos_token_ids=EOS, custom=custom)
    assert [type(processor) for processor in ours] == types(theirs)
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(3))
    expected = theirs(torch.tensor([PROMPT]), logits.clone()[None])[0]
    assert torch.equal(node_scores(logits, PROMPT, ours), expected)


def test_logits_are_left_as_they_are_by_processors_that_write_in_place() -> None:
    logits = torch.zeros(VOCABULARY)
    scores = node_scores(logits, PROMPT, [Bonus()])
    assert scores[12] == 2.0
    assert torch.equal(logits, torch.zeros(VOCABULARY))


def test_min_new_tokens_needs_the_prompt_length() -> None:
    with pytest.raises(ValueError, match="prompt_length"):
        build_processors(SamplingParams(min_new_tokens=2), eos_token_ids=EOS)


@pytest.mark.parametrize("logits", [[float("nan"), 0.0, 1.0], [float("-inf")] * 3, [0.0, float("inf"), 1.0]])
def test_a_law_without_tokens_is_an_error(logits: list[float]) -> None:
    with pytest.raises(ValueError, match="no token can follow"):
        node_law(torch.tensor(logits), [0], LogitsProcessorList())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.5),
        ("min_p", 1.1),
        ("top_h", 0.0),
        ("typical_p", 0.0),
        ("epsilon_cutoff", 1.0),
        ("eta_cutoff", -1.0),
        ("repetition_penalty", 0.0),
        ("no_repeat_ngram_size", -2),
        ("bad_words_ids", ((1,), ())),
        ("min_new_tokens", -1),
        ("suppress_tokens", (-3,)),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        SamplingParams(**{name: value})
    assert name in str(error.value) and str(value) in str(error.value)


# ---- top-p without a sort of the vocabulary

LARGE = 3 * sampling.NUCLEUS * 2


@pytest.fixture
def sorts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that the warper itself is asked."""
    calls: list[int] = []
    whole = TopPLogitsWarper.__call__

    def counted(self: TopPLogitsWarper, ids: Any, scores: Any) -> Any:
        calls.append(0)
        return whole(self, ids, scores)

    monkeypatch.setattr(TopPLogitsWarper, "__call__", counted)
    return calls


@pytest.mark.parametrize("least", [1, 40])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("spread", [0.3, 3.0, 12.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_p_is_transformers_own(
    dtype: torch.dtype, spread: float, top_p: float, least: int, sorts: list[int]
) -> None:
    """In bfloat16 many tokens are tied, flat laws have their edge far out: those are left to the warper."""
    warper = TopPLogitsWarper(top_p, min_tokens_to_keep=least)
    source = torch.Generator().manual_seed(int(spread * 10))
    ids = torch.zeros(1, 1, dtype=torch.long)
    for _ in range(8):
        scores = (torch.randn(1, LARGE, generator=source) * spread).to(dtype).float()
        scores[0, :50] = -torch.inf
        assert torch.equal(sampling.apply(warper, ids, scores), warper(ids, scores))
    if spread == 12.0 and dtype == torch.float32 and least == 1 and top_p < 0.99:
        assert len(sorts) < 12, "once a round by this test, and hardly ever by what it tests"


def test_top_p_leaves_what_it_cannot_tell_to_the_warper(sorts: list[int]) -> None:
    ids = torch.zeros(1, 1, dtype=torch.long)
    clear = torch.full((1, LARGE), -20.0)
    clear[0, 3:5] = torch.tensor([3.0, 2.0])
    tied = clear.clone()
    tied[0, 7] = 2.0
    edge = 1.0 / (1.0 + math.exp(-1.0))  # the mass of the likeliest token
    for scores, top_p, asked in ((clear, 0.8, 0), (tied, 0.7, 1), (clear, edge, 1), (clear[:, :96], 0.8, 1)):
        sorts.clear()
        sampling.apply(TopPLogitsWarper(top_p), ids, scores)
        assert len(sorts) == asked
    for value in (torch.nan, torch.inf):
        broken = clear.clone()
        broken[0, 9] = value
        sorts.clear()
        sampling.apply(TopPLogitsWarper(0.8), ids, broken)
        assert len(sorts) == 1


def test_greedy_is_temperature_zero() -> None:
    assert SamplingParams().greedy and SamplingParams(top_k=5).greedy
    assert not SamplingParams(temperature=0.1).greedy
    assert list(build_processors(SamplingParams(top_k=5, top_p=0.5))) == []


# ---- by enumeration: rounds that see their law through the processors emit what `generate` would sample

SMALL = {  # over a vocabulary of 4 with EOS = 3, after the prompt 0 1 0
    "temperature": {"temperature": 0.6},
    "top_k": {"temperature": 1.0, "top_k": 2},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "min_p": {"temperature": 1.0, "min_p": 0.4},
    "top_h": {"temperature": 1.0, "top_h": 0.6},
    "typical_p": {"temperature": 1.0, "typical_p": 0.6},
    "epsilon_cutoff": {"temperature": 1.0, "epsilon_cutoff": 0.2},
    "eta_cutoff": {"temperature": 1.0, "eta_cutoff": 0.3},
    "repetition_penalty": {"temperature": 1.0, "repetition_penalty": 1.8},
    "no_repeat_ngram_size": {"temperature": 1.0, "no_repeat_ngram_size": 2},
    "bad_words_ids": {"temperature": 1.0, "bad_words_ids": ((1, 2), (2,))},
    "min_new_tokens": {"temperature": 1.0, "min_new_tokens": 2},
    "suppress_tokens": {"temperature": 1.0, "suppress_tokens": (2,)},
    "several": {"temperature": 0.8, "top_k": 3, "top_p": 0.9, "repetition_penalty": 1.3, "min_new_tokens": 1},
}


@pytest.mark.parametrize("name", sorted(SMALL))
@pytest.mark.parametrize("rule", ["point mass", "sampled"])
def test_rounds_have_the_processed_law(
    model: LlamaForCausalLM,
    enumerate_law: Callable[[Callable[[Chooser], Hashable]], dict[Hashable, float]],
    name: str,
    rule: str,
) -> None:
    size, eos, prompt = 4, 3, [0, 1, 0]
    tree = Tree.from_rank_paths([(0,), (1,), (0, 0), (0, 1)])
    params = SamplingParams(**SMALL[name])
    theirs = generates_processors(model, params, prompt=prompt, eos=eos)
    ours = build_processors(params, prompt_length=len(prompt), eos_token_ids=[eos])

    @cache
    def logits(*drafted: int) -> torch.Tensor:
        source = torch.Generator().manual_seed(sum((token + 1) * 5**i for i, token in enumerate(drafted)))
        return 1.5 * torch.randn(size, generator=source)

    @cache
    def expected(*drafted: int) -> list[float]:
        prefix = torch.tensor([[*prompt, *drafted]])
        law = theirs(prefix, logits(*drafted).clone()[None])[0].softmax(-1).double()
        return (law / law.sum()).tolist()  # float32, as `generate` has it; sampling from it normalises

    def chain(tokens: tuple[int, ...], start: int) -> float:
        return math.prod(expected(*tokens[:place])[tokens[place]] for place in range(start, len(tokens)))

    def one_round(chooser: Chooser) -> tuple[int, ...]:
        """Drafts 0 and 1 at each depth, or draws both from a flat law."""
        flat = torch.full((size,), 1.0 / size)
        drafts = [draw_siblings(flat, 2, chooser) if rule == "sampled" else [1, 0] for _ in range(2)]
        tokens = [prompt[-1]] + [drafts[tree.depths[n] - 1][tree.ranks[n]] for n in range(1, tree.size)]

        def law(node: int) -> torch.Tensor:
            drafted = [tokens[n] for n in tree.path(node)[1:]]
            return node_law(logits(*drafted), prompt + drafted, ours)

        if rule == "sampled":
            verdict = verify_sampled(tree, torch.tensor(tokens), [flat] * tree.size, law, chooser)
        else:
            verdict = verify_point_mass(tree, torch.tensor(tokens), law, chooser)
        return (*(tokens[n] for n in verdict.path[1:]), verdict.next_token)

    joint: dict[tuple[int, ...], float] = defaultdict(float)
    for emitted, probability in enumerate_law(one_round).items():
        for rest in itertools.product(range(size), repeat=3 - len(emitted)):
            joint[emitted + rest] += probability * chain(emitted + rest, len(emitted))
    for tokens in itertools.product(range(size), repeat=3):
        assert joint[tokens] == pytest.approx(chain(tokens, 0), abs=1e-9)
