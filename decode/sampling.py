"""From logits to the law that plain `generate` would sample from, through transformers' own processors.

`SamplingParams` names what to apply, `build_processors` builds it in the order of `generate`, `node_law` gives the law
of a node's next token given the tokens before it: the committed text and the drafted path. The law is computed in
float32, as `generate` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from medusa_heads.errors import ConfigError

NUCLEUS = 1024
"""Likeliest tokens among which the edge of top-p is looked for."""


@dataclass(frozen=True)
class SamplingParams:
    """What the base's law is made of besides its logits; names and meanings are those of `GenerationConfig`.

    The defaults change nothing and decode greedily (unlike `GenerationConfig`, whose top_k is 50). With temperature 0
    the settings that only shape sampling (top_k … eta_cutoff) have no effect, as in `generate(do_sample=False)`.
    """

    temperature: float = 0.0  # 0: greedy, the argmax of the processed logits
    top_k: int = 0  # keep the k likeliest tokens; 0: all
    top_p: float = 1.0  # keep the likeliest tokens up to this mass; 1: all
    min_p: float = 0.0  # keep tokens with p >= min_p * max p; 0: all
    top_h: float | None = None  # keep the likeliest tokens up to this share of the entropy (of the likeliest 100)
    typical_p: float = 1.0  # keep the most typical tokens (locally typical sampling) up to this mass; 1: all
    epsilon_cutoff: float = 0.0  # keep tokens with p >= epsilon; 0: all
    eta_cutoff: float = 0.0  # the same, with a threshold that follows the entropy; 0: all
    repetition_penalty: float = 1.0  # logits of tokens in the prefix are divided (if negative: multiplied) by this
    no_repeat_ngram_size: int = 0  # no n-gram of this length occurs twice; 0: off
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # token sequences that are never completed
    min_new_tokens: int = 0  # no EOS before this many new tokens
    suppress_tokens: tuple[int, ...] = ()  # tokens that are never emitted

    def __post_init__(self) -> None:
        self._require("temperature", self.temperature >= 0.0, "at least 0 (0 is greedy)")
        self._require("top_k", self.top_k >= 0, "at least 0 (0 keeps all tokens)")
        self._require("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1")
        self._require("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1")
        self._require("top_h", self.top_h is None or 0.0 < self.top_h <= 1.0, "above 0 and at most 1, or None")
        self._require("typical_p", 0.0 < self.typical_p <= 1.0, "above 0 and at most 1")
        self._require("epsilon_cutoff", 0.0 <= self.epsilon_cutoff < 1.0, "at least 0 and below 1")
        self._require("eta_cutoff", 0.0 <= self.eta_cutoff < 1.0, "at least 0 and below 1")
        self._require("repetition_penalty", self.repetition_penalty > 0.0, "above 0 (1 is off)")
        self._require("no_repeat_ngram_size", self.no_repeat_ngram_size >= 0, "at least 0 (0 is off)")
        self._require("min_new_tokens", self.min_new_tokens >= 0, "at least 0")
        words = all(len(word) > 0 and min(word) >= 0 for word in self.bad_words_ids)
        self._require("bad_words_ids", words, "non-empty sequences of token ids")
        self._require("suppress_tokens", all(token >= 0 for token in self.suppress_tokens), "token ids")

    def _require(self, name: str, condition: bool, expected: str) -> None:
        value = getattr(self, name)
        if not condition or (isinstance(value, float) and not math.isfinite(value)):
            raise ConfigError(f"{name} must be {expected}, got {value}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def build_processors(
    params: SamplingParams,
    *,
    prompt_length: int | None = None,
    eos_token_ids: Sequence[int] = (),
    custom: Iterable[LogitsProcessor] = (),
    device: torch.device | str = "cpu",
) -> LogitsProcessorList:
    """The processors of one request, in the order in which `model.generate` applies them.

    prompt_length: tokens before the first new one; min_new_tokens needs it. eos_token_ids: all ids that end the text.
    custom: the user's own; they come after those that shape logits by the prefix and before those that shape sampling,
    and one of a type that the settings ask for too takes its place, as in `generate`. device: of the logits.
    """
    eos = list(eos_token_ids)
    shaping = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        shaping.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    if params.no_repeat_ngram_size > 0:
        shaping.append(NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size))
    if params.bad_words_ids:
        shaping.append(NoBadWordsLogitsProcessor([list(word) for word in params.bad_words_ids], eos or None))
    if params.min_new_tokens > 0 and eos:
        if prompt_length is None:
            raise ValueError("min_new_tokens counts from the end of the prompt: give prompt_length")
        shaping.append(MinNewTokensLengthLogitsProcessor(prompt_length, params.min_new_tokens, eos, device=str(device)))
    if params.suppress_tokens:
        shaping.append(SuppressTokensLogitsProcessor(list(params.suppress_tokens), device=str(device)))
    processors = _with_custom(shaping, list(custom))
    if params.greedy:
        return processors
    if params.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_h is not None:
        processors.append(TopHLogitsWarper(params.top_h))
    if params.top_k > 0:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        processors.append(MinPLogitsWarper(params.min_p))
    if params.typical_p < 1.0:
        processors.append(TypicalLogitsWarper(params.typical_p))
    if params.epsilon_cutoff > 0.0:
        processors.append(EpsilonLogitsWarper(params.epsilon_cutoff))
    if params.eta_cutoff > 0.0:
        processors.append(EtaLogitsWarper(params.eta_cutoff, device=str(device)))
    return processors


def _with_custom(default: LogitsProcessorList, custom: list[LogitsProcessor]) -> LogitsProcessorList:
    merged = LogitsProcessorList()
    for processor in default:
        merged.append(next((own for own in custom if type(own) is type(processor)), processor))
    merged.extend(own for own in custom if own not in merged)
    return merged


def node_scores(logits: Tensor, prefix_ids: Sequence[int] | Tensor, processors: Iterable[LogitsProcessor]) -> Tensor:
    """Processed scores (V,) in float32 of the token that follows `prefix_ids`; their argmax is the greedy choice.

    logits (V,): the base's, of any dtype; left as they are. prefix_ids (L,): all tokens before that one, from the first
    of the prompt to the last of the drafted path.
    """
    prefix = cast(torch.LongTensor, torch.as_tensor(prefix_ids, dtype=torch.long, device=logits.device).unsqueeze(0))
    scores = logits.to(torch.float32, copy=True).unsqueeze(0)  # some processors write into what they are given
    for processor in processors:  # the list's own call inspects each signature anew, at 25 microseconds
        scores = apply(processor, prefix, scores)
    return scores.squeeze(0)


def apply(processor: LogitsProcessor, prefix_ids: Tensor, scores: Tensor) -> Tensor:
    """What `processor(prefix_ids, scores)` gives, bit for bit; top-p of one row over a large vocabulary faster."""
    if type(processor) is TopPLogitsWarper and scores.shape[0] == 1 and scores.shape[1] > 4 * NUCLEUS:
        last = _last_of_nucleus(scores[0], processor.top_p, processor.min_tokens_to_keep)
        if last is not None:
            return scores.masked_fill(scores < last, processor.filter_value)
    return processor(cast(torch.LongTensor, prefix_ids), cast(torch.FloatTensor, scores))


def _last_of_nucleus(scores: Tensor, top_p: float, least: int) -> Tensor | None:
    """The least score (V,) that top-p keeps; None where only a sort of all scores can tell.

    A token is kept if those above it have a mass below `top_p`, which the likeliest few decide. The warper itself adds
    up float32 from the other end: what lies within its rounding of the edge, or is tied across it, is left to it.
    """
    values = scores.topk(NUCLEUS + 1).values.double()
    masses = torch.exp(values - torch.logsumexp(scores.double(), dim=0))
    above = masses.cumsum(0) - masses
    kept = max(int((above < top_p).sum()), least)
    rounding = len(scores) * 2.0**-24 * (1.0 - top_p) + 1e-6
    if kept > NUCLEUS or not bool((above - top_p).abs().min() > rounding) or values[kept - 1] == values[kept]:
        return None
    return values[kept - 1].to(scores.dtype)


def node_law(logits: Tensor, prefix_ids: Sequence[int] | Tensor, processors: Iterable[LogitsProcessor]) -> Tensor:
    """The base's law (V,) of the token that follows `prefix_ids`: float32 probabilities. Arguments as `node_scores`.

    Raises ValueError if the processors rule out every token, or the logits are not numbers.
    """
    law = torch.softmax(node_scores(logits, prefix_ids, processors), dim=-1)
    if torch.isnan(law[0]):  # one NaN or no finite score makes all entries NaN
        raise ValueError(
            "no token can follow: the logits are not finite, or the logits processors rule out every token"
        )
    return law
