"""Acceptance of several drafts and its ceiling, against enumeration and the transport problem as a linear program."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.stats import chi2

from decode.coupling import coupling_ceiling, deterministic_acceptance, draw_many, sampled_acceptance


def all_draws(q: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every ordered draw without replacement, with its probability."""
    draws, weights = [], []
    for draw in itertools.permutations(range(len(q)), count):
        weight, taken = 1.0, 0.0
        for token in draw:
            weight *= q[token].item() / (1.0 - taken)
            taken += q[token].item()
        draws.append(draw)
        weights.append(weight)
    return torch.tensor(draws), torch.tensor(weights, dtype=torch.float64)


def transport(p: np.ndarray, draws: np.ndarray, weights: np.ndarray) -> float:
    """max sum of pi(S, x), x in S, with marginals at most those of the drawn sets and of p."""
    sets: dict[frozenset[int], float] = {}
    for draw, weight in zip(draws.tolist(), weights.tolist(), strict=True):
        sets[frozenset(draw)] = sets.get(frozenset(draw), 0.0) + weight
    pairs = [(number, token) for number, drawn in enumerate(sets) for token in drawn]
    limits = np.zeros((len(sets) + len(p), len(pairs)))
    for column, (number, token) in enumerate(pairs):
        limits[number, column] = limits[len(sets) + token, column] = 1.0
    found = linprog(-np.ones(len(pairs)), A_ub=limits, b_ub=[*sets.values(), *p], method="highs")
    assert found.success
    return float(-found.fun)


@given(seed=st.integers(0, 10**6), size=st.integers(2, 6), count=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_the_ceiling_is_the_optimal_transport(seed: int, size: int, count: int) -> None:
    count = min(count, size)
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet([0.7] * size), rng.dirichlet([0.7] * size) * 0.99 + 0.01 / size
    draws, weights = all_draws(torch.tensor(q), count)
    ceiling = coupling_ceiling(torch.tensor(p), torch.tensor(q), draws, weights)
    assert ceiling == pytest.approx(transport(p, draws.numpy(), weights.numpy()), abs=1e-7)
    kept = (sampled_acceptance(torch.tensor(p), torch.tensor(q), draws)[:, -1] * weights).sum().item()
    assert kept <= ceiling + 1e-9
    if count == 1:
        assert kept == pytest.approx(ceiling, abs=1e-9)  # one draft: the rule is the best there is
        assert kept == pytest.approx(np.minimum(p, q).sum(), abs=1e-9)


def test_worked_example() -> None:
    """docs/exactness.md: two children are kept with 0.85; the best coupling keeps one always; A and B chosen: 0.8."""
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.6, 0.2], dtype=torch.float64)
    draws, weights = all_draws(q, 2)
    assert weights.sum().item() == pytest.approx(1.0)
    kept = (sampled_acceptance(p, q, draws) * weights[:, None]).sum(0)
    assert kept.tolist() == pytest.approx([0.7, 0.85])
    assert coupling_ceiling(p, q, draws, weights) == pytest.approx(1.0)
    assert coupling_ceiling(p, q, *all_draws(q, 1)) == pytest.approx(0.7)
    assert deterministic_acceptance(p, torch.tensor([0, 1])) == pytest.approx(0.8)


@pytest.mark.parametrize("q", [[0.5, 0.3, 0.15, 0.05], [0.9999, 0.00009, 0.000009, 0.000001]])
def test_many_draws_have_the_law_of_draws_one_after_the_other(q: list[float]) -> None:
    """Also where repetitions make short rows go on by races. G-test at level 1e-4, the seed fixed."""
    law, count = torch.tensor(q, dtype=torch.float64), 20_000
    draws = draw_many(law, count, 3, torch.Generator().manual_seed(0)).tolist()
    statistic, cells = 0.0, 0
    for draw, weight in zip(*all_draws(law, 3), strict=True):
        seen = draws.count(draw.tolist())
        statistic += 2.0 * seen * np.log(seen / (count * weight.item())) if seen else 0.0
        cells += 1
    assert statistic < chi2.isf(1e-4, df=cells - 1)


def test_a_sample_of_draws_estimates_the_ceiling() -> None:
    rng = np.random.default_rng(0)
    p, q = torch.tensor(rng.dirichlet([0.3] * 30)), torch.tensor(rng.dirichlet([0.3] * 30) * 0.99 + 0.01 / 30)
    exact = coupling_ceiling(p, q, *all_draws(q, 2))
    sample = draw_many(q, 20_000, 2, torch.Generator().manual_seed(0))
    assert coupling_ceiling(p, q, sample) == pytest.approx(exact, abs=0.01)
