"""The engine on a base as it is loaded for the CPU (packed, joined, folded) gives what the bare model gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decode.drafters.medusa import MedusaDrafter
from decode.engine import Decoder, likeliest
from decode.settings import GenerationSettings
from decode.tree import search_tree
from medusa_heads.attention import FOLDED
from medusa_heads.base import Base
from medusa_heads.medusa import MedusaHeads
from medusa_heads.prepack import PackedSibling, can_prepack
from tests.conftest import tiny_base, tiny_model, tiny_tokenizer

TREE = search_tree([[0.5, 0.3, 0.2], [0.4, 0.3], [0.4, 0.2]], 14)
PROMPT = [5, 17, 40, 8, 61, 33, 12, 70, 21]

needs_packing = pytest.mark.skipif(
    not can_prepack(torch.device("cpu"), torch.float32), reason="this torch cannot pack for this CPU"
)


def as_loaded(family: str, path: Any) -> Base:
    model: Any = tiny_model(family)
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return Base.load(str(path), dtype="float32")


@needs_packing
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral-window", "gemma3", "phi", "gpt2"])
def test_greedy_text_is_the_bare_models(family: str, tmp_path: Any) -> None:
    base, bare = as_loaded(family, tmp_path), tiny_base(family)
    if family in ("llama", "qwen2", "qwen3", "gemma3"):
        assert base.config._attn_implementation == FOLDED
        assert any(type(module) is PackedSibling for module in base.model.modules())
    torch.manual_seed(0)
    heads = MedusaHeads.for_base(base, num_heads=3, num_layers=1)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.02)
    settings = GenerationSettings(max_new_tokens=24, eos_token_ids=())
    expected = Decoder(bare).generate(PROMPT, settings).token_ids
    assert Decoder(base).generate(PROMPT, settings).token_ids == expected
    assert Decoder(base, MedusaDrafter(heads.eval(), base, TREE)).generate(PROMPT, settings).token_ids == expected


@needs_packing
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_states_of_a_tree_are_the_bare_models(family: str, tmp_path: Any) -> None:
    """To 1e-4 of their size in float32, the rows of a batch at different lengths."""
    from decode.cache import TreeCache

    states = []
    for base in (as_loaded(family, tmp_path), tiny_base(family)):
        cache = TreeCache(base.num_layers, batch_size=2, capacity=64)
        ids = torch.tensor([PROMPT, PROMPT[::-1]])
        base.forward(ids, position_ids=torch.arange(9).expand(2, 9), cache=cache)
        cache.commit([range(9), range(6)])
        positions = cache.positions(torch.tensor(TREE.depths))
        output = base.forward(
            torch.arange(2 * TREE.size).view(2, -1),
            position_ids=positions,
            attention_mask=cache.visible(TREE.ancestor_mask),
            key_positions=cache.key_positions(positions),
            cache=cache,
        )
        states.append(output.last_hidden_state)
    assert (states[0] - states[1]).abs().max() < 1e-4 * states[1].abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_likeliest_token_is_argmaxs_ties_included(dtype: torch.dtype) -> None:
    logits = torch.randint(-3, 4, (50, 400), generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(likeliest(logits), logits.argmax(-1))
    first = [row.index(max(row)) for row in logits.tolist()]
    assert likeliest(logits).tolist() == first
