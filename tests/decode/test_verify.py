"""Edges, errors and randomness of the verification rules; that they are exact is in test_verify_exact.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from decode import reference
from decode.tree import Tree
from decode.verify import (
    GeneratorChooser,
    Verdict,
    accept_or_resample,
    as_law,
    draw_siblings,
    verify_greedy,
    verify_point_mass,
    verify_sampled,
    verify_typical,
)

EXAMPLE = Tree((-1, 0, 0, 1, 1, 2), (0, 0, 1, 0, 1, 0))
A, B, C, D = range(4)
TOKENS = torch.tensor([D, A, B, C, D, C])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def one_hot(*tokens: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), 4).double()


# ---- greedy


@pytest.mark.parametrize(
    ("choices", "path", "next_token"),
    [
        ([A, C, A, B, A, A], [0, 1, 3], B),  # a leaf is reached
        ([A, D, A, A, B, A], [0, 1, 4], B),  # the second sibling
        ([A, B, A, A, A, A], [0, 1], B),  # stops inside
        ([B, A, C, A, A, D], [0, 2, 5], D),  # the other branch
        ([C, A, A, A, A, A], [0], C),  # nothing accepted
    ],
)
def test_greedy_keeps_the_path_of_the_base(choices: list[int], path: list[int], next_token: int) -> None:
    verdict = Verdict(path, next_token)
    assert verify_greedy(EXAMPLE, TOKENS, torch.tensor(choices)) == verdict
    asked: list[int] = []

    def choose(node: int) -> int:
        asked.append(node)
        return choices[node]

    assert verify_greedy(EXAMPLE, TOKENS, choose) == verdict
    assert asked == path


def test_sampling_a_certain_law_equals_greedy() -> None:
    """top_k = 1: also the token after full acceptance is the argmax."""
    choices = [A, C, A, B, A, A]
    laws = one_hot(*choices)
    expected = Verdict([0, 1, 3], B)
    for seed in range(5):
        assert verify_point_mass(EXAMPLE, TOKENS, laws.__getitem__, generator(seed)) == expected
        draft = torch.full((6, 4), 0.25)
        assert verify_sampled(EXAMPLE, TOKENS, draft, laws.__getitem__, generator(seed)) == expected
        assert verify_typical(EXAMPLE, TOKENS, laws.__getitem__, generator(seed)) == expected


# ---- laws are asked for from the root down, for visited nodes only


@pytest.mark.parametrize("rule", ["point mass", "sampled"])
def test_only_visited_laws_are_computed(rule: str) -> None:
    laws, asked = one_hot(B, A, C, A, A, D), []

    def law(node: int) -> torch.Tensor:
        asked.append(node)
        return laws[node]

    if rule == "point mass":
        verdict = verify_point_mass(EXAMPLE, TOKENS, law, generator())
    else:
        verdict = verify_sampled(EXAMPLE, TOKENS, torch.full((6, 4), 0.25), law, generator())
    assert verdict == Verdict([0, 2, 5], D)
    assert asked == [0, 2, 5]


# ---- randomness


def test_seed_decides_and_global_state_is_left_alone() -> None:
    laws = torch.softmax(torch.randn(6, 4, generator=generator(1)), dim=-1)

    def rounds(seed: int) -> list[Any]:
        source = generator(seed)
        return [
            (
                verify_point_mass(EXAMPLE, TOKENS, laws.__getitem__, source),
                verify_sampled(EXAMPLE, TOKENS, laws.flip(0), laws.__getitem__, source),
                verify_typical(EXAMPLE, TOKENS, laws.__getitem__, source),
                accept_or_resample(laws[0], laws[1], A, source),
                draw_siblings(laws[0], 3, source),
            )
            for _ in range(20)
        ]

    before = torch.get_rng_state()
    assert rounds(3) == rounds(3)
    assert rounds(3) != rounds(4)
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_follow_the_weights() -> None:
    """G-test of 50 000 draws at level 1e-4, the seed fixed; and of as many acceptances."""
    weights = torch.tensor([0.0, 3.0, 1.0, 0.0, 0.5, 0.5], dtype=torch.float64)
    chooser, draws = GeneratorChooser(generator(5)), 50_000
    counts = np.bincount([chooser.draw(weights) for _ in range(draws)], minlength=6)
    expected = draws * (weights / weights.sum()).numpy()
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    statistic = 2.0 * np.sum(counts[kept] * np.log(counts[kept] / expected[kept]))
    assert statistic < chi2.isf(1e-4, df=kept.sum() - 1)
    accepted = sum(chooser.accept(0.3) for _ in range(draws))
    assert abs(accepted - 0.3 * draws) < 4 * math.sqrt(0.3 * 0.7 * draws)


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-53])
def test_extreme_uniforms_stay_in_the_support(uniform: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GeneratorChooser, "_uniform", lambda self: torch.tensor(uniform, dtype=torch.float64))
    chooser = GeneratorChooser(generator())
    rng = np.random.default_rng(0)
    for _ in range(200):
        weights = torch.tensor(rng.dirichlet([0.1] * 9) * (rng.random(9) < 0.6) + np.eye(9)[4] * 1e-12)
        assert weights[chooser.draw(weights)] > 0.0
    assert chooser.accept(1.0)
    assert not chooser.accept(0.0)


# ---- numerical edges


@given(seed=st.integers(0, 10**6), noise=st.sampled_from([0.0, 1e-9, 1e-7]))
@settings(max_examples=40, deadline=None)
def test_nearly_equal_laws_of_a_large_vocabulary(seed: int, noise: float) -> None:
    """float32 laws that differ by rounding: nothing is emitted outside the base's support, and nearly all is kept."""
    rng = np.random.default_rng(seed)
    p = torch.softmax(torch.tensor(rng.normal(size=2000) * 4, dtype=torch.float32), dim=-1)
    p = torch.where(p < p.quantile(0.3), 0.0, p)
    p = p / p.sum()
    q = p * (1.0 + noise * torch.tensor(rng.normal(size=2000), dtype=torch.float32))
    source, draft = generator(seed), draw_siblings(q, 1, generator(seed))[0]
    accepted, token = accept_or_resample(p, q, draft, source)
    assert accepted and token == draft


