"""Growing trees: the best nodes by the product of confidences, no step that cannot matter, drawn children by their law.

The draft model is a table of logits by path, so that everything can be worked out by hand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.drafters import DraftRow
from decode.drafters.growth import FilledGrowth, LikeliestGrowth, grow, start_growths
from decode.dynamic import DynamicTree, TreeChoice
from decode.tree import Tree
from decode.verify import Chooser, verify_sampled
from medusa_heads.errors import ConfigError

CPU = torch.device("cpu")
ROOTS = [7, 9]
RULE = DynamicTree(4, 3, 12)


class Table:
    """Logits of what follows each path of drafted tokens, one table a row; counts its steps and what they read."""

    def __init__(self, size: int, rows: int = 1, seed: int = 0, sharp: float = 2.0, first: int = 0):
        self.size, self.seed, self.sharp, self.first = size, seed, sharp, first
        self.paths: list[list[tuple[int, ...]]] = [[()] for _ in range(rows)]
        self.read: list[int] = []

    def logits(self, path: tuple[int, ...], row: int = 0) -> Tensor:
        key = hash((self.seed, self.first + row, path)) % (1 << 31)
        return self.sharp * torch.randn(self.size, generator=torch.Generator().manual_seed(key))

    def step(self, parents: list[list[int]] | None, tokens: list[list[int]]) -> Tensor:
        if parents is not None:
            self.paths = [
                [(*paths[place], token) for place, token in zip(above, own, strict=True)]
                for paths, above, own in zip(self.paths, parents, tokens, strict=True)
            ]
        self.read.append(len(tokens[0]))
        return torch.stack(
            [torch.stack([self.logits(path, row) for path in paths]) for row, paths in enumerate(self.paths)]
        )


def confidence(table: Table, path: tuple[int, ...], row: int = 0) -> float:
    """Product of the probabilities along a path."""
    steps = (table.logits(path[:i], row).log_softmax(-1)[token] for i, token in enumerate(path))
    return math.exp(float(sum(steps)))


def paths_of(tree: Tree, tokens: list[int]) -> set[tuple[int, ...]]:
    return {tuple(tokens[n] for n in tree.path(node)[1:]) for node in range(1, tree.size)}


def grown(rule: DynamicTree, table: Table, row: int = 0) -> tuple[Tree, list[int]]:
    draft = grow(table.step, [LikeliestGrowth(ROOTS[row], rule)], None, CPU)
    return draft.trees[0], draft.tokens[0].tolist()


@pytest.mark.parametrize("seed", range(6))
def test_without_a_limit_on_width_the_best_of_all_paths_are_found(seed: int) -> None:
    table = Table(4, seed=seed)
    every = [p for n in (1, 2, 3) for p in itertools.product(range(4), repeat=n)]
    tree, tokens = grown(DynamicTree(depth=3, width=99, nodes=12), table)
    best = sorted(every, key=lambda path: -confidence(table, path))[:11]
    assert tokens[0] == ROOTS[0] and paths_of(tree, tokens) == set(best)


def beam(table: Table, rule: DynamicTree) -> set[tuple[int, ...]]:
    """The published rule by hand: at each depth the best `width` go on, whatever will become of them."""
    frontier: list[tuple[int, ...]] = [()]
    found: list[tuple[int, ...]] = []
    for _ in range(rule.depth):
        children = []
        for path in frontier:
            order = table.logits(path).argsort(descending=True)[: rule.width].tolist()
            children += [(*path, token) for token in order]
        found += children
        frontier = sorted(children, key=lambda path: -confidence(table, path))[: rule.width]
    return set(sorted(found, key=lambda path: -confidence(table, path))[: rule.nodes - 1])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rule", [DynamicTree(4, 2, 6), DynamicTree(5, 3, 9), DynamicTree(3, 4, 30)])
def test_nodes_are_those_of_the_published_rule(rule: DynamicTree, seed: int) -> None:
    table = Table(7, seed=seed)
    tree, tokens = grown(rule, table)
    expected = beam(table, rule)
    assert paths_of(tree, tokens) == expected and tree.size == 1 + len(expected)
    assert max(table.read) <= rule.width and len(table.read) <= rule.depth


def test_nodes_come_depth_first_with_likelier_siblings_first() -> None:
    table = Table(7, seed=1)
    tree, tokens = grown(DynamicTree(4, 3, 12), table)
    assert tree == Tree.from_rank_paths(tree.rank_paths()) and tree.depth > 1
    for node, children in enumerate(tree.children):
        path = tuple(tokens[n] for n in tree.path(node)[1:])
        order = table.logits(path).argsort(descending=True).tolist()
        assert [tokens[child] for child in children] == order[: len(children)]
        assert [tree.ranks[child] for child in children] == list(range(len(children)))


def test_a_draft_says_how_likely_each_node_is() -> None:
    table = Table(7, seed=1)
    shape = Tree.from_rank_paths([(0,), (1,)])
    draft = grow(Table(7, rows=2, seed=1).step, [LikeliestGrowth(7, RULE), FilledGrowth(9, shape)], None, CPU)
    assert draft.reach is not None and draft.reach[0] is not None and draft.reach[1] is None
    tree, tokens = draft.trees[0], draft.tokens[0].tolist()
    expected = [confidence(table, tuple(tokens[n] for n in tree.path(node)[1:])) for node in range(tree.size)]
    assert draft.reach[0] == pytest.approx(expected)


def test_no_step_is_taken_for_nodes_that_cannot_matter() -> None:
    """A first token that is all but certain to be one of three, each below what the third is worth."""
    table = Table(5)
    flat = torch.tensor([4.0, 3.9, 3.8, -9.0, -9.0])
    table.logits = lambda path, row=0: flat  # type: ignore[method-assign]
    tree, _ = grown(DynamicTree(depth=6, width=3, nodes=4), table)
    assert tree.children[0] == (1, 2, 3) and table.read == [1, 3], "what the second step found was no better"
    table.read.clear()
    grown(DynamicTree(depth=6, width=3, nodes=2), table)
    assert table.read == [1, 1], "only the best of the first depth is read: the others can no longer be among the best"


def test_a_node_below_its_floor_is_neither_kept_nor_read() -> None:
    table = Table(6, seed=3)
    free = grown(DynamicTree(4, 3, 14), table)
    table = Table(6, seed=3)
    tree, tokens = grown(DynamicTree(4, 3, 14, node_floor=0.1), table)
    kept = {path for path in paths_of(*free) if confidence(table, path) >= 0.1}
    assert paths_of(tree, tokens) == kept and 0 < len(kept) < 13


def test_a_step_that_promises_too_little_is_not_taken() -> None:
    table = Table(6, seed=3)
    grown(DynamicTree(4, 2, 14, step_floor=0.0), table)
    every = len(table.read)
    promised = []
    for floor in (0.5, 0.999):
        table = Table(6, seed=3)
        tree, tokens = grown(DynamicTree(4, 2, 14, step_floor=floor), table)
        depths = [[p for p in paths_of(tree, tokens) if len(p) == d] for d in range(1, tree.depth + 1)]
        promised = [sum(sorted((confidence(table, p) for p in paths), reverse=True)[:2]) for paths in depths]
        assert len(table.read) < every and all(p >= floor for p in promised[: len(table.read) - 1])
        assert promised[-1] < floor
    assert len(promised) == 1


@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_a_budget_of_nodes_is_kept(nodes: int) -> None:
    table = Table(5)
    tree, tokens = grown(DynamicTree(3, 3, nodes), table)
    assert tree.size == len(tokens) == nodes
    assert bool(table.read) == (nodes > 1), "without room for a draft the model is not asked"


def test_rows_of_a_batch_grow_as_they_do_alone() -> None:
    rules = [DynamicTree(5, 3, 9), DynamicTree(2, 2, 5)]
    generator = torch.Generator().manual_seed(0)
    shape = Tree.from_rank_paths([(0,), (1,), (0, 0), (0, 0, 0)])
    together = grow(
        Table(6, rows=3).step,
        [*map(LikeliestGrowth, ROOTS, rules), FilledGrowth(3, shape, 1.0, generator, None, 6)],
        None,
        CPU,
    )
    for row, rule in enumerate(rules):
        tree, tokens = grown(rule, Table(6, first=row), row)
        assert together.trees[row] == tree and together.tokens[row, : tree.size].tolist() == tokens
    again = torch.Generator().manual_seed(0)
    drawn = grow(Table(6, first=2).step, [FilledGrowth(3, shape, 1.0, again, None, 6)], None, CPU)
    assert together.tokens[2, : shape.size].tolist() == drawn.tokens[0].tolist()
    assert together.laws is not None and together.laws[0] is None and together.laws[2] is not None


def test_a_static_tree_takes_the_candidates_of_its_ranks() -> None:
    tree = Tree.from_rank_paths([(1,), (3,), (1, 0), (1, 2), (1, 2, 1)])
    table, ids = Table(6), torch.tensor([50, 40, 30, 20, 10, 0])
    draft = grow(table.step, [FilledGrowth(99, tree, 0.0, None, ids, 60)], ids, CPU)
    tokens = draft.tokens[0].tolist()
    assert draft.trees[0] == tree and draft.laws == [None]
    for node in range(1, tree.size):
        order = table.logits(tuple(tokens[n] for n in tree.path(node)[1:-1])).argsort(descending=True)
        assert tokens[node] == ids[order[tree.ranks[node]]]


def test_drawn_children_come_with_the_law_they_were_drawn_from() -> None:
    tree = Tree.from_rank_paths([(0,), (2,), (0, 0), (0, 1)])
    table, ids = Table(4), torch.tensor([5, 0, 3, 2])
    draft = grow(table.step, [FilledGrowth(1, tree, 0.7, torch.Generator().manual_seed(1), ids, 6)], ids, CPU)
    assert draft.trees[0].ranks == (0, 0, 0, 1, 1), "ranks are the order of drawing"
    assert draft.laws is not None and draft.laws[0] is not None
    tokens, laws = draft.tokens[0].tolist(), draft.laws[0]
    for node, children in enumerate(draft.trees[0].children):
        if not children:
            assert laws[node] is None
            continue
        law, path = laws[node], tuple(tokens[n] for n in tree.path(node)[1:])
        expected = torch.zeros(6)
        expected[ids] = (table.logits(path) / 0.7).softmax(-1)
        assert law is not None and law.dtype == torch.float32 and torch.equal(law, expected)
        assert len({tokens[child] for child in children}) == len(children)


TARGET = Table(3, seed=77, sharp=1.0)
DRAWN = Tree.from_rank_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)])


def emitted(chooser: Chooser, draft: Callable[[Chooser], tuple[Tree, Tensor, object]]) -> tuple[int, ...]:
    """Two tokens of a text written with drafts: of a round, and by the base alone where it gave fewer."""
    tree, tokens, laws = draft(chooser)

    def law(node: int) -> Tensor:
        return TARGET.logits(tuple(int(tokens[n]) for n in tree.path(node)[1:])).softmax(-1)

    verdict = verify_sampled(tree, tokens, laws, law, chooser)  # type: ignore[arg-type]
    text = (*(int(tokens[node]) for node in verdict.path[1:]), verdict.next_token)
    while len(text) < 2:
        text = (*text, chooser.draw(TARGET.logits(text).softmax(-1).double()))
    return text[:2]


def bases_law() -> dict[tuple[int, ...], float]:
    return {path: confidence(TARGET, path) for path in itertools.product(range(3), repeat=2)}


Enumerate = Callable[[Callable[[Chooser], Hashable]], dict[Hashable, float]]


@pytest.mark.parametrize("tree", [DRAWN, Tree.chain(3), Tree.from_rank_paths([(0,), (1,), (2,), (1, 0)])])
def test_drawn_trees_leave_the_law_of_the_base_as_it_is(enumerate_law: Enumerate, tree: Tree) -> None:
    """By enumeration of every draw and every decision."""

    def draft(chooser: Chooser) -> tuple[Tree, Tensor, object]:
        made = grow(Table(3).step, [FilledGrowth(0, tree, 1.3, chooser, None, 3)], None, CPU)  # type: ignore[arg-type]
        assert made.laws is not None
        return made.trees[0], made.tokens[0], made.laws[0]

    law = enumerate_law(lambda chooser: emitted(chooser, draft))
    assert law == pytest.approx(bases_law(), abs=1e-6)


def test_dropping_a_drawn_child_by_its_own_confidence_would_not(enumerate_law: Enumerate) -> None:
    """What docs/eagle.md warns of: the second child is dropped where it is the less likely one."""

    def draft(chooser: Chooser) -> tuple[Tree, Tensor, object]:
        growth = FilledGrowth(0, Tree.from_rank_paths([(0,), (1,)]), 1.3, chooser, None, 3)  # type: ignore[arg-type]
        made = grow(Table(3).step, [growth], None, CPU)
        assert made.laws is not None and made.laws[0] is not None
        tokens, law = made.tokens[0], made.laws[0][0]
        assert law is not None
        if law[tokens[2]] < law[tokens[1]]:
            return Tree.chain(2), tokens[:2], made.laws[0][:2]
        return Tree.chain(2), tokens[[0, 2]], made.laws[0][:2]

    law = enumerate_law(lambda chooser: emitted(chooser, draft))
    assert max(abs(law[path] - p) for path, p in bases_law().items()) > 0.01


def test_each_row_grows_by_its_temperature_within_the_budget() -> None:
    choice = TreeChoice.of(DynamicTree(4, 2, 9))
    rows = [DraftRow((1,), t, torch.Generator()) for t in (0.0, 1.5)]

    def started(**limits: int | None) -> list[Any]:
        options = {"nodes": None, "deepest": 10, **limits}
        return start_growths(choice, rows, ROOTS, ids=None, vocab_size=6, **options)  # type: ignore[arg-type]

    greedy, drawn = started()
    assert isinstance(greedy, LikeliestGrowth) and greedy.rule == choice.likeliest
    assert isinstance(drawn, FilledGrowth) and drawn.temperature == 1.5 and drawn.tree == choice.drawn
    assert drawn.tree.size == 9
    greedy, drawn = started(nodes=4)
    assert isinstance(greedy, LikeliestGrowth) and greedy.rule.nodes == 4
    assert isinstance(drawn, FilledGrowth) and drawn.tree == choice.drawn.pruned(4)
    for growth in (*started(deepest=0), *started(deepest=-3), *started(nodes=1)):
        assert growth.frontier == []
    greedy, _ = started(deepest=2)
    assert isinstance(greedy, LikeliestGrowth) and greedy.rule.depth == 2


@pytest.mark.parametrize(
    "limits",
    [
        {"depth": 0, "width": 1, "nodes": 1},
        {"depth": 1, "width": 1.5, "nodes": 1},
        {"depth": 1, "width": 1, "nodes": True},
        {"depth": 1, "width": 1, "nodes": 1, "node_floor": 1.2},
        {"depth": 1, "width": 1, "nodes": 1, "step_floor": float("nan")},
        {"depth": 1, "width": 1, "nodes": 1, "more": 2},
        {"depth": 1, "width": 1},
    ],
)
def test_wrong_limits_are_errors(limits: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="dynamic tree"):
        DynamicTree.from_dict(limits)
