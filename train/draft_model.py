"""A draft model in training: a small causal LM that reads the tokens of whole rows, with the losses of heads.

At position p of a span it has read the row's tokens up to p + 1 and guesses the one behind, which is what head 0 of any
family guesses there; the base's law for that token is its state at p + 1. So one depth of `train.losses` is all of
next-token prediction, and the depths of a draft are the same guess further on.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from train.batches import PackedBatch, pack_by_length
from train.trainer import HeadsTrainer

if TYPE_CHECKING:
    from decode.drafters.adaptive import Reach
    from decode.drafters.model import ModelDrafter
    from medusa_heads.base import Base
    from medusa_heads.draft_model import DraftModel
    from train.config import TrainingConfig
    from train.states import StateSource

DEPTH = 6
"""Tokens that a draft goes ahead where the config does not say."""
BATCH_TOKENS = 2048
"""Padded tokens of the rows that go through the layers together."""


@dataclass
class TextBatch(PackedBatch):
    """P positions of one or more spans, with the texts they stand in.

    A row's text ends with its last supervised token: nothing reads further.
    """

    tokens: Tensor
    """(N,) int64, the texts end to end."""
    where: Tensor
    """(P,) int64, the place among the N of the token behind each position: the last one read for its guess."""
    lengths: list[int]
    """Tokens of each text."""

    def to(self, device: torch.device) -> TextBatch:
        return replace(
            self,
            states=self.states.to(device),
            next_ids=self.next_ids.to(device),
            remaining=self.remaining.to(device),
            tokens=self.tokens.to(device),
            where=self.where.to(device),
        )


def read_texts(source: StateSource, rows: Sequence[int]) -> TextBatch:
    """The spans of `rows`, end to end, and the tokens before them."""
    packed = source.batch(rows)
    nothing = np.zeros(0, dtype=np.int64)
    behind = [source.spans[row][0] + 1 for row in rows]
    lengths = [int(places[-1]) + 1 if len(places) else 1 for places in behind]
    starts = np.cumsum([0, *lengths])[:-1]
    texts = [np.asarray(source.examples[row].input_ids[:n], np.int64) for row, n in zip(rows, lengths, strict=True)]
    where = [start + places for start, places in zip(starts, behind, strict=True)]
    return TextBatch(
        packed.states,
        packed.next_ids,
        packed.remaining,
        torch.from_numpy(np.concatenate([nothing, *texts])),
        torch.from_numpy(np.concatenate([nothing, *where])),
        lengths,
    )


def text_states(draft: DraftModel, batch: TextBatch, dtype: torch.dtype, batch_tokens: int = BATCH_TOKENS) -> Tensor:
    """The draft model's states (N, h) at every token of the texts, by batches of similar length.

    Texts are padded on the right, where no token of theirs looks. Without texts a single token is read, so that every
    parameter has a gradient, if of zeros, in every process.
    """
    device = batch.tokens.device
    texts = batch.tokens.split(batch.lengths) if batch.lengths else (torch.zeros(1, dtype=torch.long, device=device),)
    found: list[Tensor] = [batch.tokens.new_zeros(0)] * len(texts)
    for rows in pack_by_length([len(text) for text in texts], batch_tokens):
        padded = torch.nn.utils.rnn.pad_sequence([texts[row] for row in rows], batch_first=True)
        for row, states in zip(rows, draft(padded, dtype), strict=True):
            found[row] = states[: len(texts[row])]
    return torch.cat(found)


class DraftTrainer(HeadsTrainer):
    """A draft model with the losses of `train.losses`. A cache of the answers' states is enough: they are the teacher's
    alone."""

    heads: DraftModel

    def __init__(self, heads: DraftModel, base: Base, config: TrainingConfig):
        super().__init__(heads, base, config, depth=1)

    def read(self, source: StateSource, rows: Sequence[int]) -> TextBatch:
        return read_texts(source, rows)

    def head_states(self, batch: PackedBatch, step: int | None = None, depth: int | None = None) -> Tensor:
        """(1, P, h): deeper guesses are the same one at later positions."""
        assert isinstance(batch, TextBatch)
        states = text_states(self.heads, batch, self.compute_dtype(batch.tokens.device))
        return states[batch.where][None]

    @contextmanager
    def saved_drafter(self) -> Iterator[Callable[[Reach], ModelDrafter]]:
        """Drafters with the model as it is now, saved and loaded as whoever uses it will."""
        from decode.drafters.crossmodel import drafter_for
        from medusa_heads.draft_model import load_draft_model

        drafting = self.heads.drafting(depth=DEPTH, width=1, nodes=DEPTH + 1)
        with tempfile.TemporaryDirectory() as place:
            self.heads.write(drafting, Path(place))
            model = load_draft_model(Path(place), self.base)
        yield lambda reach: drafter_for(model, self.base, reach=reach, ids=drafting.draft_ids)
