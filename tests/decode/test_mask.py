"""The running mask is the mask made anew, entry by entry, whatever has happened to the cache between two rounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.cache import TreeCache
from decode.drafters.medusa import MedusaDrafter
from decode.engine import Decoder
from decode.mask import RunningMask
from decode.settings import GenerationSettings
from decode.tree import Tree
from medusa_heads.attention import FOLDED, fold_mask
from medusa_heads.base import Base
from medusa_heads.loading import load
from medusa_heads.medusa import MedusaHeads
from tests.conftest import tiny_base, tiny_model, tiny_tokenizer

TREES = (Tree.chain(1), Tree.chain(3), Tree((-1, 0, 0, 1, 1, 2), (0, 0, 1, 0, 1, 0)), Tree.chain(9))
CPU = torch.device("cpu")

steps = st.lists(
    st.tuples(
        st.integers(0, 3),  # which tree
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)),  # tokens that each row keeps
        st.sampled_from(["", "", "", "truncate", "drop"]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(steps, st.integers(1, 3), st.integers(1, 30))
def test_it_equals_the_mask_made_anew(rounds: list[tuple[int, tuple[int, ...], str]], groups: int, slots: int) -> None:
    cache = TreeCache(1, batch_size=3, capacity=slots)
    mask = RunningMask(cache, groups, torch.bfloat16, CPU)
    cache.lengths = [4, 2, 1]
    for number, kept, also in rounds:
        ancestors = TREES[number].ancestor_mask
        if number == 2:  # a tree for each row
            ancestors = torch.stack([ancestors.roll(row, 0) | torch.eye(6, dtype=torch.bool) for row in range(3)])
            ancestors = ancestors[: len(cache.lengths)]
        expected = fold_mask(cache.visible(ancestors)[:, None], groups, torch.bfloat16)
        assert torch.equal(mask.over(ancestors), expected)
        cache.lengths = [n + min(k, len(ancestors)) for n, k in zip(cache.lengths, kept, strict=False)]
        if also == "truncate":
            cache.truncate(cache.lengths[0] // 2)
        elif also == "drop" and len(cache.lengths) > 1:
            mask.keep_rows([len(cache.lengths) - 1, 0])
            cache.lengths = [cache.lengths[-1], cache.lengths[0]]


def test_a_round_touches_few_columns_of_a_long_text() -> None:
    cache = TreeCache(1, capacity=4096)
    cache.lengths = [3000]
    mask = RunningMask(cache, 1, torch.float32, CPU)
    buffer = mask.over(TREES[2].ancestor_mask)._base
    assert buffer is not None
    buffer[:, :, :, :3000] = 7.0  # what a round has no business with
    cache.lengths = [3003]
    after = mask.over(TREES[1].ancestor_mask)
    assert after._base is buffer and (after[..., :3000] == 7.0).all() and (after[..., 3000:3003] == 0.0).all()


@pytest.fixture
def folded(tmp_path: Any) -> Base:
    tiny_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return load(str(tmp_path), dtype="float32")


def test_the_engine_decodes_with_it(folded: Base) -> None:
    assert folded.config._attn_implementation == FOLDED and folded.query_groups > 1
    assert RunningMask.for_base(folded, TreeCache(1)) is not None
    assert RunningMask.for_base(tiny_base("gemma3"), TreeCache(1)) is None, "windows move"
    torch.manual_seed(0)
    heads = MedusaHeads.for_base(folded, num_heads=2, num_layers=1)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.3)
    prompts = [[5, 17, 40, 8], [61, 33], [12, 70, 21, 4, 9]]
    request = GenerationSettings(40, eos_token_ids=())
    drafter = MedusaDrafter(heads, folded, Tree.from_rank_paths([(0,), (1,), (2,), (0, 0), (1, 0)]))
    together = Decoder(folded, drafter, guard=None).generate_batch(prompts, request)
    unfolded = Base.from_model(tiny_model("llama"), tiny_tokenizer())
    for prompt, result in zip(prompts, together, strict=True):
        assert result.token_ids == Decoder(unfolded).generate(prompt, request).token_ids
