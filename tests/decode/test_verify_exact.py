"""Proof by enumeration: each rule runs once for every sequence of random decisions it can take, drafting included, and
the probabilities of what it emits are added up. Nothing is sampled; equality is to 1e-9 and mostly to 1e-15."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decode.tree import Tree
from decode.verify import (
    Chooser,
    Verdict,
    accept_or_resample,
    draw_siblings,
    verify_point_mass,
    verify_sampled,
    verify_typical,
)

TOLERANCE = 1e-9
Prefix = tuple[int, ...]
Enumerate = Callable[[Callable[[Chooser], Hashable]], dict[Hashable, float]]
Base = Callable[[Prefix], Tensor]


def random_law(rng: np.random.Generator, size: int) -> Tensor:
    """A law that may be flat or peaked and may have zeros."""
    weights = rng.dirichlet([rng.choice([0.2, 1.0, 5.0])] * size)
    weights[rng.random(size) < 0.2] = 0.0
    if weights.sum() == 0.0:
        weights[rng.integers(size)] = 1.0
    return torch.tensor(weights / weights.sum())


def random_base(seed: int, size: int) -> Base:
    """A law for each prefix, all different."""
    return lambda prefix: random_law(np.random.default_rng([seed, *prefix]), size)


def joint_law(base: Base, size: int, length: int, prefix: Prefix = ()) -> dict[Prefix, float]:
    """Law of the next `length` tokens by the chain rule."""
    law = {(): 1.0}
    for _ in range(length):
        law = {
            (*past, token): probability * p
            for past, probability in law.items()
            for token, p in enumerate(base((*prefix, *past)).tolist())
        }
    return law


def assert_same_law(law: dict[Hashable, float], expected: dict[Hashable, float]) -> None:
    for outcome in set(law) | set(expected):
        assert law.get(outcome, 0.0) == pytest.approx(expected.get(outcome, 0.0), abs=TOLERANCE), outcome


def assert_same_joint(emitted: dict[Hashable, float], base: Base, size: int, length: int, prefix: Prefix) -> None:
    """What a round emits, continued by the base alone, has the base's law of the next `length` tokens."""
    continued: dict[Hashable, float] = defaultdict(float)
    for tokens, probability in emitted.items():
        assert isinstance(tokens, tuple)
        for rest, p in joint_law(base, size, length - len(tokens), (*prefix, *tokens)).items():
            continued[(*tokens, *rest)] += probability * p
    assert_same_law(continued, joint_law(base, size, length, prefix))


def emitted_tokens(tokens: list[int], verdict: Verdict) -> Prefix:
    return (*(tokens[node] for node in verdict.path[1:]), verdict.next_token)


def node_law(tree: Tree, tokens: list[int], base: Base, prefix: Prefix) -> Callable[[int], Tensor]:
    return lambda node: base((*prefix, *(tokens[n] for n in tree.path(node)[1:])))


# ---- a round with each way of drafting; `prefix` is the committed text, whose last token is the root


def point_mass_round(base: Base, tree: Tree, size: int, prefix: Prefix, chooser: Chooser, seed: int = 0) -> Prefix:
    """Distinct siblings chosen by a rule of the prefix that knows nothing of the base."""
    tokens = [prefix[-1]] + [0] * (tree.size - 1)
    for node, children in enumerate(tree.children):
        order = np.random.default_rng([seed, *prefix, node]).permutation(size).tolist()
        for child, token in zip(children, order, strict=False):
            tokens[child] = token
    law = node_law(tree, tokens, base, prefix)
    return emitted_tokens(tokens, verify_point_mass(tree, torch.tensor(tokens), law, chooser))


