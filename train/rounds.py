"""Attention of many drafting rounds at once, as training unrolls them.

A round that begins at position s drafts from the base's states up to s. Its step j (from 0) stands at position s + j
and sees the keys of step 0 at positions ≤ s, made from the base's states, and the round's own keys of steps 1 … j,
made from its own: one key a step, the newest being the query's own. All rounds of a row therefore share the first part,
with one causal mask for every step, and a step adds one score a query. Nothing grows with the square of the unroll.

The two parts are joined exactly: with o the attention over the shared keys and z the logarithm of its partition sum,
attention over both is Σ w_i v_i with w = softmax(z, score_1, …, score_j), taking o for v_0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from train.batches import SequenceBatch, pack_by_length

GROUP_TOKENS = 2048
"""Padded positions of the rows whose scores stand in memory at once."""


@dataclass(frozen=True)
class RowGroup:
    """B rows of similar length, padded to Q queries and T keys."""

    queries: Tensor
    """(B, Q) int64, places among the P supervised positions; 0 for padding."""
    keys: Tensor
    """(B, T) int64, places among the N positions; 0 for padding."""
    real: Tensor
    """(B, Q) bool, queries that are no padding."""
    hidden: Tensor
    """(B, Q, T) float32: 0 for keys up to the query's own position, else −∞. Padding queries see key 0."""


def group_rows(batch: SequenceBatch) -> list[RowGroup]:
    """The rows of a batch by similar length, each supervised position a query over its row."""
    device = batch.where.device
    starts = torch.tensor([0, *batch.lengths], dtype=torch.long).cumsum(0)
    where = batch.where.cpu()
    bounds = torch.searchsorted(where, starts)
    groups = []
    for rows in pack_by_length(batch.lengths, GROUP_TOKENS):
        counts = [int(bounds[r + 1] - bounds[r]) for r in rows]
        width, length = max(counts), max(batch.lengths[r] for r in rows)
        queries = torch.zeros(len(rows), width, dtype=torch.long)
        keys = torch.zeros(len(rows), length, dtype=torch.long)
        real = torch.zeros(len(rows), width, dtype=torch.bool)
        last = torch.zeros(len(rows), width, dtype=torch.long)  # the last key each query sees
        for line, (r, count) in enumerate(zip(rows, counts, strict=True)):
            queries[line, :count] = torch.arange(int(bounds[r]), int(bounds[r + 1]))
            real[line, :count] = True
            last[line, :count] = where[bounds[r] : bounds[r + 1]] - starts[r]
            keys[line, : batch.lengths[r]] = torch.arange(batch.lengths[r]) + starts[r]
        hidden = torch.zeros(len(rows), width, length)
        hidden.masked_fill_(torch.arange(length) > last[:, :, None], -torch.inf)
        groups.append(RowGroup(queries.to(device), keys.to(device), real.to(device), hidden.to(device)))
    return groups


def shared_attention(q: Tensor, k: Tensor, v: Tensor, groups: Sequence[RowGroup]) -> tuple[Tensor, Tensor]:
    """Attention of every round over its row's keys up to where it began.

    Args:
        q: (P, H, d).
        k, v: (N, G, d), each key head for H / G query heads.

    Returns:
        (P, H, d), and the logarithm of the partition sum (P, H), in float32 at least. Scores are made anew in the
        backward pass.
    """
    return _SharedAttention.apply(q, k, v, groups)


