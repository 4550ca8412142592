from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from medusa_heads.errors import ConfigError
from train.config import TrainingConfig, build, load_config

CONFIGS = Path(__file__).parents[2] / "configs"


def write(tmp_path, text):
    (tmp_path / "c.yaml").write_text(text)
    return tmp_path / "c.yaml"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("output: x\nbatch: 3", "unknown key batch"),
        ("output: x\nheads: {num_head: 3}", r"unknown key heads\.num_head; known are .*num_heads"),
        ("base: x", "missing key output"),
        ("output: x\nepochs: many", "epochs must be of type int, not 'many'"),
        ("output: x\nepochs: true", "epochs must be of type int"),
        ("output: x\nheads: {family: moth}", r"heads\.family must be one of 'medusa'"),
        ("output: x\nloss: {teacher_weight: 1.5}", r"loss\.teacher_weight must lie in \[0, 1\]"),
        ("output: x\nepochs: 0", "epochs must be at least 1"),
        ("output: x\ndata: {paths: here}", r"data\.paths must be a list"),
        ("output: x\nheads: {own_projection: true}\nloss: {sampled_rows: 10}", "sampled_rows.*own_projection"),
        ("output: x\nloss: {acceptance_weight: -0.1}", r"loss\.acceptance_weight must lie in \[0, 1\]"),
        ("output: x\nloss: {feature_noise: -1}", r"loss\.feature_noise must not be negative"),
        ("output: x\nloss: {unroll: 0}", r"loss\.unroll must be at least 1"),
        ("output: x\nloss: {unroll: 2}", r"loss\.unroll does not belong to heads of family medusa"),
        ("output: x\nheads: {family: eagle}\nevaluation: {tree_width: 0}", "tree_width must be at least 1"),
        ("output: x\nheads: {prefix_attention: true}", "prefix_attention does not belong to heads of family medusa"),
        ("output: x\nheads: {family: eagle, layers: [1]}", "layers does not belong .* eagle version 1"),
        (
            "output: x\nheads: {family: eagle, version: 3}\nloss: {feature_weight: 1}",
            "feature_weight does not belong .* eagle version 3",
        ),
        ("output: x\nevaluation: {depth: 3}", "evaluation.depth does not belong to heads of family medusa"),
        ("output: x\nheads: {family: draft_model, num_layers: 0}", "num_layers of a draft model must be at least 1"),
        ("output: x\nheads: {family: draft_model, layers: [0, 1]}", "names 2 layers for the 1 of heads.num_layers"),
        ("output: x\nheads: {family: draft_model, own_projection: true}", "own_projection does not .* draft_model"),
        ("output: x\nheads: {family: draft_model}\nloss: {unroll: 2}", "loss.unroll does not .* draft_model"),
        ("output: x\nheads: {family: draft_model}\nevaluation: {depth: 0}", "evaluation.depth must be at least 1"),
        ("output: x\noptimizer: {name: muon}\nmixed_precision: fp16", "muon does not go with fp16"),
        ("output: x\nkeep_checkpoints: 0", "keep_checkpoints must be at least 1, not 0"),
        ("output: x\nevaluation: {rows: 0}", r"evaluation\.rows must be at least 1, not 0"),
        ("output: x\nevaluation: {rows: -3}", r"evaluation\.rows must be at least 1, not -3"),
        ("output: x\nloss: {sampled_rows: 1}", r"loss\.sampled_rows must be at least 2, not 1"),
        ("- 1", "must be a mapping"),
        ("a: [", "is not YAML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text))


def test_overrides_reach_sections_and_are_checked_too(tmp_path):
    path = write(tmp_path, "output: x\noptimizer: {beta1: 0.8}")
    config = load_config(
        path, ["optimizer.learning_rate=3e-4", "heads.num_heads=2", "mixed_precision=no", "data.paths=[a, b]"]
    )
    assert config.optimizer.learning_rate == 3e-4 and config.optimizer.beta1 == 0.8
    assert config.heads.num_heads == 2 and config.mixed_precision == "no" and config.data.paths == ("a", "b")
    for bad in ("optimizer.lr=1", "optimizer", "output.x=1"):
        with pytest.raises(ConfigError):
            load_config(path, [bad])


def test_a_config_survives_yaml():
    config = build(TrainingConfig, {"output": "x", "mixed_precision": "no", "features": {"layers": [1, 2]}})
    assert build(TrainingConfig, yaml.safe_load(config.to_yaml())) == config


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_recipes_are_valid(path):
    load_config(path)


def test_the_shipped_heads_are_at_most_two_percent_of_their_base():
    heads = load_config(CONFIGS / "smollm2-135m-medusa.yaml").heads
    assert not heads.own_projection
    assert heads.num_heads * heads.num_layers * (576 * 576 + 576) <= 0.02 * 134_515_008