def sampled_round(base: Base, tree: Tree, size: int, prefix: Prefix, chooser: Chooser, seed: int = 0) -> Prefix:
    """Siblings drawn at every node from a draft law of its own, which depends on the drafted path."""
    tokens, laws = [prefix[-1]] * tree.size, []
    for node, children in enumerate(tree.children):
        drafted = [tokens[n] for n in tree.path(node)[1:]]
        laws.append(random_law(np.random.default_rng([seed + 1, *prefix, *drafted]), size))
        for child, token in zip(children, draw_siblings(laws[-1], len(children), chooser), strict=True):
            tokens[child] = token
    law = node_law(tree, tokens, base, prefix)
    return emitted_tokens(tokens, verify_sampled(tree, torch.tensor(tokens), laws, law, chooser))


def shared_round(base: Base, tree: Tree, size: int, prefix: Prefix, chooser: Chooser, seed: int = 0) -> Prefix:
    """One list of draws for each depth, shared by its nodes, as heads draft that do not see the path."""
    by_depth = [random_law(np.random.default_rng([seed + 2, *prefix, depth]), size) for depth in range(tree.depth)]
    width = max(len(children) for children in tree.children)
    draws = [draw_siblings(law, width, chooser) for law in by_depth]
    tokens = [prefix[-1]] + [draws[tree.depths[n] - 1][tree.ranks[n]] for n in range(1, tree.size)]
    by_depth.append(torch.empty(0))  # the deepest nodes have no children: not read
    laws = [by_depth[depth] for depth in tree.depths]
    law = node_law(tree, tokens, base, prefix)
    return emitted_tokens(tokens, verify_sampled(tree, torch.tensor(tokens), laws, law, chooser))


EXAMPLE = Tree((-1, 0, 0, 1, 1, 2), (0, 0, 1, 0, 1, 0))  # the worked example of decode.tree
TREES = {
    "root alone": Tree((-1,), (0,)),
    "chain of 1": Tree.chain(2),
    "chain of 3": Tree.chain(4),
    "two siblings": Tree.from_rank_paths([(0,), (1,)]),
    "three siblings": Tree.from_rank_paths([(0,), (1,), (2,)]),
    "example": EXAMPLE,
    "depth 3": Tree.from_rank_paths([(0,), (1,), (0, 0), (0, 1), (0, 1, 0)]),
}
laws_of = st.integers(0, 2**32 - 1).map(np.random.default_rng)


# ---- one token


