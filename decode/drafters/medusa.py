"""Drafting with Medusa heads: one static tree, filled anew each round with each head's likeliest tokens."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from decode.drafters import Draft, DraftRow
from decode.tree import Tree
from medusa_heads.base import BaseOutput
from medusa_heads.errors import ConfigError, HeadsError
from medusa_heads.hub import heads_directory
from medusa_heads.prepack import PackedLinear, can_prepack, pack_linears

if TYPE_CHECKING:
    from medusa_heads.base import Base
    from medusa_heads.medusa import MedusaHeads


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
        self.ranks = 1 + max(tree.ranks)
        below_root = range(1, tree.size)
        self._depth_index = torch.tensor([tree.depths[n] - 1 for n in below_root], device=base.device, dtype=torch.long)
        self._rank_index = torch.tensor([tree.ranks[n] for n in below_root], device=base.device, dtype=torch.long)

    @classmethod
    def from_pretrained(
        cls, name: str | Path, base: Base, *, tree: Tree | None = None, revision: str | None = None
    ) -> MedusaDrafter:
        """Heads by directory, embedded name or Hub id, with the tree tuned for this machine (see `decode.profiles`), or
        else their own `tree.json`, unless another tree is given."""
        from decode.profiles import tuned_tree
        from medusa_heads.medusa import MedusaHeads

        directory = heads_directory(name, revision=revision)
        heads = MedusaHeads.from_pretrained(directory, base=base)
        return cls(heads, base, tree or tuned_tree(directory, base) or read_tree(directory))

    def start(self, rows: Sequence[DraftRow]) -> MedusaSession:
        return MedusaSession(self)

    @torch.no_grad()
    def candidates(self, hidden_states: Tensor) -> Tensor:
        """Each head's likeliest tokens, best first: (B, h) → (B, depth, ranks)."""
        states = torch.stack([block(hidden_states) for block in self.blocks], dim=1)
        best = self._project(states).topk(self.ranks, dim=-1).indices
        return best if self.draft_ids is None else self.draft_ids[best]

    def fill(self, hidden_states: Tensor, roots: Tensor) -> Tensor:
        """Tokens of the tree's nodes: (B, h), (B,) → (B, N)."""
        if self.tree.size == 1:
            return roots[:, None]
        drafted = self.candidates(hidden_states)[:, self._depth_index, self._rank_index]
        return torch.cat((roots[:, None], drafted), dim=1)


class MedusaSession:
    """State of one call: the base's hidden state at the last token it has seen, for each row."""

    def __init__(self, drafter: MedusaDrafter):
        self.drafter = drafter
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
        tree = self.drafter.tree
        ids = torch.tensor(list(roots), device=self.hidden.device)
        return Draft([tree] * len(roots), self.drafter.fill(self.hidden, ids))

    def keep_rows(self, rows: Sequence[int]) -> None:
        if self.hidden is not None:
            self.hidden = self.hidden[list(rows)]

    def resume(self, row: DraftRow, length: int) -> None:
        """Nothing is kept: the last prompt token is always shown anew, and its state is all that counts."""


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
    """A projection a head: (B, depth, h) → (B, depth, rows)."""

    def __init__(self, projections: Sequence[nn.Module]):
        super().__init__()
        self.projections = nn.ModuleList(projections)

    def forward(self, states: Tensor) -> Tensor:
        return torch.stack([p(states[:, i]) for i, p in enumerate(self.projections)], dim=1)


class _Rows(nn.Module):
    """Chosen rows of the base's projection: (B, depth, h) → (B, depth, rows). Order among them is all that counts."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.linear: nn.Module
        if can_prepack(weight.device, weight.dtype):
            self.linear = PackedLinear(weight, bias)
        else:
            self.linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
            self.linear.weight = nn.Parameter(weight, requires_grad=False)
            if bias is not None:
                self.linear.bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, states: Tensor) -> Tensor:
        return self.linear(states)


def _projection(heads: MedusaHeads, base: Base, depth: int) -> nn.Module:
    if heads.config.own_projection:
        own = copy.deepcopy(heads.lm_heads[:depth]).to(base.device, base.dtype)
        if can_prepack(base.device, base.dtype):
            pack_linears(own, keep=None)
        return _EachOwn(list(own))
    if heads.draft_ids is not None:
        ids = heads.draft_ids.to(base.device)
        bias = base.projection_bias
        return _Rows(base.projection_weight[ids], None if bias is None else bias[ids])
    return _Whole(base)


class _Whole(nn.Module):
    """The base's whole projection."""

    def __init__(self, base: Base):
        super().__init__()
        self._project = base.project

    def forward(self, states: Tensor) -> Tensor:
        return self._project(states)
