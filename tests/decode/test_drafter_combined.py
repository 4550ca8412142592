"""Several drafters in one tree: merging, the budget, and what is learnt of each source."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from decode.drafters import Draft, DraftRow, load_drafter
from decode.drafters.combined import CombinedDrafter, CombinedSession, Offer, prior_chances
from decode.drafters.early_exit import EarlyExitDrafter
from decode.drafters.lookup import LookupDrafter
from decode.drafters.specs import parse, parse_all
from decode.drafters.trie import Trie
from decode.engine import Decoder
from decode.settings import GenerationSettings
from decode.tree import Tree
from medusa_heads.base import BaseOutput
from medusa_heads.errors import ConfigError, HeadsError
from tests.conftest import tiny_base
from tests.decode.drafters import REPETITIVE, greedy_by_hand


class Scripted:
    """Drafts one chain, the same in every round."""

    def __init__(self, tokens: list[int], layers: Sequence[int] = (), law: torch.Tensor | None = None):
        self.chain, self.layers, self.law = tokens, layers, law
        self.observed: list[BaseOutput] = []
        self.asked: list[int | None] = []

    def start(self, rows: Sequence[DraftRow]) -> Scripted:
        return self

    def observe(self, output: BaseOutput, tokens: torch.Tensor, paths: Sequence[Sequence[int]]) -> None:
        self.observed.append(output)

    def draft(self, roots: Sequence[int], nodes: int | None = None) -> Draft:
        self.asked.append(nodes)
        tree = Tree.chain(1 if nodes == 1 else 1 + len(self.chain))
        laws = None if self.law is None else [[self.law] * tree.size]
        return Draft([tree], torch.tensor([[roots[0], *self.chain][: tree.size]]), laws)

    def keep_rows(self, rows: Sequence[int]) -> None: ...

    def resume(self, row: DraftRow, length: int) -> None: ...


ROW = DraftRow((1,), 0.0, torch.Generator())


def session_of(*sources: Scripted, **options: float) -> CombinedSession:
    session = CombinedDrafter(sources, torch.device("cpu"), **options).start([ROW])  # type: ignore[arg-type]
    show(session, [1])
    return session


def show(session: CombinedSession, tokens: list[int]) -> None:
    session.observe(BaseOutput(torch.zeros(1, len(tokens), 4)), torch.tensor([tokens]), [range(len(tokens))])


def drafted(draft: Draft) -> set[tuple[int, ...]]:
    """The paths of the only row."""
    tree, tokens = draft.trees[0], draft.tokens[0].tolist()
    return {tuple(tokens[n] for n in tree.path(node)) for node in range(tree.size) if not tree.children[node]}


def test_drafts_with_a_common_beginning_become_one_tree() -> None:
    draft = session_of(Scripted([5, 6, 7]), Scripted([5, 9]), least=0.0).draft([2])
    assert drafted(draft) == {(2, 5, 6, 7), (2, 5, 9)} and draft.trees[0].size == 5
    assert draft.laws is None


def test_the_budget_goes_to_the_source_that_was_right_lately() -> None:
    good, bad = Scripted([5, 6, 7]), Scripted([8, 9, 10])
    session = session_of(bad, good, nodes=4, least=0.0)
    first = session.draft([2])
    assert first.trees[0].size == 4
    for _ in range(12):
        show(session, [2, 5, 6, 7])
        draft = session.draft([2])
    assert drafted(draft) == {(2, 5, 6, 7)}, "the other source gets nothing of four nodes any more"
    for _ in range(40):
        show(session, [2, 8, 9, 10])
        draft = session.draft([2])
    assert drafted(draft) == {(2, 8, 9, 10)}, "what is right changes"


def test_a_source_that_is_never_right_rests_and_is_tried_again() -> None:
    good, bad = Scripted([5, 6]), Scripted([8, 9])
    session = session_of(bad, good)
    for _ in range(400):
        session.draft([2])
        show(session, [2, 5, 6])
    assert all(nodes != 1 for nodes in good.asked), "what is right is always asked"
    resting = [nodes == 1 for nodes in bad.asked]
    assert not any(resting[:10]) and sum(resting) > 200
    first = resting.index(True)
    assert not all(resting[first:]), "it gets another chance now and then"


def test_drawn_rows_take_one_sources_tree_with_its_law() -> None:
    law = torch.full((96,), 1 / 96)
    drawn, copied = Scripted([5, 6], law=law), Scripted([8, 9, 10])
    session = session_of(drawn, copied)
    assert drafted(session.draft([2])) == {(2, 5, 6)}
    show(session, [2, 8, 9, 10])
    for _ in range(8):
        draft = session.draft([2])
        show(session, [2, 8, 9, 10])
    assert drafted(draft) == {(2, 8, 9, 10)} and draft.laws is None
    for _ in range(40):
        draft = session.draft([2])
        show(session, [2, 5, 6])
    assert drafted(draft) == {(2, 5, 6)} and draft.laws is not None and draft.laws[0][0] is law


def test_each_source_gets_the_states_that_it_asked_for() -> None:
    one, two = Scripted([5], layers=(1, 3)), Scripted([6], layers=(0, 3))
    combined = CombinedDrafter([one, two], torch.device("cpu"))
    assert list(combined.layers) == [0, 1, 3]
    states = tuple(torch.full((1, 1, 4), float(layer)) for layer in combined.layers)
    combined.start([ROW]).observe(BaseOutput(torch.zeros(1, 1, 4), states), torch.tensor([[1]]), [[0]])
    assert [float(s[0, 0, 0]) for s in one.observed[0].layer_states] == [1.0, 3.0]
    assert [float(s[0, 0, 0]) for s in two.observed[0].layer_states] == [0.0, 3.0]


def test_chances_without_an_estimate_fall_with_depth_and_rank() -> None:
    tree = Tree.from_rank_paths([(0,), (1,), (0, 0)])
    chances = dict(zip([(), *tree.rank_paths()], prior_chances(tree), strict=True))
    assert chances[()] == 1.0 > chances[0,] > chances[1,] > chances[0, 0] > 0.0
    assert Offer(tree, [1, 2, 3, 4], None, [1.0, 0.5, 0.25, 0.1]).given_parent(2) == pytest.approx(0.5)


def test_a_merged_trie_has_no_node_likelier_than_its_parent() -> None:
    ours, theirs = Trie(1), Trie(1)
    ours.add(ours.add(0, 2, 0.3), 3, 0.9)
    theirs.add(theirs.add(0, 2, 0.8), 4, 0.5)
    ours.merge(theirs)
    assert ours.reach == pytest.approx([1.0, 0.8, 0.72, 0.4])


def test_one_argument_swaps_drafters() -> None:
    base = tiny_base()
    for name, kind in (("lookup,nodes=5", LookupDrafter), ("exit:1,width=2", EarlyExitDrafter)):
        assert isinstance(load_drafter(name, base), kind)
    assert load_drafter("lookup,least=1", base).least == 1  # type: ignore[attr-defined]
    assert load_drafter("lookup", base, depth=3).depth == 3  # type: ignore[attr-defined]
    both = load_drafter("exit:1,depth=2+lookup,nodes=5", base)
    assert isinstance(both, CombinedDrafter) and both.drafters[0].reach.depth == 2  # type: ignore[attr-defined]
    result = Decoder(base, both, guard=None).generate(REPETITIVE, GenerationSettings(12, eos_token_ids=()))
    assert result.token_ids == greedy_by_hand(base, REPETITIVE, 12)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("lookup,size=3", "lookup has no setting size; there are nodes"),
        ("lookup,nodes", "written key=value"),
        ("exit:two", "names a number of layers"),
        ("exit", "exit needs a value: exit:L"),
        ("exit:9", "not a part of them"),
        ("exit:1,reach=2", "unknown options of a draft: reach; there are depth"),
        ("exit:1,depth=two", "a draft: depth is int, not 'two'"),
        ("lookup,nodes=many", "lookup: nodes is int, not 'many'"),
        ("lookup,nodes=1.5", "lookup: nodes is int, not 1.5"),
        ("smollm2-135m-medusa,tree=5", "heads of the family medusa: tree is Tree, not 5"),
        ("model:nowhere,depth=two", "a draft: depth is int, not 'two'"),
        ("model:", "model needs a value"),
        ("lookup+", "a drafter has a name"),
        ("heads+lookup", "no embedded heads for the base"),
    ],
)
def test_a_name_that_is_none_says_what_is_wrong(name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_drafter(name, tiny_base())


@pytest.mark.parametrize(
    ("name", "closest"),
    [
        ("lokup", "lookup"),
        ("heads+looku,nodes=3", "lookup"),
        ("head", "heads"),
        ("exti:4", "exit"),
        ("modle:me/draft", "model"),
        ("smollm2-135m-medus", "smollm2-135m-medusa"),
        ("xyzzy", None),
    ],
)
def test_a_misspelt_name_is_refused_before_the_hub_is_asked(
    name: str, closest: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_heads.fetching.snapshot_download", lambda *_, **__: pytest.fail("the Hub was asked"))
    with pytest.raises(ConfigError, match=r"there are heads, lookup, model:NAME, exit:L.*smollm2-135m-medusa") as error:
        load_drafter(name, tiny_base())
    assert re.findall(r"is it '(.*?)'\?", str(error.value)) == ([closest] if closest else [])


def test_names_that_may_be_heads_are_left_to_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    for name in ("me/heads", "mine", "smollm2-135m", "smollm2-135m-medusa", "./nowhere"):
        assert parse(name) == ("heads", name, {})


def test_settings_are_read_as_numbers_where_they_are() -> None:
    assert parse("model:a/b-c,width=3,node_floor=0.1,way=text") == (
        "model",
        "a/b-c",
        {"width": 3, "node_floor": 0.1, "way": "text"},
    )
    assert parse("me/heads") == ("heads", "me/heads", {})


def test_directories_do_not_take_the_names_of_drafters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("heads", "lookup", "me+you"):
        Path(name).mkdir()
    base = tiny_base()
    assert isinstance(load_drafter("lookup", base), LookupDrafter)
    with pytest.raises(ConfigError, match="no embedded heads for the base"):
        load_drafter("heads", base)
    for path in (Path("heads"), Path("lookup"), "./heads", "me+you"):
        with pytest.raises(HeadsError, match="not a directory of heads"):
            load_drafter(path, base)
    assert parse_all("heads+lookup") == [("heads", "heads", {}), ("lookup", "", {})]
