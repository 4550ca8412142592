"""One text in the making: its tokens, its law, its randomness, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decode.sampling import build_processors, node_law, node_scores
from decode.settings import GenerationResult, GenerationSettings
from decode.stats import Stats
from decode.text import TextStream
from decode.tree import Tree
from decode.verify import Verdict, verify_greedy, verify_point_mass, verify_sampled
from medusa_heads.base import Base


class Row:
    """State of one row. The engine calls `verify` and `accept` once a round."""

    def __init__(self, base: Base, prompt_ids: Sequence[int], settings: GenerationSettings, index: int, stream: bool):
        self.index = index
        self.settings = settings
        self.ids = list(prompt_ids)
        self.prompt_length = len(self.ids)
        self.finish_reason: str | None = None
        self.stats = Stats(prompt_tokens=len(self.ids))
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
            self.generator.manual_seed(settings.seed + index)
        self._tokenizer = base.tokenizer
        self.text: TextStream | None = None
        if settings.stop or stream:
            self.text = TextStream(base.tokenizer, settings.stop)
        self.logits: list[Tensor] = []

    @property
    def root(self) -> int:
        """The token emitted last, which the base has not seen yet."""
        return self.ids[-1]

    @property
    def new_ids(self) -> list[int]:
        return self.ids[self.prompt_length :]

    @property
    def greedy_at_once(self) -> bool:
        """Whether the argmax of raw logits decides, so that all nodes can be decided in one step."""
        return self.settings.sampling.greedy and len(self.processors) == 0

    def verify(
        self, tree: Tree, tokens: Tensor, logits: Tensor, choices: Tensor | None, laws: Tensor | None = None
    ) -> Verdict:
        """The path to keep. tokens (N,) on the CPU; logits (N, V); choices (N,): their argmax, where it decides."""

        def prefix(node: int) -> list[int]:
            return self.ids + [int(tokens[n]) for n in tree.path(node)[1:]]

        if self.settings.sampling.greedy:
            if choices is not None:
                return verify_greedy(tree, tokens, choices)
            return verify_greedy(
                tree, tokens, lambda node: int(node_scores(logits[node], prefix(node), self.processors).argmax())
            )

        def law(node: int) -> Tensor:
            return node_law(logits[node], prefix(node), self.processors)

        if laws is not None:
            return verify_sampled(tree, tokens, laws, law, self.generator)
        return verify_point_mass(tree, tokens, law, self.generator)

    def accept(self, tree: Tree, tokens: Tensor, verdict: Verdict, logits: Tensor) -> list[int]:
        """Takes in a round's tokens up to where the text ends. Returns the ones kept."""
        emitted = [int(tokens[node]) for node in verdict.path[1:]] + [verdict.next_token]
        kept: list[int] = []
        for node, token in zip(verdict.path, emitted, strict=True):
            self.ids.append(token)
            kept.append(token)
            if self.settings.output_logits:
                self.logits.append(logits[node].float())
            self.finish_reason = self._reason_to_end(token)
            if self.finish_reason is not None:
                break
        self.stats.new_tokens += len(kept)
        return kept

    def _reason_to_end(self, token: int) -> str | None:
        stopped = self.text.push(token) if self.text is not None else False
        if token in self.eos:
            return "eos"
        if stopped:
            return "stop"
        criteria = self.settings.stopping_criteria
        if criteria is not None and bool(criteria(torch.tensor([self.ids]), None).all()):
            return "criteria"
        if len(self.ids) - self.prompt_length >= self.settings.max_new_tokens:
            return "length"
        return None

    def result(self) -> GenerationResult:
        assert self.finish_reason is not None
        text: str | None = None
        if self.text is not None:
            self.text.finish()
            text = self.text.text
        elif self._tokenizer is not None:
            text = str(self._tokenizer.decode(self.new_ids, skip_special_tokens=True))
        logits = torch.stack(self.logits) if self.logits else None
        return GenerationResult(self.new_ids, text, self.finish_reason, self.stats, logits)
