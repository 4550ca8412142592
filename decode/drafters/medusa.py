"""Drafting with Medusa heads: one static tree, filled anew each round.

The nodes of a depth take their tokens from one head, by rank: its likeliest tokens, or, for a row that is to be drafted
by drawing, tokens drawn from softmax(logits / temperature) one after the other without replacement. A head does not see
the path, so the nodes of a depth share one list of draws; docs/exactness.md proves that this is exact.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from decode.drafters import Draft, DraftRow
from decode.drafters.projection import draft_projection
from decode.dynamic import DRAWN_RATES
from decode.tree import Tree, search_tree
from decode.verify import draw_siblings
from medusa_heads.base import BaseOutput
from medusa_heads.errors import ConfigError, HeadsError
from medusa_heads.hub import heads_directory, is_own
from medusa_heads.prepack import can_prepack, pack_linears

if TYPE_CHECKING:
    from medusa_heads.base import Base
    from medusa_heads.medusa import MedusaHeads

COMMON_NODES = 8
"""Of a tree for heads that come without one."""


class MedusaDrafter:
    """Medusa heads and the tree that their candidates fill."""

    layers: Sequence[int] = ()

    def __init__(self, heads: MedusaHeads, base: Base, tree: Tree):
        if tree.depth > heads.config.num_heads:
            raise ConfigError(f"the tree is {tree.depth} deep, but there are {heads.config.num_heads} heads")
        rows = heads.config.draft_vocab_size or heads.config.vocab_size
        if max(tree.ranks) >= rows:
            raise ConfigError(f"the tree asks for rank {max(tree.ranks)} of a draft vocabulary of {rows}")
        self.heads = heads
        self.tree = tree
        self.draft_ids = None if heads.draft_ids is None else heads.draft_ids.to(base.device)
        # Heads deeper than the tree are never asked.
        self.blocks = copy.deepcopy(heads.heads[: tree.depth]).to(base.device, base.dtype)
        self._project = _projection(heads, base, tree.depth)
        if can_prepack(base.device, base.dtype):
            pack_linears(self.blocks, keep=None)
        self.device = base.device
        self._shapes: dict[int | None, _Shape] = {}

    @classmethod
    def from_pretrained(
        cls, name: str | Path, base: Base, *, tree: Tree | None = None, revision: str | None = None
    ) -> MedusaDrafter:
        """Heads by directory, embedded name or Hub id, with the tree tuned for this machine (see `decode.profiles`), or
        else their own `tree.json`, unless another tree is given. Another project's heads come without: a small tree by
        rates that are common."""
        from decode.profiles import tuned_tree
        from medusa_heads.medusa import MedusaHeads

        directory = heads_directory(name, revision=revision)
        heads = MedusaHeads.from_pretrained(directory, base=base)
        tree = tree or tuned_tree(directory, base)
        if tree is None and not is_own(directory) and not (directory / "tree.json").is_file():
            rows = heads.config.draft_vocab_size or heads.config.vocab_size
            tree = search_tree([DRAWN_RATES[:rows]] * heads.config.num_heads, COMMON_NODES)
        return cls(heads, base, tree or read_tree(directory))

    def start(self, rows: Sequence[DraftRow]) -> MedusaSession:
        return MedusaSession(self, rows)

    def shape(self, nodes: int | None = None) -> _Shape:
        """The tree, or what `Tree.pruned` leaves of it where it has more than `nodes` nodes."""
        if nodes not in self._shapes:
            tree = self.tree if nodes is None else self.tree.pruned(nodes)
            self._shapes[nodes] = _Shape(tree, self.device)
        return self._shapes[nodes]

    @torch.no_grad()
    def logits(self, hidden_states: Tensor, depth: int) -> Tensor:
        """Of the first `depth` heads, over the vocabulary that they draft from: (B, h) → (B, depth, rows)."""
        states = [block(hidden_states) for block in self.blocks[:depth]]
        return self._project(torch.stack(states, dim=1))

    def likeliest(self, logits: Tensor, shape: _Shape) -> Tensor:
        """Tokens of the nodes below the root, each the likeliest of its rank: (B, depth, rows) → (B, N - 1)."""
        best = logits.topk(1 + max(shape.tree.ranks), dim=-1).indices
        best = best if self.draft_ids is None else self.draft_ids[best]
        return best[:, shape.depth_index, shape.rank_index]

    def fill(self, hidden_states: Tensor, roots: Tensor, shape: _Shape | None = None) -> Tensor:
        """Tokens of all nodes, the likeliest ones below the root: (B, h), (B,) → (B, N)."""
        shape = shape or self.shape()
        if shape.tree.size == 1:
            return roots[:, None]
        drafted = self.likeliest(self.logits(hidden_states, shape.tree.depth), shape)
        return torch.cat((roots[:, None], drafted), dim=1)

    def draw(
        self, logits: Tensor, shape: _Shape, temperature: float, generator: torch.Generator
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Tokens of the nodes below the root of `shape.drawn`, drawn from softmax(logits / temperature) in float32.

        Args:
            logits: (depth, rows) of one row.

        Returns:
            (N - 1,) token ids on the CPU; and for each node the law (V,) of its children, None for leaves. Nodes of one
            depth share their law's memory.
        """
        laws = torch.softmax(logits.float() / temperature, dim=-1).to("cpu")
        draws = [draw_siblings(law, width, generator) for law, width in zip(laws, shape.widths, strict=True)]
        ids = torch.tensor([draws[d][r] for d, r in shape.places], dtype=torch.long)
        if self.draft_ids is not None:
            rows = self.draft_ids.to("cpu")
            ids = rows[ids]
            laws = laws.new_zeros(len(laws), self.heads.config.vocab_size).index_copy_(1, rows, laws)
        by_node = zip(shape.drawn.depths, shape.drawn.children, strict=True)
        return ids, [laws[depth] if children else None for depth, children in by_node]


