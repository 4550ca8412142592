"""Whether a base can be decoded by trees: refused with the reason, never decoded wrongly."""

from __future__ import annotations

import weakref

import torch

from decode.cache import TreeCache
from decode.tree import Tree
from medusa_heads.base import Base
from medusa_heads.errors import UnsupportedModelError

PROBE = Tree((-1, 0, 0, 1, 2), (0, 0, 1, 0, 0))
"""Two branches of two nodes below the root."""
TOLERANCE = 0.05
"""Relative to the states' size. Rounding in bfloat16 stays below 0.02; a branch that sees its neighbour, or a position
that is off by one, moves a state by more than 0.1 of it (measured on the families of the tests)."""

_checked: weakref.WeakSet[Base] = weakref.WeakSet()


def check_tree_support(base: Base) -> None:
    """Scores a small tree both ways, in one pass and branch by branch, and raises UnsupportedModelError unless they
    agree; also unless `base.project` gives the model's own logits. Done once for each base."""
    if base in _checked:
        return
    ids = torch.arange(6, device=base.device)[None] % base.vocab_size
    cache = TreeCache(base.num_layers, capacity=16)
    try:
        base.forward(ids, position_ids=torch.arange(6, device=base.device)[None], cache=cache)
        cache.commit([range(6)])
        tokens = torch.tensor([[1, 2, 3, 4, 5]], device=base.device) % base.vocab_size
        positions = cache.positions(torch.tensor(PROBE.depths, device=base.device))
        tree = base.forward(
            tokens,
            position_ids=positions,
            attention_mask=cache.visible(PROBE.ancestor_mask.to(base.device)),
            key_positions=cache.key_positions(positions),
            cache=cache,
        ).last_hidden_state
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise UnsupportedModelError(
            f"{type(base.model).__name__} cannot be run over a tree of tokens: {type(error).__name__}: {error}"
        ) from error
    for leaf in (3, 4):
        path = PROBE.path(leaf)
        text = torch.cat((ids, tokens[:, path]), dim=1)
        plain = base.forward(text).last_hidden_state[:, -len(path) :]
        deviation = (tree[:, path] - plain).abs().max() / plain.abs().max()
        if not deviation < TOLERANCE:
            raise UnsupportedModelError(
                f"{type(base.model).__name__} scores a tree of tokens differently from plain text (states differ by "
                f"{float(deviation):.0%}): its attention ignores the tree's mask or positions"
            )
    theirs = base.model(text).logits[:, -1].float()
    ours = base.project(plain[:, -1]).float()
    if not torch.allclose(theirs, ours, atol=TOLERANCE * float(theirs.abs().max()), rtol=0.0):
        raise UnsupportedModelError(
            f"{type(base.model).__name__} does more to its logits than its output projection and the scalings known "
            "here: heads on its hidden states would not see the base's own law"
        )
    _checked.add(base)
