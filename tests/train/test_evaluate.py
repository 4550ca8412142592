from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decode.tree import Tree
from train.batches import PackedBatch
from train.evaluate import (
    MAX_RANK,
    Ranks,
    best_tree,
    conditional_accuracy,
    path_probabilities,
    simulate,
    top_accuracy,
    true_ranks,
)
from train.losses import Rows
from train.trainer import row_labels


def found(*rows, remaining=None):
    ranks = np.array(rows)
    return Ranks(ranks, np.arange(len(rows))[::-1] if remaining is None else np.array(remaining))


@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_ranks_are_places_in_topk_over_the_drafted_rows(chunk):
    torch.manual_seed(0)
    weight, ids = torch.randint(-2, 3, (20, 4)).float(), torch.tensor([3, 9, 1, 12, 7])
    states, next_ids = torch.randint(-1, 2, (2, 9, 4)).float(), torch.tensor([3, 1, 9, 9, 2, 7, 12, 1, 3])
    batch = PackedBatch(states[0], next_ids, torch.tensor([3, 2, 1, 0, 4, 3, 2, 1, 0]))
    ranks = true_ranks(states, batch, lambda u: u @ weight[ids].T, Rows(row_labels(ids, 20)), chunk)
    for head in range(2):
        for j in range(9):
            if batch.remaining[j] < head + 1:
                assert ranks[j, head] == -1
                continue
            order = ids[torch.sort(states[head, j] @ weight[ids].T, descending=True, stable=True).indices].tolist()
            token = int(next_ids[j + 1 + head])
            assert ranks[j, head] == (order.index(token) if token in order else MAX_RANK)


def test_accuracies_by_hand():
    ranks = found([0, 0], [1, 5], [0, 1], [MAX_RANK, 0], [0, -1])
    assert top_accuracy(ranks, 2) == [[3 / 5, 4 / 5], [2 / 4, 3 / 4]]
    assert conditional_accuracy(ranks, 2) == [[3 / 5, 1 / 5], [1 / 3, 1 / 3]]


def test_paths_count_what_comes_true_together():
    paths = dict(path_probabilities(found([0, 0], [0, 0], [1, 0], [0, MAX_RANK], [0, -1])))
    assert paths == {(0,): 0.75, (0, 0): 0.5, (1,): 0.25, (1, 0): 0.25}


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=40), st.integers(2, 30))
def test_the_best_paths_form_a_tree_that_no_other_beats(rows, budget):
    paths = path_probabilities(found(*rows))
    tree = best_tree(paths, budget)
    gain = {path: probability for path, probability in paths}
    total = sum(gain[p] for p in tree.rank_paths())
    assert total == pytest.approx(sum(sorted(gain.values(), reverse=True)[: budget - 1]))


def test_simulation_by_hand():
    # x_0 from the prefill; at position 0 a path of two comes true (2 + 1 tokens); at 3 none (1 token); at 4 the end.
    ranks = found([0, 0], [3, 3], [3, 3], [1, 0], [-1, -1])
    chain = Tree.chain(3)
    assert simulate(ranks, chain) == pytest.approx(5 / 3)
    assert simulate(ranks, Tree.chain(1)) == 1.0
    two = found([0, 0], [3, 3], [3, 3], [1, 0], [-1, -1], [0, -1], [-1, -1], remaining=[4, 3, 2, 1, 0, 1, 0])
    assert simulate(two, chain) == pytest.approx(7 / 5)


def test_simulation_never_counts_tokens_past_the_end():
    assert simulate(found([0, -1], [-1, -1]), Tree.chain(3)) == 1.0
