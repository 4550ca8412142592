"""EAGLE and Hydra heads for tests: random ones that guess about as well as the base repeats itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from medusa_heads.base import Base
from medusa_heads.eagle import EagleHeads
from medusa_heads.hydra import HydraHeads

KINDS: dict[str, dict[str, Any]] = {
    "eagle1": {"version": 1},
    "eagle3": {"version": 3},
    "hydra": {"num_heads": 4, "num_layers": 2},
    "hydra-prefix": {"num_heads": 4, "prefix_attention": True},
}


def noisy(heads: nn.Module, scale: float = 0.1, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return heads.eval()


def random_heads(base: Base, kind: str, *, scale: float = 0.1, seed: int = 0, draft_ids: Tensor | None = None) -> Any:
    family = EagleHeads if kind.startswith("eagle") else HydraHeads
    return noisy(family.for_base(base, draft_ids=draft_ids, **KINDS[kind]), scale, seed)
