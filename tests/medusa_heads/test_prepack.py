"""Packed linear layers are the same function of the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from medusa_heads.base import Base
from medusa_heads.prepack import PackedLinear, can_prepack, pack_linears
from tests.conftest import VOCAB, tiny_base, tiny_model

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 17, 40, 8, 61, 33]])

needs_packing = pytest.mark.skipif(not can_prepack(CPU, torch.float32), reason="this torch cannot pack for this CPU")
needs_bf16 = pytest.mark.skipif(not can_prepack(CPU, torch.bfloat16), reason="this CPU has no bfloat16 arithmetic")


def layer(bias: bool, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(48, 80, bias=bias).to(dtype).requires_grad_(False)


@needs_packing
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 48), (7, 48), (2, 5, 48), (3, 1, 48)])
def test_float32_equals_the_plain_layer(shape: tuple[int, ...], bias: bool) -> None:
    plain = layer(bias)
    packed = PackedLinear(plain.weight, plain.bias)
    x = torch.randn(shape)
    torch.testing.assert_close(packed(x), plain(x), rtol=1e-5, atol=1e-5)
    assert packed(x).dtype == torch.float32


@needs_bf16
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 9])
def test_bfloat16_stays_within_one_rounding_of_the_exact_product(rows: int, bias: bool) -> None:
    plain = layer(bias, torch.bfloat16)
    packed = PackedLinear(plain.weight, plain.bias)
    x = torch.randn(rows, 48).to(torch.bfloat16)
    exact = nn.functional.linear(x.double(), plain.weight.double(), plain.bias.double() if bias else None)
    out = packed(x)
    assert out.dtype == torch.bfloat16
    # Half a unit in the last of bfloat16's 8 bits, and float32 sums of 48 products.
    assert ((out.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5).all()


@needs_packing
def test_a_non_contiguous_input_and_weight() -> None:
    weight = torch.randn(48, 80).T
    x = torch.randn(48, 6).T
    torch.testing.assert_close(PackedLinear(weight, None)(x), x @ weight.T, rtol=1e-5, atol=1e-5)


@needs_packing
def test_the_model_may_go_on_changing_a_weight_that_was_packed() -> None:
    plain = layer(False)
    packed = PackedLinear(plain.weight, None)
    x = torch.randn(2, 48)
    before = packed(x)
    plain.weight.zero_()
    assert torch.equal(packed(x), before) and before.abs().max() > 0.1


class Odd(nn.Linear):
    """A subclass, as quantised and adapted layers are."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1.0


@needs_packing
def test_only_exact_linear_layers_are_packed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Odd(8, 8), Conv1D(6, 8), nn.LayerNorm(6)).requires_grad_(False)
    x = torch.randn(3, 8)
    expected = model(x)
    assert pack_linears(model, keep=None) == 2
    assert [type(m) for m in model] == [PackedLinear, Odd, PackedLinear, nn.LayerNorm]
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    assert pack_linears(model, keep=None) == 0, "a second packing finds nothing"


def test_what_cannot_be_packed_is_left_alone() -> None:
    assert not can_prepack(torch.device("cuda"), torch.float32)
    assert not can_prepack(CPU, torch.float16) and not can_prepack(CPU, torch.float64)
    model = nn.Sequential(nn.Linear(8, 8, dtype=torch.float64))
    assert pack_linears(model, keep=None) == 0 and type(model[0]) is nn.Linear
    base = Base.from_model(tiny_model().half())
    assert base.prepack() == 0


@needs_packing
@pytest.mark.parametrize("family", ["llama", "llama-untied-biased", "gpt2", "phi", "gemma2", "gpt_neox"])
def test_a_packed_base_says_the_same(family: str) -> None:
    base, packed = tiny_base(family), tiny_base(family)
    linears = sum(type(m) in (nn.Linear, Conv1D) for m in base.model.modules())
    assert packed.prepack() == linears > 4
    states, expected = packed.forward(IDS).last_hidden_state, base.forward(IDS).last_hidden_state
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(packed.project(states), base.model(IDS).logits, rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(packed.model(IDS).logits, base.model(IDS).logits, rtol=1e-4, atol=2e-4)
    assert torch.equal(packed.projection_weight, base.projection_weight)
    assert torch.equal(packed.embed(IDS), base.embed(IDS))
    assert (packed.device, packed.dtype, packed.vocab_size) == (base.device, base.dtype, VOCAB)
    assert packed.num_parameters == base.num_parameters


@needs_packing
def test_gradients_reach_the_heads_through_the_projections_raw_weight() -> None:
    base = tiny_base("llama")
    base.prepack()
    states = base.forward(IDS).last_hidden_state.clone().requires_grad_(True)
    logits = nn.functional.linear(states, base.projection_weight)
    logits.logsumexp(-1).sum().backward()
    expected = torch.softmax(logits.detach(), -1) @ base.projection_weight
    torch.testing.assert_close(states.grad, expected, rtol=1e-4, atol=1e-5)
    rows = states.detach().requires_grad_(True)
    base.project_rows(rows, torch.tensor([3, 4])).sum().backward()
    torch.testing.assert_close(rows.grad[0, 0], base.projection_weight[3] + base.projection_weight[4])
