"""What cannot be decoded by trees is refused with the reason; what can is checked once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, BertConfig, BertLMHeadModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from decode import support
from decode.engine import Decoder
from decode.settings import GenerationSettings
from decode.support import check_tree_support
from medusa_heads.base import Base
from medusa_heads.errors import UnsupportedModelError
from tests.conftest import FAMILIES, VOCAB, tiny_base, tiny_model


def with_attention(name: str, attention: Any) -> Base:
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)
    model = tiny_model()
    model.set_attn_implementation(name)
    return Base.from_model(model)


def test_an_attention_that_ignores_masks_is_refused() -> None:
    def causal_only(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        length, slots = query.shape[2], key.shape[2]
        causal = torch.ones(length, slots, dtype=torch.bool).tril(slots - length)
        kwargs.pop("is_causal", None)
        return sdpa_attention_forward(module, query, key, value, causal[None, None], **kwargs)

    base = with_attention("causal_only_for_tests", causal_only)
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM scores a tree .* ignores the tree's mask"):
        check_tree_support(base)
    with pytest.raises(UnsupportedModelError, match="ignores the tree's mask"):
        Decoder(base).generate([5, 6], GenerationSettings(max_new_tokens=2))


def test_a_model_that_ignores_positions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_base()
    forward = base.forward

    def by_slot(ids: Tensor, **options: Any) -> Any:
        if options.get("attention_mask") is not None:
            options["position_ids"] = 6 + torch.arange(ids.shape[1])[None]
        return forward(ids, **options)

    monkeypatch.setattr(base, "forward", by_slot)
    with pytest.raises(UnsupportedModelError, match="mask or positions"):
        check_tree_support(base)


def test_a_model_that_changes_its_logits_in_an_unknown_way_is_refused() -> None:
    model = tiny_model()
    inner = model.forward
    base = Base.from_model(model)

    def shifted(*args: Any, **kwargs: Any) -> Any:
        out = inner(*args, **kwargs)
        out.logits = out.logits * 1.5
        return out

    model.forward = shifted
    with pytest.raises(UnsupportedModelError, match="does more to its logits"):
        check_tree_support(base)


def test_a_model_whose_pass_over_a_tree_fails_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_base()

    def forward(*args: Any, **kwargs: Any) -> Any:
        raise TypeError("unexpected keyword argument")

    monkeypatch.setattr(base, "forward", forward)
    with pytest.raises(UnsupportedModelError, match=r"cannot be run over a tree .*TypeError: unexpected keyword"):
        check_tree_support(base)


def test_an_encoder_is_refused() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    with pytest.raises(UnsupportedModelError):
        check_tree_support(Base.from_model(BertLMHeadModel(BertConfig(vocab_size=VOCAB, **sizes)).eval()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_in_both_precisions(family: str, dtype: torch.dtype) -> None:
    check_tree_support(Base.from_model(tiny_model(family).to(dtype)))


def test_a_vocabulary_smaller_than_the_probe_passes() -> None:
    model = tiny_model()
    model.resize_token_embeddings(3)
    check_tree_support(Base.from_model(model))


def test_a_base_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_base()
    check_tree_support(base)
    monkeypatch.setattr(support, "TreeCache", None)
    check_tree_support(base)
