"""The loss of heads that share a vocabulary projection, in chunks.

With u = head i's state at position j of a span, W the projection's rows (V, h) and y = x_{j+1+i} (see
`train.batches`), the loss of one (position, head) pair is

    (1 − a) · (−log p_y)  +  a · (−Σ_v q_v log p_v),      p = softmax(W u),  q = softmax(W s / T)

where s is the base's own state at position j+1+i, so that q is the base's law of the same token. Its gradient by the
logits is c·p − a·q − (1−a)·e_y with c the sum of the weights that are present, which is all that has to be known of
a chunk: logits of a chunk are made, turned into their gradient, pulled back to u, and dropped. The gradients of all
chunks are kept (K·P·h numbers) and handed to autograd in the backward pass; K·P·V numbers never stand in memory.

Drafting from a part of the vocabulary: p and q are normalised over the rows there are, labels elsewhere add nothing
to the first term. With `log_weights` the rows are a random sample of the vocabulary, row v standing for exp(log w_v)
rows like it (1/its probability of being drawn): log w is added to the logits of p and q alike, which makes both
partition sums unbiased, and a label's term is weighted by w_y for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Projection = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LossSettings:
    teacher_weight: float = 0.0
    """a: 0 is hard labels alone, 1 the teacher alone."""
    teacher_temperature: float = 1.0
    """T: below 1 sharpens the teacher, toward what greedy decoding accepts."""
    chunk_positions: int = 128
    """Target positions whose logits stand in memory at once; each costs (heads + 1) · V numbers."""


@dataclass(frozen=True)
class Rows:
    """The vocabulary rows that a loss is over."""

    labels: Tensor | None = None
    """(vocabulary,) int64: index among the rows of each token, −1 where it has none. None: rows are the vocabulary."""
    log_weights: Tensor | None = None
    """(V,) float32 for sampled rows, else None."""

    def index(self, tokens: Tensor) -> Tensor:
        return tokens if self.labels is None else self.labels[tokens]


def head_weights(num_heads: int, decay: float) -> list[float]:
    """decay^i for head i, Medusa's weighting."""
    return [decay**i for i in range(num_heads)]


def chunked_loss(
    head_states: Tensor,
    states: Tensor,
    next_ids: Tensor,
    remaining: Tensor,
    scale: Tensor,
    project: Projection,
    teacher: Projection,
    rows: Rows,
    settings: LossSettings,
    parameters: Sequence[nn.Parameter] = (),
) -> tuple[Tensor, Tensor]:
    """Σ over heads i of scale_i · (sum of head i's losses over its pairs).

    Args:
        head_states: (K, P, h).
        states, next_ids, remaining: as in `train.batches.PackedBatch`.
        scale: (K,) weight of each pair of a head.
        project: (K, C, h) → (K, C, V), differentiable logits of the heads; log weights are added here, not there.
        teacher: (C, h) → (C, V), the base's own logits over the same rows.
        parameters: what `project` itself trains (a projection of the heads' own).

    Returns:
        The loss (scalar, float32) and figures (K, 3), without gradient: sums over each head's pairs of the loss,
        of hits (the label has the greatest logit) and of ones.
    """
    return _ChunkedLoss.apply(
        head_states, states, next_ids, remaining, scale, project, teacher, rows, settings, *parameters
    )


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head_states: Tensor,
        states: Tensor,
        next_ids: Tensor,
        remaining: Tensor,
        scale: Tensor,
        project: Projection,
        teacher: Projection,
        rows: Rows,
        settings: LossSettings,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        num_heads, count, hidden = head_states.shape
        state_grad = torch.zeros_like(head_states)
        parameter_grads = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
        figures = torch.zeros(num_heads, 3, dtype=torch.float32, device=head_states.device)
        labels = rows.index(next_ids)
        depth = torch.arange(1, num_heads + 1, device=head_states.device)[:, None]
        for start in range(0, count, settings.chunk_positions):
            targets = torch.arange(start, min(start + settings.chunk_positions, count), device=head_states.device)
            sources = targets - depth  # (K, C): the position from which head i predicts each target
            inside = sources.clamp_min(0)
            valid = (sources >= 0) & (remaining[inside] >= depth)
            u = torch.gather(head_states, 1, inside[:, :, None].expand(-1, -1, hidden)).to(states.dtype)
            u.requires_grad_()
            with torch.enable_grad():
                logits = project(u)
            chunk = slice(start, start + len(targets))
            loss, hits, logit_grad = _loss_and_gradient(
                logits.detach(), teacher, states[chunk], labels[chunk], rows.log_weights, settings
            )
            pair_scale = scale[:, None] * valid
            if parameters:
                logit_grad = logit_grad.mul_(pair_scale[:, :, None])
            grads = torch.autograd.grad(logits, [u, *parameters], logit_grad)
            u_grad = grads[0].to(head_states.dtype)
            if not parameters:
                u_grad = u_grad * pair_scale[:, :, None].to(head_states.dtype)
            for total, grad in zip(parameter_grads, grads[1:], strict=True):
                total += grad
            for i in range(num_heads):
                first = min(len(targets), max(0, i + 1 - start))
                state_grad[i, start + first - i - 1 : start + len(targets) - i - 1] = u_grad[i, first:]
            figures[:, 0] += (loss * valid).sum(1)
            figures[:, 1] += (hits & valid).sum(1)
            figures[:, 2] += valid.sum(1)
        ctx.save_for_backward(state_grad, *parameter_grads)
        ctx.dtypes = [p.dtype for p in parameters]
        ctx.mark_non_differentiable(figures)
        return (figures[:, 0] * scale).sum(), figures

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        state_grad, *parameter_grads = ctx.saved_tensors
        upstream = outputs[0]
        own = [(upstream * g).to(dtype) for g, dtype in zip(parameter_grads, ctx.dtypes, strict=True)]
        return (upstream.to(state_grad.dtype) * state_grad, *([None] * 8), *own)


