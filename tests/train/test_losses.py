from __future__ import annotations

import pytest
import torch
from torch import nn

from train.batches import count_targets, span_positions
from train.losses import LossSettings, Rows, acceptance_loss, chunked_loss, feature_loss
from train.trainer import row_labels, sample_rows

HEADS, HIDDEN, VOCAB = 3, 8, 29


def example(spans=(7, 2, 9), seed=0):
    """Random states and labels of three spans; the shortest gives the last heads no target."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(spans)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return {
        "head_states": draw(HEADS, count, HIDDEN).requires_grad_(),
        "states": draw(count, HIDDEN),
        "next_ids": torch.randint(VOCAB, (count,), generator=generator),
        "remaining": torch.cat([torch.arange(n - 1, -1, -1) for n in spans]),
        "scale": torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64),
    }


def plain_loss(
    batch, weight, teacher_weight, temperature, ids=None, own=None, log_weights=None, acceptance=0.0, kind=None
):
    """The definition, written out: all logits at once, a loop over pairs."""
    rows = weight if ids is None else weight[ids]
    total = 0.0
    for head in range(HEADS):
        projection = rows if own is None else own[head]
        for j in range(len(batch["next_ids"])):
            if batch["remaining"][j] < head + 1:
                continue
            target = j + 1 + head
            token = int(batch["next_ids"][target])
            extra = 0.0 if log_weights is None else log_weights
            log_p = torch.log_softmax(batch["head_states"][head, j] @ projection.T + extra, -1)
            q = torch.softmax(batch["states"][target] @ rows.T / temperature + extra, -1)
            overlap = torch.minimum(log_p.exp(), q).sum()
            term = -overlap.log() if kind == "log" else 1 - overlap
            total = total + batch["scale"][head] * acceptance * term
            total = total - (1 - acceptance) * batch["scale"][head] * teacher_weight * (q * log_p).sum()
            place = token if ids is None else (ids == token).nonzero()
            if ids is None or len(place):
                place = int(place)
                copies = 1.0 if log_weights is None else log_weights[place].exp()
                hard = (1 - acceptance) * (1 - teacher_weight)
                total = total - batch["scale"][head] * hard * copies * log_p[place]
    return total


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
@pytest.mark.parametrize(("teacher_weight", "temperature"), [(0.0, 1.0), (1.0, 1.0), (0.4, 0.7)])
@pytest.mark.parametrize("part", [False, True])
def test_the_chunked_loss_equals_the_plain_one_with_its_gradient(chunk, teacher_weight, temperature, part):
    batch = example()
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.float64)
    ids = torch.tensor([5, 3, 20, 11, 0, 28]) if part else None
    rows = weight if ids is None else weight[ids]
    loss, figures = chunked_loss(
        **batch,
        project=lambda u: u @ rows.T,
        teacher=lambda s: s @ rows.T,
        rows=Rows(row_labels(ids, VOCAB)),
        settings=LossSettings(teacher_weight, temperature, chunk),
    )
    expected = plain_loss(batch, weight, teacher_weight, temperature, ids)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    (gradient,) = torch.autograd.grad(3 * loss, batch["head_states"])
    (wanted,) = torch.autograd.grad(3 * expected, batch["head_states"])
    torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-6)
    assert figures[:, 2].tolist() == count_targets(batch["remaining"], HEADS) == [15, 12, 10]


@pytest.mark.parametrize("kind", ["total_variation", "log"])
@pytest.mark.parametrize(("acceptance", "teacher_weight"), [(1.0, 0.0), (0.5, 1.0), (0.3, 0.4)])
@pytest.mark.parametrize("sampled", [False, True])
def test_losses_on_acceptance_equal_the_plain_ones_with_their_gradient(kind, acceptance, teacher_weight, sampled):
    batch = example()
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.float64)
    places, log_weights = sample_rows(VOCAB, 9, seed=3, step=1) if sampled else (torch.tensor([5, 3, 20, 0]), None)
    rows = weight[places]
    loss, _ = chunked_loss(
        **batch,
        project=lambda u: u @ rows.T,
        teacher=lambda s: s @ rows.T,
        rows=Rows(row_labels(places, VOCAB), log_weights),
        settings=LossSettings(teacher_weight, 0.8, 4, acceptance, kind),
    )
    doubled = None if log_weights is None else log_weights.double()
    expected = plain_loss(batch, weight, teacher_weight, 0.8, places, None, doubled, acceptance, kind)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    gradients = [torch.autograd.grad(x, batch["head_states"])[0] for x in (loss, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_acceptance_by_hand():
    p, q = torch.tensor([[[0.5, 0.3, 0.2]]]), torch.tensor([[0.2, 0.3, 0.5]])
    distance, gradient = acceptance_loss(p, q, "total_variation")
    assert distance.item() == pytest.approx(0.3)  # 1 − (0.2 + 0.3 + 0.2)
    # More logit for token 2, which is drafted too rarely, raises p there by p(1 − p) and with it the acceptance.
    assert gradient[0, 0].tolist() == pytest.approx([0.5 * 0.2, 0.3 * 0.2, -0.2 * 0.8])
    logarithm, steeper = acceptance_loss(p, q, "log")
    assert logarithm.exp().item() == pytest.approx(1 / 0.7)
    torch.testing.assert_close(steeper, gradient / 0.7)
    same, still = acceptance_loss(p, p[0], "log")
    assert same.item() == pytest.approx(0.0, abs=1e-6) and not still.any()


def test_the_feature_loss_compares_each_step_with_the_state_it_imitates():
    batch = example()
    predicted = batch["head_states"]
    loss = feature_loss(predicted, batch["states"], batch["remaining"], batch["scale"])
    total = 0.0
    for head in range(HEADS):
        for j in range(len(batch["next_ids"])):
            if batch["remaining"][j] > head:
                gap = (predicted[head, j] - batch["states"][j + 1 + head]).abs()
                each = torch.where(gap < 1, gap**2 / 2, gap - 0.5)
                total = total + batch["scale"][head] * each.mean()
    torch.testing.assert_close(loss.double(), total, rtol=1e-5, atol=1e-6)


def test_projections_of_the_heads_own_get_their_gradient():
    batch = example()
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.float64)
    own = nn.Parameter(torch.randn(HEADS, VOCAB, HIDDEN, dtype=torch.float64))
    loss, _ = chunked_loss(
        **batch,
        project=lambda u: torch.einsum("kch,kvh->kcv", u, own),
        teacher=lambda s: s @ weight.T,
        rows=Rows(),
        settings=LossSettings(0.4, 1.0, 4),
        parameters=[own],
    )
    expected = plain_loss(batch, weight, 0.4, 1.0, own=own)
    for got, wanted in zip(
        torch.autograd.grad(loss, [batch["head_states"], own]),
        torch.autograd.grad(expected, [batch["head_states"], own]),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_sampled_rows_count_for_those_they_stand_for():
    batch = example()
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.float64)
    places, log_weights = sample_rows(VOCAB, 9, seed=3, step=1)
    assert places[:4].tolist() == [0, 1, 2, 3] and len(set(places.tolist())) == 9
    assert log_weights.exp().sum() == pytest.approx(VOCAB)
    rows = weight[places]
    loss, _ = chunked_loss(
        **batch,
        project=lambda u: u @ rows.T,
        teacher=lambda s: s @ rows.T,
        rows=Rows(row_labels(places, VOCAB), log_weights),
        settings=LossSettings(0.4, 1.0, 4),
    )
    expected = plain_loss(batch, weight, 0.4, 1.0, places, log_weights=log_weights.double())
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    gradients = [torch.autograd.grad(x, batch["head_states"])[0] for x in (loss, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_hard_loss_over_sampled_rows_is_right_on_average():
    """The gradient by a state, over many draws of rows, tends to that over the whole vocabulary."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(60, HIDDEN, generator=generator)
    state = (torch.randn(1, 2, HIDDEN, generator=generator) * 0.3).requires_grad_()
    fixed = {
        "states": torch.zeros(2, HIDDEN),
        "next_ids": torch.tensor([0, 2]),
        "remaining": torch.tensor([1, 0]),
        "scale": torch.ones(1),
        "settings": LossSettings(0.0),
    }

    def gradient(ids, log_weights=None):
        rows = weight[ids]
        loss, _ = chunked_loss(
            state,
            **fixed,
            project=lambda u: u @ rows.T,
            teacher=lambda s: s @ rows.T,
            rows=Rows(row_labels(ids, 60), log_weights),
        )
        return torch.autograd.grad(loss, state)[0][0, 0]

    exact = gradient(torch.arange(60))
    mean = torch.stack([gradient(*sample_rows(60, 30, 0, step)) for step in range(400)]).mean(0)
    assert (mean - exact).norm() < 0.1 * exact.norm()


