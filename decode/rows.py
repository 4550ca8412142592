"""One text in the making: its tokens, its law, its randomness, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from decode.drafters import DraftRow
from decode.sampling import build_processors, node_law, node_scores
from decode.settings import GenerationResult, GenerationSettings
from decode.stats import Stats
from decode.text import TextStream
from decode.tree import Tree
from decode.verify import Verdict, verify_greedy, verify_point_mass, verify_sampled, verify_typical
from medusa_heads.base import Base


class _TextEnded(Exception):
    """A rule has reached a node whose token ends the text (control flow, not an error)."""

    def __init__(self, node: int):
        self.node = node


def _kept(logits: Tensor) -> Tensor:
    """Logits (V,) in float32, as a copy: a view would keep those of all nodes of the round in memory."""
    return logits.to(torch.float32, copy=True)


class Row:
    """State of one row. The engine calls `verify` and `accept` once a round."""

    def __init__(self, base: Base, prompt_ids: Sequence[int], settings: GenerationSettings, index: int, stream: bool):
        self.index = index
        self.settings = settings
        self.ids = list(prompt_ids)
        self.prompt_length = len(self.ids)
        self.finish_reason: str | None = None
        self.stats = Stats(prompt_tokens=len(self.ids), acceptance=settings.acceptance)
        self.eos = set(base.eos_token_ids if settings.eos_token_ids is None else settings.eos_token_ids)
        self.processors = (
            settings.logits_processor
            if settings.logits_processor is not None
            else build_processors(
                settings.sampling,
                prompt_length=self.prompt_length,
                eos_token_ids=sorted(self.eos),
                device=base.device,
            )
        )
        self.generator = torch.Generator()
        if settings.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(settings.seed)
        self._tokenizer = base.tokenizer
        self.text: TextStream | None = None
        if settings.stop or stream:
            self.text = TextStream(base.tokenizer, settings.stop)
        self.logits: list[Tensor] = []
        self.scores: list[Tensor] = []
        self._scores_at: dict[int, Tensor] = {}
        """Processed scores by node of the round, where they are to be kept."""

    @property
    def root(self) -> int:
        """The token emitted last, which the base has not seen yet."""
        return self.ids[-1]

    @property
    def draft_row(self) -> DraftRow:
        """What the drafting session is told of the row."""
        return DraftRow(tuple(self.ids), self.settings.draft_temperature, self.generator)

    @property
    def new_ids(self) -> list[int]:
        return self.ids[self.prompt_length :]

    @property
    def greedy_at_once(self) -> bool:
        """Whether the argmax of raw logits decides, so that all nodes can be decided in one step."""
        return self.settings.sampling.greedy and len(self.processors) == 0

    def verify(
        self,
        tree: Tree,
        tokens: Tensor,
        logits: Tensor,
        choices: Tensor | None,
        laws: Tensor | Sequence[Tensor | None] | None = None,
    ) -> Verdict:
        """The path to keep. tokens (N,) on the CPU; logits (N, V); choices (N,): their argmax, where it decides; laws:
        this row's of `Draft.laws`.

        The exact rules ask for the law of a node when the path has reached it. So processors are called once a token,
        in the order of plain decoding, and never for what lies behind the end of the text: one that keeps state (a
        grammar's position) sees the calls that it would see without drafts. (Typical acceptance looks at more paths.)
        """
        self._scores_at.clear()

        def ended(node: int) -> bool:
            return node > 0 and self._ends_text(int(tokens[node]), len(self.new_ids) + tree.depths[node])

        def scores(node: int) -> Tensor:
            if ended(node):
                raise _TextEnded(node)
            drafted = [int(tokens[n]) for n in tree.path(node)[1:]]
            processed = node_scores(logits[node], self.ids + drafted, self.processors)
            if self.settings.output_scores:
                self._scores_at[node] = processed
            return processed

        def law(node: int) -> Tensor:
            return node_law(scores(node), (), ())

        try:
            if self.settings.sampling.greedy:
                if choices is not None:
                    return verify_greedy(tree, tokens, choices)
                return verify_greedy(tree, tokens, lambda node: int(scores(node).argmax()))
            if self.settings.acceptance == "approximate-typical":
                epsilon, alpha = self.settings.typical_epsilon, self.settings.typical_alpha
                return verify_typical(tree, tokens, law, self.generator, ended, epsilon=epsilon, alpha=alpha)
            if laws is not None:
                return verify_sampled(tree, tokens, laws, law, self.generator)
            return verify_point_mass(tree, tokens, law, self.generator)
        except _TextEnded as end:
            return Verdict(tree.path(end.node), int(tokens[end.node]))  # what would follow is not asked for

    def accept(self, tree: Tree, tokens: Tensor, verdict: Verdict, logits: Tensor) -> list[int]:
        """Takes in a round's tokens up to where the text ends. Returns the ones kept."""
        emitted = [int(tokens[node]) for node in verdict.path[1:]] + [verdict.next_token]
        kept: list[int] = []
        for node, token in zip(verdict.path, emitted, strict=True):
            self.ids.append(token)
            kept.append(token)
            if self.settings.output_logits:
                self.logits.append(_kept(logits[node]))
            if self.settings.output_scores:
                scores = self._scores_at.get(node)
                self.scores.append(_kept(logits[node]) if scores is None else scores)
            self.finish_reason = self._reason_to_end(token)
            if self.finish_reason is not None:
                break
        self.stats.new_tokens += len(kept)
        return kept

    def _ends_text(self, token: int, new_tokens: int) -> bool:
        """Whether a text whose last token is this one, the `new_tokens`-th, ends by an EOS or its length."""
        return token in self.eos or new_tokens >= self.settings.max_new_tokens

    def _reason_to_end(self, token: int) -> str | None:
        stopped = self.text.push(token) if self.text is not None else False
        criteria, met = self.settings.stopping_criteria, False
        if criteria is not None:
            scores: Any = tuple(s[None] for s in self.scores) if self.settings.output_scores else None
            met = bool(criteria(cast(torch.LongTensor, torch.tensor([self.ids])), scores).all())
        if token in self.eos:
            return "eos"
        if stopped:
            return "stop"
        if met:
            return "criteria"
        return "length" if self._ends_text(token, len(self.ids) - self.prompt_length) else None

    def result(self) -> GenerationResult:
        assert self.finish_reason is not None
        text: str | None = None
        if self.text is not None:
            self.text.finish()
            text = self.text.text
        elif self._tokenizer is not None:
            text = str(self._tokenizer.decode(self.new_ids, skip_special_tokens=True))
        with torch.inference_mode(False):  # so that the caller may change them in place
            logits = torch.stack(self.logits) if self.logits else None
            scores = torch.stack(self.scores) if self.scores else None
        return GenerationResult(self.new_ids, text, self.finish_reason, self.stats, logits, scores)
