"""Linear layers packed once for the CPU's matrix kernels.

`torch.nn.functional.linear` hands oneDNN a row-major weight, which is reordered into the kernel's blocked layout at
every call; for the few rows of a decoding step that costs more than the product itself. Here the reordering is done
once. The product is the same function of the same numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


class PackedLinear(nn.Module):
    """`y = x Wᵀ + b` with W in oneDNN's blocked layout. Inference only; holds no parameters.

    `keep` is the original weight where somebody else still reads it (a tied embedding): it takes no memory of its own.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, keep: Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
        self.bias = None if bias is None else bias.detach()
        self.weight = keep

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def can_prepack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build of torch packs weights of `dtype` on `device`."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return False
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linears(model: nn.Module, keep: nn.Module | None) -> int:
    """Replaces every plain linear layer of `model` by its packed form, in place. Returns how many were replaced.

    Only exact `nn.Linear` and `Conv1D` modules are taken: a subclass (quantised, adapted) has a forward of its own.
    `keep` is the module whose weight stays readable, the vocabulary projection.
    """
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                weight = child.weight
            elif type(child) is Conv1D:
                weight = child.weight.T
            else:
                continue
            if not can_prepack(weight.device, weight.dtype):
                continue
            packed = PackedLinear(weight, child.bias, weight if child is keep else None)
            setattr(parent, name, packed)
            replaced += 1
    return replaced