@given(rng=laws_of, size=st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_one_drafted_token(enumerate_law: Enumerate, rng: np.random.Generator, size: int) -> None:
    p, q = random_law(rng, size), random_law(rng, size)

    def draft_and_verify(chooser: Chooser) -> tuple[bool, int]:
        return accept_or_resample(p, q, chooser.draw(q), chooser)

    law = enumerate_law(draft_and_verify)
    for token in range(size):
        assert law[True, token] + law[False, token] == pytest.approx(p[token].item(), abs=TOLERANCE)
    accepted = sum(law[True, token] for token in range(size))
    assert accepted == pytest.approx(torch.minimum(p, q).sum().item(), abs=TOLERANCE)  # the most any coupling can


@given(rng=laws_of, size=st.integers(1, 6))
@settings(max_examples=30, deadline=None)
def test_equal_laws_always_accept(enumerate_law: Enumerate, rng: np.random.Generator, size: int) -> None:
    p = random_law(rng, size)
    law = enumerate_law(lambda chooser: accept_or_resample(p, p.clone(), chooser.draw(p), chooser)[0])
    assert law == {True: pytest.approx(1.0, abs=TOLERANCE)}


@given(rng=laws_of, size=st.integers(1, 5), data=st.data())
@settings(max_examples=40, deadline=None)
def test_siblings_are_drawn_without_replacement(
    enumerate_law: Enumerate, rng: np.random.Generator, size: int, data: st.DataObject
) -> None:
    q = random_law(rng, size)
    count = data.draw(st.integers(0, size))
    law = enumerate_law(lambda chooser: tuple(draw_siblings(q, count, chooser)))
    support = [token for token in range(size) if q[token] > 0]
    fill = [token for token in range(size) if q[token] == 0]
    expected = {}
    for order in itertools.permutations(support, min(count, len(support))):
        probability = 1.0
        for place, token in enumerate(order):
            left = sum(q[other].item() for other in support if other not in order[:place])
            probability *= q[token].item() / left
        expected[(*order, *fill[: count - len(order)])] = probability
    assert set(law) == set(expected)
    for tokens, probability in expected.items():
        assert law[tokens] == pytest.approx(probability, abs=TOLERANCE)


# ---- one node with siblings: where the rules differ; deeper trees follow by induction and are checked below


@given(seed=st.integers(0, 10**6), size=st.integers(2, 5), width=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_sampled_siblings(enumerate_law: Enumerate, seed: int, size: int, width: int) -> None:
    tree, base = Tree.from_rank_paths([(rank,) for rank in range(min(width, size))]), random_base(seed, size)
    emitted = enumerate_law(lambda chooser: sampled_round(base, tree, size, (0,), chooser, seed))
    assert_same_joint(emitted, base, size, 2, (0,))


@given(seed=st.integers(0, 10**6), size=st.integers(2, 4), name=st.sampled_from(sorted(TREES)))
@settings(max_examples=60, deadline=None)
def test_point_mass_trees(enumerate_law: Enumerate, seed: int, size: int, name: str) -> None:
    tree, base = TREES[name], random_base(seed, size)
    emitted = enumerate_law(lambda chooser: point_mass_round(base, tree, size, (0,), chooser, seed))
    assert_same_joint(emitted, base, size, tree.depth + 1, (0,))


@given(seed=st.integers(0, 10**6), size=st.integers(2, 4), name=st.sampled_from(sorted(TREES)))
@settings(max_examples=40, deadline=None)
def test_sampling_the_target_equals_rejecting_in_turn(
    enumerate_law: Enumerate, seed: int, size: int, name: str
) -> None:
    """With every draft law a point mass, and nothing left of it for later siblings, `verify_sampled` is "accept with
    p(x), else zero and renormalise". Path and next token have the law of "sample, then keep the child that equals"."""
    tree, base = TREES[name], random_base(seed, size)
    tokens = [0] * tree.size
    laws = torch.zeros(tree.size, size, dtype=torch.float64)
    for node, children in enumerate(tree.children):
        order = np.random.default_rng([seed, node]).permutation(size).tolist()
        for child, token in zip(children, order, strict=False):
            tokens[child] = token
        laws[node, order[0]] = 1.0
    law = node_law(tree, tokens, base, (0,))

    def kept(verdict: Verdict) -> tuple[Prefix, int]:
        return tuple(verdict.path), verdict.next_token

    drafted = torch.tensor(tokens)
    once = enumerate_law(lambda chooser: kept(verify_point_mass(tree, drafted, law, chooser)))
    in_turn = enumerate_law(lambda chooser: kept(verify_sampled(tree, drafted, laws, law, chooser)))
    assert_same_law(once, in_turn)


@given(seed=st.integers(0, 10**6), name=st.sampled_from(sorted(TREES)))
@settings(max_examples=20, deadline=None)
def test_sampled_trees_with_shared_draws(enumerate_law: Enumerate, name: str, seed: int) -> None:
    tree, base, size = TREES[name], random_base(seed, 3), 3
    emitted = enumerate_law(lambda chooser: shared_round(base, tree, size, (1,), chooser, seed))
    assert_same_joint(emitted, base, size, tree.depth + 1, (1,))


@given(seed=st.integers(0, 10**6), name=st.sampled_from(sorted(TREES)))
@settings(max_examples=20, deadline=None)
def test_sampled_trees_with_draws_of_their_own(enumerate_law: Enumerate, name: str, seed: int) -> None:
    tree, base, size = TREES[name], random_base(seed, 3), 3
    emitted = enumerate_law(lambda chooser: sampled_round(base, tree, size, (1,), chooser, seed))
    assert_same_joint(emitted, base, size, tree.depth + 1, (1,))


@pytest.mark.parametrize("one_round", [point_mass_round, sampled_round, shared_round])
def test_rounds_in_a_row(enumerate_law: Enumerate, one_round: Callable[..., Prefix]) -> None:
    """Several rounds, each with another tree, cut at four tokens: an output of exactly max_new_tokens."""
    size, length, base = 2, 4, random_base(7, 2)
    trees = [TREES["two siblings"], Tree.chain(3), Tree.chain(2), TREES["root alone"]]

    def generate(chooser: Chooser) -> Prefix:
        text: Prefix = (1,)
        for index in itertools.count():
            text += one_round(base, trees[index % len(trees)], size, text, chooser)
            if len(text) > length:
                return text[1 : length + 1]
        raise AssertionError

    law = enumerate_law(generate)
    assert_same_law(law, joint_law(base, size, length, (1,)))


# ---- the worked example of docs/exactness.md

A, B, C, D = range(4)
P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.2, 0.6, 0.2], dtype=torch.float64)


