"""Ways of drafting: one file each, one interface.

A `Drafter` holds weights and settings and may serve many calls; `start` makes the `DraftSession` of one call, which
owns that call's state. The engine shows the session every token that the base has seen, with the base's states, and
asks it for the next tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from decode.tree import Tree
from medusa_heads.base import BaseOutput

if TYPE_CHECKING:
    from medusa_heads.base import Base


@dataclass(frozen=True)
class Draft:
    """What a session proposes for a round, for B rows."""

    trees: Sequence[Tree]
    """One topology a row; all of one size N."""
    tokens: Tensor
    """(B, N) token ids; node 0 is the row's root."""
    laws: Tensor | None = None
    """(B, N, V) float32: the law from which the children of each node were sampled without replacement; None where
    the children are deterministic (the likeliest tokens)."""


class DraftSession(Protocol):
    """The drafting state of one call of the decoder."""

    def observe(self, output: BaseOutput, tokens: Tensor, paths: Sequence[Sequence[int]]) -> None:
        """Takes in what a forward pass of the base kept.

        Args:
            output: states (B, T, h) of the pass.
            tokens: (B, T), its input tokens.
            paths: for each row, the kept positions among the T, in text order; empty where a row kept nothing.
        """
        ...

    def draft(self, roots: Sequence[int]) -> Draft:
        """The next tree of each row; `roots` are the tokens emitted last, which the base has not seen yet."""
        ...

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Forgets all rows but these."""
        ...


class Drafter(Protocol):
    """Proposes trees for one base."""

    layers: Sequence[int]
    """States of the base that the sessions read beside the last (see `Base.forward`)."""

    def start(self, batch_size: int) -> DraftSession: ...


def load_drafter(name: str | Path, base: Base, **options: object) -> Drafter:
    """The drafter for heads of a directory, an embedded name or a Hub id, with the tree that they were saved with."""
    from decode.drafters.medusa import MedusaDrafter

    return MedusaDrafter.from_pretrained(name, base, **options)  # type: ignore[arg-type]
