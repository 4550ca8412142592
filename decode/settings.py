"""What a call of the decoder is asked for, and what it gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from decode.sampling import SamplingParams
from decode.stats import Stats
from medusa_heads.errors import ConfigError


@dataclass(frozen=True)
class GenerationSettings:
    """One request. A batch takes one for all its rows, or one for each."""

    max_new_tokens: int = 256
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int | None = None
    """Seeds the request's own generator; None: from the system's entropy. Where one request stands for all rows of a
    batch, row r is seeded with seed + r."""
    eos_token_ids: tuple[int, ...] | None = None
    """Ids that end a text (the id itself is kept); None: the base's own; (): none."""
    stop: tuple[str, ...] = ()
    """Strings that end a text; the text is cut before them."""
    logits_processor: LogitsProcessorList | None = None
    """Processors ready made, as `generate` prepares them; they replace what `sampling` would build, and `sampling`
    then only says whether to sample (temperature above 0)."""
    stopping_criteria: StoppingCriteriaList | None = None
    """Asked once after each token, with the row's ids so far (1, L), and with `output_scores` its scores."""
    output_logits: bool = False
    """Keep the base's float32 logits, before any processor, of each new token."""
    output_scores: bool = False
    """Keep the float32 scores, after all processors, of each new token."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if any(not s for s in self.stop):
            raise ConfigError("a stop string must not be empty")


@dataclass
class GenerationResult:
    """One finished row."""

    token_ids: list[int]
    """New tokens; the EOS token, or the token that completed a stop string, is the last where one ended the text."""
    text: str | None
    """Their text without special tokens, cut before a stop string; None for a base without a tokenizer."""
    finish_reason: str
    """eos, stop (string), length (max_new_tokens), context (the base's limit) or criteria (a stopping criterion)."""
    stats: Stats
    logits: torch.Tensor | None = None
    """(new tokens, V) float32, where asked for."""
    scores: torch.Tensor | None = None
    """(new tokens, V) float32, where asked for."""


@dataclass
class Chunk:
    """What one round added to a stream. The last chunk carries the result."""

    token_ids: Sequence[int]
    text: str
    accepted: int = 0
    """How many of the tokens were drafted; the rest are the base's own."""
    result: GenerationResult | None = None
    row: int = 0
    """Which row of a batch the chunk belongs to."""
