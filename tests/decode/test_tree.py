"""Draft trees: the worked example of `decode.tree`, the search against brute force, and what is refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.tree import Tree, expected_length, search_tree
from medusa_heads.errors import ConfigError

EXAMPLE = Tree(parents=(-1, 0, 0, 1, 1, 2), ranks=(0, 0, 1, 0, 1, 0))
ACCURACY = [[0.6, 0.2], [0.5, 0.1]]


def test_the_worked_example() -> None:
    assert EXAMPLE.size == 6 and EXAMPLE.depth == 2
    assert EXAMPLE.depths == (0, 1, 1, 2, 2, 2)
    assert EXAMPLE.children == ((1, 2), (3, 4), (5,), (), (), ())
    assert EXAMPLE.path(4) == [0, 1, 4] and EXAMPLE.path(0) == [0]
    assert EXAMPLE.ancestor_mask.dtype == torch.bool
    assert EXAMPLE.ancestor_mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 0, 1, 0, 0, 1],
    ]
    assert EXAMPLE.rank_paths() == [(0,), (1,), (0, 0), (0, 1), (1, 0)]


def test_children_come_likeliest_first_whatever_their_numbers() -> None:
    assert Tree((-1, 0, 0, 0), (0, 2, 0, 1)).children[0] == (2, 3, 1)


def test_a_chain() -> None:
    chain = Tree.chain(4)
    assert chain == Tree((-1, 0, 1, 2), (0, 0, 0, 0))
    assert torch.equal(chain.ancestor_mask, torch.ones(4, 4).tril().bool())
    assert Tree.chain(1).depth == 0


def test_rank_paths_are_numbered_depth_first_so_that_the_likeliest_path_is_consecutive() -> None:
    tree = Tree.from_rank_paths([(1,), (0, 1), (1, 0), (0,), (0, 0)])
    assert tree == Tree(parents=(-1, 0, 1, 1, 0, 4), ranks=(0, 0, 0, 1, 1, 0))
    assert tree.path(2) == [0, 1, 2]
    assert Tree.from_rank_paths([]) == Tree((-1,), (0,))


def test_drawn_siblings_are_numbered_without_gaps() -> None:
    tree = Tree((-1, 0, 0, 1, 2, 2), (0, 5, 1, 3, 4, 0))
    assert tree.in_drawing_order() == Tree((-1, 0, 0, 1, 2, 2), (0, 1, 0, 0, 1, 0))
    assert EXAMPLE.in_drawing_order() is EXAMPLE


def test_pruning_keeps_what_is_worth_most() -> None:
    assert EXAMPLE.pruned(6) is EXAMPLE and EXAMPLE.pruned(64) is EXAMPLE
    assert EXAMPLE.pruned(1) == Tree.chain(1)
    assert EXAMPLE.pruned(2).rank_paths() == [(0,)]
    assert EXAMPLE.pruned(3).rank_paths() == [(0,), (0, 0)]
    assert EXAMPLE.pruned(4).rank_paths() == [(0,), (1,), (0, 0)]
    with pytest.raises(ConfigError, match="0 nodes are allowed"):
        EXAMPLE.pruned(0)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_pruned_tree_has_lost_last_children_only(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 12))
    parents, ranks = [-1], [0]
    for node in range(1, size):
        parent = data.draw(st.integers(0, node - 1))
        taken = {ranks[n] for n in range(1, node) if parents[n] == parent}
        parents.append(parent)
        ranks.append(data.draw(st.sampled_from([rank for rank in range(14) if rank not in taken])))
    tree = Tree(tuple(parents), tuple(ranks)).in_drawing_order()
    whole = tree.rank_paths()
    for nodes in range(1, size + 1):
        pruned = tree.pruned(nodes)
        kept = pruned.rank_paths()
        assert pruned.size == nodes and set(kept) <= set(whole)
        assert kept == [path for path in whole if path in kept], "nodes stay in their order"
        assert all((*path[:-1], rank) in kept for path in kept for rank in range(path[-1]))


def test_a_likelier_sibling_need_not_be_there() -> None:
    assert Tree.from_rank_paths([(3,), (3, 7)]).rank_paths() == [(3,), (3, 7)]


@pytest.mark.parametrize(
    ("parents", "ranks", "message"),
    [
        ((), (), "as many ranks as parents"),
        ((-1, 0), (0,), "as many ranks as parents"),
        ((0, 0), (0, 0), "-1 as the parent of node 0"),
        ((-1, 1), (0, 0), "node 1 of a tree has parent 1"),
        ((-1, 2, 0), (0, 0, 0), "node 1 of a tree has parent 2"),
        ((-1, -1), (0, 0), "node 1 of a tree has parent -1"),
        ((-1, 0, 0), (0, 1, 1), "repeats rank 1 under node 0"),
        ((-1, 0), (0, -1), "negative"),
    ],
)
def test_what_is_no_tree(parents: tuple[int, ...], ranks: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Tree(parents, ranks)


def test_rank_paths_that_make_no_tree() -> None:
    with pytest.raises(ConfigError, match=r"\(1, 0\) has no parent"):
        Tree.from_rank_paths([(0,), (1, 0)])
    with pytest.raises(ConfigError, match=r"\(0,\) is given twice"):
        Tree.from_rank_paths([(0,), (0,)])
    with pytest.raises(ConfigError, match="no parent"):
        Tree.from_rank_paths([()])


def test_there_and_back_through_json() -> None:
    assert Tree.from_dict(json.loads(json.dumps(EXAMPLE.to_dict()))) == EXAMPLE


@pytest.mark.parametrize(
    "data",
    [
        {"parents": [-1]},
        {"parents": [-1], "ranks": [0], "more": 1},
        {"parents": [-1, 0.0], "ranks": [0, 0]},
        {"parents": [-1, 0], "ranks": [0, "0"]},
        {"parents": 3, "ranks": [0]},
        {"parents": [-1, None], "ranks": [0, 0]},
    ],
)
def test_a_damaged_file_is_a_config_error(data: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Tree.from_dict(data)


def test_expected_length_of_the_example_by_hand() -> None:
    # 1 + 0.6 + 0.2 + 0.6·0.5 + 0.6·0.1 + 0.2·0.5
    assert expected_length(EXAMPLE, ACCURACY) == pytest.approx(2.26)
    assert expected_length(Tree.chain(1), ACCURACY) == 1.0


def test_the_search_by_hand() -> None:
    grown = [search_tree(ACCURACY, budget).rank_paths() for budget in range(1, 6)]
    assert grown[0] == []
    assert grown[1] == [(0,)]
    assert grown[2] == [(0,), (0, 0)]
    assert grown[3] == [(0,), (0, 0), (1,)]
    assert grown[4] == [(0,), (0, 0), (1,), (1, 0)]


def test_the_search_stops_where_nothing_can_be_right() -> None:
    assert search_tree([[0.5, 0.0], [0.0, 0.0]], 10).rank_paths() == [(0,)]
    assert search_tree([], 10).size == 1
    assert search_tree(ACCURACY, 100).size == 1 + 2 + 4


def test_the_search_keeps_the_ranks_where_a_later_one_is_likelier() -> None:
    assert search_tree([[0.1, 0.4], [0.3]], 3).rank_paths() == [(1,), (1, 0)]


def test_a_tree_has_a_root() -> None:
    with pytest.raises(ConfigError, match="budget is 0"):
        search_tree(ACCURACY, 0)


def subtrees(nodes: list[tuple[int, ...]], budget: int) -> Iterator[list[tuple[int, ...]]]:
    """Every parent-closed choice of up to `budget` rank paths."""
    for size in range(budget + 1):
        for chosen in itertools.combinations(nodes, size):
            if all(path[:-1] in chosen or len(path) == 1 for path in chosen):
                yield list(chosen)


probability = st.integers(0, 20).map(lambda n: n / 20)


@settings(max_examples=60, deadline=None)
@given(
    accuracy=st.lists(st.lists(probability, min_size=2, max_size=2), min_size=1, max_size=3).map(
        lambda rows: rows if len(rows) < 3 else [rows[0], rows[1], rows[2][:1]]
    ),
    budget=st.integers(1, 5),
)
def test_no_tree_of_the_budget_is_longer_than_the_one_found(accuracy: list[list[float]], budget: int) -> None:
    nodes = [
        path
        for depth in range(1, len(accuracy) + 1)
        for path in itertools.product(*(range(len(r)) for r in accuracy[:depth]))
    ]
    best = max(expected_length(Tree.from_rank_paths(chosen), accuracy) for chosen in subtrees(nodes, budget - 1))
    found = search_tree(accuracy, budget)
    assert found.size <= budget
    assert expected_length(found, accuracy) == pytest.approx(best)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    paths: list[tuple[int, ...]] = [()]
    for _ in range(draw(st.integers(0, 10))):
        parent = draw(st.sampled_from(paths))
        child = (*parent, draw(st.integers(0, 3)))
        if child not in paths:
            paths.append(child)
    return Tree.from_rank_paths(paths[1:])


@settings(max_examples=60, deadline=None)
@given(tree=trees())
def test_depths_masks_paths_and_ranks_agree(tree: Tree) -> None:
    assert Tree.from_rank_paths(tree.rank_paths()) == tree
    for node in range(tree.size):
        path = tree.path(node)
        assert path[0] == 0 and path[-1] == node and path == sorted(path)
        assert tree.ancestor_mask[node].nonzero().flatten().tolist() == path
        assert tree.depths[node] == len(path) - 1
        assert all(tree.parents[child] == node for child in tree.children[node])
    assert sorted(child for nodes in tree.children for child in nodes) == list(range(1, tree.size))
