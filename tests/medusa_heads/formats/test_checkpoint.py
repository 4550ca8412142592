"""Files that are damaged or mean harm: a clear error, nothing executed, nothing read or written outside."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from medusa_heads.errors import HeadsError
from medusa_heads.families import load_heads
from medusa_heads.formats.checkpoint import open_checkpoints, read_pickle, shard_map
from tests.medusa_heads.formats.layouts import random_tensors, sequence_shapes, store

TENSORS = random_tensors(sequence_shapes(1, 1, own=True))


class Harm:
    """What an unpickler would run."""

    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def refused(directory: Path, message: str) -> None:
    with pytest.raises(HeadsError, match=message) as error:
        load_heads(directory)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


@pytest.mark.parametrize("how", ["torch", "plain", "beside tensors"])
def test_a_pickle_that_means_harm_is_not_executed(tmp_path: Path, how: str) -> None:
    store(tmp_path / "heads", {}, "medusa_lm_head.pt", {})
    target, file = tmp_path / "made", tmp_path / "heads" / "medusa_lm_head.pt"
    if how == "plain":
        file.write_bytes(pickle.dumps(Harm(target)))
    else:
        torch.save({**(TENSORS if how == "beside tensors" else {}), "x": Harm(target)}, file)
    refused(tmp_path / "heads", "pickle that holds more than tensors, or is damaged; it was not executed$")
    assert not target.exists()
    torch.load(file, weights_only=False) if how != "plain" else pickle.loads(file.read_bytes())
    assert target.exists(), "it would have done harm"


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("kind", ["truncated", "garbage", "empty"])
def test_damaged_weights(tmp_path: Path, file: str, kind: str) -> None:
    store(tmp_path, {}, file, TENSORS)
    content = (tmp_path / file).read_bytes()
    damaged = {"truncated": content[: len(content) // 2], "garbage": b"\xff" * 99, "empty": b""}[kind]
    (tmp_path / file).write_bytes(damaged)
    refused(tmp_path, f"{file}.* damaged")


@pytest.mark.parametrize("content", [[torch.zeros(2)], torch.zeros(2), {"a": 3}, {3: torch.zeros(2)}])
def test_a_pickle_of_something_else(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(HeadsError, match=r"not tensors by name|not a tensor"):
        read_pickle(tmp_path / "x.pt")


def test_sparse_and_quantised_tensors(tmp_path: Path) -> None:
    store(tmp_path, {}, "medusa_lm_head.pt", {**TENSORS, "0.0.linear.bias": torch.eye(32).to_sparse()})
    refused(tmp_path, "a tensor of torch.sparse_coo")


@pytest.mark.parametrize(
    "shard", ["../secret.safetensors", "/etc/secret.safetensors", "a/b.safetensors", "..", "", "a\\b.safetensors", 3]
)
def test_an_index_cannot_lead_out_of_its_directory(tmp_path: Path, shard: Any) -> None:
    save_file(TENSORS, tmp_path / "secret.safetensors")
    heads = store(tmp_path / "heads", {}, "x.safetensors", TENSORS)
    index = heads / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: shard for name in TENSORS}}))
    refused(heads, "is no file name in this directory|is no file of weights")


def test_an_index_names_files_of_weights_alone(tmp_path: Path) -> None:
    (tmp_path / "i.json").write_text(json.dumps({"weight_map": {"a": "config.json"}}))
    with pytest.raises(HeadsError, match="which is no file of weights"):
        shard_map(tmp_path / "i.json")


@pytest.mark.parametrize("file", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_an_index_that_does_not_keep_its_word(tmp_path: Path, file: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    kind = "safetensors" if "safetensors" in file else "bin"
    (tmp_path / file).write_text(json.dumps({"weight_map": {name: f"a.{kind}" for name in TENSORS}}))
    refused(tmp_path, f"names the shard a.{kind}, which is not there")
    rest = {name: tensor for name, tensor in TENSORS.items() if name != "0.1.weight"}
    store(tmp_path, {}, f"a.{kind}", rest)
    refused(tmp_path, rf"says that a\.{kind} holds 0\.1\.weight, but it does not")
    store(tmp_path, {}, f"a.{kind}", TENSORS)
    assert load_heads(tmp_path).config.num_heads == 1
    (tmp_path / file).write_text("{}")
    refused(tmp_path, "has no weight_map")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (b"{", "is not JSON"),
        (b"[]", "does not hold a JSON object"),
        (b"\xff", "is not JSON"),
        (b"[" * 99999, "not JSON"),
    ],
)
def test_damaged_configs(tmp_path: Path, config: bytes, message: str) -> None:
    store(tmp_path, {}, "medusa_lm_head.pt", TENSORS)
    (tmp_path / "config.json").write_bytes(config)
    refused(tmp_path, message)


def test_no_weights_and_unknown_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "holds no weights under a name that heads are stored by")
    store(tmp_path, {}, "model.safetensors", {"mystery": torch.zeros(2)})
    refused(tmp_path, r"holds no heads of a known format: model.safetensors \(mystery …\)")


def test_safetensors_are_read_by_name_and_not_before(tmp_path: Path) -> None:
    store(tmp_path, {}, "model.safetensors", TENSORS)
    (checkpoint,) = open_checkpoints(tmp_path, {})
    assert checkpoint.names == frozenset(TENSORS)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(HeadsError, match="damaged or no safetensors file"):
        checkpoint.tensors(["0.1.weight"])
    with pytest.raises(HeadsError, match="has no tensor other"):
        checkpoint.tensors(["other"])
