"""Training that goes on from trained heads (`heads.start`)."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import load_file

from medusa_heads import Base
from medusa_heads.errors import ConfigError, HeadsError
from tests.train.helpers import save_tiny_base, tiny_config, write_rows
from tests.train.runs import logged, run, weights
from train.config import TrainingConfig, build
from train.families import make_trainer

MEDUSA = {"num_heads": 2, "num_layers": 1, "draft_vocab_size": 8}
FAMILIES = {
    "medusa": MEDUSA,
    "hydra": {"family": "hydra", "num_heads": 2, "num_layers": 1, "draft_vocab_size": 8},
    "eagle": {"family": "eagle", "version": 3, "layers": [0, 1], "draft_vocab_size": 8},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    directory = tmp_path_factory.mktemp("going-on")
    save_tiny_base(directory / "base")
    write_rows(directory / "rows.jsonl")
    return directory


def live(place, **changes):
    return {"features": {"directory": None}, "positions_per_step": 200, **changes}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_step_is_where_the_last_run_ended(place, tmp_path, family):
    heads = FAMILIES[family]
    settings = live(place, max_steps=12, optimizer={"learning_rate": 2e-2, "warmup_steps": 2}, log_every=1)
    first = run(place, tmp_path / "first", heads=heads, **settings)
    rate = {"learning_rate": 1e-9, "warmup_steps": 0}
    again = run(
        place,
        tmp_path / "again",
        heads=heads | {"start": str(first)},
        **{**settings, "optimizer": rate, "max_steps": 12},
    )
    before, fresh, after = (logged(out)[i]["loss"] for out, i in ((first, -1), (first, 0), (again, -1)))
    assert abs(after - before) < 0.2 * (fresh - before)
    for name, tensor in weights(again).items():
        assert torch.allclose(tensor.float(), weights(first)[name].float(), atol=1e-2), name


def test_their_draft_vocabulary_is_kept_and_what_is_scored(place, tmp_path):
    first = run(place, tmp_path / "first", **live(place, heads=MEDUSA, max_steps=2))
    ids = load_file(first / "model.safetensors")["draft_ids"]
    # Rows of other text would choose other tokens.
    other = write_rows(tmp_path / "other.jsonl", letters="uvwxyz ")
    again = run(
        place,
        tmp_path / "again",
        **live(place, heads=MEDUSA | {"start": str(first)}, max_steps=2, data={"paths": [str(other)], "held_out": 0.2}),
    )
    assert torch.equal(load_file(again / "model.safetensors")["draft_ids"], ids)
    config = build(TrainingConfig, tiny_config(place, heads=MEDUSA | {"start": str(first)}))
    trainer = make_trainer(config, Base.load(str(place / "base"), dtype="float32"), [])
    assert torch.equal(trainer.teacher.weight, trainer.base.projection_weight[ids])
    assert trainer.labels is not None and trainer.labels[ids].tolist() == list(range(len(ids)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 2}, "differs in num_layers: 1, not 2"),
        ({"draft_vocab_size": 7}, "drafts from 8 rows, not 7"),
        ({"family": "hydra"}, "holds heads of family medusa"),
        ({"family": "draft_model", "num_heads": 4}, "heads.start does not belong to"),
    ],
)
def test_other_heads_are_refused(place, tmp_path, changes, message):
    first = run(place, tmp_path / "first", **live(place, heads=MEDUSA, max_steps=1))
    with pytest.raises(ConfigError, match=message):
        run(place, tmp_path / "again", **live(place, heads=MEDUSA | {"start": str(first)} | changes, max_steps=1))


def test_heads_of_another_base_are_refused(place, tmp_path):
    first = run(place, tmp_path / "first", **live(place, heads=MEDUSA, max_steps=1))
    config = json.loads((first / "config.json").read_text())
    config["weights_hash"] = "".join(random.Random(0).choices("0123456789abcdef", k=len(config["weights_hash"])))
    (first / "config.json").write_text(json.dumps(config))
    with pytest.raises(HeadsError, match="base"):
        run(place, tmp_path / "again", **live(place, heads=MEDUSA | {"start": str(first)}, max_steps=1))
