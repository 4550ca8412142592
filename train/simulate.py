"""What a drafter would gain on text that is already there: its own trees, walked along the row's tokens.

The drafter's session is shown the base's states as decoding would show them, drafts a tree a round, and the longest
path that agrees with the text is kept. For text that the base wrote greedily this is greedy decoding without a forward
of the base; a dynamic tree, whose shape depends on wrong guesses too, cannot be judged from ranks alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from decode.drafters import DraftRow
from decode.tree import Tree
from medusa_heads.base import BaseOutput
from train.batches import state_name

if TYPE_CHECKING:
    from decode.drafters import Drafter
    from medusa_heads.base import Base
    from train.states import StateSource


@dataclass
class Walk:
    """Counts over rows."""

    tokens: int = 0
    """Of the answers, but for those in the last round that a cut answer does not show."""
    forwards: int = 0
    """Of the base, prefills included."""

    @property
    def acceptance_length(self) -> float:
        return self.tokens / self.forwards if self.forwards else 0.0


def accepted_path(tree: Tree, tokens: Sequence[int], truth: Sequence[int]) -> int:
    """How many of the tokens `truth`, which follow the root, some path of the tree holds."""
    node = depth = 0
    while depth < len(truth):
        children = [n for n in range(tree.size) if tree.parents[n] == node and tokens[n] == truth[depth]]
        if not children:
            break
        node, depth = children[0], depth + 1
    return depth


@torch.no_grad()
def walk_rows(
    drafter: Drafter,
    base: Base,
    source: StateSource,
    rows: Sequence[int],
    nodes: int | None = None,
    *,
    reads_states: bool = True,
) -> Walk:
    """Drafts through the answers of `rows`.

    Args:
        nodes: at most this many in a tree; None: as many as the drafter finds best.
        reads_states: False for a drafter that goes by the tokens alone: it is shown none, and none are read.
    """
    walk = Walk()
    names = ["last", *(state_name(base, layer) for layer in drafter.layers)]
    for row in rows:
        if reads_states:
            states = [kind[0] for kind in source.row_states([row], names)]
        else:
            states = [source.no_states().new_zeros(len(source.examples[row]), 0)]
        _walk_row(drafter, source, row, states, nodes, walk)
    return walk


def _walk_row(
    drafter: Drafter, source: StateSource, row: int, states: Sequence[Tensor], nodes: int | None, walk: Walk
) -> None:
    ids = list(source.examples[row].input_ids)
    positions, _, remaining = source.spans[row]
    session = drafter.start([DraftRow(ids[: int(positions[0]) + 1], 0.0, torch.Generator())])
    seen = 0

    def observe(end: int) -> None:
        """Shows the base's states before position `end`."""
        nonlocal seen
        part = slice(seen, end)
        last, *layers = (kind[None, part] for kind in states)
        tokens = torch.tensor([ids[part]], device=last.device)
        session.observe(BaseOutput(last, tuple(layers)), tokens, [list(range(end - seen))])
        seen = end

    at = 0
    while at < len(positions):
        begin, end = int(positions[at]), int(positions[at] + remaining[at])
        observe(begin + 1)
        walk.forwards += 1
        walk.tokens += 1 + end - begin
        while begin < end:
            draft = session.draft([ids[begin + 1]], nodes)
            depth = accepted_path(draft.trees[0], draft.tokens[0].tolist(), ids[begin + 2 : end + 2])
            begin += 1 + depth
            observe(begin + 1)
            walk.forwards += 1
        at += int(remaining[at]) + 1
