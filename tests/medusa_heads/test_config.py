"""`config.json` of heads, both ways; whatever is not understood is an error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from medusa_heads.config import FORMAT, EagleConfig, HydraConfig, MedusaConfig
from medusa_heads.errors import ConfigError

FULL = MedusaConfig(
    hidden_size=32,
    vocab_size=96,
    num_heads=3,
    num_layers=2,
    own_projection=True,
    draft_vocab_size=40,
    base_model_name_or_path="org/base",
    base_revision="abc",
    tokenizer_hash="t",
    weights_hash="w",
)


@pytest.mark.parametrize("config", [FULL, MedusaConfig(hidden_size=8, vocab_size=9)])
def test_there_and_back_through_json(config: MedusaConfig) -> None:
    assert MedusaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_the_file_says_what_it_is() -> None:
    assert FULL.to_dict() == {
        "model_type": "medusa_heads",
        "head_family": "medusa",
        "format": 1,
        "hidden_size": 32,
        "vocab_size": 96,
        "num_heads": 3,
        "num_layers": 2,
        "own_projection": True,
        "draft_vocab_size": 40,
        "base_model_name_or_path": "org/base",
        "base_revision": "abc",
        "tokenizer_hash": "t",
        "weights_hash": "w",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"typo": 1, "another": 2}, "unknown keys in the heads' config: another, typo"),
        ({"format": FORMAT + 1}, f"format {FORMAT + 1}; this version reads format {FORMAT}"),
        ({"format": None}, "format None"),
        ({"model_type": "llama"}, "not a config of Medusa heads"),
        ({"head_family": "eagle"}, "not a config of Medusa heads"),
        ({"num_heads": 0}, "num_heads must be a positive integer, not 0"),
        ({"hidden_size": "32"}, "hidden_size must be a positive integer, not '32'"),
        ({"num_layers": 1.0}, "num_layers must be a positive integer, not 1.0"),
        ({"num_layers": True}, "num_layers must be a positive integer, not True"),
        ({"draft_vocab_size": 97}, "draft_vocab_size 97 does not lie within the vocabulary of 96"),
        ({"draft_vocab_size": 0}, "draft_vocab_size 0"),
        ({"draft_vocab_size": "8"}, "draft_vocab_size must be an integer or null, not '8'"),
        ({"own_projection": "no"}, "own_projection must be true or false, not 'no'"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        MedusaConfig.from_dict(FULL.to_dict() | change)
    assert message in str(error.value)


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size"])
def test_sizes_must_be_there(key: str) -> None:
    data = FULL.to_dict()
    del data[key]
    with pytest.raises(ConfigError, match=f"missing keys in the heads' config: {key}"):
        MedusaConfig.from_dict(data)


def test_reading_leaves_the_dictionary_alone() -> None:
    data = FULL.to_dict()
    MedusaConfig.from_dict(data)
    assert data == FULL.to_dict()


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (EagleConfig, {"version": 1, "norm_before_residual": True}, "belong to version 3"),
        (EagleConfig, {"version": 1, "state_norm": "each"}, "belong to version 3"),
        (EagleConfig, {"version": 3, "layers": (1, 2), "state_norm": "all"}, "state_norm must be joined, each or null"),
        (HydraConfig, {"prefix_norm": True}, "prefix_norm belongs to the prefix attention"),
        (HydraConfig, {"projection_bias": True}, "projection_bias belongs to projections of their own"),
    ],
)
def test_options_of_other_projects_heads_that_clash(config: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(hidden_size=32, vocab_size=96, **options)
