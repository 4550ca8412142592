"""Drafting with EAGLE heads: one draft layer that goes on by itself, a tree grown anew each round.

The head's input at position t is the base's feature there and the token at t + 1 (`medusa_heads.eagle`). What is
committed in its cache comes from the base's states alone: before a draft, the session reads the positions that the base
has kept since the last one, the root included, in one pass. Its output at the last of them gives the candidates of
depth 1; further steps go on from the head's own outputs, and what they write to the cache is dropped after the round.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from decode.cache import TreeCache
from decode.drafters import Draft, DraftRow
from decode.drafters.gather import join_states, kept_states, take
from decode.drafters.growing import GrowingDrafter
from decode.drafters.growth import Growth, grow, start_growths
from decode.drafters.projection import draft_projection
from decode.dynamic import DynamicTree, TreeChoice
from decode.tree import Tree
from medusa_heads.base import BaseOutput
from medusa_heads.eagle import EagleHeads
from medusa_heads.norms import fuse_norms
from medusa_heads.prepack import can_prepack, pack_linears, pack_siblings

if TYPE_CHECKING:
    from medusa_heads.base import Base

CHUNK = 512
"""Positions of a prompt that the head reads in one pass: bounds the memory of attention."""


class EagleDrafter(GrowingDrafter):
    """EAGLE heads and how far their trees may grow (see `GrowingDrafter`)."""

    heads_class = EagleHeads

    def __init__(self, heads: EagleHeads, base: Base, tree: DynamicTree | Tree, drawn: Tree | None = None):
        self.base = base
        self.choice = TreeChoice.of(tree, drawn)
        self.layers: Sequence[int] = heads.layers
        self.heads = copy.deepcopy(heads).to(base.device, base.dtype).eval().requires_grad_(False)
        self.num_parameters = heads.num_parameters  # packing hides those of the copy
        self.vocab_size = heads.config.vocab_size
        limits = [n for n in (base.max_positions, heads.config.shape.max_position_embeddings) if n is not None]
        self.max_positions = min(limits)
        """Positions that base and head were made for."""
        if can_prepack(base.device, base.dtype):
            probe = torch.zeros(1, 2, base.hidden_size, dtype=base.dtype)
            pack_siblings(self.heads, lambda: self.heads(probe, probe, torch.zeros(1, 2, dtype=torch.long)))
            pack_linears(self.heads, keep=None)
            fuse_norms(self.heads)
        self.draft_ids = self.heads.draft_ids
        self.cpu_ids = None if self.draft_ids is None else self.draft_ids.to("cpu")
        self._project = self.heads.lm_head if heads.config.own_projection else draft_projection(base, self.draft_ids)

    def start(self, rows: Sequence[DraftRow]) -> EagleSession:
        return EagleSession(self, rows)

    def logits(self, features: Tensor) -> Tensor:
        """Of the token that follows: (B, M, h) → (B, M, rows of the draft vocabulary)."""
        return self._project(self.heads.states(features))


@dataclass
class _Seen:
    """What the base has given of one row."""

    row: DraftRow
    tokens: list[int] = field(default_factory=list)
    fresh: list[BaseOutput] = field(default_factory=list)
    """States (n, h) of the last of them, not fused yet."""
    fused: int = 0
    """Tokens whose feature the session holds."""


class EagleSession:
    """State of one call: for each row the tokens and features that the base has given, and the head's cache.

    The cache commits position t once token t + 1 is known. The features of all positions are kept, so that a later call
    can go on from any of them.
    """

    def __init__(self, drafter: EagleDrafter, rows: Sequence[DraftRow]):
        self.drafter = drafter
        self.seen = [_Seen(row) for row in rows]
        self.cache = TreeCache(1, len(rows))
        self.features: Tensor | None = None
        """(B, capacity, h)."""
        self.steps = 0
        """Of the last draft."""

    def observe(self, output: BaseOutput, tokens: Tensor, paths: Sequence[Sequence[int]]) -> None:
        ids = tokens.tolist()
        for row, (seen, path) in enumerate(zip(self.seen, paths, strict=True)):
            if path:
                seen.tokens += [ids[row][node] for node in path]
                seen.fresh.append(kept_states(output, row, path))

    def draft(self, roots: Sequence[int], nodes: int | None = None) -> Draft:
        if not all(seen.tokens for seen in self.seen):
            raise RuntimeError("a draft was asked for before the base has seen a token")
        drafter = self.drafter
        # The root's position is the number of tokens seen; a node's is that plus its depth.
        room = drafter.max_positions - 1 - max(len(seen.tokens) for seen in self.seen)
        growths = start_growths(
            drafter.choice,
            [seen.row for seen in self.seen],
            roots,
            nodes=nodes,
            deepest=room,
            ids=drafter.cpu_ids,
            vocab_size=drafter.vocab_size,
        )
        return self.grow(growths)

    @torch.no_grad()
    def grow(self, growths: Sequence[Growth]) -> Draft:
        """Grows a tree for each row behind what the base has seen of it."""
        step = _Round(self)
        try:
            return grow(step, growths, self.drafter.draft_ids, self.drafter.base.device)
        finally:
            self.steps = step.count
            self.cache.release()

    @torch.no_grad()
    def lead(self, tokens: Sequence[int]) -> Tensor:
        """Logits (n, R) along a given path of the only row: behind its root, `tokens[0]`, and each further token."""
        step = _Round(self)
        try:
            return torch.stack([step([[0]] if i else None, [[token]])[0, 0] for i, token in enumerate(tokens)])
        finally:
            self.cache.release()

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.seen = [self.seen[row] for row in rows]
        self.cache.keep_rows(rows)
        if self.features is not None:
            self.features = self.features[list(rows)]

    def resume(self, row: DraftRow, length: int) -> None:
        self._fuse()
        old = self.seen[0]
        self.seen = [_Seen(row, old.tokens[:length], fused=min(old.fused, length))]
        # Another token follows the last position now.
        self.cache.truncate(min(self.cache.lengths[0], max(length - 1, 0)))

    def read(self, roots: Sequence[int]) -> Tensor:
        """Takes the positions that are new into the cache. Returns the features (B, 1, h) behind the last of each row.

        Args:
            roots: for each row the token that follows what the base has seen.
        """
        self._fuse()
        assert self.features is not None
        texts = [[*seen.tokens, root] for seen, root in zip(self.seen, roots, strict=True)]
        ends = [len(seen.tokens) for seen in self.seen]
        for row, end in enumerate(ends):
            if self.cache.lengths[row] == end:  # drafted from before, perhaps with another root
                self.cache.truncate(end - 1, row)
        behind = self.features.new_empty(len(texts), 1, self.features.shape[-1])
        while self.cache.lengths != ends:
            begins = list(self.cache.lengths)
            counts = [min(CHUNK, end - begin) for begin, end in zip(begins, ends, strict=True)]
            output = self._read_pieces(texts, begins, counts)
            self.cache.commit([range(count) for count in counts])
            for row, (begin, count) in enumerate(zip(begins, counts, strict=True)):
                if count and begin + count == ends[row]:
                    behind[row, 0] = output[row, count - 1]
        return behind

    def _read_pieces(self, texts: Sequence[list[int]], begins: Sequence[int], counts: Sequence[int]) -> Tensor:
        """A pass over `counts` positions of each row from `begins` on, right-padded: (B, longest count, h)."""
        assert self.features is not None
        width, base = max(counts), self.drafter.base
        ids = [text[b + 1 : b + 1 + n] + [0] * (width - n) for text, b, n in zip(texts, begins, counts, strict=True)]
        places = torch.tensor(begins, device=base.device)[:, None] + torch.arange(width, device=base.device)
        features = take(self.features, places.clamp_max(self.features.shape[1] - 1))
        visible = None
        if self.cache.offset > 0:
            visible = self.cache.visible(torch.ones(width, width, dtype=torch.bool, device=base.device).tril())
        embeddings = base.embed(torch.tensor(ids, device=base.device))
        return self.drafter.heads(embeddings, features, places, visible, self.cache)

    def _fuse(self) -> None:
        """Turns the fresh states of all rows into features, in one pass."""
        counts = [sum(len(part.last_hidden_state) for part in seen.fresh) for seen in self.seen]
        if not any(counts):
            return
        states = join_states([part for seen in self.seen for part in seen.fresh])
        values = self.drafter.heads.fuse(states)[0].split(counts)
        self._make_room(max(seen.fused + count for seen, count in zip(self.seen, counts, strict=True)), values[0])
        assert self.features is not None
        for row, (seen, count) in enumerate(zip(self.seen, counts, strict=True)):
            self.features[row, seen.fused : seen.fused + count] = values[row]
            seen.fused, seen.fresh = seen.fused + count, []

    def _make_room(self, length: int, like: Tensor) -> None:
        old = self.features
        if old is None or old.shape[1] < length:
            capacity = max(length, 256 if old is None else 2 * old.shape[1])
            self.features = like.new_zeros(len(self.seen), capacity, like.shape[-1])
            if old is not None:
                self.features[:, : old.shape[1]] = old


class _Round:
    """The steps of one draft."""

    def __init__(self, session: EagleSession):
        self.session = session
        self.count = 0
        """Steps taken."""
        self.outputs: Tensor
        """(B, M, h) of the last step."""
        self.ancestors: Tensor
        """(B, M, held) which drafted positions in the cache each of its nodes sees, itself included."""

    def __call__(self, parents: list[list[int]] | None, tokens: list[list[int]]) -> Tensor:
        """See `decode.drafters.growth.Step`."""
        drafter, cache = self.session.drafter, self.session.cache
        device = drafter.base.device
        self.count += 1
        if parents is None:
            self.outputs = self.session.read([row[0] for row in tokens])
            self.ancestors = torch.zeros(len(tokens), 1, 0, dtype=torch.bool, device=device)
            return drafter.logits(self.outputs)
        above = torch.tensor(parents, device=device)
        width = above.shape[1]
        own = torch.eye(width, dtype=torch.bool, device=device).expand(len(tokens), width, width)
        self.ancestors = torch.cat((take(self.ancestors, above), own), dim=-1)
        positions = cache.positions(torch.full((width,), self.count - 2, device=device))
        self.outputs = drafter.heads(
            drafter.base.embed(torch.tensor(tokens, device=device)),
            take(self.outputs, above),
            positions,
            cache.visible(self.ancestors),
            cache,
        )
        cache.hold(width)
        return drafter.logits(self.outputs)
