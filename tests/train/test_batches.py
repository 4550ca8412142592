from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from train.batches import pack_by_length, plan_epoch, share_rows, steps_in_epoch

SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=60)


@given(SIZES, st.integers(1, 200), st.integers(0, 3), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_epoch_has_each_row_once_in_the_same_number_of_steps(sizes, budget, epoch, bucketed):
    plan = plan_epoch(sizes, budget, 0, epoch, sizes if bucketed else None)
    assert sorted(row for step in plan for row in step) == list(range(len(sizes)))
    assert len(plan) == steps_in_epoch(sizes, budget)
    assert all(plan)


def test_epochs_and_seeds_differ_and_repeat():
    sizes = [10] * 50
    assert plan_epoch(sizes, 100, 0, 0) == plan_epoch(sizes, 100, 0, 0)
    assert plan_epoch(sizes, 100, 0, 0) != plan_epoch(sizes, 100, 0, 1)
    assert plan_epoch(sizes, 100, 0, 0) != plan_epoch(sizes, 100, 1, 0)


def test_steps_are_of_nearly_equal_size():
    sizes = [1 + i % 40 for i in range(400)]
    totals = [sum(sizes[r] for r in step) for step in plan_epoch(sizes, 500, 0, 0)]
    assert max(totals) - min(totals) <= 80


def test_buckets_hold_rows_of_similar_length():
    lengths = [1 + (i * 37) % 100 for i in range(800)]
    spread = lambda plan: sum(max(lengths[r] for r in s) - min(lengths[r] for r in s) for s in plan)  # noqa: E731
    assert spread(plan_epoch(lengths, 500, 0, 0, lengths)) < 0.3 * spread(plan_epoch(lengths, 500, 0, 0))


@given(SIZES, st.integers(1, 5))
def test_shares_are_balanced_and_lose_nothing(sizes, parts):
    shares = share_rows(range(len(sizes)), sizes, parts)
    assert sorted(r for share in shares for r in share) == list(range(len(sizes)))
    totals = [sum(sizes[r] for r in share) for share in shares]
    assert max(totals) - min(totals) <= max(sizes)


@given(SIZES, st.integers(1, 200))
def test_padded_batches_stay_within_their_budget(lengths, budget):
    batches = pack_by_length(lengths, budget)
    assert sorted(r for b in batches for r in b) == list(range(len(lengths)))
    assert all(len(b) == 1 or len(b) * max(lengths[r] for r in b) <= budget for b in batches)