class _Shape:
    """A tree, and what filling it needs to know."""

    def __init__(self, tree: Tree, device: torch.device):
        self.tree = tree
        self.drawn = tree.in_drawing_order()
        """The tree of rows that are drafted by drawing."""
        below_root = range(1, tree.size)
        self.depth_index = torch.tensor([tree.depths[n] - 1 for n in below_root], device=device, dtype=torch.long)
        self.rank_index = torch.tensor([tree.ranks[n] for n in below_root], device=device, dtype=torch.long)
        self.places = [(self.drawn.depths[n] - 1, self.drawn.ranks[n]) for n in below_root]
        """Head and draw of each node below the root."""
        self.widths = [1 + max(rank for d, rank in self.places if d == depth) for depth in range(tree.depth)]
        """How many tokens are drawn from each head."""


class MedusaSession:
    """State of one call: for each row, how it is drafted, and the base's hidden state at the last token it has seen."""

    def __init__(self, drafter: MedusaDrafter, rows: Sequence[DraftRow]):
        self.drafter = drafter
        self.rows = list(rows)
        self.hidden: Tensor | None = None

    def observe(self, output: BaseOutput, tokens: Tensor, paths: Sequence[Sequence[int]]) -> None:
        states = output.last_hidden_state
        if self.hidden is None:
            self.hidden = states.new_zeros(states.shape[0], states.shape[-1])
        for row, path in enumerate(paths):
            if path:
                self.hidden[row] = states[row, path[-1]]

    def draft(self, roots: Sequence[int], nodes: int | None = None) -> Draft:
        if self.hidden is None:
            raise RuntimeError("a draft was asked for before the base has seen a token")
        drafter, shape = self.drafter, self.drafter.shape(nodes)
        ids = torch.tensor(list(roots), device=self.hidden.device)
        drawn = [i for i, row in enumerate(self.rows) if row.temperature > 0.0]
        if not drawn or shape.tree.size == 1:
            return Draft([shape.tree] * len(ids), drafter.fill(self.hidden, ids, shape))
        logits = drafter.logits(self.hidden, shape.tree.depth)
        tokens = ids[:, None].repeat(1, shape.tree.size)
        if len(drawn) < len(self.rows):
            tokens[:, 1:] = drafter.likeliest(logits, shape)
        trees = [shape.tree] * len(ids)
        laws: list[list[Tensor | None] | None] = [None] * len(ids)
        for i in drawn:
            row = self.rows[i]
            below_root, laws[i] = drafter.draw(logits[i], shape, row.temperature, row.generator)
            tokens[i, 1:] = below_root.to(tokens.device)
            trees[i] = shape.drawn
        return Draft(trees, tokens, laws)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]
        if self.hidden is not None:
            self.hidden = self.hidden[list(rows)]

    def resume(self, row: DraftRow, length: int) -> None:
        """No state is kept: the last prompt token is always shown anew, and its state is all that counts."""
        self.rows, self.hidden = [row], None


def read_tree(directory: Path) -> Tree:
    """The tree that heads were saved with."""
    path = directory / "tree.json"
    if not path.is_file():
        raise HeadsError(f"{directory} has no tree.json: give a tree, or let training's evaluation choose one")
    try:
        return Tree.from_dict(json.loads(path.read_text())["tree"])
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        raise HeadsError(f"{path} holds no tree: {error}") from None


class _EachOwn(nn.Module):
    """A projection a head: (B, depth, h) → (B, depth, rows), of the first heads where fewer are asked."""

    def __init__(self, projections: Sequence[nn.Module]):
        super().__init__()
        self.projections = nn.ModuleList(projections)

    def forward(self, states: Tensor) -> Tensor:
        parts = zip(states.unbind(dim=1), self.projections[: states.shape[1]], strict=True)
        return torch.stack([project(state) for state, project in parts], dim=1)


def _projection(heads: MedusaHeads, base: Base, depth: int) -> nn.Module:
    if heads.config.own_projection:
        own = copy.deepcopy(heads.lm_heads[:depth]).to(base.device, base.dtype)
        if can_prepack(base.device, base.dtype):
            pack_linears(own, keep=None)
        return _EachOwn(list(own))
    return draft_projection(base, heads.draft_ids)