class _SharedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, groups: Sequence[RowGroup]) -> tuple[Tensor, Tensor]:
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        log_z = torch.zeros(q.shape[:2], dtype=_wide(q.dtype), device=q.device)
        for group in groups:
            scores = _scores(q, k, group)
            law = torch.softmax(scores, dim=-1)
            z = scores.amax(-1, keepdim=True) - law.amax(-1, keepdim=True).log()
            places = group.queries[group.real]
            out[places] = _by_query(law.to(v.dtype) @ _of_keys(v, group), group)
            log_z[places] = _by_query(z, group)[..., 0]
        ctx.save_for_backward(q, k, v, out)
        ctx.groups = groups
        return out, log_z

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out = ctx.saved_tensors
        out_grad, z_grad = upstream
        # By a score: law · (out_grad · v − out_grad · out + z_grad), the Jacobians of the softmax and of log z.
        wide, key_heads = _wide(q.dtype), k.shape[1]
        level = (out_grad.to(wide) * out).sum(-1) - z_grad
        q_grad, k_grad, v_grad = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        for group in ctx.groups:
            law = torch.softmax(_scores(q, k, group), dim=-1)
            law.unflatten(2, (-1, group.queries.shape[1])).mul_(group.real[:, None, None, :, None])
            pulled = _of_queries(out_grad, group, key_heads)
            by_score = (pulled @ _of_keys(v, group).mT).to(wide).sub_(_of_queries(level[..., None], group, key_heads))
            by_score = by_score.mul_(law).to(q.dtype)
            q_grad[group.queries[group.real]] = _by_query(by_score @ _of_keys(k, group), group)
            _add_by_key(k_grad, by_score.mT @ _of_queries(q, group, key_heads), group)
            _add_by_key(v_grad, law.to(v.dtype).mT @ pulled, group)
        scale = q.shape[-1] ** -0.5
        return q_grad.mul_(scale), k_grad.mul_(scale), v_grad, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _of_queries(x: Tensor, group: RowGroup, key_heads: int) -> Tensor:
    """(P, H, c) → (B, G, H/G · Q, c): query heads that share a key head are one axis with the queries."""
    rows = x[group.queries].unflatten(2, (key_heads, -1))
    return rows.permute(0, 2, 3, 1, 4).flatten(2, 3)


def _by_query(x: Tensor, group: RowGroup) -> Tensor:
    """(B, G, H/G · Q, c) → (real queries, H, c), the way back."""
    rows = x.unflatten(2, (-1, group.queries.shape[1])).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return rows[group.real]


def _of_keys(x: Tensor, group: RowGroup) -> Tensor:
    """(N, G, d) → (B, G, T, d)."""
    return x[group.keys].transpose(1, 2)


def _add_by_key(total: Tensor, x: Tensor, group: RowGroup) -> None:
    """Adds (B, G, T, d) to (N, G, d). What padding adds is 0."""
    total.index_add_(0, group.keys.flatten(), x.transpose(1, 2).flatten(0, 1))


def _scores(q: Tensor, k: Tensor, group: RowGroup) -> Tensor:
    """(B, G, H/G · Q, T), −∞ where a key is not seen; like all sums of scores in float32 at least."""
    queries = _of_queries(q, group, k.shape[1]) * q.shape[-1] ** -0.5
    scores = (queries @ _of_keys(k, group).mT).to(_wide(q.dtype))
    scores.unflatten(2, (-1, group.queries.shape[1])).add_(group.hidden[:, None, None])
    return scores


def join_own_keys(
    out: Tensor, log_z: Tensor, q: Tensor, own_keys: Sequence[Tensor], own_values: Sequence[Tensor]
) -> Tensor:
    """Attention over the shared keys and a round's own.

    Args:
        out, log_z: from `shared_attention`.
        q: (P, H, d).
        own_keys, own_values: (P, G, d) for each step from 1 to the query's own.

    Returns:
        (P, H, d).
    """
    if not own_keys:
        return out
    by_head = q.unflatten(1, (own_keys[0].shape[1], -1))  # (P, G, H/G, d)
    scores = [(by_head * k[:, :, None]).sum(-1, dtype=_wide(q.dtype)) * q.shape[-1] ** -0.5 for k in own_keys]
    law = torch.softmax(torch.stack([log_z.unflatten(1, by_head.shape[1:3]), *scores], dim=-1), dim=-1).to(out.dtype)
    values = [out.unflatten(1, by_head.shape[1:3]), *(v[:, :, None] for v in own_values)]
    joined = law[..., 0, None] * values[0]
    for i, value in enumerate(values[1:], 1):
        joined = joined + law[..., i, None] * value
    return joined.flatten(1, 2)
