"""RMS norms in one call.

Most families of transformers carry their own `…RMSNorm`, eight small operations in Python. torch has the same function
as one. A module is replaced only where both give the same on probes in its own dtype; a family whose norm does
something else (adds one to its weight, scales in another order) keeps its own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

EPSILON_NAMES = ("variance_epsilon", "eps", "epsilon")


class FusedRMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps), rounded to x's dtype, times the weight. Keeps the module's own parameter."""

    def __init__(self, weight: nn.Parameter, eps: float):
        super().__init__()
        self.weight = weight
        self.size = weight.shape[0]
        self.doubled = (2 * self.size,)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32 or torch.compiler.is_compiling():
            return torch.rms_norm(x, (self.size,), None, self.eps) * self.weight
        # The layer norm of (x, -x), whose mean is 0 and whose variance is the mean of x²: on a CPU one kernel, where
        # torch's RMS norm is eight. It sums in float32, whose last bits this order of summing changes.
        return (
            torch.layer_norm(torch.cat((x, -x), -1), self.doubled, None, None, self.eps)[..., : self.size] * self.weight
        )

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}"


def fuse_norms(model: nn.Module) -> int:
    """Replaces the RMS norms of `model` that are exactly that, in place. Returns how many."""
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            fused = _fused(child)
            if fused is not None and _agree(child, fused):
                setattr(parent, name, fused)
                replaced += 1
    return replaced


def _fused(module: nn.Module) -> FusedRMSNorm | None:
    """The candidate for a module that calls itself an RMS norm and holds a weight and an epsilon, nothing else."""
    if not type(module).__name__.endswith("RMSNorm") or isinstance(module, FusedRMSNorm):
        return None
    weight = dict(module.named_parameters()).get("weight")
    epsilons = [getattr(module, name) for name in EPSILON_NAMES if isinstance(getattr(module, name, None), float)]
    tensors = len(list(module.parameters())) + len(list(module.buffers()))
    if weight is None or weight.dim() != 1 or tensors != 1 or len(epsilons) != 1:
        return None
    return FusedRMSNorm(weight, epsilons[0]).train(module.training)


@torch.no_grad()
def _agree(module: nn.Module, fused: FusedRMSNorm) -> bool:
    """Whether both give the same within one rounding; small inputs show the epsilon."""
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-3, 1.0, 50.0):
        x = (scale * torch.randn(2, 3, fused.size, generator=generator)).to(fused.weight.device, fused.weight.dtype)
        theirs, ours = module(x), fused(x)
        if ours.dtype != theirs.dtype:
            return False
        rounding = torch.finfo(theirs.dtype).eps
        if not torch.allclose(ours.float(), theirs.float(), rtol=rounding, atol=rounding * 1e-3):
            return False
    return True
