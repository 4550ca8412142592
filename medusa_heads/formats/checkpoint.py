"""A foreign checkpoint as it lies on disk: its `config.json`, and its tensors by name, read when they are asked for.

Nothing in it is trusted. Pickles are read with `weights_only=True`, an index file can name files of its own directory
alone, and whatever is not a dense tensor of an ordinary number type is refused.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from medusa_heads.errors import HeadsError

CONFIG = "config.json"
SOURCES: tuple[tuple[str, ...], ...] = (
    (
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ),
    ("medusa_lm_head.safetensors", "medusa_lm_head.pt"),
    ("hydra_lm_head.safetensors", "hydra_lm_head.pt"),
)
"""Names under which projects leave weights. Those of one line hold the same by convention: the first that is there
counts, as transformers has it."""

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
OTHERS = (torch.int64, torch.int32, torch.bool)


@dataclass(frozen=True)
class Checkpoint:
    """One source of weights of a directory, with the directory's config."""

    directory: Path
    file: Path
    """The weights, or the index of their shards."""
    config: Mapping[str, Any]
    names: frozenset[str]
    """Of all tensors in it."""
    load: Callable[[Sequence[str]], dict[str, Tensor]]
    skipped: tuple[str, ...] = ()
    """Files beside it that hold the same by convention and were not read."""
    named_base: str | None = None
    """The base that the caller names, of which only the config is looked at."""

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors by name, on the CPU in their own dtype. Raises HeadsError for a damaged or exotic one."""
        wanted = sorted(names)
        absent = [name for name in wanted if name not in self.names]
        if absent:
            raise HeadsError(f"{self.file} has no tensor {absent[0]}")
        found = self.load(wanted)
        for name, tensor in found.items():
            check_tensor(name, tensor, self.file)
        return found


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises HeadsError where there is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise HeadsError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise HeadsError(f"{path} does not hold a JSON object")
    return data


def open_checkpoints(directory: Path, config: Mapping[str, Any]) -> list[Checkpoint]:
    """The sources of weights in a directory, one for each line of `SOURCES` that has a file there."""
    found = []
    for names in SOURCES:
        present = [name for name in names if (directory / name).is_file()]
        if present:
            found.append(_open(directory / present[0], config, tuple(present[1:])))
    return found


def _open(path: Path, config: Mapping[str, Any], skipped: tuple[str, ...]) -> Checkpoint:
    if path.name.endswith(".index.json"):
        names, load = _sharded(path)
    elif path.suffix == ".safetensors":
        names, load = safetensors_names(path), lambda wanted: read_safetensors(path, wanted)
    else:
        tensors = read_pickle(path)
        names, load = frozenset(tensors), lambda wanted: {name: tensors[name] for name in wanted}
    return Checkpoint(path.parent, path, config, frozenset(names), load, skipped)


def safetensors_names(path: Path) -> frozenset[str]:
    """Names in a safetensors file, from its header alone."""
    try:
        with safe_open(path, framework="pt") as file:
            return frozenset(file.keys())
    except (SafetensorError, ValueError, OSError) as error:
        raise HeadsError(f"{path} is damaged or no safetensors file: {error}") from None


def read_safetensors(path: Path, names: Sequence[str]) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in names}
    except (SafetensorError, ValueError, OSError) as error:
        raise HeadsError(f"{path} is damaged or no safetensors file: {error}") from None


def read_pickle(path: Path) -> dict[str, Tensor]:
    """The state dict in a file of torch.save; nothing in it is executed (`weights_only=True`)."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # torch's own message advises to execute the file: it is not passed on
        raise HeadsError(
            f"{path} is a pickle that holds more than tensors, or is damaged; it was not executed"
        ) from None
    except Exception as error:  # whatever the unpickler trips over in a damaged file
        raise HeadsError(f"{path} is damaged or no file of tensors: {_first_line(error)}") from None
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise HeadsError(f"{path} holds a {type(content).__name__}, not tensors by name")
    odd = next((name for name, value in content.items() if not isinstance(value, Tensor)), None)
    if odd is not None:
        raise HeadsError(f"{path}: {odd} is a {type(content[odd]).__name__}, not a tensor")
    return {name: value.detach() for name, value in content.items()}


def _sharded(index: Path) -> tuple[frozenset[str], Callable[[Sequence[str]], dict[str, Tensor]]]:
    shards = shard_map(index)

    def load(wanted: Sequence[str]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for shard in sorted({shards[name] for name in wanted}):
            path, here = index.parent / shard, [name for name in wanted if shards[name] == shard]
            if not path.is_file():
                raise HeadsError(f"{index} names the shard {shard}, which is not there")
            if path.suffix == ".safetensors":
                absent = set(here) - safetensors_names(path)
                content = {} if absent else read_safetensors(path, here)
            else:
                content = read_pickle(path)
                absent = set(here) - set(content)
            if absent:
                raise HeadsError(f"{index} says that {path.name} holds {min(absent)}, but it does not")
            found |= {name: content[name] for name in here}
        return found

    return frozenset(shards), load


def shard_map(index: Path) -> dict[str, str]:
    """Which shard holds which tensor. Raises HeadsError for a name that could lead out of the directory."""
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict):
        raise HeadsError(f"{index} has no weight_map")
    for name, shard in shards.items():
        if not isinstance(shard, str) or shard != Path(shard).name or "\\" in shard or "\0" in shard:
            raise HeadsError(f"{index}: the shard of {name} is {shard!r}, which is no file name in this directory")
        if not shard.endswith((".safetensors", ".bin")):
            raise HeadsError(f"{index}: the shard of {name} is {shard!r}, which is no file of weights")
    return shards


def check_tensor(name: str, tensor: Tensor, file: Path) -> None:
    """Raises HeadsError for a tensor that no head is made of: sparse, quantised, empty, of an exotic type."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype not in (*FLOATS, *OTHERS):
        kind = tensor.dtype if tensor.layout == torch.strided else tensor.layout
        raise HeadsError(f"{file}: {name} is a tensor of {kind}, which cannot be read as weights of a head")
    if tensor.numel() == 0:
        raise HeadsError(f"{file}: {name} is empty (shape {tuple(tensor.shape)})")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]
