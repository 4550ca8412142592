"""How good heads are on held-out rows: their candidates' ranks, and what a tree would gain from them.

The truth is the row's own next token: for rows that the base wrote greedily that is what greedy decoding accepts. A
rank is the true token's place among a head's logits (0 the greatest; equal logits in order of their index, as
`topk` lists them). Marginal accuracies alone overrate a tree, since the heads are right together or wrong together;
so ranks are kept jointly: a node of a tree is accepted when every rank on its path comes true at the same position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decode.tree import Tree
from train.batches import PackedBatch
from train.losses import Projection, Rows
from train.states import StateSource

MAX_RANK = 64
"""Ranks from here on are stored as this: outside every tree."""
TOP = 10


@dataclass
class Ranks:
    """Ranks of the true tokens over N positions, span after span."""

    ranks: np.ndarray
    """(N, K) int: the rank under head i of the token it is to predict; MAX_RANK for further down, −1 past the end."""
    remaining: np.ndarray
    """(N,) positions of the same span that follow."""


@torch.no_grad()
def true_ranks(
    head_states: Tensor, batch: PackedBatch, project: Projection, rows: Rows, chunk_positions: int
) -> np.ndarray:
    """(P, K) as in `Ranks`.

    Args:
        head_states: (K, P, h).
        project: (K, C, h) → (K, C, V), logits over `rows`.
    """
    num_heads, count, _ = head_states.shape
    labels = rows.index(batch.next_ids)
    depth = torch.arange(1, num_heads + 1, device=head_states.device)[:, None]
    result = np.full((count, num_heads), -1, dtype=np.int64)
    for start in range(0, count, chunk_positions):
        sources = torch.arange(start, min(start + chunk_positions, count), device=head_states.device)
        wanted = labels[(sources + depth).clamp_max(count - 1)]  # (K, C)
        logits = project(head_states[:, start : start + len(sources)])
        index = wanted.clamp_min(0)[:, :, None]
        truth = logits.gather(2, index)
        place = torch.arange(logits.shape[2], device=logits.device)
        rank = ((logits > truth) | ((logits == truth) & (place < index))).sum(2)
        rank = rank.clamp_max(MAX_RANK).masked_fill(wanted < 0, MAX_RANK)
        rank = rank.masked_fill(batch.remaining[sources] < depth, -1)
        result[start : start + len(sources)] = rank.T.cpu().numpy()
    return result


def collect_ranks(
    source: StateSource,
    row_indices: Sequence[int],
    read: Callable[[StateSource, Sequence[int]], PackedBatch],
    head_states: Callable[[PackedBatch], Tensor],
    project: Projection,
    rows: Rows,
    device: torch.device,
    chunk_positions: int = 256,
    batch_positions: int = 4096,
) -> Ranks:
    """Ranks over whole rows, read in batches; `head_states` gives (K, P, h) for one."""
    ranks, remaining = [], []
    pending: list[int] = []
    for place, row in enumerate(row_indices):
        pending.append(row)
        if sum(source.sizes[r] for r in pending) >= batch_positions or place == len(row_indices) - 1:
            batch = read(source, pending).to(device)
            ranks.append(true_ranks(head_states(batch), batch, project, rows, chunk_positions))
            remaining.append(batch.remaining.cpu().numpy())
            pending = []
    return Ranks(np.concatenate(ranks), np.concatenate(remaining))


def top_accuracy(found: Ranks, top: int = TOP) -> list[list[float]]:
    """(K, top): probability that the truth is among a head's first 1 … top candidates."""
    return [
        [float((column[column >= 0] <= r).mean()) if (column >= 0).any() else 0.0 for r in range(top)]
        for column in found.ranks.T
    ]


def conditional_accuracy(found: Ranks, top: int = TOP) -> list[list[float]]:
    """(K, top): [k][r] is the probability that head k's rank-r candidate is right, given that the truth was among the
    first `top` candidates of every head before: what `decode.tree.search_tree` asks for."""
    alive = np.ones(len(found.ranks), dtype=bool)
    table = []
    for column in found.ranks.T:
        alive = alive & (column >= 0)
        seen = column[alive]
        table.append([float((seen == r).mean()) if len(seen) else 0.0 for r in range(top)])
        alive = alive & (column < top)
    return table


def path_probabilities(found: Ranks, limit: int = 1024) -> list[tuple[tuple[int, ...], float]]:
    """How often each rank path comes true, over the positions where all heads have a target; the `limit` best.

    A path is true at a position when every rank on it is. A longer path is never more probable than its beginning,
    so the first N entries always form a tree.
    """
    whole = found.ranks[(found.ranks >= 0).all(axis=1)]
    counts: Counter[tuple[int, ...]] = Counter()
    for row in whole.tolist():
        for depth, rank in enumerate(row):
            if rank >= MAX_RANK:
                break
            counts[tuple(row[: depth + 1])] += 1
    best = sorted(counts.items(), key=lambda item: (-item[1], len(item[0]), item[0]))[:limit]
    return [(path, count / len(whole)) for path, count in best]


def best_tree(paths: Sequence[tuple[tuple[int, ...], float]], budget: int) -> Tree:
    """The tree of at most `budget` nodes, root included, that gains most on the measured paths."""
    return Tree.from_rank_paths([path for path, _ in paths[: budget - 1]])


def simulate(found: Ranks, tree: Tree) -> float:
    """Acceptance length of greedy decoding with `tree` on the measured text: tokens ÷ base forwards.

    Walks each span as the decoder does: the prefill gives x_0; a round at position j accepts the longest path of the
    tree whose ranks are true there, d tokens, and gets one more from the base.
    """
    paths = set(tree.rank_paths())
    tokens = forwards = 0
    ranks, remaining = found.ranks.tolist(), found.remaining.tolist()
    position = 0
    while position < len(ranks):
        end = position + remaining[position]
        tokens += end - position + 1
        forwards += 1
        while position < end:
            forwards += 1
            accepted: tuple[int, ...] = ()
            for rank in ranks[position]:
                if (*accepted, rank) not in paths:
                    break
                accepted = (*accepted, rank)
            position += len(accepted) + 1
        position = end + 1
    return tokens / forwards if forwards else 0.0


def summarize(found: Ranks, budgets: Sequence[int] = (2, 4, 8, 12, 16, 24, 32, 64)) -> dict[str, Any]:
    """The figures that go into metrics.json."""
    paths = path_probabilities(found)
    return {
        "positions": len(found.ranks),
        "top_accuracy": top_accuracy(found),
        "conditional_accuracy": conditional_accuracy(found),
        "acceptance_length_by_nodes": {str(n): simulate(found, best_tree(paths, n)) for n in budgets},
        "paths": [[list(path), probability] for path, probability in paths[:256]],
    }
