"""The EAGLE drafter: its cache is that of the base's states, its tokens those of the head run by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.drafters import DraftRow, load_drafter
from decode.drafters.eagle import EagleDrafter
from decode.drafters.hydra import HydraDrafter
from decode.dynamic import DEFAULT, DynamicTree, read_choice
from decode.profiles import write_profile
from decode.tree import Tree
from medusa_heads.base import Base, BaseOutput
from medusa_heads.eagle import EagleHeads
from medusa_heads.errors import ConfigError, HeadsError
from tests.conftest import VOCAB, tiny_base, tiny_model
from tests.decode.eagle_heads import random_heads

RULE = DynamicTree(depth=3, width=3, nodes=9)
DRAFT_IDS = torch.tensor([40, 3, 95, 7, 0, 61, 12, 33])


@pytest.fixture(autouse=True)
def _profiles_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.profiles.cache_dir", lambda: tmp_path / "cache")


def rows(*temperatures: float) -> list[DraftRow]:
    return [DraftRow((1,), t, torch.Generator().manual_seed(5 + i)) for i, t in enumerate(temperatures)]


class Texts:
    """Texts with the base's states at each token, shown to a session pass by pass as the engine would."""

    def __init__(self, base: Base, heads: EagleHeads, lengths: list[int], seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.ids = [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]
        layers = getattr(heads, "layers", ())
        self.outputs = [base.forward(ids[None], layers=layers) for ids in self.ids]
        self.shown = [0] * len(lengths)

    def show(self, session: Any, counts: list[int], gap: int = 0) -> None:
        """The next `counts` tokens of each row; with a gap, on a tree's path that skips nodes."""
        width = max(1, max(counts)) * (1 + gap)
        paths = [[i * (1 + gap) for i in range(n)] if gap else range(n) for n in counts]
        tokens = torch.full((len(counts), width), 90)

        def spread(states: list[Tensor]) -> Tensor:
            whole = torch.full((len(counts), width, states[0].shape[-1]), 77.0)
            for row, (path, begin) in enumerate(zip(paths, self.shown, strict=True)):
                for i, place in enumerate(path):
                    whole[row, place] = states[row][0, begin + i]
                    tokens[row, place] = self.ids[row][begin + i]
            return whole

        last = spread([o.last_hidden_state for o in self.outputs])
        layers = [spread([o.layer_states[i] for o in self.outputs]) for i in range(len(self.outputs[0].layer_states))]
        session.observe(BaseOutput(last, tuple(layers)), tokens, paths)
        self.shown = [begin + n for begin, n in zip(self.shown, counts, strict=True)]

    def roots(self) -> list[int]:
        return [int(ids[n]) for ids, n in zip(self.ids, self.shown, strict=True)]


def keys_and_values(session: Any, row: int) -> Tensor:
    """(2, heads, committed, d)."""
    layer: Any = session.cache.layers[0]
    return torch.stack((layer.keys, layer.values))[:, row, :, : session.cache.lengths[row]]


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@pytest.mark.parametrize("family", ["llama", "phi"])
def test_the_cache_equals_one_rebuilt_from_the_bases_states(family: str, kind: str) -> None:
    base = tiny_base(family)
    heads = random_heads(base, kind)
    drafter = EagleDrafter(heads, base, RULE)
    session, texts = drafter.start(rows(0.0, 0.0, 0.0)), Texts(base, heads, [30, 30, 30])
    texts.show(session, [5, 9, 2])
    session.draft(texts.roots())
    for counts in ([1, 3, 2], [4, 1, 1], [1, 1, 3]):
        texts.show(session, counts, gap=1)
        draft = session.draft(texts.roots())
    texts.show(session, [2, 1, 1])  # rounds without a draft are caught up with
    texts.show(session, [1, 1, 2], gap=2)
    draft = session.draft(texts.roots())
    fresh, again = drafter.start(rows(0.0, 0.0, 0.0)), Texts(base, heads, [30, 30, 30])
    again.show(fresh, texts.shown)
    anew = fresh.draft(texts.roots())
    assert draft.trees == anew.trees and torch.equal(draft.tokens, anew.tokens)
    assert session.cache.lengths == fresh.cache.lengths == texts.shown
    for row in range(3):
        torch.testing.assert_close(keys_and_values(session, row), keys_and_values(fresh, row))


def by_hand(heads: EagleHeads, base: Base, output: BaseOutput, text: list[int], path: list[int]) -> Tensor:
    """Logits of what follows a drafted path: the head over the whole text without any cache, causally, then over its
    own outputs along the path. text: all tokens, the root included, one more than there are states."""
    features = heads.fuse(output)
    tokens = [*text[1:], *path]
    for _ in range(len(path) + 1):
        count = features.shape[1]
        places = torch.arange(count)[None]
        following = heads(base.embed(torch.tensor([tokens[:count]])), features, places)
        features = torch.cat((features, following[:, -1:]), dim=1)
    return heads.head_logits(following[0, -1], base)


@pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS])
@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_children_are_the_likeliest_of_the_head_run_by_hand(family: str, kind: str, draft_ids: Tensor | None) -> None:
    base = tiny_base(family)
    heads = random_heads(base, kind, draft_ids=draft_ids)
    session, texts = EagleDrafter(heads, base, RULE).start(rows(0.0, 0.0)), Texts(base, heads, [8, 5])
    texts.show(session, [6, 3])
    draft = session.draft(texts.roots())
    for row, tree in enumerate(draft.trees):
        seen, tokens = texts.shown[row], draft.tokens[row].tolist()
        states = texts.outputs[row]
        output = BaseOutput(states.last_hidden_state[:, :seen], tuple(s[:, :seen] for s in states.layer_states))
        assert tree.size == 9 and tree.depth > 1 and tokens[0] == texts.roots()[row]
        for node, children in enumerate(tree.children):
            if not children:
                continue
            path = [tokens[n] for n in tree.path(node)[1:]]
            best = by_hand(heads, base, output, texts.ids[row][: seen + 1].tolist(), path).argsort(descending=True)
            best = best if draft_ids is None else draft_ids[best]
            assert [tokens[child] for child in children] == best[: len(children)].tolist()


