"""Drafting with Hydra heads: head i reads the base's last state and the tokens drafted before its own.

One head a depth, so that a tree is no deeper than there are heads; it grows as with EAGLE heads. The heads have no
state of their own between rounds, but for the cache of their prefix attention, if they have one: it reads the base's
states once each, in the pass before a draft.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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
from medusa_heads.errors import ConfigError
from medusa_heads.hydra import HydraHeads
from medusa_heads.norms import fuse_norms
from medusa_heads.prepack import can_prepack, pack_linears, pack_siblings

if TYPE_CHECKING:
    from medusa_heads.base import Base

CHUNK = 512
"""Positions of a prompt that the prefix attention reads in one pass."""


class HydraDrafter(GrowingDrafter):
    """Hydra heads and how far their trees may grow (see `GrowingDrafter`)."""

    heads_class = HydraHeads
    layers: Sequence[int] = ()

    def __init__(self, heads: HydraHeads, base: Base, tree: DynamicTree | Tree, drawn: Tree | None = None):
        self.base = base
        self.choice = TreeChoice.of(tree, drawn)
        if self.choice.depth > heads.config.num_heads:
            raise ConfigError(f"the tree is {self.choice.depth} deep, but there are {heads.config.num_heads} heads")
        self.heads = copy.deepcopy(heads).to(base.device, base.dtype).eval().requires_grad_(False)
        self.num_parameters = heads.num_parameters  # packing hides those of the copy
        prefix = self.heads.prefix
        self.vocab_size = heads.config.vocab_size
        limits = [base.max_positions, None if prefix is None else heads.config.shape.max_position_embeddings]
        self.max_positions = min((n for n in limits if n is not None), default=None)
        """Positions that base and prefix attention were made for; None: any number."""
        if can_prepack(base.device, base.dtype):
            if prefix is not None:
                probe, places = torch.zeros(1, 2, base.hidden_size, dtype=base.dtype), torch.arange(2)[None]
                pack_siblings(prefix, lambda: prefix(probe, places))
            pack_linears(self.heads, keep=None)
            fuse_norms(self.heads)
        self.draft_ids = self.heads.draft_ids
        self.cpu_ids = None if self.draft_ids is None else self.draft_ids.to("cpu")
        self._project: Any = None if heads.config.own_projection else draft_projection(base, self.draft_ids)

    @classmethod
    def deepest(cls, heads: HydraHeads) -> int:
        return heads.config.num_heads

    def start(self, rows: Sequence[DraftRow]) -> HydraSession:
        return HydraSession(self, rows)

    def logits(self, depth: int, states: Tensor, embeddings: Tensor) -> Tensor:
        """Of head `depth`: states (B, M, h), embeddings (B, M, (depth + 1)·h) of the tokens behind → (B, M, rows)."""
        read = self.heads.heads[depth](torch.cat((states, embeddings), dim=-1))
        return self.heads.lm_heads[depth](read) if self._project is None else self._project(read)


@dataclass
class _Seen:
    """What the base has given of one row."""

    row: DraftRow
    length: int = 0
    fresh: list[BaseOutput] = field(default_factory=list)
    """States (n, h) that the prefix attention has not read; without one, of the last token alone."""


class HydraSession:
    """State of one call: for each row the state that the heads read, and the cache of the prefix attention."""

    def __init__(self, drafter: HydraDrafter, rows: Sequence[DraftRow]):
        self.drafter = drafter
        self.seen = [_Seen(row) for row in rows]
        self.cache = TreeCache(1, len(rows))
        self.state: Tensor | None = None
        """(B, 1, h), of the last token seen, as the heads read it."""
        self.steps = 0
        """Of the last draft."""

    def observe(self, output: BaseOutput, tokens: Tensor, paths: Sequence[Sequence[int]]) -> None:
        for row, (seen, path) in enumerate(zip(self.seen, paths, strict=True)):
            if path:
                seen.length += len(path)
                if self.drafter.heads.prefix is None:
                    seen.fresh = [kept_states(output, row, [path[-1]])]
                else:
                    seen.fresh.append(kept_states(output, row, path))

    def draft(self, roots: Sequence[int], nodes: int | None = None) -> Draft:
        if not all(seen.length for seen in self.seen):
            raise RuntimeError("a draft was asked for before the base has seen a token")
        drafter = self.drafter
        deepest = drafter.choice.depth
        if drafter.max_positions is not None:
            # The root's position is the number of tokens seen; a node's is that plus its depth.
            deepest = min(deepest, drafter.max_positions - 1 - max(seen.length for seen in self.seen))
        growths = start_growths(
            drafter.choice,
            [seen.row for seen in self.seen],
            roots,
            nodes=nodes,
            deepest=deepest,
            ids=drafter.cpu_ids,
            vocab_size=drafter.vocab_size,
        )
        return self.grow(growths)

    @torch.no_grad()
    def grow(self, growths: Sequence[Growth]) -> Draft:
        """Grows a tree for each row behind what the base has seen of it."""
        step = _Round(self)
        draft = grow(step, growths, self.drafter.draft_ids, self.drafter.base.device)
        self.steps = step.count
        return draft

    @torch.no_grad()
    def lead(self, tokens: Sequence[int]) -> Tensor:
        """Logits (n, R) along a given path of the only row: behind its root, `tokens[0]`, and each further token."""
        step = _Round(self)
        return torch.stack([step([[0]] if i else None, [[token]])[0, 0] for i, token in enumerate(tokens)])

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.seen = [self.seen[row] for row in rows]
        self.cache.keep_rows(rows)
        if self.state is not None:
            self.state = self.state[list(rows)]

    def resume(self, row: DraftRow, length: int) -> None:
        """The prefix attention keeps what it has read of the first `length` tokens; what it has not read of them, it
        reads now."""
        if self.seen[0].fresh and self.drafter.heads.prefix is not None:
            self.read()
        self.seen = [_Seen(row, length)]
        self.cache.truncate(min(self.cache.lengths[0], length))

    @torch.no_grad()
    def read(self) -> Tensor:
        """The state (B, 1, h) of each row's last token, as the heads read it."""
        for row, seen in enumerate(self.seen):
            if not seen.fresh:
                continue
            states = join_states(seen.fresh).last_hidden_state
            if self.state is None:
                self.state = states.new_zeros(len(self.seen), 1, states.shape[-1])
            self.state[row] = states[0, -1:]
        if self.drafter.heads.prefix is not None and any(seen.fresh for seen in self.seen):
            self._read_prefix()
        for seen in self.seen:
            seen.fresh = []
        assert self.state is not None
        return self.state

    def _read_prefix(self) -> None:
        """A pass of the prefix attention over the fresh states of all rows, chunk by chunk, right-padded."""
        prefix = self.drafter.heads.prefix
        assert self.state is not None and prefix is not None
        device = self.state.device
        fresh = [join_states(seen.fresh).last_hidden_state[0] if seen.fresh else None for seen in self.seen]
        longest = max(len(states) for states in fresh if states is not None)
        for begin in range(0, longest, CHUNK):
            parts = [None if states is None else states[begin : begin + CHUNK] for states in fresh]
            counts = [0 if part is None else len(part) for part in parts]
            width = max(counts)
            padded = self.state.new_zeros(len(parts), width, self.state.shape[-1])
            for row, part in enumerate(parts):
                if part is not None:
                    padded[row, : len(part)] = part
            positions = self.cache.positions(torch.arange(width, device=device))
            visible = None
            if self.cache.offset > 0:
                visible = self.cache.visible(torch.ones(width, width, dtype=torch.bool, device=device).tril())
            read = prefix(padded, positions, visible, self.cache)
            self.cache.commit([range(count) for count in counts])
            for row, count in enumerate(counts):
                if count:
                    self.state[row, 0] = read[row, count - 1]


class _Round:
    """The steps of one draft."""

    def __init__(self, session: HydraSession):
        self.session = session
        self.count = 0
        """Steps taken."""
        self.behind: Tensor
        """(B, M, count·h), embeddings of the path of each node of the last step, the root's first."""

    def __call__(self, parents: list[list[int]] | None, tokens: list[list[int]]) -> Tensor:
        """See `decode.drafters.growth.Step`."""
        drafter = self.session.drafter
        device = drafter.base.device
        embeddings = drafter.base.embed(torch.tensor(tokens, device=device))
        if parents is None:
            # Only the roots are read in this step, whatever was padded.
            self.behind = embeddings
            self.states = self.session.read()
        else:
            self.behind = torch.cat((take(self.behind, torch.tensor(parents, device=device)), embeddings), dim=-1)
        self.count += 1
        width = self.behind.shape[1]
        return drafter.logits(self.count - 1, self.states.expand(-1, width, -1), self.behind)
