"""Drafters of every kind for tests, by name, and what their texts are compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from decode.drafters.adaptive import Reach
from decode.drafters.early_exit import EarlyExitDrafter
from decode.drafters.lookup import LookupDrafter
from decode.drafters.model import ModelDrafter
from medusa_heads.base import Base
from tests.conftest import tiny_tokenizer

PROMPT = [5, 17, 40, 8, 61, 33, 12, 70, 21]
REPETITIVE = [5, 17, 40, 8, 61, 5, 17, 40, 8, 33, 5, 17]
CHAIN = Reach(depth=4, pass_cost=0.0, node_floor=0.0)
BUSHY = Reach(depth=3, width=3, nodes=9, pass_cost=0.0, node_floor=0.0)


def relative(base: Base, noise: float = 0.03, seed: int = 1) -> Base:
    """A draft model that often agrees with the base: the base, with noise on its weights."""
    model = copy.deepcopy(base.model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.add_(noise * parameter.std() * torch.randn_like(parameter))
    return Base.from_model(model, tiny_tokenizer(), name="relative")


DRAFTERS: dict[str, Callable[[Base], Any]] = {
    "lookup": lambda base: LookupDrafter(base, least=0.0),
    "model-chain": lambda base: ModelDrafter(relative(base), base, reach=CHAIN),
    "model-tree": lambda base: ModelDrafter(relative(base), base, reach=BUSHY),
    "exit-chain": lambda base: EarlyExitDrafter(base, 1, reach=CHAIN),
    "exit-tree": lambda base: EarlyExitDrafter(base, 1, reach=BUSHY),
}


def greedy_by_hand(base: Base, prompt: list[int], count: int) -> list[int]:
    """The base's own greedy text, by whole forward passes without any cache."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(base.model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]