def test_a_long_prompt_is_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_base()
    heads = random_heads(base, "eagle3")
    drafts = []
    for chunk in (512, 7):
        monkeypatch.setattr("decode.drafters.eagle.CHUNK", chunk)
        session, texts = EagleDrafter(heads, base, RULE).start(rows(0.0, 0.0)), Texts(base, heads, [40, 20])
        texts.show(session, [20, 15])
        texts.show(session, [13, 0])
        drafts.append(session.draft(texts.roots()))
    assert torch.equal(drafts[0].tokens, drafts[1].tokens) and drafts[0].trees == drafts[1].trees


def test_rows_go_on_when_others_have_ended() -> None:
    base = tiny_base()
    heads = random_heads(base, "eagle1")
    drafter = EagleDrafter(heads, base, RULE)
    session, texts = drafter.start(rows(0.0, 1.0, 0.0)), Texts(base, heads, [20, 20, 20])
    texts.show(session, [4, 9, 6])
    session.draft(texts.roots())
    session.keep_rows([0, 2])
    texts.ids, texts.outputs, texts.shown = ([x[0], x[2]] for x in (texts.ids, texts.outputs, texts.shown))  # type: ignore[assignment]
    texts.show(session, [2, 3], gap=1)
    draft = session.draft(texts.roots())
    for row in (0, 1):
        alone = drafter.start(rows(0.0))
        states = BaseOutput(texts.outputs[row].last_hidden_state[:, : texts.shown[row]])
        alone.observe(states, texts.ids[row][None, : texts.shown[row]], [range(texts.shown[row])])
        single = alone.draft([texts.roots()[row]])
        assert single.trees[0] == draft.trees[row]
        assert single.tokens[0].tolist() == draft.tokens[row, : single.trees[0].size].tolist()


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "hydra", "hydra-prefix"])
@pytest.mark.parametrize("length", [0, 1, 4, 8])
def test_a_later_turn_goes_on_from_any_length(kind: str, length: int) -> None:
    base = tiny_base()
    heads = random_heads(base, kind)
    drafter: Any = (EagleDrafter if kind.startswith("eagle") else HydraDrafter)(heads, base, RULE)
    session, first = drafter.start(rows(0.0)), Texts(base, heads, [12])
    first.show(session, [6])
    session.draft(first.roots())
    first.show(session, [2], gap=1)  # not drafted from
    session.resume(rows(0.0)[0], length)
    generator = torch.Generator().manual_seed(9)
    second = Texts(base, heads, [15])
    ids = torch.cat((first.ids[0][:length], torch.randint(VOCAB, (15 - length,), generator=generator)))
    second.ids, second.outputs = [ids], [base.forward(ids[None], layers=drafter.layers)]
    second.shown = [length]
    second.show(session, [13 - length])
    draft = session.draft(second.roots())
    fresh = drafter.start(rows(0.0))
    second.shown = [0]
    second.show(fresh, [13])
    assert torch.equal(draft.tokens, fresh.draft(second.roots()).tokens)
    if kind != "hydra":
        assert session.cache.lengths == [13]
        torch.testing.assert_close(keys_and_values(session, 0), keys_and_values(fresh, 0))


