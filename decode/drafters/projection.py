"""The base's vocabulary projection as heads draft from it: all of its rows, or chosen ones, packed once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from medusa_heads.prepack import PackedLinear, can_prepack

if TYPE_CHECKING:
    from medusa_heads.base import Base


def draft_projection(base: Base, ids: Tensor | None) -> nn.Module:
    """Logits over the vocabulary rows `ids` (R,), over all of them for None: (..., h) → (..., R)."""
    if ids is None:
        return _Whole(base)
    ids = ids.to(base.device)
    bias = base.projection_bias
    return _Rows(base, base.projection_weight[ids], None if bias is None else bias[ids])


class _Rows(nn.Module):
    """Chosen rows of the base's projection: (..., h) → (..., rows)."""

    def __init__(self, base: Base, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self._rescale = base.rescale
        self.linear: nn.Module
        if can_prepack(weight.device, weight.dtype):
            self.linear = PackedLinear(weight, bias)
        else:
            self.linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
            self.linear.weight = nn.Parameter(weight, requires_grad=False)
            if bias is not None:
                self.linear.bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, states: Tensor) -> Tensor:
        return self._rescale(self.linear(states))


class _Whole(nn.Module):
    """The base's whole projection."""

    def __init__(self, base: Base):
        super().__init__()
        self._project = base.project

    def forward(self, states: Tensor) -> Tensor:
        return self._project(states)
