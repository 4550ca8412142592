"""The Medusa drafter: the tree it is given, filled with the heads' likeliest tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decode.drafters import DraftRow, load_drafter
from decode.drafters.medusa import MedusaDrafter, read_tree
from decode.tree import Tree
from medusa_heads.base import Base, BaseOutput
from medusa_heads.errors import ConfigError, HeadsError
from medusa_heads.medusa import MedusaHeads
from tests.conftest import VOCAB, tiny_base, tiny_model

TREE = Tree((-1, 0, 0, 1, 1, 2), (0, 0, 1, 0, 2, 0))
DRAFT_IDS = torch.tensor([40, 3, 95, 7, 0, 61])


def random_heads(base: Base, num_heads: int = 2, own: bool = False, draft_ids: Tensor | None = None) -> MedusaHeads:
    heads = MedusaHeads.for_base(base, num_heads, 2, own, draft_ids)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.1)
    return heads.eval()


def likeliest(heads: MedusaHeads, base: Base, state: Tensor, head: int, rank: int) -> int:
    """From the heads' own logits, by sorting."""
    logits = heads.head_logits(heads(state), base)[head]
    row = int(logits.argsort(descending=True)[rank])
    return row if heads.draft_ids is None else int(heads.draft_ids[row])


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS])
@pytest.mark.parametrize("family", ["llama", "phi"])
def test_nodes_hold_the_candidates_of_their_depth_and_rank(family: str, draft_ids: Tensor | None, own: bool) -> None:
    base = tiny_base(family)
    heads = random_heads(base, own=own, draft_ids=draft_ids)
    drafter = MedusaDrafter(heads, base, TREE)
    states = torch.randn(3, 32)
    filled = drafter.fill(states, torch.tensor([11, 12, 13]))
    assert filled.shape == (3, 6)
    for row in range(3):
        expected = [likeliest(heads, base, states[row], TREE.depths[n] - 1, TREE.ranks[n]) for n in range(1, 6)]
        assert filled[row].tolist() == [11 + row, *expected]
    if draft_ids is not None:
        assert set(filled[:, 1:].flatten().tolist()) <= set(draft_ids.tolist())


def test_a_tree_of_the_root_alone_drafts_nothing() -> None:
    base = tiny_base()
    drafter = MedusaDrafter(random_heads(base), base, Tree.chain(1))
    assert drafter.fill(torch.randn(2, 32), torch.tensor([4, 5])).tolist() == [[4], [5]]


def test_heads_beyond_the_trees_depth_are_not_run() -> None:
    base = tiny_base()
    heads = random_heads(base, num_heads=4)
    drafter = MedusaDrafter(heads, base, TREE)
    assert len(drafter.blocks) == 2
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.zero_()
    state = torch.randn(1, 32)
    before = drafter.fill(state, torch.tensor([1]))
    assert torch.equal(before, MedusaDrafter(random_heads(base, 2), base, TREE).fill(state, torch.tensor([1])))


def test_a_tree_deeper_than_the_heads_is_an_error_that_names_both() -> None:
    base = tiny_base()
    with pytest.raises(ConfigError, match="the tree is 3 deep, but there are 2 heads"):
        MedusaDrafter(random_heads(base), base, Tree.chain(4))


def test_a_rank_beyond_the_draft_vocabulary_is_an_error() -> None:
    base = tiny_base()
    MedusaDrafter(random_heads(base, draft_ids=DRAFT_IDS), base, Tree((-1, 0), (0, 5)))
    with pytest.raises(ConfigError, match="rank 6 of a draft vocabulary of 6"):
        MedusaDrafter(random_heads(base, draft_ids=DRAFT_IDS), base, Tree((-1, 0), (0, 6)))
    with pytest.raises(ConfigError, match=f"rank {VOCAB} of a draft vocabulary of {VOCAB}"):
        MedusaDrafter(random_heads(base), base, Tree((-1, 0), (0, VOCAB)))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_follow_the_bases_dtype_and_are_left_as_they_were(dtype: torch.dtype, own: bool) -> None:
    base = Base.from_model(tiny_model().to(dtype))
    heads = random_heads(base, own=own)
    before = {key: value.clone() for key, value in heads.state_dict().items()}
    drafter = MedusaDrafter(heads, base, TREE)
    state = base.forward(torch.tensor([[5, 6, 7]])).last_hidden_state[:, -1]
    assert drafter.fill(state, torch.tensor([1])).dtype == torch.int64
    assert all(torch.equal(value, before[key]) for key, value in heads.state_dict().items())
    assert {p.dtype for p in heads.parameters()} == {torch.float32}


