"""The optimizers of a run: AdamW for all parameters, or Muon for the matrices and AdamW for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from train.config import OptimizerConfig
    from train.trainer import HeadsTrainer


def make_optimizers(trainer: HeadsTrainer, settings: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """One or two, which together train every parameter.

    With `muon`, the weight of every linear layer but the vocabulary projections goes to Muon (Jordan et al. 2024),
    updates scaled to the root mean square of AdamW's (Liu et al. 2025, "Muon is Scalable for LLM Training",
    equation 4); norms, biases and projections go to AdamW at `adamw_learning_rate`.
    """
    matrices = hidden_matrices(trainer) if settings.name == "muon" else []
    chosen = {id(p) for p in matrices}
    others = [p for p in trainer.parameters() if id(p) not in chosen]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(
            torch.optim.Muon(
                matrices,
                lr=settings.learning_rate,
                weight_decay=settings.weight_decay,
                momentum=settings.momentum,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    if others:
        rate = settings.learning_rate if settings.name == "adamw" else settings.adamw_learning_rate
        betas = (settings.beta1, settings.beta2)
        optimizers.append(
            torch.optim.AdamW(others, lr=rate, betas=betas, weight_decay=settings.weight_decay, fused=True)
        )
    return optimizers


def hidden_matrices(trainer: HeadsTrainer) -> list[nn.Parameter]:
    """Weights of linear layers between hidden states: all but the vocabulary projections."""
    weights = {id(module.weight) for module in trainer.modules() if isinstance(module, nn.Linear)}
    projections = {id(p) for p in trainer.own_parameters}
    return [p for p in trainer.parameters() if id(p) in weights - projections]
