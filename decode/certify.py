"""Certification: whether a decoder writes its base's own text, on the machine, base and heads at hand.

What the decoder emits is held against the base's plain forward passes: token by token with transformers' own cache, and
over the whole text at once without any. Neither knows trees, the engine's cache or its rules.

Greedy: every token must be the base's first choice given the text before it, and the text that of plain decoding. Two
ways of computing the same logits differ by rounding, so that a choice between tokens which are nearly tied may fall
either way. How far they differ is measured on the base alone, and a divergence counts as rounding only where the base's
own gap between the two tokens is within it.

Sampling: the first tokens of many draws are held against their exact joint law by a G-test. The cells of the test are
fixed by that law before anything is drawn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from decode.benchmark.identity import first_difference
from decode.engine import Decoder
from decode.prefix import Prefix
from decode.sampling import SamplingParams, build_processors, node_law
from decode.settings import GenerationSettings
from medusa_heads.base import Base
from medusa_heads.errors import ConfigError

BLOCK = 3
"""Tokens of a draw: the first comes from the prompt's pass, the second from the root of a tree, the third from below an
accepted draft or from the next round."""
MIN_EXPECTED = 5.0
"""Least expected count of a cell, for the G statistic to follow its chi-square law."""
LEVEL = 1e-3
"""A right decoder fails the G-test once in a thousand runs."""
LIKELY = 10
"""Tokens a position over which rounding is measured."""
LAW_BATCH = 32

Start = tuple[int, ...]


@dataclass(frozen=True)
class Divergence:
    """The first token at which the decoder's text leaves plain decoding's."""

    position: int
    """Index of the new token."""
    emitted: int | None
    """The decoder's token; None where its text has ended."""
    plain: int | None
    """Plain decoding's token; None where its text has ended."""
    gap: float | None
    """How much the base's logit of the one exceeds that of the other; None where a text has ended."""
    top2_gap: float
    """Between the base's two likeliest tokens there."""


@dataclass(frozen=True)
class GreedyCheck:
    """One prompt, decoded greedily."""

    id: str | int
    new_tokens: int
    base_forwards: int
    accepted_drafts: int
    identical: bool
    """The text is plain decoding's, token for token."""
    divergence: Divergence | None
    wrong_choices: int
    """Tokens that are not the base's first choice given the text before them, by more than rounding."""
    near_ties: int
    """Tokens that are not its first choice by no more than rounding."""
    rounding: float
    """How much the base's own gaps between likely tokens differ, at most, between its two ways of computing them."""

    @property
    def passed(self) -> bool:
        gap = 0.0 if self.divergence is None else self.divergence.gap
        return self.wrong_choices == 0 and gap is not None and gap <= self.rounding


@dataclass(frozen=True)
class SamplingCheck:
    """One prompt, sampled many times."""

    id: str | int
    draws: int
    accepted_drafts: int
    g: float
    degrees_of_freedom: int
    impossible: int
    """Draws with a token to which the base gives probability 0."""
    malformed: int
    """Draws that go on behind an EOS, or end before their length without one."""


