"""The tree for a machine: gain over cost, against exhaustive search and against the clock's own shape."""

from __future__ import annotations

import json
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.measure import Costs, bushy_tree, measure_costs, spread
from decode.tree import Tree, expected_length, search_tree
from decode.tuning import (
    Option,
    RoundCost,
    best_option,
    cost_of_rounds,
    interpolate,
    options_from_accuracy,
    options_from_paths,
)
from medusa_heads.base import Base
from medusa_heads.errors import ConfigError
from medusa_heads.medusa import MedusaHeads

ACCURACY = [[0.5, 0.2, 0.1], [0.4, 0.2, 0.1], [0.3, 0.1, 0.1]]


def choose_tree(accuracy: list[list[float]], cost_by_size: dict[int, float]) -> Tree:
    return best_option(options_from_accuracy(accuracy, RoundCost(cost_by_size))).tree


def all_trees(num_heads: int, ranks: int, largest: int) -> list[Tree]:
    paths = [(a,) for a in range(ranks)]
    if num_heads > 1:
        paths += [(a, b) for a in range(ranks) for b in range(ranks)]
    found = []
    for count in range(largest):
        for chosen in combinations(paths, count):
            if all(path[:-1] in chosen or len(path) == 1 for path in chosen):
                found.append(Tree.from_rank_paths(list(chosen)))
    return found


def test_verification_for_free_takes_the_largest_tree_and_dear_nodes_take_none() -> None:
    assert choose_tree(ACCURACY, {1: 1.0, 16: 1.0}).size == 16
    assert choose_tree(ACCURACY, {1: 1.0, 2: 3.0, 16: 30.0}).size == 1


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.floats(0.01, 0.33), min_size=2, max_size=2), min_size=2, max_size=2), st.data())
def test_no_tree_of_any_shape_is_faster_than_the_chosen_one(accuracy: list[list[float]], data: st.DataObject) -> None:
    cost = {1: 1.0} | {size: data.draw(st.floats(0.5, 3.0)) for size in range(2, 6)}
    chosen = choose_tree(accuracy, cost)
    best = max(expected_length(tree, accuracy) / cost[tree.size] for tree in all_trees(2, 2, 5))
    assert expected_length(chosen, accuracy) / cost[chosen.size] == pytest.approx(best)


def test_dear_drafting_ahead_limits_the_depth() -> None:
    free = best_option(options_from_accuracy(ACCURACY, RoundCost({1: 1.0, 12: 1.05}, {1: 0.0, 2: 0.0, 3: 0.0})))
    dear = best_option(options_from_accuracy(ACCURACY, RoundCost({1: 1.0, 12: 1.05}, {1: 0.0, 2: 0.5, 3: 5.0})))
    assert free.tree.depth == 3 and dear.tree.depth == 1


def test_heads_whose_drafting_was_not_measured_are_not_used() -> None:
    options = options_from_accuracy(ACCURACY, RoundCost({1: 1.0, 12: 1.1}, {1: 0.1, 2: 0.2}))
    assert max(option.tree.depth for option in options) == 2


def test_an_option_adds_up_what_a_round_takes() -> None:
    cost = RoundCost({1: 1.0, 3: 2.0}, {1: 0.25, 2: 0.5}, fixed=0.125)
    assert cost.seconds(1, 0) == 1.125
    assert cost.seconds(2, 1) == 1.5 + 0.25 + 0.125
    assert Option(Tree.chain(3), 2.0, cost.seconds(3, 2)).tokens_per_second == 2.0 / 2.625


def test_joint_paths_are_used_where_independence_would_misjudge() -> None:
    """Two heads that are right together or not at all: 0.4 each, 0.4 jointly, not 0.16."""
    paths = [((0,), 0.4), ((0, 0), 0.4), ((1,), 0.3), ((2,), 0.05)]
    best = {option.tree.size: option for option in options_from_paths(paths, RoundCost({1: 1.0, 4: 1.0}))}
    assert best[3].tree.rank_paths() == [(0,), (0, 0)] and best[3].expected_length == pytest.approx(1.8)
    assert best[4].expected_length == pytest.approx(2.1)


def test_a_path_without_its_beginning_is_left_out() -> None:
    options = options_from_paths([((1, 0), 0.5), ((0,), 0.2)], RoundCost({1: 1.0, 4: 1.0}))
    assert {tuple(option.tree.rank_paths()) for option in options} == {(), ((0,),)}


def test_both_forms_agree_on_independent_heads() -> None:
    paths = [((a, b), ACCURACY[0][a] * ACCURACY[1][b]) for a in range(3) for b in range(3)] + [
        ((a,), ACCURACY[0][a]) for a in range(3)
    ]
    cost = RoundCost({1: 1.0, 8: 1.6})
    by_paths, by_rank = (
        best_option(options_from_paths(paths, cost)),
        best_option(options_from_accuracy(ACCURACY[:2], cost)),
    )
    assert by_paths.expected_length == pytest.approx(by_rank.expected_length)
    assert by_paths.tree.size == by_rank.tree.size


def test_costs_between_measured_sizes_lie_on_the_line_and_none_beyond() -> None:
    assert interpolate({1: 1.0, 5: 3.0}, 2) == pytest.approx(1.5)
    with pytest.raises(ConfigError, match="measured are 1, 5"):
        interpolate({1: 1.0, 5: 3.0}, 6)


@pytest.mark.parametrize("forward", [{}, {2: 1.0}, {1: 0.0, 2: 1.0}])
def test_costs_that_are_none_are_refused(forward: dict[int, float]) -> None:
    with pytest.raises(ConfigError, match="positive"):
        RoundCost(forward)


def test_measured_costs_survive_json_and_choose_a_tree(base: Base) -> None:
    heads = MedusaHeads.for_base(base, num_heads=2, num_layers=1)
    costs = measure_costs(base, heads, sizes=(1, 4), contexts=(8, 16), repeats=2)
    assert set(costs.forward) == {8, 16} and set(costs.forward[8]) == {1, 4} and set(costs.draft) == {1, 2}
    assert all(
        low > 0.0 and low <= middle <= high for at in costs.forward.values() for low, middle, high in at.values()
    )
    again = Costs.from_dict(json.loads(json.dumps(costs.as_dict())))
    assert again == costs
    mean = (costs.forward[8][4][1] + costs.forward[16][4][1]) / 2
    assert costs.round_cost().forward[4] == pytest.approx(mean)
    assert costs.round_cost(16).forward[4] == costs.forward[16][4][1]
    assert best_option(options_from_accuracy(ACCURACY, costs.round_cost())).tree.size <= 4


def test_a_context_that_was_not_measured_is_an_error() -> None:
    with pytest.raises(ConfigError, match="512"):
        Costs({128: {1: (1.0, 1.0, 1.0)}}, {}, 1).round_cost(512)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 64])
def test_the_measured_tree_has_the_size_asked_for(size: int) -> None:
    assert bushy_tree(size).size == size


def test_spread_is_the_quartiles() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)
    assert spread([7.0]) == (7.0, 7.0, 7.0)


def test_a_disturbed_measurement_is_named() -> None:
    with pytest.raises(ConfigError, match=r"a round of 4 nodes .* busy"):
        cost_of_rounds({1: 1.0, 4: 0.5}, {1: 0, 4: 2}, {1: 0.3, 2: 0.6})


def test_a_search_stops_where_nothing_is_to_be_gained() -> None:
    assert search_tree([[0.5, 0.0]], 8).size == 2
    assert choose_tree([[0.5, 0.0]], {1: 1.0, 8: 1.0}).size == 2
