"""What a training step reads, and in which order.

Positions of all rows of a step are laid end to end. A *span* is one answer of n generated tokens x_0 … x_{n-1}; it
has n positions. Position j of a span holds the hidden state from which the base predicts x_j (j = 0: the state of the
last prompt token) and x_j itself. So head i (0-based) at position j predicts x_{j+1+i}, and the base's own law for
that token is the projection of the state at position j+1+i: labels and teachers are shifts by 1+i inside a span.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from medusa_heads.base import Base


def state_name(base: Base, layer: int) -> str:
    """Under which name sources keep the state entering a layer; the number of layers stands for the last state."""
    return "last" if layer == base.num_layers else f"layer_{layer}"


@dataclass
class PackedBatch:
    """P positions of one or more spans, end to end."""

    states: Tensor
    """(P, h) the base's last hidden state, in the base's dtype."""
    next_ids: Tensor
    """(P,) int64, the token that follows each position."""
    remaining: Tensor
    """(P,) int64, how many positions of the same span follow this one."""

    def to(self, device: torch.device) -> PackedBatch:
        return PackedBatch(self.states.to(device), self.next_ids.to(device), self.remaining.to(device))


@dataclass
class SequenceBatch(PackedBatch):
    """The same P positions, with the whole rows they stand in: what a head that attends reads.

    Of a row of L tokens the L − 1 positions that have a next token are there; N is their sum over the rows.
    """

    features: tuple[Tensor, ...]
    """(N, h) for each kind of state that was asked for."""
    following: Tensor
    """(N,) int64, the token that follows each of the N positions."""
    where: Tensor
    """(P,) int64, the place among the N of each of the P positions."""
    lengths: list[int]
    """Positions of each row."""
    rows: list[int]
    """Numbers of the rows in their source."""

    def to(self, device: torch.device) -> SequenceBatch:
        return SequenceBatch(
            self.states.to(device),
            self.next_ids.to(device),
            self.remaining.to(device),
            tuple(f.to(device) for f in self.features),
            self.following.to(device),
            self.where.to(device),
            self.lengths,
            self.rows,
        )

    @property
    def positions(self) -> Tensor:
        """(N,) int64, the position of each inside its row."""
        return torch.cat([torch.arange(0), *map(torch.arange, self.lengths)]).to(self.where.device)


def span_positions(input_ids: Sequence[int], supervised: Sequence[bool]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions of one sequence that predict a supervised token.

    Returns:
        positions (P,): indices t into the sequence with token t+1 supervised.
        next_ids (P,): token t+1.
        remaining (P,): how many positions of the same span follow.
    """
    ids = np.asarray(input_ids, dtype=np.int64)
    mask = np.asarray(supervised, dtype=bool)
    positions = np.flatnonzero(mask[1:])
    last = np.ones(len(positions), dtype=bool)
    last[:-1] = np.diff(positions) != 1
    ends = np.flatnonzero(last)
    remaining = ends[np.searchsorted(ends, np.arange(len(positions)))] - np.arange(len(positions))
    return positions, ids[positions + 1], remaining


def count_targets(remaining: Tensor | np.ndarray, num_heads: int) -> list[int]:
    """How many (position, target) pairs each head has: head i needs 1+i further positions in the span."""
    return [int((remaining >= 1 + i).sum()) for i in range(num_heads)]


def plan_epoch(
    sizes: Sequence[int], positions_per_step: int, seed: int, epoch: int, lengths: Sequence[int] | None = None
) -> list[list[int]]:
    """The rows of every step of one epoch: a function of its arguments alone, whatever the number of processes.

    Rows are shuffled and cut into steps of nearly equal size. Every row comes once, and every epoch has the same
    number of steps (see `steps_in_epoch`).

    Args:
        sizes: positions of each row.
        lengths: where given, rows are ordered by it inside windows of 16 steps before they are cut, so that the rows
            of one step have similar lengths and little padding; the steps are shuffled again.
    """
    generator = np.random.default_rng([seed, epoch])
    order = generator.permutation(len(sizes))
    steps = steps_in_epoch(sizes, positions_per_step)
    if lengths is not None:
        window = max(1, round(16 * len(sizes) / steps))
        keys = np.asarray(lengths)
        cuts = [order[i : i + window] for i in range(0, len(order), window)]
        order = np.concatenate([cut[np.argsort(keys[cut], kind="stable")] for cut in cuts])
    ends = np.cumsum(np.asarray(sizes)[order])
    bounds = [0]
    for k in range(1, steps):
        at = int(np.searchsorted(ends, ends[-1] * k / steps)) + 1
        bounds.append(min(max(at, bounds[-1] + 1), len(order) - (steps - k)))
    plan = [order[a:b].tolist() for a, b in zip(bounds, [*bounds[1:], len(order)], strict=True)]
    return [plan[i] for i in generator.permutation(steps)] if lengths is not None else plan


def steps_in_epoch(sizes: Sequence[int], positions_per_step: int) -> int:
    """Steps that `plan_epoch` makes: of about `positions_per_step` positions, each with a row at least."""
    return max(1, min(len(sizes), round(sum(sizes) / positions_per_step)))


def share_rows(rows: Sequence[int], sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Deals the rows of a step to `parts` micro-batches of nearly equal positions, the longest first."""
    shares: list[list[int]] = [[] for _ in range(parts)]
    filled = [0] * parts
    for row in sorted(rows, key=lambda r: (-sizes[r], r)):
        target = filled.index(min(filled))
        shares[target].append(row)
        filled[target] += sizes[row]
    return shares


def pack_by_length(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Batches of rows of similar length whose padded size stays within `batch_tokens` (a longer row goes alone)."""
    batches: list[list[int]] = []
    current: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda r: (-lengths[r], r)):
        if current and lengths[current[0]] * (len(current) + 1) > batch_tokens:
            batches.append(current)
            current = []
        current.append(row)
    if current:
        batches.append(current)
    return batches