def _loss_and_gradient(
    logits: Tensor,
    teacher: Projection,
    states: Tensor,
    labels: Tensor,
    log_weights: Tensor | None,
    settings: LossSettings,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, hits and gradient by the logits for every pair of one chunk.

    Args:
        logits: (K, C, V).
        states: (C, h), the base's states at the targets.
        labels: (C,) index of each target among the rows, −1 for none.

    Returns:
        loss (K, C) float32; hits (K, C) bool; gradient (K, C, V) in the logits' dtype, not scaled.
    """
    alpha, hard = settings.teacher_weight, 1.0 - settings.teacher_weight
    if log_weights is not None:
        logits = logits + log_weights.to(logits.dtype)
    p = torch.softmax(logits, dim=-1)  # float32 inside, rounded once
    at = labels.clamp_min(0)[None, :, None].expand(logits.shape[0], -1, 1)
    label_weight = (labels >= 0).float()
    if log_weights is not None:
        label_weight = label_weight * log_weights.exp()[labels.clamp_min(0)]
    label_logit, label_p = logits.gather(2, at)[..., 0].float(), p.gather(2, at)[..., 0].float()
    hits = (label_p == p.amax(-1).float()) & (labels >= 0)
    log_z = label_logit - label_p.log()
    vanished = label_p < 1e-30
    if bool(vanished.any()):
        log_z[vanished] = torch.logsumexp(logits[vanished].float(), dim=-1)
    loss = hard * label_weight * (log_z - label_logit)
    keep = alpha + hard * label_weight  # (C,): the gradient's weight of p
    if hard and (log_weights is not None or bool((labels < 0).any())):
        p *= keep[:, None].to(p.dtype)
    if alpha:
        wanted = teacher(states)
        if settings.teacher_temperature != 1.0:
            wanted = wanted / settings.teacher_temperature
        if log_weights is not None:
            wanted = wanted + log_weights.to(wanted.dtype)
        q = torch.softmax(wanted, dim=-1).to(p.dtype)
        expected = torch.bmm(logits.transpose(0, 1), q[:, :, None])[..., 0].T.float()
        loss = loss + alpha * (log_z - expected)
        p.sub_(q, alpha=alpha)
    if hard:
        p.scatter_add_(2, at, (-hard * label_weight).to(p.dtype)[None, :, None].expand_as(at))
    return loss, hits, p
