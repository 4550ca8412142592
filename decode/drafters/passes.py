"""Passes of a model over a growing tree: what its cache holds of the nodes, and what they see."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from decode.cache import TreeCache
from medusa_heads.base import Base

CHUNK = 512
"""Tokens of a text that are read in one pass."""


class TreePasses:
    """The passes of one round, for the B rows of a cache. Their nodes stay held behind the committed text.

    `nodes` has, for each row, every token that was read with the held node before it (-1: the committed text).
    """

    def __init__(
        self,
        model: Base,
        cache: TreeCache,
        layers: Cache | None = None,
        project: Callable[[Tensor], Tensor] | None = None,
    ):
        """
        Args:
            layers: the part of the cache that the model fills, where it is not all of it.
            project: (..., h) → (..., V), logits of the tokens that are drafted from; None: the model's own.
        """
        self.model = model
        self.project = project or model.project
        self.cache = cache
        self.layers = cache if layers is None else layers
        self.nodes: list[list[tuple[int, int]]] = [[] for _ in cache.lengths]
        self._above: Tensor | None = None
        """(B, M, held) of the pass before: what its nodes see of the tree."""
        self._first = 0
        """Held node that its first token is."""
        self._positions: list[Tensor] = []

    def read(self, parents: list[list[int]] | None, tokens: list[list[int]]) -> Tensor:
        """Logits (B, M, V) of what follows M tokens a row; parents as in `growth.Step`, the committed text for the
        first pass. Padding is read like any other token, and is as true to its parent."""
        device, (rows, width) = self.model.device, (len(tokens), len(tokens[0]))
        own = torch.eye(width, dtype=torch.bool, device=device).expand(rows, width, width)
        held = self.cache.held
        if self._above is None or parents is None:
            seen = own
            before = [[-1] * width] * rows
        else:
            index = torch.tensor(parents, device=device)[:, :, None].expand(rows, width, self._above.shape[-1])
            seen = torch.cat((self._above.gather(1, index), own), dim=-1)
            before = [[self._first + place for place in row] for row in parents]
        depth = torch.full((width,), len(self._positions), device=device)
        positions = self.cache.positions(depth)
        if self.model.max_positions is not None:
            positions = positions.clamp_max(self.model.max_positions - 1)
        self._positions.append(positions)
        states = self.model.forward(
            torch.tensor(tokens, device=device),
            position_ids=positions,
            attention_mask=self.cache.visible(seen),
            key_positions=self.cache.key_positions(torch.cat(self._positions, dim=1)),
            cache=self.layers,
        ).last_hidden_state
        self.cache.hold(width)
        self._above, self._first = seen, held
        for nodes, ids, above in zip(self.nodes, tokens, before, strict=True):
            nodes += zip(ids, above, strict=True)
        return self.project(states)

    def path(self, row: int, tokens: list[int]) -> list[int]:
        """The held nodes of a row that spell `tokens`, as far as they were read."""
        path, parent = [], -1
        known = {(above, token): node for node, (token, above) in reversed(list(enumerate(self.nodes[row])))}
        for token in tokens:
            node = known.get((parent, token))
            if node is None:
                break
            path.append(node)
            parent = node
        return path


def read_texts(model: Base, cache: TreeCache, pieces: list[list[int]]) -> Tensor:
    """Reads what each row's text has beyond its committed tokens, and commits it. Returns the states (B, h) at each
    row's last token; of rows without new tokens, zeros."""
    states: Tensor | None = None
    for start in range(0, max(map(len, pieces)), CHUNK):
        chunk = [piece[start : start + CHUNK] for piece in pieces]
        width = max(map(len, chunk))
        tokens = torch.tensor([ids + [0] * (width - len(ids)) for ids in chunk], device=model.device)
        positions = cache.positions(torch.arange(width, device=model.device))
        visible, keys = None, None
        if cache.offset:
            causal = torch.ones(width, width, dtype=torch.bool, device=model.device).tril()
            visible, keys = cache.visible(causal), cache.key_positions(positions)
        if model.max_positions is not None:
            positions = positions.clamp_max(model.max_positions - 1)
        output = model.forward(
            tokens, position_ids=positions, attention_mask=visible, key_positions=keys, cache=cache
        ).last_hidden_state
        cache.commit([range(len(ids)) for ids in chunk])
        if states is None:
            states = output.new_zeros(len(pieces), output.shape[-1])
        for row, ids in enumerate(chunk):
            if ids:
                states[row] = output[row, len(ids) - 1]
    assert states is not None
    return states
