"""Linear layers packed once for the CPU's matrix kernels.

`torch.nn.functional.linear` hands oneDNN a row-major weight, which is reordered into the kernel's blocked layout at
every call; for the few rows of a decoding step that costs more than the product itself. Here the reordering is done
once. The product is the same function of the same numbers.

Layers that are given the same input (query, key and value; gate and up) become one product, whose parts they hand out.
Which ones those are is seen in a pass of the model, not read off names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")


def _packed_linear_shape(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], packed.shape[0]))


# What a compiler sees of a packed layer: one operation that it calls and does not look into. torch's own, whose weight
# Inductor expects to be a constant of its own packing, it refuses.
_LIBRARY = torch.library.Library("medusa_heads", "DEF")
_LIBRARY.define("packed_linear(Tensor x, Tensor packed, Tensor? bias) -> Tensor")
_LIBRARY.impl("packed_linear", _packed_linear, "CPU")
_LIBRARY.impl("packed_linear", _packed_linear, "MkldnnCPU")
torch.library.register_fake("medusa_heads::packed_linear", _packed_linear_shape, lib=_LIBRARY)


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
        self._product = torch.ops.mkldnn._linear_pointwise.default  # the overload: not looked up at every call

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.ops.medusa_heads.packed_linear(x, self.packed, self.bias)
        return self._product(x, self.packed, self.bias, "none", [], "")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Siblings:
    """Linear layers that a model gives one and the same tensor, computed as one product when the first is called.

    Holds that tensor and the parts not yet asked for, until the last one is. A call with another tensor computes anew,
    so that any order of calls, and calls from several threads, give the right parts.
    """

    def __init__(self, linears: Sequence[nn.Linear]):
        self.sizes = [linear.out_features for linear in linears]
        bias = None
        if any(linear.bias is not None for linear in linears):
            bias = torch.cat(
                [
                    linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
                    for linear in linears
                ]
            )
        self.joint = PackedLinear(torch.cat([linear.weight for linear in linears]), bias)
        self._held: tuple[Tensor, list[Tensor | None]] | None = None

    def part(self, x: Tensor, index: int) -> Tensor:
        """Output of layer `index`: (..., in) → (..., its out)."""
        held = self._held
        own = held[1][index] if held is not None and held[0] is x else None
        if held is None or own is None:
            held = (x, list(self.joint.forward(x).split(self.sizes, dim=-1)))
            own = held[1][index]
            assert own is not None
        held[1][index] = None
        self._held = None if all(part is None for part in held[1]) else held
        return own


class PackedSibling(nn.Module):
    """One of several packed layers that share their input."""

    def __init__(self, siblings: Siblings, index: int, in_features: int):
        super().__init__()
        self.siblings = siblings
        self.index = index
        self.in_features, self.out_features = in_features, siblings.sizes[index]

    def forward(self, x: Tensor) -> Tensor:
        return self.siblings.part(x, self.index)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, of {len(self.siblings.sizes)}"


def packed_weights(model: nn.Module) -> list[Tensor]:
    """The packed weights among a model's layers."""
    layers: list[PackedLinear] = []
    for module in model.modules():
        if isinstance(module, PackedLinear):
            layers.append(module)
        elif isinstance(module, PackedSibling) and module.index == 0:
            layers.append(module.siblings.joint)
    return [layer.packed for layer in layers]


def can_prepack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build of torch packs weights of `dtype` on `device`."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return False
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def is_plain(weight: object) -> bool:
    """Whether a weight is numbers as they are. Quantised ones are of a class of their own, in a layer of one too, or
    (torchao) in an `nn.Linear`."""
    return type(weight) in (nn.Parameter, Tensor)


def pack_linears(model: nn.Module, keep: nn.Module | None) -> int:
    """Replaces every plain linear layer of `model` by its packed form, in place. Returns how many were replaced.

    Only exact `nn.Linear` and `Conv1D` modules are taken: a subclass (quantised, adapted) has a forward of its own. And
    only plain weights (`is_plain`).
    `keep` is the module whose weight stays readable, the vocabulary projection.
    """
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in (nn.Linear, Conv1D) and not is_plain(child.weight):
                continue
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


def pack_siblings(model: nn.Module, run: Callable[[], object]) -> int:
    """Packs the linear layers that share their input with others of the same module, in place. Returns how many.

    `run` is a pass of the model over any input.
    """
    replaced = 0
    for parent, names in _sharing_input(model, run):
        linears: list[nn.Linear] = [getattr(parent, name) for name in names]
        weights = [linear.weight for linear in linears]
        if len({(weight.device, weight.dtype) for weight in weights}) > 1:
            continue
        if not can_prepack(weights[0].device, weights[0].dtype):
            continue
        siblings = Siblings(linears)
        for index, (name, linear) in enumerate(zip(names, linears, strict=True)):
            setattr(parent, name, PackedSibling(siblings, index, linear.in_features))
        replaced += len(names)
    return replaced


def _sharing_input(model: nn.Module, run: Callable[[], object]) -> list[tuple[nn.Module, list[str]]]:
    """(module, names of its linear layers that were given the same tensor, unchanged between the calls).

    Layers that are called more than once in a pass, or belong to several modules, are left out.
    """
    places: dict[nn.Linear, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear and is_plain(child.weight):
                places.setdefault(child, []).append((parent, name))
    calls: dict[nn.Linear, list[tuple[Tensor, int]]] = {linear: [] for linear in places}

    def note(linear: Any, arguments: tuple[Any, ...]) -> None:
        x = arguments[0]
        calls[linear].append((x, 0 if x.is_inference() else x._version))

    handles = [linear.register_forward_pre_hook(note) for linear in places]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    groups: dict[tuple[int, int, int], tuple[nn.Module, list[str]]] = {}
    for linear, seen in calls.items():
        if len(seen) == 1 and len(places[linear]) == 1:
            (x, version), (parent, name) = seen[0], places[linear][0]
            groups.setdefault((id(parent), id(x), version), (parent, []))[1].append(name)
    return [(parent, names) for parent, names in groups.values() if len(names) > 1]