def test_a_vanishing_label_probability_keeps_the_loss_finite():
    weight = torch.tensor([[200.0], [0.0]])
    loss, _ = chunked_loss(
        torch.ones(1, 2, 1),
        torch.ones(2, 1),
        torch.tensor([0, 1]),
        torch.tensor([1, 0]),
        torch.ones(1),
        lambda u: u @ weight.T,
        lambda s: s @ weight.T,
        Rows(),
        LossSettings(0.0),
    )
    assert loss.item() == pytest.approx(200.0)


def test_no_chunk_of_logits_is_larger_than_asked():
    batch = example((40,))
    seen = []

    def project(u):
        seen.append(u.shape[1])
        return u @ torch.ones(VOCAB, HIDDEN, dtype=torch.float64).T

    chunked_loss(**batch, project=project, teacher=lambda s: s, rows=Rows(), settings=LossSettings(0.0, 1.0, 16))
    assert max(seen) == 16 and sum(seen) == 40


def test_span_positions_of_two_answers():
    ids = [10, 11, 12, 13, 14, 15, 16]
    mask = [False, False, True, True, False, True, True]
    positions, next_ids, remaining = span_positions(ids, mask)
    assert positions.tolist() == [1, 2, 4, 5]
    assert next_ids.tolist() == [12, 13, 15, 16]
    assert remaining.tolist() == [1, 0, 1, 0]