def test_another_root_drafts_anew() -> None:
    base = tiny_base()
    heads = random_heads(base, "eagle3", scale=0.5)
    session, texts = EagleDrafter(heads, base, RULE).start(rows(0.0)), Texts(base, heads, [9])
    with pytest.raises(RuntimeError, match="before the base has seen a token"):
        session.draft([1])
    texts.show(session, [7])
    first, other, again = (session.draft([root]).tokens for root in (5, 6, 5))
    assert torch.equal(first, again) and not torch.equal(first[:, 1:], other[:, 1:])


def test_a_round_without_a_draft_asks_nothing_of_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_base()
    heads = random_heads(base, "eagle3")
    drafter = EagleDrafter(heads, base, RULE)
    session, texts = drafter.start(rows(0.0)), Texts(base, heads, [9])
    texts.show(session, [7])
    monkeypatch.setattr(drafter.heads, "forward", lambda *_: pytest.fail("the head was run"))
    draft = session.draft([4], nodes=1)
    assert draft.trees[0].size == 1 and draft.tokens.tolist() == [[4]]


def test_drafts_end_where_the_positions_end() -> None:
    base = tiny_base()
    heads = random_heads(base, "eagle3")
    for kind in (0.0, 1.0):
        drafter = EagleDrafter(heads, base, DynamicTree(4, 1, 5))
        drafter.max_positions = 12
        session, texts = drafter.start(rows(kind)), Texts(base, heads, [20])
        texts.show(session, [7])
        depths = []
        for _ in range(5):
            depths.append(session.draft(texts.roots()).trees[0].depth)
            texts.show(session, [1])
        assert depths == ([4, 3, 2, 1, 0] if kind == 0.0 else [3, 3, 0, 0, 0]), "a topology is whole or not there"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("own", [False, True])
def test_heads_follow_the_bases_dtype_and_are_left_as_they_were(dtype: torch.dtype, own: bool) -> None:
    base = Base.from_model(tiny_model().to(dtype))
    heads = EagleHeads.for_base(base, own_projection=own, draft_ids=DRAFT_IDS).float()
    before = {key: value.clone() for key, value in heads.state_dict().items()}
    session = EagleDrafter(heads, base, RULE).start(rows(0.0))
    output = base.forward(torch.tensor([[5, 6, 7]]), layers=heads.layers)
    session.observe(output, torch.tensor([[5, 6, 7]]), [range(3)])
    tokens = session.draft([8]).tokens
    assert tokens.dtype == torch.int64 and set(tokens[0, 1:].tolist()) <= set(DRAFT_IDS.tolist())
    assert all(torch.equal(value, before[key]) for key, value in heads.state_dict().items())


def save(directory: Path, heads: EagleHeads, tree: dict[str, Any] | None) -> Path:
    heads.save_pretrained(directory, extras={} if tree is None else {"tree.json": json.dumps(tree)})
    return directory


def test_heads_are_loaded_with_what_they_were_saved_with_and_what_was_tuned(tmp_path: Path) -> None:
    base = tiny_base()
    heads, drawn = random_heads(base, "eagle3"), Tree.from_rank_paths([(0,), (1,)])
    limits = DynamicTree(2, 3, 5, node_floor=0.1)
    plain = save(tmp_path / "plain", heads, None)
    assert load_drafter(plain, base).choice.likeliest == DEFAULT  # type: ignore[attr-defined]
    own = save(tmp_path / "own", heads, {"dynamic": limits.to_dict(), "tree": drawn.to_dict()})
    drafter = load_drafter(own, base)
    assert isinstance(drafter, EagleDrafter)
    assert (drafter.choice.likeliest, drafter.choice.drawn) == (limits, drawn)
    tuned = DynamicTree(4, 1, 5)
    write_profile(own, base, tuned, {})
    choice = EagleDrafter.from_pretrained(own, base).choice
    assert (choice.likeliest, choice.drawn) == (tuned, drawn)
    write_profile(own, base, Tree.chain(4), {})
    choice = EagleDrafter.from_pretrained(own, base).choice
    assert (choice.likeliest, choice.drawn) == (limits, Tree.chain(4))
    given = EagleDrafter.from_pretrained(own, base, tree=Tree.chain(3)).choice
    assert given.likeliest == given.drawn == Tree.chain(3)
    deeper = load_drafter(own, base, depth=7, nodes=12).choice  # type: ignore[attr-defined]
    assert deeper.likeliest == DynamicTree(7, 3, 12, node_floor=0.1) and deeper.drawn.size == 12
    with pytest.raises(ConfigError, match="depth and a tree exclude each other"):
        EagleDrafter.from_pretrained(own, base, tree=Tree.chain(3), depth=2)


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"dynamic": {"depth": 0}}', '{"tree": {"parents": [0]}}'])
def test_a_damaged_tree_file_is_an_error_that_names_it(tmp_path: Path, content: str) -> None:
    (tmp_path / "tree.json").write_text(content)
    with pytest.raises(HeadsError, match=r"tree\.json holds no tree"):
        read_choice(tmp_path)
