"""The acceptance rule of speculative sampling in plain NumPy, to be read next to its proof in docs/exactness.md.

The decoder runs `decode.verify`; its tests hold the two against each other.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def accept_or_resample(
    p_target: ArrayLike, p_draft: ArrayLike, draft_token: int, rng: np.random.Generator
) -> tuple[bool, int]:
    """Whether the drafted token was accepted, and the token to emit, whose law is `p_target` whatever the draft's.

    p_target: (V,) probabilities p of the base. p_draft: (V,) probabilities q that `draft_token` was sampled from.

    Accept the drafted token x with probability min(1, p(x) / q(x)); otherwise sample from the residual,
    max(0, p - q) renormalised (Leviathan et al. 2023, algorithm 1; Chen et al. 2023).

    Edges: with p = q rejection has probability 0 and the residual is empty; where rounding rejects all the same, p
    itself is sampled. A token with q(x) = 0 cannot have been sampled from q (`decode.verify` refuses it as a drafter's
    fault); here the ratio's limit accepts it if p(x) > 0, and it is never emitted if p(x) = 0.

    Raises ValueError if p or q is no law (not 1-D, not finite, negative, not summing to 1), if their lengths differ, or
    if the token is outside the vocabulary.
    """
    p, q = _law(p_target, "p_target"), _law(p_draft, "p_draft")
    if len(p) != len(q):
        raise ValueError(f"p_target has {len(p)} entries and p_draft {len(q)}: they must share a vocabulary")
    if not 0 <= draft_token < len(p):
        raise ValueError(f"draft_token {draft_token} is outside the vocabulary of {len(p)}")

    if rng.random() * q[draft_token] < p[draft_token]:  # u < p(x) / q(x), without the division
        return True, int(draft_token)
    residual = np.maximum(p - q, 0.0)
    if residual.sum() == 0.0:
        residual = p
    return False, int(rng.choice(len(p), p=residual / residual.sum()))


def _law(values: ArrayLike, name: str) -> NDArray[np.float64]:
    law = np.asarray(values, dtype=np.float64)
    if law.ndim != 1 or law.size == 0:
        raise ValueError(f"{name} must be a vector of probabilities, got shape {law.shape}")
    if not np.isfinite(law).all() or (law < 0.0).any():
        raise ValueError(f"{name} has entries that are negative or not finite")
    if abs(law.sum() - 1.0) > 1e-4:  # a float32 softmax is within 1e-6
        raise ValueError(f"{name} sums to {law.sum()}, not to 1")
    return law / law.sum()
