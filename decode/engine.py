"""The decoder: draft a tree, score it in one pass of the base, keep a path, again.

Plain decoding is the same loop with a tree of one node, so that the two are compared on equal terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from decode.cache import TreeCache
from decode.drafters import Draft, Drafter, DraftSession, SharesCache
from decode.fixed import SLOTS, FixedPasses, rounded_up
from decode.guard import DEFAULT_GUARD, CostMemory, Guard, GuardSettings
from decode.mask import RunningMask
from decode.prefix import Prefix
from decode.rows import Row
from decode.settings import Chunk, GenerationResult, GenerationSettings
from decode.stats import Clock
from decode.support import check_tree_support
from decode.tree import Tree
from medusa_heads.base import Base, BaseOutput
from medusa_heads.errors import ConfigError

ROOT_ONLY = Tree.chain(1)
PREFILL_CHUNK = 512
"""Tokens of a prompt in one forward pass: bounds the memory of attention and logits over long prompts."""


def _padded(mask: Tensor, nodes: int) -> Tensor:
    """(n, n) → (nodes, nodes): what is added sees itself alone."""
    padded = torch.eye(nodes, dtype=torch.bool)
    padded[: len(mask), : len(mask)] = mask
    return padded


def likeliest(logits: Tensor) -> Tensor:
    """The greatest entry's index, the first of equal ones: (..., V) → (...). `argmax` gives the same, but takes four
    times as long in bfloat16 on a CPU."""
    return logits.max(-1).indices


class Decoder:
    """Generates with a base, and with a drafter if there is one. Holds no state of a call; what its guard learns of the
    machine's costs it keeps for later calls."""

    def __init__(self, base: Base, drafter: Drafter | None = None, *, guard: GuardSettings | None = DEFAULT_GUARD):
        """With `guard` None every round drafts as the drafter likes. Calls in which a seeded row's text depends on what
        is drafted are never guarded: a guard goes by the clock, and the text must be the seed's alone."""
        check_tree_support(base)
        self.base = base
        self.drafter = drafter
        self.guard = guard
        self.costs = CostMemory()

    def _guard_for(self, settings: Sequence[GenerationSettings]) -> Guard | None:
        if self.guard is None or self.drafter is None:
            return None
        if any(own.seed is not None and own.drafts_move_text for own in settings):
            return None
        return Guard(self.guard, self.costs)

    def generate(
        self, prompt_ids: Sequence[int], settings: GenerationSettings | None = None, *, prefix: Prefix | None = None
    ) -> GenerationResult:
        """Continues one prompt."""
        call = _Call(self, [prompt_ids], [settings or GenerationSettings()], prefix=prefix)
        for _ in call.run():
            pass
        return call.results[0]

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        settings: GenerationSettings | Sequence[GenerationSettings] | None = None,
    ) -> list[GenerationResult]:
        """Continues several prompts of any lengths together; each row as if it were alone."""
        call = _Call(self, prompts, per_row(settings, len(prompts)))
        for _ in call.run():
            pass
        return [call.results[i] for i in range(len(prompts))]

    def stream(
        self, prompt_ids: Sequence[int], settings: GenerationSettings | None = None, *, prefix: Prefix | None = None
    ) -> Iterator[Chunk]:
        """Continues one prompt, yielding what each round adds. The last chunk has the result."""
        if self.base.tokenizer is None:
            raise ConfigError("streaming text needs a base with a tokenizer")
        yield from _Call(self, [prompt_ids], [settings or GenerationSettings()], stream=True, prefix=prefix).chunks()

    def stream_batch(
        self,
        prompts: Sequence[Sequence[int]],
        settings: GenerationSettings | Sequence[GenerationSettings] | None = None,
        *,
        prefix: Prefix | None = None,
    ) -> Iterator[Chunk]:
        """Continues several prompts, yielding for each round what each row adds; the last chunk of a row has its
        result. The chunks' text is empty for a base without a tokenizer. A prefix serves one prompt alone."""
        stream = self.base.tokenizer is not None
        yield from _Call(self, prompts, per_row(settings, len(prompts)), stream=stream, prefix=prefix).chunks()