@dataclass
class Certificate:
    """All checks of a decoder, and the verdict."""

    dtype: str
    sampling_params: SamplingParams
    level: float = LEVEL
    greedy: list[GreedyCheck] = field(default_factory=list)
    sampling: list[SamplingCheck] = field(default_factory=list)

    @property
    def p_value(self) -> float | None:
        """Of all sampled prompts together; None where nothing was sampled."""
        if not self.sampling:
            return None
        return chi_square_tail(sum(s.g for s in self.sampling), sum(s.degrees_of_freedom for s in self.sampling))

    @property
    def greedy_passed(self) -> bool:
        return all(check.passed for check in self.greedy)

    @property
    def sampling_passed(self) -> bool:
        """In half precision the edge of a top-p or top-k set moves with rounding, and a draw beyond it proves nothing
        by itself; the G-test counts it all the same."""
        p = self.p_value
        if p is None:
            return True
        exact = self.dtype == "float32"
        faults = sum(check.malformed + (check.impossible if exact else 0) for check in self.sampling)
        return p >= self.level and faults == 0

    @property
    def passed(self) -> bool:
        return self.greedy_passed and self.sampling_passed

    @property
    def accepted_drafts(self) -> int:
        return sum(g.accepted_drafts for g in self.greedy) + sum(s.accepted_drafts for s in self.sampling)

    def as_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "dtype": self.dtype,
            "greedy": {
                "passed": self.greedy_passed,
                "prompts": len(self.greedy),
                "identical": sum(check.identical for check in self.greedy),
                "new_tokens": sum(check.new_tokens for check in self.greedy),
                "base_forwards": sum(check.base_forwards for check in self.greedy),
                "accepted_drafts": sum(check.accepted_drafts for check in self.greedy),
                "checks": [asdict(check) | {"passed": check.passed} for check in self.greedy],
            },
            "sampling": {
                "passed": self.sampling_passed,
                "params": asdict(self.sampling_params),
                "tokens_of_a_draw": BLOCK,
                "p_value": self.p_value,
                "level": self.level,
                "accepted_drafts": sum(check.accepted_drafts for check in self.sampling),
                "checks": [asdict(check) for check in self.sampling],
            },
        }


def check_greedy(decoder: Decoder, identity: str | int, prompt: Sequence[int], max_new_tokens: int) -> GreedyCheck:
    """Decodes a prompt greedily and holds each token against the base's own choice."""
    base = decoder.base
    result = decoder.generate(prompt, GenerationSettings(max_new_tokens=max_new_tokens))
    ours, prompt = result.token_ids, list(prompt)
    theirs, stepwise = plain_greedy(base, prompt, max_new_tokens)
    at_once = whole_logits(base, prompt, ours)
    rounding = gap_rounding(whole_logits(base, prompt, theirs), stepwise)
    chosen = at_once.gather(1, torch.tensor(ours, device=at_once.device)[:, None]).squeeze(1)
    deficits = (at_once.amax(dim=1) - chosen).tolist()
    return GreedyCheck(
        id=identity,
        new_tokens=len(ours),
        base_forwards=result.stats.base_forwards,
        accepted_drafts=accepted_drafts(result.stats.acceptance_histogram),
        identical=ours == theirs,
        divergence=None if ours == theirs else _divergence(ours, theirs, at_once),
        wrong_choices=sum(not deficit <= rounding for deficit in deficits),
        near_ties=sum(0.0 < deficit <= rounding for deficit in deficits),
        rounding=rounding,
    )


def _divergence(ours: Sequence[int], theirs: Sequence[int], logits: Tensor) -> Divergence:
    """`logits` (n, V): the base's before each of our tokens."""
    position = first_difference(ours, theirs)
    assert position is not None
    emitted = ours[position] if position < len(ours) else None
    plain = theirs[position] if position < len(theirs) else None
    here = logits[min(position, len(logits) - 1)]
    best = here.topk(2).values
    gap = None if emitted is None or plain is None else abs(float(here[plain] - here[emitted]))
    return Divergence(position, emitted, plain, gap, float(best[0] - best[1]))


@torch.no_grad()
def plain_greedy(base: Base, prompt: Sequence[int], max_new_tokens: int) -> tuple[list[int], Tensor]:
    """Greedy decoding one token at a time with transformers' own cache.

    Returns the new tokens, the EOS included, and the float32 logits (n, V) that each was chosen from.
    """
    if base.max_positions is not None:
        max_new_tokens = min(max_new_tokens, base.max_positions - len(prompt))
    cache = DynamicCache(config=base.config)
    new: list[int] = []
    logits: list[Tensor] = []
    step = list(prompt)
    while len(new) < max_new_tokens and not (new and new[-1] in base.eos_token_ids):
        start = len(prompt) + len(new) - len(step)
        positions = torch.arange(start, start + len(step), device=base.device)[None]
        ids = torch.tensor([step], device=base.device)
        states = base.forward(ids, position_ids=positions, cache=cache).last_hidden_state
        logits.append(base.project(states[0, -1]).float())
        new.append(int(logits[-1].argmax()))
        step = new[-1:]
    return new, torch.stack(logits)