def rows(count: int) -> list[DraftRow]:
    return [DraftRow((1,), 0.0, torch.Generator())] * count


def test_a_session_drafts_from_the_state_of_the_last_kept_token() -> None:
    base = tiny_base()
    drafter = MedusaDrafter(random_heads(base), base, TREE)
    session = drafter.start(rows(2))
    with pytest.raises(RuntimeError, match="before the base has seen a token"):
        session.draft([1, 2])
    first, second = torch.randn(2, 6, 32), torch.randn(2, 6, 32)
    session.observe(BaseOutput(first), torch.zeros(2, 6), [[0, 1, 4], [0]])
    session.observe(BaseOutput(second), torch.zeros(2, 6), [[], [0, 2]])
    draft = session.draft([7, 8])
    assert draft.laws is None and list(draft.trees) == [TREE, TREE]
    states = torch.stack((first[0, 4], second[1, 2]))
    assert torch.equal(draft.tokens, drafter.fill(states, torch.tensor([7, 8])))
    session.keep_rows([1])
    assert torch.equal(session.draft([8]).tokens, drafter.fill(states[1:], torch.tensor([8])))


def test_sessions_of_one_drafter_share_nothing() -> None:
    base = tiny_base()
    drafter = MedusaDrafter(random_heads(base), base, TREE)
    sessions = [drafter.start(rows(1)), drafter.start(rows(1))]
    states = [torch.randn(1, 2, 32), torch.randn(1, 2, 32)]
    for session, state in zip(sessions, states, strict=True):
        session.observe(BaseOutput(state), torch.zeros(1, 2), [[0, 1]])
    for session, state in zip(sessions, states, strict=True):
        assert torch.equal(session.draft([3]).tokens, drafter.fill(state[:, 1], torch.tensor([3])))


def save(directory: Path, heads: MedusaHeads, tree: object) -> Path:
    heads.save_pretrained(directory, extras={"tree.json": json.dumps({"tree": tree})})
    return directory


def test_heads_are_loaded_with_their_tree(tmp_path: Path) -> None:
    base = tiny_base()
    heads = random_heads(base)
    directory = save(tmp_path / "heads", heads, TREE.to_dict())
    drafter = load_drafter(directory, base)
    assert isinstance(drafter, MedusaDrafter) and drafter.tree == TREE
    state = torch.randn(1, 32)
    rounded = heads.to(torch.bfloat16).float()
    expected = MedusaDrafter(rounded, base, TREE).fill(state, torch.tensor([1]))
    assert torch.equal(drafter.fill(state, torch.tensor([1])), expected)
    assert MedusaDrafter.from_pretrained(directory, base, tree=Tree.chain(3)).tree == Tree.chain(3)


def test_heads_of_another_base_are_refused(tmp_path: Path) -> None:
    directory = save(tmp_path / "heads", random_heads(tiny_base()), TREE.to_dict())
    other = tiny_base()
    other.weights_hash = "0123456789abcdef"
    with pytest.raises(HeadsError, match="belong to another base"):
        load_drafter(directory, other)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"parents": [-1]}',
        '{"parents": [-1, 4], "ranks": [0, 0]}',
        '{"parents": [-1, "a"], "ranks": [0, 0]}',
    ],
)
def test_a_damaged_tree_file_is_an_error_that_names_it(tmp_path: Path, content: str) -> None:
    (tmp_path / "tree.json").write_text(content)
    with pytest.raises(HeadsError, match=r"tree\.json holds no tree"):
        read_tree(tmp_path)


def test_without_a_tree_file_the_way_out_is_named(tmp_path: Path) -> None:
    with pytest.raises(HeadsError, match=r"has no tree\.json: give a tree"):
        read_tree(tmp_path)