def per_row(
    settings: GenerationSettings | Sequence[GenerationSettings] | None, rows: int
) -> Sequence[GenerationSettings]:
    """Settings of each row; where one stands for all, its seed counts up so that rows draw differently."""
    settings = settings or GenerationSettings()
    if isinstance(settings, GenerationSettings):
        seed = settings.seed
        return [settings if seed is None else replace(settings, seed=seed + row) for row in range(rows)]
    if len(settings) != rows:
        raise ConfigError(f"{len(settings)} settings are given for {rows} prompts")
    return settings


class _Call:
    """One call of the decoder: its rows, its cache, its drafting session. All its tensors are of torch's inference
    mode, in which no operation keeps books for gradients."""

    @torch.inference_mode()
    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        settings: Sequence[GenerationSettings],
        stream: bool = False,
        prefix: Prefix | None = None,
    ):
        self.base = decoder.base
        self.limit = self.base.max_positions
        for prompt in prompts:
            self._check_prompt(prompt)
        self.rows = [
            Row(self.base, prompt, own, i, stream)
            for i, (prompt, own) in enumerate(zip(prompts, settings, strict=True))
        ]
        self.results: dict[int, GenerationResult] = {}
        self.clock = Clock()
        self.guard = decoder._guard_for(settings)
        self.layers = tuple(decoder.drafter.layers) if decoder.drafter else ()
        self.session: DraftSession | None = None
        self.prefix = prefix
        if prefix is not None and len(prompts) != 1:
            raise ConfigError(f"a prefix serves one prompt at a time, not {len(prompts)}")
        if prefix is None or not self._resume(prefix, decoder.drafter):
            longest = max(len(p) + own.max_new_tokens for p, own in zip(prompts, settings, strict=True))
            room = longest + 64
            self.cache = TreeCache(
                self.base.num_layers, len(prompts), rounded_up(room, SLOTS) if self.base.fixed_shapes else room
            )
            if decoder.drafter is not None:
                self.session = decoder.drafter.start([row.draft_row for row in self.rows])
            if prefix is not None:
                prefix.base, prefix.cache, prefix.ids = self.base, self.cache, []
                prefix.drafter, prefix.session = decoder.drafter, self.session
        if isinstance(self.session, SharesCache):
            self.session.share(self.cache)
        self.mask = RunningMask.for_base(self.base, self.cache)
        self.fixed = FixedPasses(self.base, self.cache, self.mask) if self.base.fixed_shapes else None

    def _resume(self, prefix: Prefix, drafter: Drafter | None) -> bool:
        """Takes over what a kept prefix shares with the prompt; False where that is of another base or drafter."""
        if prefix.cache is None or prefix.base is not self.base or prefix.drafter is not drafter:
            return False
        row = self.rows[0]
        reused = prefix.shared_length(row.ids)
        prefix.ids = None
        self.cache = prefix.cache
        self.cache.release()
        self.cache.truncate(reused)
        self.session = prefix.session
        if self.session is not None:
            self.session.resume(row.draft_row, reused)
        prefix.ids = row.ids[:reused]
        row.stats.reused_tokens = reused
        return True

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        if len(prompt) == 0:
            raise ConfigError("a prompt must have at least one token")
        if max(prompt) >= self.base.vocab_size or min(prompt) < 0:
            raise ConfigError(f"a prompt has token ids outside the base's vocabulary of {self.base.vocab_size}")
        if self.limit is not None and len(prompt) >= self.limit:
            raise ConfigError(
                f"the prompt has {len(prompt)} tokens; the base's context of {self.limit} leaves no room for an answer"
            )

    @torch.inference_mode()
    def run(self) -> Iterator[tuple[Row, list[int], int]]:
        """Yields (row, tokens kept, of which drafted) for each row and round, until all rows have ended."""
        yield from self._prefill()
        while self.rows:
            yield from self._round()

    def chunks(self) -> Iterator[Chunk]:
        """The run as a stream."""
        for row, kept, accepted in self.run():
            text = row.text.take() if row.text is not None else ""
            yield Chunk(kept, text, accepted, self.results.get(row.index), row.index)

    def _prefill(self) -> Iterator[tuple[Row, list[int], int]]:
        """Shows the base the prompts, chunk by chunk, and emits each row's first token."""
        logits: dict[int, Tensor] = {}
        with self.clock.stage("prefill"):
            done = list(self.cache.lengths)
            while any(n < row.prompt_length for n, row in zip(done, self.rows, strict=True)):
                pieces = [row.ids[n : n + PREFILL_CHUNK] for n, row in zip(done, self.rows, strict=True)]
                paths = [range(len(piece)) for piece in pieces]
                output, tokens = self._forward_pieces(pieces)
                self._observe(output, tokens, paths)
                for i, (piece, row) in enumerate(zip(pieces, self.rows, strict=True)):
                    done[i] += len(piece)
                    if piece and done[i] == row.prompt_length:
                        logits[i] = self.base.project(output.last_hidden_state[i, len(piece) - 1])
            for row in self.rows:
                row.stats.base_forwards += 1
        with self.clock.stage("verify"):
            settled = [self._settle(row, ROOT_ONLY, None, logits[i][None]) for i, row in enumerate(self.rows)]
        yield from self._report([(row, kept, 0) for row, (_, kept, _) in zip(self.rows, settled, strict=True)])

    def _forward_pieces(self, pieces: Sequence[Sequence[int]]) -> tuple[BaseOutput, Tensor]:
        """A pass over one run of prompt tokens a row, right-padded: what follows a row's own tokens is never kept."""
        width = max(len(piece) for piece in pieces)
        tokens = torch.tensor([list(piece) + [0] * (width - len(piece)) for piece in pieces], device=self.base.device)
        positions = self.cache.positions(torch.arange(width, device=self.base.device))
        if self.cache.offset == 0:
            visible, keys = None, None
        else:
            causal = torch.ones(width, width, dtype=torch.bool, device=self.base.device).tril()
            visible, keys = self.cache.visible(causal), self.cache.key_positions(positions)
        if self.limit is not None:
            positions = positions.clamp_max(self.limit - 1)
        output = self.base.forward(
            tokens,
            position_ids=positions,
            attention_mask=visible,
            key_positions=keys,
            cache=self.cache,
            layers=self.layers,
        )
        return output, tokens

    def _round(self) -> Iterator[tuple[Row, list[int], int]]:
        begin = self.clock.seconds
        with self.clock.stage("draft"):
            draft = self._draft()
        with self.clock.stage("forward"):
            output = self._forward_trees(draft)
            logits = self.base.project(output.last_hidden_state)
        with self.clock.stage("verify"):
            at_once = any(row.greedy_at_once for row in self.rows)
            # The one point of a round where a device is waited for: what was drafted is done by then as well.
            choices = likeliest(logits).to("cpu") if at_once else None
            tokens = draft.tokens.to("cpu")
            settled = []
            for i, row in enumerate(self.rows):
                laws = draft.laws[i] if draft.laws is not None else None
                size = draft.trees[i].size
                row.stats.base_forwards += 1
                settled.append(self._settle(row, draft.trees[i], tokens[i, :size], logits[i, :size], choices, laws, i))
        with self.clock.stage("commit"):
            self._observe(output, draft.tokens, [path for path, _, _ in settled])
        report = []
        for i, (row, (_, kept, drafted)) in enumerate(zip(self.rows, settled, strict=True)):
            held_back = self.guard is not None and self.guard.holds_back
            row.stats.count_round(drafted, draft.trees[i].size, held_back)
            report.append((row, kept, drafted))
        if self.guard is not None:
            emitted = sum(len(kept) for _, kept, _ in settled) / len(settled)
            self.guard.count(len(settled), draft.tokens.shape[1], emitted, self.clock.seconds - begin)
        yield from self._report(report)

    def _draft(self) -> Draft:
        roots = [row.root for row in self.rows]
        nodes = None if self.guard is None else self.guard.nodes(len(roots))
        if self.session is not None and nodes != 1:
            with self._changing():
                return self._within_limit(self.session.draft(roots, nodes))
        ids = torch.tensor(roots, device=self.base.device)
        return Draft([ROOT_ONLY] * len(roots), ids[:, None])

    def _within_limit(self, draft: Draft) -> Draft:
        """The draft without the trees that would reach beyond the base's context."""
        if self.limit is None:
            return draft
        fits = [n + tree.depth < self.limit for n, tree in zip(self.cache.lengths, draft.trees, strict=True)]
        if all(fits):
            return draft
        trees = [tree if fit else ROOT_ONLY for tree, fit in zip(draft.trees, fits, strict=True)]
        laws = None if draft.laws is None else [law if fit else None for law, fit in zip(draft.laws, fits, strict=True)]
        return Draft(trees, draft.tokens[:, : max(tree.size for tree in trees)], laws)

    def _forward_trees(self, draft: Draft) -> BaseOutput:
        if self.fixed is not None:
            return self.fixed.over(draft, self.layers)
        device = self.base.device
        shared = all(tree is draft.trees[0] for tree in draft.trees)
        if shared:
            depths = torch.tensor(draft.trees[0].depths, device=device)
            ancestors = draft.trees[0].ancestor_mask.to(device)
        else:
            nodes = draft.tokens.shape[1]
            depths = torch.tensor([tree.depths + (0,) * (nodes - tree.size) for tree in draft.trees], device=device)
            ancestors = torch.stack([_padded(tree.ancestor_mask, nodes) for tree in draft.trees]).to(device)
        positions = self.cache.positions(depths)
        if self.mask is not None and self.cache.held == 0:
            visible, keys = self.mask.over(ancestors), None
        else:
            visible, keys = self.cache.visible(ancestors), self.cache.key_positions(positions)
        return self.base.forward(
            draft.tokens,
            position_ids=positions,
            attention_mask=visible,
            key_positions=keys,
            cache=self.cache,
            layers=self.layers,
            step=True,
        )

    def _settle(
        self,
        row: Row,
        tree: Tree,
        tokens: Tensor | None,
        logits: Tensor,
        choices: Tensor | None = None,
        laws: Tensor | Sequence[Tensor | None] | None = None,
        index: int = 0,
    ) -> tuple[list[int], list[int], int]:
        """Verifies one row. Returns the path whose tokens the cache keeps, the tokens emitted, and how many of those
        were drafted."""
        tokens = torch.tensor([row.root]) if tokens is None else tokens
        own = choices[index, : tree.size] if choices is not None and row.greedy_at_once else None
        verdict = row.verify(tree, tokens, logits, own, laws)
        kept = row.accept(tree, tokens, verdict, logits)
        return verdict.path[: len(kept)], kept, min(len(kept), len(verdict.path) - 1)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Around what changes the cache's text or the session: where it fails, a kept prefix is not whole."""
        if self.prefix is not None:
            self.prefix.ids = None
        yield
        if self.prefix is not None:
            self.prefix.ids = self.rows[0].ids[: self.cache.lengths[0]]

    def _observe(self, output: BaseOutput, tokens: Tensor, paths: Sequence[Sequence[int]]) -> None:
        with self._changing():
            self.cache.commit(paths)
            if self.session is not None:
                self.session.observe(output, tokens, paths)

    def _report(self, report: list[tuple[Row, list[int], int]]) -> Iterator[tuple[Row, list[int], int]]:
        """Ends rows that are done, then hands out what the round gave."""
        for row, _, _ in report:
            if row.finish_reason is None and self.limit is not None and len(row.ids) >= self.limit:
                row.finish_reason = "context"
            if row.finish_reason is not None:
                row.stats.seconds = self.clock.seconds
                row.stats.stage_seconds = dict(self.clock.stages)
                self.results[row.index] = row.result()
        self._drop_finished()
        yield from report

    def _drop_finished(self) -> None:
        going = [i for i, row in enumerate(self.rows) if row.finish_reason is None]
        if len(going) == len(self.rows):
            return
        if going:
            self.cache.keep_rows(going)
            if self.mask is not None:
                self.mask.keep_rows(going)
            if self.session is not None:
                self.session.keep_rows(going)
        self.rows = [self.rows[i] for i in going]