@torch.no_grad()
def whole_logits(base: Base, prompt: Sequence[int], new: Sequence[int]) -> Tensor:
    """The base's float32 logits (n, V) before each of the new tokens, from one pass over the whole text."""
    ids = torch.tensor([[*prompt, *new[:-1]]], device=base.device)
    return base.project(base.forward(ids).last_hidden_state[0, len(prompt) - 1 :]).float()


def gap_rounding(one: Tensor, other: Tensor) -> float:
    """Greatest difference between two computations of the same logits (n, V), in how far the likeliest token leads each
    of the next ones. The logits of all tokens may rise and fall together by far more than that."""
    likely = one.topk(min(LIKELY, one.shape[-1])).indices
    leads = [logits.gather(1, likely[:, :1]) - logits.gather(1, likely) for logits in (one, other)]
    return float((leads[0] - leads[1]).abs().max())


def accepted_drafts(histogram: Sequence[int]) -> int:
    return sum(count * rounds for count, rounds in enumerate(histogram))


class BlockLaw:
    """The exact joint law of the first tokens after a prompt, in cells of an expected count that a G-test bears.

    A cell is a block of tokens, or a beginning of one with all the continuations that are too rare for cells of their
    own. What is too rare even then is one cell together.
    """

    def __init__(self, base: Base, prompt: Sequence[int], params: SamplingParams, draws: int, length: int = BLOCK):
        self._length = length
        self._ends = set(base.eos_token_ids)
        self._masses: dict[Start, float] = {(): 1.0}
        """Every beginning with a law or a cell of its own."""
        self._supports: dict[Start, Tensor] = {}
        cells: dict[tuple[Start, bool], float] = {}
        """(beginning, whether it stands for its rare continuations) → probability."""
        frontier: list[Start] = [()]
        for _ in range(length):
            following: list[Start] = []
            for prefix, law in zip(frontier, _laws(base, prompt, frontier, params), strict=True):
                self._supports[prefix] = (law > 0.0).cpu()
                mass = self._masses[prefix]
                own = torch.nonzero(draws * mass * law >= MIN_EXPECTED).flatten().tolist()
                for token in own:
                    self._masses[(*prefix, token)] = mass * float(law[token])
                    following.append((*prefix, token))
                left = law.index_fill(0, torch.tensor(own, dtype=torch.long, device=law.device), 0.0)
                cells[prefix, True] = mass * float(left.sum())
            cells |= {(prefix, False): self._masses[prefix] for prefix in following if prefix[-1] in self._ends}
            frontier = [prefix for prefix in following if prefix[-1] not in self._ends]
        cells |= {(prefix, False): self._masses[prefix] for prefix in frontier}
        self._index, self.probabilities = _pooled(cells, draws)

    def malformed(self, block: Sequence[int]) -> bool:
        """Whether a draw ends elsewhere than at its length or its first EOS."""
        ends = [position for position, token in enumerate(block) if token in self._ends]
        return len(block) != (ends[0] + 1 if ends else self._length)

    def cell(self, block: Sequence[int]) -> int:
        """Index of the cell in which a well-formed draw falls."""
        prefix: Start = ()
        for token in block:
            if (*prefix, token) not in self._masses:
                return self._index[prefix, True]
            prefix = (*prefix, token)
        return self._index[prefix, False]

    def impossible(self, block: Sequence[int]) -> bool:
        """Whether the law gives some token of a draw probability 0, as far as the law is known."""
        for position, token in enumerate(block):
            support = self._supports.get(tuple(block[:position]))
            if support is not None and not support[token]:
                return True
        return False


def _pooled(cells: dict[tuple[Start, bool], float], draws: int) -> tuple[dict[tuple[Start, bool], int], list[float]]:
    """Cells by index, the rare ones in one together (with the rarest other cell, where they are still too rare)."""
    order = sorted(cells, key=lambda cell: -cells[cell])
    index: dict[tuple[Start, bool], int] = {}
    probabilities: list[float] = []
    for cell in order:
        left = sum(probabilities)
        if draws * cells[cell] < MIN_EXPECTED or draws * (1.0 - left - cells[cell]) < MIN_EXPECTED:
            break
        index[cell] = len(probabilities)
        probabilities.append(cells[cell])
    rest = [cell for cell in order if cell not in index]
    probabilities.append(max(0.0, 1.0 - sum(probabilities)))
    return index | {cell: len(probabilities) - 1 for cell in rest}, probabilities


