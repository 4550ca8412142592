"""What a call of the decoder is asked for, and what it gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from decode.sampling import SamplingParams
from decode.stats import Stats
from medusa_heads.errors import ConfigError

DRAWN_FROM = 1.0
"""Temperature from which drawn drafts beat the likeliest ones, measured on the embedded pair
(docs/results/drafting_by_temperature.json)."""


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
    drafting: Literal["auto", "likeliest", "sampled"] = "auto"
    """Whether the children of a node are the drafter's likeliest tokens or drawn from its law; both are exact. Auto
    draws from `DRAWN_FROM` upward, where drawn ones are accepted more often (docs/exactness.md). A greedy request takes
    the likeliest, and so does every drafter without a law, and auto with approximate acceptance."""
    acceptance: Literal["exact", "approximate-typical"] = "exact"
    """By which rule drafts are kept. Exact: the text has the law of the base alone. `approximate-typical` keeps every
    draft that the base finds plausible (`verify.verify_typical`): longer paths, in text that leans towards what is
    drafted, and that a seed alone does not decide. For sampling only."""
    typical_epsilon: float = 0.09
    typical_alpha: float = 0.3
    """Of `approximate-typical`: a draft is plausible if p > min(epsilon, alpha · exp(-entropy))."""
    output_logits: bool = False
    """Keep the base's float32 logits, before any processor, of each new token."""
    output_scores: bool = False
    """Keep the float32 scores, after all processors, of each new token."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if any(not s for s in self.stop):
            raise ConfigError("a stop string must not be empty")
        if self.drafting not in ("auto", "likeliest", "sampled"):
            raise ConfigError(f"drafting must be auto, likeliest or sampled, not {self.drafting!r}")

        if self.acceptance not in ("exact", "approximate-typical"):
            raise ConfigError(f"acceptance must be exact or approximate-typical, not {self.acceptance!r}")
        if self.acceptance == "approximate-typical" and self.sampling.greedy:
            raise ConfigError(
                "acceptance='approximate-typical' is for sampling: give a temperature above 0 (greedy decoding keeps "
                "the base's own choice alone)"
            )
        if not 0.0 < self.typical_epsilon <= 1.0 or not 0.0 < self.typical_alpha < float("inf"):
            raise ConfigError(
                "typical acceptance needs 0 < typical_epsilon <= 1 and typical_alpha > 0, got "
                f"{self.typical_epsilon} and {self.typical_alpha}"
            )

    @property
    def draft_temperature(self) -> float:
        """The temperature at which drafts are drawn; 0: the likeliest tokens."""
        temperature = self.sampling.temperature
        drawn = temperature >= DRAWN_FROM and self.acceptance == "exact" if self.drafting == "auto" else True
        return 0.0 if self.drafting == "likeliest" or not drawn else temperature

    @property
    def drafts_move_text(self) -> bool:
        """Whether the text that a seed gives depends on what is drafted, and how much: where drafts are drawn, they
        take from the row's randomness; where acceptance is approximate, they decide."""
        return self.draft_temperature > 0.0 or self.acceptance != "exact"


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