def test_worked_example_of_one_token(enumerate_law: Enumerate) -> None:
    law = enumerate_law(lambda chooser: accept_or_resample(P, Q, chooser.draw(Q), chooser))
    assert_same_law(law, {(True, A): 0.2, (True, B): 0.3, (True, C): 0.2, (False, A): 0.3})


def test_worked_example_of_two_siblings(enumerate_law: Enumerate) -> None:
    tree = Tree.from_rank_paths([(0,), (1,)])

    def draft_and_verify(chooser: Chooser) -> tuple[int, int]:
        """Which sibling is kept (0: none) and the first token emitted."""
        tokens = [C, *draw_siblings(Q, 2, chooser)]
        verdict = verify_sampled(tree, torch.tensor(tokens), [Q] * 3, lambda node: P, chooser)
        return verdict.path[-1], emitted_tokens(tokens, verdict)[0]

    law = enumerate_law(draft_and_verify)
    assert_same_law(law, {(1, A): 0.2, (1, B): 0.3, (1, C): 0.2, (2, A): 0.15, (0, A): 0.15})


EXAMPLE_TOKENS = torch.tensor([D, A, B, C, D, C])
EXAMPLE_LAWS = torch.tensor(
    [
        [0.50, 0.30, 0.10, 0.10],  # after the root
        [0.10, 0.10, 0.60, 0.20],  # after A
        [0.25, 0.25, 0.25, 0.25],  # after B
        [0.70, 0.10, 0.10, 0.10],  # after A C
        [0.10, 0.70, 0.10, 0.10],  # after A D
        [0.10, 0.10, 0.10, 0.70],  # after B C
    ],
    dtype=torch.float64,
)


def test_worked_example_of_a_tree(enumerate_law: Enumerate) -> None:
    law = enumerate_law(
        lambda chooser: tuple(verify_point_mass(EXAMPLE, EXAMPLE_TOKENS, EXAMPLE_LAWS.__getitem__, chooser).path)
    )
    assert_same_law(law, {(0,): 0.2, (0, 1): 0.1, (0, 2): 0.225, (0, 1, 3): 0.3, (0, 1, 4): 0.1, (0, 2, 5): 0.075})
    assert sum(len(path) * probability for path, probability in law.items()) == pytest.approx(2.275)


def test_typical_acceptance_is_not_exact(enumerate_law: Enumerate) -> None:
    """On the worked example the base says A first with 0.5; typical acceptance always says A, then always C."""
    law = enumerate_law(
        lambda chooser: emitted_tokens(
            EXAMPLE_TOKENS.tolist(), verify_typical(EXAMPLE, EXAMPLE_TOKENS, EXAMPLE_LAWS.__getitem__, chooser)
        )
    )
    assert_same_law(law, {(A, C, A): 0.7, (A, C, B): 0.1, (A, C, C): 0.1, (A, C, D): 0.1})