def test_empty_residual_leaves_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected although p = q, as only rounding can: the token comes from p, not from a division by zero."""
    monkeypatch.setattr(GeneratorChooser, "accept", lambda self, probability: False)
    p = torch.tensor([0.0, 0.25, 0.75, 0.0])
    accepted, token = accept_or_resample(p, p, 1, generator())
    assert not accepted and token in (1, 2)
    tree = Tree.from_rank_paths([(0,), (1,)])
    verdict = verify_sampled(tree, torch.tensor([0, 1, 2]), [p] * 3, lambda node: p, generator())
    assert verdict.path == [0] and verdict.next_token in (1, 2)


def test_siblings_beyond_the_draft_law_are_drafts_without_a_law() -> None:
    q = torch.tensor([0.0, 0.0, 1.0, 0.0])
    assert draw_siblings(q, 3, generator()) == [2, 0, 1]
    tree = Tree.from_rank_paths([(0,), (1,), (2,)])
    law = one_hot(1)[0]
    verdict = verify_sampled(tree, torch.tensor([0, 2, 0, 1]), [q] * 4, lambda node: law, generator())
    assert verdict == Verdict([0, 3], verdict.next_token)


# ---- what a drafter or a base must not hand over

GOOD = torch.tensor([0.1, 0.2, 0.3, 0.4])
BAD_LAWS = {
    "shape": (torch.full((1, 4), 0.25), r"shape"),
    "length": (torch.full((5,), 0.2), r"shape \(4,\), got \(5,\)"),
    "half precision": (GOOD.bfloat16(), r"float32 or float64 .* got torch.bfloat16"),
    "logits": (torch.tensor([0.5, -1.0, 0.7, 0.8]), r"negative entry"),
    "NaN": (torch.tensor([0.5, math.nan, 0.5, 0.0]), r"NaN entry"),
    "infinite": (torch.tensor([0.5, math.inf, 0.5, 0.0]), r"sums to inf"),
    "unnormalised": (torch.tensor([0.5, 0.5, 0.5, 0.0]), r"sums to 1.5, not to 1"),
    "empty": (torch.zeros(4), r"sums to 0.0, not to 1"),
    "support": (torch.tensor([0.5, 0.5, 0.0, 0.0]), r"drafted token 2 probability 0"),
}


@pytest.mark.parametrize("fault", sorted(BAD_LAWS))
def test_a_wrong_draft_law_is_an_error(fault: str) -> None:
    law, message = BAD_LAWS[fault]
    with pytest.raises(ValueError, match=rf"the draft law.*{message}"):
        accept_or_resample(GOOD, law, C, generator())
    with pytest.raises(ValueError, match=rf"the draft law at node 0.*{message}"):
        verify_sampled(Tree.chain(2), torch.tensor([A, C]), [law, law], lambda node: GOOD, generator())
    if fault not in ("support", "length"):
        with pytest.raises(ValueError, match=rf"the draft law.*{message}"):
            draw_siblings(law, 1, generator())


@pytest.mark.parametrize("fault", sorted(set(BAD_LAWS) - {"support", "length"}))
def test_a_wrong_target_law_is_an_error(fault: str) -> None:
    law, message = BAD_LAWS[fault]
    match = rf"the target law at node 0.*{message}"
    with pytest.raises(ValueError, match=match):
        verify_point_mass(Tree.chain(2), torch.tensor([A, C]), lambda node: law, generator())
    with pytest.raises(ValueError, match=match):
        verify_sampled(Tree.chain(2), torch.tensor([A, C]), [GOOD, GOOD], lambda node: law, generator())
    with pytest.raises(ValueError, match=match):
        verify_typical(Tree.chain(2), torch.tensor([A, C]), lambda node: law, generator())
    with pytest.raises(ValueError, match=rf"the target law.*{message}"):
        accept_or_resample(law, GOOD, C, generator())


def test_a_sibling_drafted_twice_is_an_error() -> None:
    tree, drafts = Tree.from_rank_paths([(0,), (1,)]), torch.tensor([A, B, B])
    with pytest.raises(ValueError, match=r"without the siblings before it.*drafted token 1 probability 0"):
        verify_sampled(tree, drafts, [GOOD] * 3, lambda node: one_hot(D)[0], generator())


def test_a_gap_in_the_draws_is_an_error() -> None:
    tree = Tree((-1, 0, 0), (0, 0, 2))
    with pytest.raises(ValueError, match="node 2 has rank 2 but is draw 1"):
        verify_sampled(tree, torch.tensor([A, B, C]), [GOOD] * 3, lambda node: one_hot(D)[0], generator())


def test_wrong_sizes_are_errors() -> None:
    with pytest.raises(ValueError, match=r"tokens must have shape \(6,\)"):
        verify_greedy(EXAMPLE, TOKENS[:5], torch.zeros(6, dtype=torch.long))
    with pytest.raises(ValueError, match=r"choices must have shape \(6,\)"):
        verify_greedy(EXAMPLE, TOKENS, torch.zeros(6, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="3 rows for a tree of 6 nodes"):
        verify_sampled(EXAMPLE, TOKENS, [GOOD] * 3, lambda node: GOOD, generator())
    with pytest.raises(ValueError, match="drafted token 4 is not in the vocabulary of 4"):
        accept_or_resample(GOOD, GOOD, 4, generator())
    for tokens, stranger in (([A, 4, B], 4), ([A, C, -1], -1)):  # the second where the draft law has nothing left
        with pytest.raises(ValueError, match=f"drafted token {stranger} is not in the vocabulary of 4"):
            verify_sampled(
                Tree.from_rank_paths([(0,), (1,)]),
                torch.tensor(tokens),
                [one_hot(C)[0]] * 3,
                lambda node: one_hot(D)[0],
                generator(),
            )
    with pytest.raises(ValueError, match="cannot draw 5 distinct tokens from a vocabulary of 4"):
        draw_siblings(GOOD, 5, generator())
    with pytest.raises(ValueError, match=r"epsilon=0\.0"):
        verify_typical(EXAMPLE, TOKENS, lambda node: GOOD, generator(), epsilon=0.0)


def test_laws_are_normalised_in_float64() -> None:
    law = torch.softmax(torch.randn(50_000, generator=generator()), dim=-1)
    normal = as_law(law, "p")
    assert normal.dtype == torch.float64
    assert normal.sum().item() == pytest.approx(1.0, abs=1e-14)


# ---- typical acceptance


def test_typical_threshold_and_choice_of_path() -> None:
    """Flat laws make the threshold alpha * exp(-H), peaked ones epsilon; the likelier of two equal paths is kept."""
    flat = torch.tensor([0.25, 0.25, 0.25, 0.25], dtype=torch.float64)  # alpha * exp(-H) = alpha / 4
    tree = Tree.from_rank_paths([(0,), (1,), (1, 0)])
    nodes = torch.tensor([D, A, B, C])
    keep = verify_typical(tree, nodes, lambda node: flat, generator(), epsilon=0.9, alpha=0.99)
    assert keep.path == [0, 2, 3]  # 0.25 > 0.2475, and the longer path wins
    drop = verify_typical(tree, nodes, lambda node: flat, generator(), epsilon=0.9, alpha=1.01)
    assert drop.path == [0]
    drop = verify_typical(tree, nodes, lambda node: flat, generator(), epsilon=0.25, alpha=9.0)
    assert drop.path == [0]  # epsilon is the smaller threshold and must be exceeded
    equal = Tree.from_rank_paths([(0,), (1,)])
    law = torch.tensor([0.3, 0.6, 0.1, 0.0], dtype=torch.float64)
    assert verify_typical(equal, torch.tensor([D, A, B]), lambda node: law, generator()).path == [0, 2]


# ---- the NumPy reference


class ScriptedRng:
    """Gives one uniform, and reports the residual instead of drawing from it."""

    def __init__(self, uniform: float) -> None:
        self.uniform, self.residual = uniform, None

    def random(self) -> float:
        return self.uniform

    def choice(self, size: int, p: np.ndarray) -> int:
        assert len(p) == size
        self.residual = p
        return int(np.argmax(p))


@given(seed=st.integers(0, 10**6), size=st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_reference_has_the_target_law(seed: int, size: int) -> None:
    """Its threshold is found by scripted uniforms on both sides of it, its residual is read: the law adds up to p."""
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet([0.5] * size), rng.dirichlet([0.5] * size)
    q[rng.random(size) < 0.2] = 0.0
    q = q / q.sum() if q.sum() > 0 else np.eye(size)[0]
    emitted = np.zeros(size)
    for token in np.flatnonzero(q):
        ratio = min(1.0, p[token] / q[token])
        assert reference.accept_or_resample(p, q, token, ScriptedRng(ratio * (1 - 1e-9))) == (True, token)
        emitted[token] += q[token] * ratio
        if ratio < 1.0:
            rejecting = ScriptedRng(ratio * (1 + 1e-9))
            accepted, _ = reference.accept_or_resample(p, q, token, rejecting)
            assert not accepted
            emitted += q[token] * (1.0 - ratio) * rejecting.residual
    assert emitted == pytest.approx(p, abs=1e-9)


def test_reference_and_decoder_decide_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        p, q = rng.dirichlet([0.5] * 5), rng.dirichlet([0.5] * 5)
        token, uniform = int(rng.choice(5, p=q)), float(rng.random())
        monkeypatch.setattr(GeneratorChooser, "_uniform", lambda self, u=uniform: torch.tensor(u, dtype=torch.float64))
        monkeypatch.setattr(GeneratorChooser, "draw", lambda self, weights: int(weights.argmax()))
        ours = accept_or_resample(torch.tensor(p), torch.tensor(q), token, generator())
        assert ours == reference.accept_or_resample(p, q, token, ScriptedRng(uniform))


def test_reference_edges() -> None:
    rng = np.random.default_rng(0)
    p = np.array([0.5, 0.5, 0.0])
    for _ in range(50):
        assert reference.accept_or_resample(p, p, 1, rng) == (True, 1)  # p = q
        assert reference.accept_or_resample(p, [0.0, 0.0, 1.0], 2, rng)[1] in (0, 1)  # p(x) = 0
        assert reference.accept_or_resample(p, [1.0, 0.0, 0.0], 1, rng) == (True, 1)  # q(x) = 0 < p(x)
        accepted, token = reference.accept_or_resample(p, p, 2, rng)  # q(x) = p(x) = 0, and no residual
        assert not accepted and token in (0, 1)
        assert reference.accept_or_resample([1.0], [1.0], 0, rng) == (True, 0)
    float32 = torch.softmax(torch.randn(50_000, generator=generator()), dim=-1).numpy()
    assert reference.accept_or_resample(float32, float32, 7, rng) == (True, 7)


@pytest.mark.parametrize(
    ("law", "message"),
    [
        ([0.5, 0.6, 0.0], "sums to 1.1"),
        ([0.0, 0.0, 0.0], "sums to 0"),
        ([1.5, -0.5, 0.0], "negative or not finite"),
        ([math.nan, 0.5, 0.5], "negative or not finite"),
        ([math.inf, 0.5, 0.5], "negative or not finite"),
        ([[0.5, 0.5, 0.0]], "vector"),
        ([], "vector"),
        ([0.5, 0.5], "share a vocabulary"),
    ],
)
def test_reference_refuses_what_is_no_law(law: list[Any], message: str) -> None:
    good, rng = [0.2, 0.3, 0.5], np.random.default_rng(0)
    with pytest.raises(ValueError, match=message):
        reference.accept_or_resample(law, good, 0, rng)
    with pytest.raises(ValueError, match=message):
        reference.accept_or_resample(good, law, 0, rng)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        reference.accept_or_resample(good, good, 3, rng)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        reference.accept_or_resample(good, good, -1, rng)
