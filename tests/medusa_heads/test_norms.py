"""RMS norms in one call: the same numbers, and only where they are the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from medusa_heads.norms import FusedRMSNorm, fuse_norms
from tests.conftest import tiny_base, tiny_model

IDS = torch.tensor([[5, 17, 40, 8, 61, 33]])


def randomized(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A tiny model whose norms' weights are not all one."""
    model: nn.Module = tiny_model(family)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.5 * torch.rand(parameter.shape))
    return model.to(dtype)


def norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral-window"])
def test_the_norms_of_these_families_are_replaced_and_nothing_changes(family: str, dtype: torch.dtype) -> None:
    model, fused = randomized(family, dtype), randomized(family, dtype)
    count = len(norms(model))
    assert fuse_norms(fused) == count >= 5
    assert sum(type(module) is FusedRMSNorm for module in fused.modules()) == count
    ours, theirs = fused(IDS).logits, model(IDS).logits
    assert (ours - theirs).abs().max() <= (0 if dtype == torch.float32 else 2**-7) * theirs.abs().max()
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in fused.named_parameters()] == names, "parameters keep their names"
    assert fuse_norms(fused) == 0, "a second time finds nothing"


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3", "gpt_neox", "phi"])
def test_norms_that_do_something_else_stay(family: str) -> None:
    """Gemma's adds one to its weight; the others have layer norms with a bias."""
    model = randomized(family)
    before = model(IDS).logits
    assert fuse_norms(model) == 0
    assert torch.equal(model(IDS).logits, before)


class LyingRMSNorm(nn.Module):
    """Has an RMS norm's name, weight and epsilon, and scales differently."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 0.7))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2 * self.eps)


def test_a_name_is_not_trusted_and_an_epsilon_is_seen() -> None:
    assert fuse_norms(nn.Sequential(LyingRMSNorm(1e-5))) == 0


def test_a_weights_change_is_followed() -> None:
    model = randomized("llama")
    fuse_norms(model)
    before = model(IDS).logits
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "input_layernorm" in name).mul_(2.0)
    assert not torch.allclose(model(IDS).logits, before)


def test_a_packed_bases_fingerprint_is_the_same() -> None:
    base, packed = tiny_base("qwen3"), tiny_base("qwen3")
    packed.prepack()
    assert packed.fingerprint() == base.fingerprint()