@torch.no_grad()
def _laws(base: Base, prompt: Sequence[int], prefixes: Sequence[Start], params: SamplingParams) -> Iterator[Tensor]:
    """The base's law (V,) in float64 after the prompt and each of the prefixes, which are all of one length."""
    processors = build_processors(
        params, prompt_length=len(prompt), eos_token_ids=base.eos_token_ids, device=base.device
    )
    for start in range(0, len(prefixes), LAW_BATCH):
        some = prefixes[start : start + LAW_BATCH]
        ids = torch.tensor([[*prompt, *prefix] for prefix in some], device=base.device)
        logits = base.project(base.forward(ids).last_hidden_state[:, -1])
        for row, prefix in zip(logits, some, strict=True):
            law = node_law(row, [*prompt, *prefix], processors).double()
            yield law / law.sum()


def check_sampling(
    decoder: Decoder, identity: str | int, prompt: Sequence[int], params: SamplingParams, draws: int, seed: int
) -> SamplingCheck:
    """Draws blocks of tokens after a prompt and holds them against their exact law."""
    if params.greedy:
        raise ConfigError("a sampling check needs a temperature above 0")
    law = BlockLaw(decoder.base, prompt, params, draws)
    observed: Counter[int] = Counter()
    accepted = impossible = malformed = 0
    prefix = Prefix()  # the prompt is read once for all draws
    for draw in range(draws):
        settings = GenerationSettings(max_new_tokens=BLOCK, sampling=params, seed=seed + draw)
        result = decoder.generate(prompt, settings, prefix=prefix)
        accepted += accepted_drafts(result.stats.acceptance_histogram)
        if law.malformed(result.token_ids):
            malformed += 1
            continue
        observed[law.cell(result.token_ids)] += 1
        impossible += law.impossible(result.token_ids)
    g, freedom = g_statistic([observed[i] for i in range(len(law.probabilities))], law.probabilities)
    return SamplingCheck(identity, draws, accepted, g, freedom, impossible, malformed)


def g_statistic(observed: Sequence[int], probabilities: Sequence[float]) -> tuple[float, int]:
    """G = 2 Σ O ln(O / E) over cells with O > 0, and its degrees of freedom. All probabilities are positive."""
    total, g = sum(observed), 0.0
    for count, probability in zip(observed, probabilities, strict=True):
        if count:
            g += 2.0 * count * math.log(count / (total * probability))
    return g, len(probabilities) - 1


def chi_square_tail(value: float, degrees_of_freedom: int) -> float:
    """Probability that a chi-square variable exceeds `value`; 1 where there is nothing to test."""
    if degrees_of_freedom == 0:
        return 1.0
    half = torch.tensor([degrees_of_freedom / 2.0, max(0.0, value) / 2.0], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def certify(
    decoder: Decoder,
    prompts: Iterable[tuple[str | int, Sequence[int]]],
    *,
    max_new_tokens: int,
    params: SamplingParams,
    draws: int,
    sampled_prompts: int,
    seed: int,
    after_check: Callable[[Certificate], None] = lambda certificate: None,
) -> Certificate:
    """Runs all checks.

    Args:
        prompts: (id, token ids); all are decoded greedily, the first `sampled_prompts` are sampled as well.
        draws: of each sampled prompt. With a greedy `params`, nothing is sampled.
        after_check: called after each check with the certificate so far.
    """
    certificate = Certificate(str(decoder.base.dtype).removeprefix("torch."), params)
    prompts = list(prompts)
    for identity, prompt in prompts:
        certificate.greedy.append(check_greedy(decoder, identity, prompt, max_new_tokens))
        after_check(certificate)
    for identity, prompt in [] if params.greedy else prompts[:sampled_prompts]:
        certificate.sampling.append(check_sampling(decoder, identity, prompt, params, draws, seed))
        after_check(certificate)
    return certificate
