"""Which optimizer trains what, and that a run with two of them learns, resumes and checkpoints like any other."""

from __future__ import annotations

import pytest
import torch

from medusa_heads.errors import ConfigError
from tests.conftest import tiny_base
from tests.train.helpers import tiny_config
from train.config import OptimizerConfig, TrainingConfig, build
from train.families import make_trainer
from train.optimizers import hidden_matrices, make_optimizers


def trainer_of(tmp_path, **heads):
    config = build(TrainingConfig, tiny_config(tmp_path, heads=heads))
    return make_trainer(config, tiny_base("llama"), [])


def groups(optimizers):
    return {type(o).__name__: [p for group in o.param_groups for p in group["params"]] for o in optimizers}


@pytest.mark.parametrize(
    "heads",
    [
        {"num_heads": 2, "num_layers": 2},
        {"num_heads": 2, "num_layers": 1, "own_projection": True},
        {"family": "hydra", "num_heads": 2, "num_layers": 1},
        {"family": "eagle", "version": 3},
        {"family": "eagle", "version": 1, "own_projection": True},
    ],
)
def test_every_parameter_has_one_optimizer_and_muon_only_matrices(tmp_path, heads):
    trainer = trainer_of(tmp_path, **heads)
    assert list(groups(make_optimizers(trainer, OptimizerConfig()))) == ["AdamW"]
    found = groups(make_optimizers(trainer, OptimizerConfig(name="muon")))
    muon, adamw = found["Muon"], found.get("AdamW", [])
    assert sorted(map(id, muon + adamw)) == sorted(id(p) for p in trainer.parameters())
    assert muon and all(p.ndim == 2 for p in muon)
    projections = {id(p) for p in trainer.own_parameters}
    assert bool(projections) == bool(heads.get("own_projection"))
    assert projections <= {id(p) for p in adamw}
    assert all(p.ndim == 1 or id(p) in projections for p in adamw)


def test_rates_are_each_ones_own(tmp_path):
    settings = OptimizerConfig(name="muon", learning_rate=0.02, adamw_learning_rate=0.001, momentum=0.9)
    muon, adamw = make_optimizers(trainer_of(tmp_path, family="eagle", version=3), settings)
    assert (muon.defaults["lr"], muon.defaults["momentum"], adamw.defaults["lr"]) == (0.02, 0.9, 0.001)


def test_an_update_of_muon_has_the_size_of_adamws_and_no_preferred_direction(tmp_path):
    trainer = trainer_of(tmp_path, family="eagle", version=3)
    matrix = hidden_matrices(trainer)[0]
    before = matrix.detach().clone()
    # A gradient of one dominant direction: AdamW would follow signs, Muon raises all directions to one size.
    generator = torch.Generator().manual_seed(0)
    strong = torch.outer(
        torch.randn(len(matrix), generator=generator), torch.randn(matrix.shape[1], generator=generator)
    )
    matrix.grad = 100 * strong + torch.randn(matrix.shape, generator=generator)
    settings = OptimizerConfig(name="muon", learning_rate=0.01)
    make_optimizers(trainer, settings)[0].step()
    update = (before - matrix.detach()) / 0.01
    of_gradient, of_update = torch.linalg.svdvals(matrix.grad), torch.linalg.svdvals(update)
    assert of_gradient[0] / of_gradient[1] > 20 and of_update[0] / of_update[1] < 2
    assert update.square().mean().sqrt() == pytest.approx(0.2, rel=0.5)


def test_an_unknown_optimizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"optimizer.name must be one of 'adamw', 'muon', not 'sgd'"):
        build(TrainingConfig, tiny_config(tmp_path, optimizer={"name": "sgd"}))
