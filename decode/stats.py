"""What a call of the decoder did: one counter and one clock for plain and speculative decoding alike."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

STAGES = ("prefill", "draft", "forward", "verify", "commit")


@dataclass
class Stats:
    """Counts are of one row; times are of the call, which rows of a batch share."""

    acceptance: str = "exact"
    """The rule by which drafts were kept (`GenerationSettings.acceptance`); an approximate one says so."""
    prompt_tokens: int = 0
    new_tokens: int = 0
    """Tokens kept: what was accepted behind the end of the text does not count."""
    base_forwards: int = 0
    """Forward passes of the base, the prompt's counted as one. Plain decoding needs one a token."""
    rounds: int = 0
    """Passes that verified a tree (or, without drafts, its root alone)."""
    acceptance_histogram: list[int] = field(default_factory=list)
    """[n] = rounds that kept n drafted tokens."""
    tree_nodes: int = 0
    """Nodes verified over all rounds."""
    guarded_rounds: int = 0
    """Rounds in which the guard allowed less than the drafter's own tree, or no draft (see `decode.guard`)."""
    reused_tokens: int = 0
    """Prompt tokens that a kept prefix saved from being computed again."""
    seconds: float = 0.0
    stage_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    @property
    def exact(self) -> bool:
        """Whether the text has the base's own law."""
        return self.acceptance == "exact"

    @property
    def tau(self) -> float:
        """Acceptance length: new tokens ÷ forward passes of the base, the base's own token included."""
        return self.new_tokens / self.base_forwards if self.base_forwards else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds if self.seconds else 0.0

    def count_round(self, kept_drafts: int, nodes: int, guarded: bool = False) -> None:
        self.rounds += 1
        self.guarded_rounds += guarded
        self.tree_nodes += nodes
        if kept_drafts >= len(self.acceptance_histogram):
            self.acceptance_histogram += [0] * (kept_drafts + 1 - len(self.acceptance_histogram))
        self.acceptance_histogram[kept_drafts] += 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "exact": self.exact,
            "acceptance": self.acceptance,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "base_forwards": self.base_forwards,
            "rounds": self.rounds,
            "tau": round(self.tau, 4),
            "seconds": round(self.seconds, 6),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "acceptance_histogram": self.acceptance_histogram,
            "tree_nodes": self.tree_nodes,
            "guarded_rounds": self.guarded_rounds,
            "reused_tokens": self.reused_tokens,
            "stage_seconds": {stage: round(s, 6) for stage, s in self.stage_seconds.items()},
        }


class Clock:
    """Adds up the time of each stage of a call."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.stages = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.stages[name] += time.perf_counter() - begin

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start
