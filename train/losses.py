"""The loss of heads that share a vocabulary projection, in chunks.

With u = head i's state at position j of a span, W the projection's rows (V, h) and y = x_{j+1+i} (see
`train.batches`), the loss of one (position, head) pair is

    (1 − a) · (−log p_y)  +  a · (−Σ_v q_v log p_v),      p = softmax(W u),  q = softmax(W s / T)

where s is the base's own state at position j+1+i, so that q is the base's law of the same token. Its gradient by the
logits is c·p − a·q − (1−a)·e_y with c the sum of the weights that are present, which is all that has to be known of
a chunk: logits of a chunk are made, turned into their gradient, pulled back to u, and dropped. The gradients of all
chunks are kept (K·P·h numbers) and handed to autograd in the backward pass; K·P·V numbers never stand in memory.
(The teacher's term has the gradient of the Kullback-Leibler divergence from q to p, which is less by q's entropy.)

A drafted token is accepted with probability A = Σ_v min(p_v, q_v) (Leviathan et al. 2023, theorem 3.5), so a loss may
look at that: 1 − A, the total variation distance, or −log A, which weighs the positions where little is accepted
more. With m_v = [p_v < q_v] the gradient of A by logit v is p_v (m_v − Σ_w m_w p_w).

Drafting from a part of the vocabulary: p and q are normalised over the rows there are, labels elsewhere add nothing
to the first term. With `log_weights` the rows are a random sample of the vocabulary, row v standing for exp(log w_v)
rows like it (1/its probability of being drawn): log w is added to the logits of p and q alike, which makes both
partition sums unbiased, and a label's term is weighted by w_y for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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
    acceptance_weight: float = 0.0
    """b: the loss is (1 − b) times the above and b times a loss on A."""
    acceptance: Literal["total_variation", "log"] = "total_variation"
    """1 − A, or −log A."""


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
    acceptance = settings.acceptance_weight
    soft = (1.0 - acceptance) * settings.teacher_weight
    hard = (1.0 - acceptance) * (1.0 - settings.teacher_weight)
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
    keep = soft + hard * label_weight  # (C,): the gradient's weight of p
    q = _law(teacher(states), log_weights, settings.teacher_temperature, p.dtype) if soft or acceptance else p
    towards_acceptance = None
    if acceptance:
        term, towards_acceptance = acceptance_loss(p, q, settings.acceptance)
        loss = loss + acceptance * term
    if acceptance or (hard and (log_weights is not None or bool((labels < 0).any()))):
        p *= keep[:, None].to(p.dtype)
    if soft:
        expected = torch.bmm(logits.transpose(0, 1), q[:, :, None])[..., 0].T.float()
        loss = loss + soft * (log_z - expected)
        p.sub_(q, alpha=soft)
    if hard:
        p.scatter_add_(2, at, (-hard * label_weight).to(p.dtype)[None, :, None].expand_as(at))
    if towards_acceptance is not None:
        p.add_(towards_acceptance, alpha=acceptance)
    return loss, hits, p


def _law(logits: Tensor, log_weights: Tensor | None, temperature: float, dtype: torch.dtype) -> Tensor:
    """The teacher's distribution over the rows, (C, V)."""
    if temperature != 1.0:
        logits = logits / temperature
    if log_weights is not None:
        logits = logits + log_weights.to(logits.dtype)
    return torch.softmax(logits, dim=-1).to(dtype)


def acceptance_loss(p: Tensor, q: Tensor, kind: Literal["total_variation", "log"]) -> tuple[Tensor, Tensor]:
    """1 − A or −log A with A = Σ min(p, q), and its gradient by the logits of p.

    Args:
        p: (K, C, V), q: (C, V), distributions.

    Returns:
        (K, C) float32, and (K, C, V) in the dtype of p. Where p = q the gradient is 0.
    """
    overlap = torch.minimum(p, q).sum(-1, dtype=torch.float32).clamp_min(1e-12)
    gradient = p * (p < q)
    gradient.addcmul_(p, gradient.sum(-1, keepdim=True, dtype=torch.float32).to(p.dtype), value=-1.0).neg_()
    if kind == "total_variation":
        return 1.0 - overlap, gradient
    return -overlap.log(), gradient.div_(overlap[..., None].to(p.dtype))


def feature_loss(head_states: Tensor, states: Tensor, remaining: Tensor, scale: Tensor) -> Tensor:
    """EAGLE-1's regression: Σ over steps i of scale_i · Σ over its pairs of the mean over h of SmoothL1.

    Args:
        head_states: (K, P, h), step i's imitation of the state 1 + i positions further.
        states: (P, h), the base's.
        remaining: (P,), as in `train.batches.PackedBatch`.
        scale: (K,).
    """
    total = head_states.new_zeros((), dtype=torch.float32)
    for i, predicted in enumerate(head_states):
        sources = torch.nonzero(remaining > i)[:, 0]
        wanted = states[sources + 1 + i].float()
        distance = nn.functional.smooth_l1_loss(predicted[sources].float(), wanted, reduction="none")
        total = total + scale[i] * distance.mean(-1).sum()
    return total
