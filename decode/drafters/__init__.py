"""Ways of drafting: one file each, one interface.

A `Drafter` holds weights and settings and may serve many calls; `start` makes the `DraftSession` of one call, which
owns that call's state. The engine shows the session every token that the base has seen, with the base's states, and
asks it for the next tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from decode.tree import Tree
from medusa_heads.base import BaseOutput

if TYPE_CHECKING:
    from decode.cache import TreeCache
    from medusa_heads.base import Base


@dataclass(frozen=True)
class DraftRow:
    """What a session is told of a row when a call begins."""

    prompt_ids: Sequence[int]
    temperature: float
    """0: draft the likeliest tokens. Above: children may be drawn from softmax(logits ÷ temperature), and their law is
    then handed over with them."""
    generator: torch.Generator
    """The row's own randomness, on the CPU; drafting and verification take turns with it."""


@dataclass(frozen=True)
class Draft:
    """What a session proposes for a round, for B rows."""

    trees: Sequence[Tree]
    """One topology a row; sizes may differ."""
    tokens: Tensor
    """(B, N) token ids, N the size of the largest tree; node 0 is the row's root. What lies behind a smaller tree is
    padding."""
    laws: Sequence[Tensor | Sequence[Tensor | None] | None] | None = None
    """For each row the law from which the children of each node were drawn without replacement, in the order of their
    ranks: (nodes, V) float32, or by node (V,), in which nodes may share memory and leaves have None; None for a row
    whose drafts are deterministic."""
    reach: Sequence[Sequence[float] | None] | None = None
    """For each row the drafter's estimate, node by node, that the node is kept; None where it makes none."""


class DraftSession(Protocol):
    """The drafting state of one call of the decoder."""

    def observe(self, output: BaseOutput, tokens: Tensor, paths: Sequence[Sequence[int]]) -> None:
        """Takes in what a forward pass of the base kept. Cheap: rounds without a draft pay for it too.

        Args:
            output: states (B, T, h) of the pass; those asked for in `Drafter.layers` beside the last.
            tokens: (B, T), its input tokens.
            paths: for each row, the kept positions among the T, in text order; empty where a row kept nothing.
        """
        ...

    def draft(self, roots: Sequence[int], nodes: int | None = None) -> Draft:
        """The next tree of each row.

        Args:
            roots: the tokens emitted last, which the base has not seen yet.
            nodes: at most this many in a tree, the root included; None: as many as the drafter finds best.
        """
        ...

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Forgets all rows but these."""
        ...

    def resume(self, row: DraftRow, length: int) -> None:
        """Begins another call, of one row, behind the first `length` tokens of what the session has seen of its only
        row; the rest is forgotten."""
        ...


@runtime_checkable
class SharesCache(Protocol):
    """A session that reads the base's own keys and values."""

    def share(self, cache: TreeCache) -> None:
        """Called when a call begins, resumed ones included. Between the base's passes the session may hold nodes behind
        the committed text (`TreeCache.hold`); it releases them before `draft` returns."""
        ...


class Drafter(Protocol):
    """Proposes trees for one base."""

    layers: Sequence[int]
    """States of the base that the sessions read beside the last (see `Base.forward`)."""

    def start(self, rows: Sequence[DraftRow]) -> DraftSession: ...


def load_drafter(name: str | Path, base: Base, *, heads: str | Path | None = None, **options: Any) -> Drafter:
    """The drafter that `name` says: one argument swaps one way of drafting for another.

    Args:
        name: one of

            NAME         heads of any family, by directory, embedded name or Hub id, with the tree tuned for this
                         machine or else the one that they were saved with
            lookup       prompt lookup
            model:NAME   another causal LM as the draft model: a directory, Hub id, `.gguf` file or embedded name
            exit:L       the base's first L layers

            or several of them joined by `+`, which draft into one tree, such as `heads+lookup`. Each may be
            followed by settings of its drafter: `model:NAME,width=4,depth=6`, `lookup,nodes=24`.
        heads: what the name `heads` stands for; None: the base's embedded heads.
        options: settings as well, for a name that is not a combination.

    Raises:
        ConfigError: a name or a setting that is none.
        HeadsError: heads or a draft model that do not belong to the base.
    """
    from decode.drafters.specs import load

    return load(name, base, heads, options)
