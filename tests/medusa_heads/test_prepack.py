"""Packed linear layers are the same function of the same numbers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from medusa_heads.base import Base
from medusa_heads.prepack import PackedLinear, PackedSibling, can_prepack, pack_linears, pack_siblings
from tests.conftest import VOCAB, tiny_base, tiny_model
from tests.medusa_heads.test_base import perturb_vectors

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
    base, packed = (Base.from_model(perturb_vectors(tiny_model(family))) for _ in range(2))
    linears = sum(type(m) in (nn.Linear, Conv1D) for m in base.model.modules())
    assert packed.prepack() == linears > 4
    states, expected = packed.forward(IDS).last_hidden_state, base.forward(IDS).last_hidden_state
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(packed.project(states), base.model(IDS).logits, rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(packed.model(IDS).logits, base.model(IDS).logits, rtol=1e-4, atol=2e-4)
    assert torch.equal(packed.projection_weight, base.projection_weight)
    assert torch.equal(packed.model.get_output_embeddings().weight, base.projection_weight)
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


SIBLINGS = {
    "llama": {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"},
    "llama-untied-biased": {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"},
    "qwen2": {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"},
    "phi": {"q_proj", "k_proj", "v_proj"},
    "gpt_neox": set(),
    "gpt2": set(),
}


@needs_packing
@pytest.mark.parametrize("family", SIBLINGS)
def test_layers_with_one_input_become_one_product(family: str) -> None:
    base = tiny_base(family)
    base.prepack()
    found = {name.rpartition(".")[2] for name, m in base.model.named_modules() if type(m) is PackedSibling}
    assert found == SIBLINGS[family]


class Block(nn.Module):
    """Layers that look alike and do not all share an input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 4, bias=False), nn.Linear(6, 3), nn.Linear(6, 4)
        self.twice, self.late = nn.Linear(6, 6), nn.Linear(6, 6)
        self.again = self.twice

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.q(x), self.k(x), self.v(x * 2.0), self.twice(self.again(x))]
        x.add_(1.0)
        return torch.cat([*parts, self.late(x)], dim=-1)


@needs_packing
def test_only_layers_that_see_the_same_unchanged_tensor_are_joined() -> None:
    torch.manual_seed(0)
    block = Block().requires_grad_(False)
    x = torch.randn(2, 3, 6)
    expected = block(x.clone())
    assert pack_siblings(block, lambda: block(x.clone())) == 2
    assert [name for name, m in block.named_modules() if type(m) is PackedSibling] == ["q", "k"]
    torch.testing.assert_close(block(x.clone()), expected, rtol=1e-5, atol=1e-5)


@needs_packing
def test_joined_layers_may_be_called_in_any_order_and_number() -> None:
    torch.manual_seed(0)
    block = Block().requires_grad_(False)
    q, k = block.q, block.k
    pack_siblings(block, lambda: block(torch.randn(1, 6)))
    x, y = torch.randn(2, 6), torch.randn(5, 6)
    for layers in ("kq", "qq", "qkqk", "kkq"):
        for layer in layers:
            for given in (x, y, x):
                ours = getattr(block, layer)(given)
                torch.testing.assert_close(ours, {"q": q, "k": k}[layer](given), rtol=1e-5, atol=1e-5)


@needs_packing
def test_joined_layers_keep_no_tensor_once_all_were_called() -> None:
    block = Block().requires_grad_(False)
    pack_siblings(block, lambda: block(torch.randn(1, 6)))
    x = torch.randn(2, 6)
    block.q(x)
    assert block.q.siblings._held is not None
    block.k(x)
    assert block.q.siblings._held is None


@needs_packing
def test_joined_layers_serve_several_threads() -> None:
    torch.manual_seed(0)
    block = Block().requires_grad_(False)
    q, k = block.q, block.k
    pack_siblings(block, lambda: block(torch.randn(1, 6)))
    inputs = [torch.randn(3, 6) for _ in range(64)]

    def both(x: Tensor) -> bool:
        return torch.allclose(block.q(x), q(x), atol=1e-5) and torch.allclose(block.k(x), k(x), atol=1e-5)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(both, inputs))
