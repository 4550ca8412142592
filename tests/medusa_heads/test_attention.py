"""Folded attention equals transformers' own, which repeats the keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from medusa_heads import attention
from medusa_heads.attention import FOLDED, fold_mask, folded_attention, register
from medusa_heads.base import Base
from tests.conftest import tiny_model

KEY_HEADS, DIM, SLOTS = 2, 8, 11


class Layer(nn.Module):
    """What transformers' attention asks of the module that calls it."""

    is_causal = True

    def __init__(self, groups: int):
        super().__init__()
        self.num_key_value_groups = groups


def inputs(groups: int, length: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(groups * 10 + length)
    query = torch.randn(batch, KEY_HEADS * groups, length, DIM)
    return query, torch.randn(batch, KEY_HEADS, SLOTS, DIM), torch.randn(batch, KEY_HEADS, SLOTS, DIM)


def masks(length: int, batch: int = 2) -> Tensor:
    """A different random mask a row; each token sees at least its own slot."""
    visible = torch.rand(batch, 1, length, SLOTS) < 0.5
    visible[..., torch.arange(length), SLOTS - length + torch.arange(length)] = True
    return visible


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("length", range(1, 8))
def test_equals_attention_with_repeated_keys(groups: int, length: int) -> None:
    query, key, value = inputs(groups, length)
    visible = masks(length)
    bias = torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min)
    for mask in (visible, bias):
        for scaling in (None, 0.2):
            ours, weights = folded_attention(Layer(groups), query, key, value, mask, scaling=scaling)
            theirs, _ = sdpa_attention_forward(Layer(groups), query, key, value, mask, scaling=scaling)
            assert ours.shape == theirs.shape == (2, length, KEY_HEADS * groups, DIM) and weights is None
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_mask_makes_a_difference() -> None:
    """Guards the comparison above: masks are not ignored on both sides."""
    query, key, value = inputs(2, 3)
    first, second = masks(3), masks(3)
    assert not torch.allclose(
        folded_attention(Layer(2), query, key, value, first)[0],
        folded_attention(Layer(2), query, key, value, second)[0],
    )


@pytest.mark.parametrize("groups", [1, 2])
def test_without_a_mask_transformers_own_causal_path_is_taken(groups: int) -> None:
    query, _, _ = inputs(groups, SLOTS)
    _, key, value = inputs(groups, SLOTS)
    ours, _ = folded_attention(Layer(groups), query, key, value, None)
    theirs, _ = sdpa_attention_forward(Layer(groups), query, key, value, None)
    assert torch.equal(ours, theirs)


def test_keys_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The point of it: the keys reach the kernel as they lie in the cache."""
    query, key, value = inputs(4, 3)
    seen: list[Tensor] = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def spy(*args: Tensor, **kwargs: object) -> Tensor:
        seen.extend(args)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(attention.torch.nn.functional, "scaled_dot_product_attention", spy)
    folded_attention(Layer(4), query, key, value, masks(3))
    assert seen[1].data_ptr() == key.data_ptr() and seen[1].shape == key.shape
    assert seen[2].data_ptr() == value.data_ptr() and seen[2].shape == value.shape


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral-window", "gemma3"])
def test_a_model_says_the_same_through_it(family: str) -> None:
    register()
    register()
    ids = torch.tensor([[5, 17, 40, 8, 61, 33, 9, 9, 3]])
    padding = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]])
    plain, folded = tiny_model(family), tiny_model(family)
    folded.set_attn_implementation(FOLDED)
    assert folded.config._attn_implementation == FOLDED
    plain, folded = Base.from_model(plain), Base.from_model(folded)
    torch.testing.assert_close(
        folded.forward(ids).last_hidden_state, plain.forward(ids).last_hidden_state, rtol=1e-4, atol=1e-4
    )
    ours = folded.forward(ids, attention_mask=padding).last_hidden_state[:, 2:]
    theirs = plain.forward(ids, attention_mask=padding).last_hidden_state[:, 2:]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 3, 7])
def test_a_mask_folded_once_a_pass_does_the_same_in_every_layer(groups: int, length: int) -> None:
    """Also in a layer with another number of query groups than the mask was folded for."""
    query, key, value = inputs(groups, length)
    visible = masks(length)
    theirs, _ = sdpa_attention_forward(Layer(groups), query, key, value, visible)
    for folded_for in (groups, 2, 3):
        ours, _ = folded_attention(Layer(groups), query, key, value, fold_mask(visible, folded_for, torch.float32))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_folded_mask_takes_the_queries_dtype() -> None:
    query, key, value = (x.double() for x in inputs(2, 3))
    visible = masks(3)
    ours, _ = folded_attention(Layer(2), query, key, value, fold_mask(visible, 2, torch.float32))
    theirs, _ = sdpa_attention_forward(Layer(2), query, key, value, visible)
    torch.testing.assert_close(ours, theirs)
