"""The Hydra drafter: each head reads the path before its own token, and the prefix attention every state once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.drafters import DraftRow, load_drafter
from decode.drafters.hydra import HydraDrafter
from decode.dynamic import DynamicTree
from decode.engine import Decoder
from decode.settings import GenerationSettings
from decode.tree import Tree
from medusa_heads.base import Base, BaseOutput
from medusa_heads.errors import ConfigError
from medusa_heads.hydra import HydraHeads
from tests.conftest import VOCAB, tiny_base, tiny_model
from tests.decode.eagle_heads import noisy, random_heads

RULE = DynamicTree(depth=3, width=3, nodes=9)
DRAFT_IDS = torch.tensor([40, 3, 95, 7, 0, 61, 12, 33])
STATIC = Tree.from_rank_paths([(0,), (1,), (0, 0), (0, 2), (1, 1), (0, 2, 0)])


def rows(*temperatures: float) -> list[DraftRow]:
    return [DraftRow((1,), t, torch.Generator().manual_seed(5 + i)) for i, t in enumerate(temperatures)]


def by_hand(heads: HydraHeads, base: Base, states: Tensor, root: int, path: list[int]) -> Tensor:
    """Logits of what follows a drafted path: states (1, n, h) of the text before the root."""
    read = states if heads.prefix is None else heads.prefix(states, torch.arange(states.shape[1])[None])
    embeddings = base.embed(torch.tensor([root, *path]))
    state = heads.head(len(path), read[0, -1], embeddings)
    return heads.head_logits(state[None], base, first=len(path))[0]


@pytest.mark.parametrize("tree", [RULE, STATIC])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS])
@pytest.mark.parametrize("prefix", [False, True])
def test_children_are_the_likeliest_of_their_head(
    prefix: bool, draft_ids: Tensor | None, own: bool, tree: DynamicTree | Tree
) -> None:
    base = tiny_base("qwen2")
    options: dict[str, Any] = {"prefix_attention": prefix, "own_projection": own, "draft_ids": draft_ids}
    heads: Any = noisy(HydraHeads.for_base(base, num_layers=2, **options))
    session = HydraDrafter(heads, base, tree).start(rows(0.0, 0.0))
    states, lengths, roots = torch.randn(2, 7, 32), [6, 4], [11, 12]
    session.observe(BaseOutput(states), torch.zeros(2, 7, dtype=torch.long), [range(3), range(1)])
    session.observe(BaseOutput(states[:, 2:]), torch.zeros(2, 5, dtype=torch.long), [[1, 2, 3], []])
    session.observe(BaseOutput(states[:, 1:]), torch.zeros(2, 6, dtype=torch.long), [[], [0, 1, 2]])
    draft = session.draft(roots)
    for row, drawn in enumerate(draft.trees):
        tokens = draft.tokens[row].tolist()
        assert tokens[0] == roots[row] and drawn.depth > 1
        assert isinstance(tree, DynamicTree) or drawn == tree
        for node, children in enumerate(drawn.children):
            path = [tokens[n] for n in drawn.path(node)[1:]]
            if len(path) == 3:
                assert not children
                continue
            best = by_hand(heads, base, states[row : row + 1, : lengths[row]], roots[row], path).argsort(
                descending=True
            )
            best = best if draft_ids is None else draft_ids[best]
            assert [tokens[child] for child in children] == [int(best[drawn.ranks[child]]) for child in children]


def test_a_long_prompt_is_read_in_chunks_and_rows_end(monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_base()
    heads = random_heads(base, "hydra-prefix")
    states = torch.randn(3, 30, 32)
    drafts = []
    for chunk in (512, 7):
        monkeypatch.setattr("decode.drafters.hydra.CHUNK", chunk)
        session = HydraDrafter(heads, base, RULE).start(rows(0.0, 0.0, 0.0))
        session.observe(BaseOutput(states), torch.zeros(3, 30, dtype=torch.long), [range(30), range(5), range(20)])
        session.draft([4, 5, 6])
        session.keep_rows([0, 2])
        session.observe(BaseOutput(states[1:, 25:]), torch.zeros(2, 5, dtype=torch.long), [[0, 3], [2]])
        drafts.append(session.draft([7, 8]))
    assert torch.equal(drafts[0].tokens, drafts[1].tokens) and drafts[0].trees == drafts[1].trees


def test_a_tree_deeper_than_the_heads_is_an_error_that_names_both() -> None:
    base = tiny_base()
    for tree in (Tree.chain(6), DynamicTree(5, 2, 8)):
        with pytest.raises(ConfigError, match="the tree is 5 deep, but there are 4 heads"):
            HydraDrafter(random_heads(base, "hydra"), base, tree)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_follow_the_bases_dtype_and_are_left_as_they_were(dtype: torch.dtype) -> None:
    base = Base.from_model(tiny_model().to(dtype))
    heads = HydraHeads.for_base(base, prefix_attention=True, draft_ids=DRAFT_IDS).float()
    before = {key: value.clone() for key, value in heads.state_dict().items()}
    session = HydraDrafter(heads, base, RULE).start(rows(0.0, 1.0))
    with pytest.raises(RuntimeError, match="before the base has seen a token"):
        session.draft([1, 2])
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    session.observe(base.forward(ids), ids, [range(3), range(3)])
    draft = session.draft([8, 9])
    assert draft.laws is not None and draft.laws[0] is None and draft.laws[1] is not None
    for row, tree in enumerate(draft.trees):
        assert set(draft.tokens[row, 1 : tree.size].tolist()) <= set(DRAFT_IDS.tolist())
    assert all(torch.equal(value, before[key]) for key, value in heads.state_dict().items())


def test_heads_are_loaded_with_their_static_tree_or_a_dynamic_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode.profiles.cache_dir", lambda: tmp_path / "cache")
    base = tiny_base()
    heads = HydraHeads.for_base(base, num_heads=3)
    heads.save_pretrained(tmp_path / "static", extras={"tree.json": json.dumps({"tree": STATIC.to_dict()})})
    heads.save_pretrained(tmp_path / "plain")
    loaded: Any = load_drafter(tmp_path / "static", base)
    assert isinstance(loaded, HydraDrafter) and loaded.choice.likeliest == loaded.choice.drawn == STATIC
    plain: Any = load_drafter(tmp_path / "plain", base)
    assert plain.choice.likeliest.depth == 3, "no deeper than there are heads"
    assert plain.choice.drawn.depth <= 3


def test_overfitted_heads_accept_the_full_depth() -> None:
    base = tiny_base()
    base.eos_token_ids = ()
    prompt = [5, 17, 40, 8, 61, 33, 12, 70, 21]
    ids = torch.tensor([prompt])
    for _ in range(28):
        ids = torch.cat((ids, base.model(ids).logits[:, -1:].argmax(-1)), dim=1)
    truth = ids[0, len(prompt) :].tolist()
    states = base.forward(ids).last_hidden_state[0]
    heads = HydraHeads.for_base(base, num_heads=3).train()
    optimizer = torch.optim.Adam(heads.parameters(), lr=0.02)
    start, end = len(prompt) - 1, ids.shape[1] - 4
    following = torch.stack([base.embed(ids[0, start + 1 + i : end + 1 + i]) for i in range(3)], dim=1)
    for _ in range(300):
        logits = heads.head_logits(heads(states[start:end], following), base)
        loss: Any = sum(
            torch.nn.functional.cross_entropy(logits[i], ids[0, start + 2 + i : end + 2 + i]) for i in range(3)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for tree in (Tree.chain(4), DynamicTree(3, 2, 7)):
        decoder = Decoder(base, HydraDrafter(heads.eval(), base, tree), guard=None)
        result = decoder.generate(prompt, GenerationSettings(max_new_tokens=21))
        assert result.token_ids == truth[:21] and max(truth) < VOCAB
        assert result.stats.acceptance_histogram == [0, 0, 0, 5]
