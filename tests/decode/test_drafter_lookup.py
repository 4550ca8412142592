"""Prompt lookup: the index against a scan of the text, what is drafted, and what is learnt of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.drafters import DraftRow
from decode.drafters.lookup import CHANCE, LONGEST, LookupDrafter, NgramIndex
from decode.drafters.trie import History, Trie
from decode.tree import Tree
from medusa_heads.errors import ConfigError
from tests.conftest import tiny_base

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def index_of(text: list[int]) -> NgramIndex:
    index = NgramIndex()
    index.extend_to(text)
    return index


def scanned(text: list[int]) -> list[tuple[int, int]]:
    """Every earlier place behind the text's last token, with the length of the match, by looking at all of them."""
    found = []
    for place in range(1, len(text)):
        length = 0
        while length < min(place, LONGEST) and text[place - 1 - length] == text[-1 - length]:
            length += 1
        if length:
            found.append((length, place))
    return sorted(found, reverse=True)


@given(text=TEXTS)
@settings(max_examples=150, deadline=None)
def test_matches_are_those_of_a_scan(text: list[int]) -> None:
    if len(text) <= 20:  # within what a search looks at
        assert index_of(text).matches() == scanned(text)
    else:
        ours = index_of(text).matches()
        assert set(ours) <= set(scanned(text)) and ours == sorted(ours, reverse=True)


@given(text=TEXTS, other=TEXTS, data=st.data())
@settings(max_examples=80, deadline=None)
def test_a_truncated_index_equals_one_made_anew(text: list[int], other: list[int], data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(text)))
    index = index_of(text)
    index.truncate(length)
    fresh = index_of(text[:length])
    assert (index.ids, index._last, index._previous) == (fresh.ids, fresh._last, fresh._previous)
    index.extend_to(text[:length] + other)
    assert index.matches() == index_of(text[:length] + other).matches()


def test_a_token_is_entered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds cost by their new tokens, not by the text's length."""
    entered = []
    append = NgramIndex.append
    monkeypatch.setattr(NgramIndex, "append", lambda self, token: (entered.append(token), append(self, token))[1])
    session = LookupDrafter(tiny_base()).start([DraftRow((1,), 0.0, torch.Generator())])
    text = [1, 2, 3, 1, 2, 3, 1]
    session.observe(None, torch.tensor([text]), [range(7)])
    session.draft([2])
    session.observe(None, torch.tensor([[2, 3, 9]]), [[0, 1]])
    session.draft([4])
    assert entered == [*text, 2, 3, 4]


def test_a_continuation_that_reaches_the_end_repeats_itself() -> None:
    assert list(index_of([7, 1, 2, 1, 2]).continuation(3, 5)) == [1, 2, 1, 2, 1]


def drafted(text: list[int], **options: float) -> tuple[Tree, list[int], list[float]]:
    session = LookupDrafter(tiny_base(), **options).start([DraftRow((1,), 0.0, torch.Generator())])
    session.observe(None, torch.tensor([text[:-1]]), [range(len(text) - 1)])
    draft = session.draft([text[-1]])
    assert draft.laws is None and draft.reach is not None and draft.reach[0] is not None
    return draft.trees[0], draft.tokens[0].tolist(), list(draft.reach[0])


def test_the_longest_match_comes_first_and_others_become_branches() -> None:
    text = [5, 6, 7, 8, 40, 41, 9, 7, 8, 50, 51, 9, 8, 60, 3, 5, 6, 7, 8]
    tree, tokens, reach = drafted(text, least=0.0, nodes=12, depth=2)
    below = [tokens[child] for child in tree.children[0]]
    assert below == [40, 50, 60], "matches of 4, 2 and 1 tokens"
    assert tokens[tree.children[tree.children[0][0]][0]] == 41
    assert reach[0] == 1.0
    assert all(reach[node] <= reach[parent] for node, parent in enumerate(tree.parents) if parent >= 0)
    first = CHANCE[4]
    assert reach[tree.children[0][0]] == pytest.approx(first)
    assert reach[tree.children[0][1]] == pytest.approx(CHANCE[2] * (1 - first))


def test_the_budget_is_kept_and_goes_to_the_likeliest() -> None:
    text = [5, 6, 7, 8, 40, 41, 42, 43, 9, 8, 60, 61, 62, 63, 5, 6, 7, 8]
    for nodes in range(1, 8):
        tree, tokens, _ = drafted(text, nodes=nodes, least=0.0)
        assert tree.size <= nodes and (nodes == 1 or tokens[1] == 40)
    session = LookupDrafter(tiny_base()).start([DraftRow((1,), 0.0, torch.Generator())])
    session.observe(None, torch.tensor([text[:-1]]), [range(len(text) - 1)])
    assert session.draft([8], nodes=3).trees[0] == Tree.chain(3)


def test_a_text_without_repetition_drafts_nothing() -> None:
    assert drafted([1, 2, 3, 4, 5])[0].size == 1


def test_drafts_that_fail_are_drafted_less() -> None:
    """A text whose repetitions always go on differently: the row learns that copying does not pay."""
    session = LookupDrafter(tiny_base()).start([DraftRow((1,), 0.0, torch.Generator())])
    sizes, filler = [], 10
    session.observe(None, torch.tensor([[1, 2, 3, 4]]), [range(4)])
    for _ in range(12):
        sizes.append(session.draft([1]).trees[0].size)
        session.observe(None, torch.tensor([[1]]), [[0]])
        session.draft([filler])
        session.observe(None, torch.tensor([[filler]]), [[0]])
        filler += 1
    assert sizes[-1] < sizes[0]


def test_history_counts_hits_against_what_was_expected() -> None:
    history = History()
    assert history.ratio("never tried") == 1.0
    for _ in range(60):
        history.count("sure", 0.5, True)
        history.count("wrong", 0.5, False)
    assert history.ratio("sure") > 1.7 and history.ratio("wrong") < 0.2
    for _ in range(60):
        history.count("sure", 0.5, False)
    assert history.ratio("sure") < 0.4, "what is long past fades"


def test_a_trie_learns_from_each_guess_on_the_true_path() -> None:
    counted: list[tuple[object, float, bool]] = []

    class Recorded(History):
        def count(self, kind: object, expected: float, kept: bool) -> None:
            counted.append((kind, round(expected, 6), kept))

    trie = Trie(9)
    a, b = trie.add(0, 1, 0.5, "a"), trie.add(0, 2, 0.25, "b")
    trie.add(a, 5, 0.9, "under a")
    trie.add(b, 6, 0.8, "under b")
    trie.learn([2, 7, 3], Recorded())
    assert counted == [("a", 0.5, False), ("b", 0.5, True), ("under b", 0.8, False)]


def test_rows_of_a_batch_share_nothing_and_may_leave() -> None:
    drafter = LookupDrafter(tiny_base())
    rows = [DraftRow((1,), 0.0, torch.Generator())] * 2
    session = drafter.start(rows)
    session.observe(None, torch.tensor([[1, 2, 3, 1], [7, 8, 7, 0]]), [range(4), range(3)])
    draft = session.draft([2, 8])
    assert draft.tokens[0, :3].tolist() == [2, 3, 1] and draft.tokens[1, :3].tolist() == [8, 7, 8]
    session.keep_rows([1])
    session.observe(None, torch.tensor([[8, 7]]), [[0, 1]])
    assert session.draft([8]).tokens[0, :3].tolist() == [8, 7, 8]


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one node"):
        LookupDrafter(tiny_base(), nodes=0)
    with pytest.raises(ConfigError, match="least is a probability"):
        LookupDrafter(tiny_base(), least=2.0)
