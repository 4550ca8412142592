"""How often drafted siblings are kept by each way of drafting, and the most that any exact rule could keep.

For measuring, not for decoding: which way of drafting suits a temperature, and whether a better coupling of several
drawn drafts would be worth having (docs/exactness.md, "How far from the best").
"""

from __future__ import annotations

import torch
from torch import Tensor

from decode.verify import as_law

_TRIES = 32


def draw_many(q: Tensor, count: int, width: int, generator: torch.Generator) -> Tensor:
    """(count, width) tokens from q (V,), each row's drawn one after the other without replacement.

    Independent draws with the repetitions left out have that law. Rows that need more than a few tries go on by
    exponential races over the tokens they do not have yet.
    """
    q = as_law(q, "q")
    cumulative = q.cumsum(0)
    uniform = torch.rand(count, _TRIES, dtype=torch.float64, generator=generator)
    tries = torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)
    drawn = []
    for row in tries.tolist():
        distinct = list(dict.fromkeys(row))[:width]
        if len(distinct) < width:
            left = q.index_fill(0, torch.tensor(distinct), 0.0)
            races = torch.empty_like(q).exponential_(generator=generator)
            distinct += (left / races).topk(width - len(distinct)).indices.tolist()
        drawn.append(distinct)
    return torch.tensor(drawn)


def deterministic_acceptance(p: Tensor, siblings: Tensor) -> float:
    """Probability that one of `siblings` (k,), tokens chosen without a draw, is kept: their mass under p (V,)."""
    return float(as_law(p, "p")[siblings].sum())


def sampled_acceptance(p: Tensor, q: Tensor, draws: Tensor) -> Tensor:
    """(M, k) probability that one of the first 1 … k siblings of each draw is kept by `verify.verify_sampled`.

    p, q (V,): the base's law and the draft law. draws (M, k): M times k siblings, each drawn without replacement.
    """
    target, draft = as_law(p, "p"), as_law(q, "q")
    kept = torch.empty(draws.shape, dtype=torch.float64)
    for row, siblings in enumerate(draws.tolist()):
        left, p_now, q_now = 1.0, target, draft
        for place, token in enumerate(siblings):
            left *= 1.0 - min(1.0, float(p_now[token] / q_now[token]))
            kept[row, place] = 1.0 - left
            residual = torch.clamp(p_now - q_now, min=0.0)
            p_now = residual / residual.sum() if residual.any() else p_now
            q_now = q_now.index_fill(0, torch.tensor(token), 0.0)
            q_now = q_now / q_now.sum()
    return kept


def coupling_ceiling(p: Tensor, q: Tensor, draws: Tensor, weights: Tensor | None = None) -> float:
    """The greatest probability with which any exact rule keeps one of k siblings drawn from q without replacement.

    draws (M, k): all ordered draws, with their probabilities as `weights` (M,), for the exact figure; or a sample of
    them (weights None), for an estimate that tends to it from below.

    max P(X in S) over couplings of the draws S with X ~ p is 1 - max over sets A of [P(S within A) - p(A)]
    (max-flow = min-cut). For draws with or without replacement the best A is among those that hold the tokens of
    greatest q/p (Hu et al. 2025, "Towards optimal multi-draft speculative decoding"), so one sort finds it.
    """
    target, draft = as_law(p, "p"), as_law(q, "q")
    order = torch.argsort(
        draft / target, descending=True, stable=True
    )  # p = 0 < q comes first; 0/0 (NaN) is irrelevant
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    mass = torch.full((len(draws),), 1.0 / len(draws), dtype=torch.float64) if weights is None else weights
    last = place[draws].amax(dim=1)  # S lies within the first j tokens if all of its places are below j
    within = torch.zeros(len(order), dtype=torch.float64).index_add_(0, last, mass.double()).cumsum(0)
    return 1.0 - max(0.0, float((within - target[order].cumsum(0)).max()))
