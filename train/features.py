"""Hidden states of the frozen base, computed once and read by every epoch.

    python -m train.features --config configs/x.yaml [key=value …]

Shard k holds the states of a fixed run of examples (`rows_per_shard` of them, in data order) and carries a digest of
their tokens and of everything else the states depend on. A shard whose digest still holds is kept, so a killed run
goes on where it was, and data that have grown cost only the shards that are new. A shard is written beside its place
and renamed when whole; which shards there should be, and of which data, is written first (`train.manifest`).
`train.states` reads them, and nothing of a cache that is not whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from medusa_heads.errors import UserError
from train.batches import pack_by_length, span_positions
from train.data import Example
from train.manifest import DataRecord, Manifest

if TYPE_CHECKING:
    from medusa_heads.base import Base


class FeaturesError(UserError):
    """Cached states are missing, incomplete or of another base."""


@dataclass(frozen=True)
class FeatureSettings:
    """What is stored. States depend on these and on the base, so they are part of each shard's digest."""

    positions: Literal["answers", "all"] = "answers"
    """`answers` keeps the positions that predict a supervised token: all that heads on single states read.
    `all` keeps the prompts' positions too, which a drafter with attention of its own needs."""
    layers: tuple[int, ...] = ()
    """Layers whose entering states are stored beside the last state (0 is the embedding)."""
    dtype: str = "bfloat16"
    rows_per_shard: int = 1000

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[self.dtype]


def kept_positions(example: Example, settings: FeatureSettings) -> np.ndarray:
    """Indices into the example whose states are stored."""
    if settings.positions == "all":
        return np.arange(len(example))
    return span_positions(example.input_ids, example.supervised)[0]


def estimate_bytes(examples: Sequence[Example], settings: FeatureSettings, hidden_size: int) -> int:
    """Size on disk of the states of `examples`, in bytes."""
    stored = sum(len(kept_positions(e, settings)) for e in examples)
    width = hidden_size * (1 + len(settings.layers)) * settings.torch_dtype.itemsize
    return stored * width + sum(len(e) for e in examples) * 5


def base_states(
    base: Base, examples: Sequence[Example], layers: Sequence[int], batch_tokens: int
) -> tuple[dict[str, list[Tensor]], int]:
    """States of each example, in the given order, by batches of similar length.

    Rows are padded on the right. A causal base never looks right, so the states of real tokens need no mask.

    Returns:
        `{"last": [(T_r, h) …], "layer_3": […]}` and the number of tokens read, padding included.
    """
    names = ["last", *(f"layer_{i}" for i in layers)]
    found: dict[str, list[Tensor]] = {name: [torch.empty(0)] * len(examples) for name in names}
    read = 0
    for rows in pack_by_length([len(e) for e in examples], batch_tokens):
        width = max(len(examples[r]) for r in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        for line, r in enumerate(rows):
            ids[line, : len(examples[r])] = torch.tensor(examples[r].input_ids)
        out = base.forward(ids.to(base.device), layers=layers)
        read += ids.numel()
        for name, states in zip(names, (out.last_hidden_state, *out.layer_states), strict=True):
            for line, r in enumerate(rows):
                found[name][r] = states[line, : len(examples[r])]
    return found, read


def _digest(examples: Sequence[Example], settings: FeatureSettings, fingerprint: dict[str, Any]) -> str:
    """Identity of a shard's content. The base is known by its weights and tokenizer, not by its path."""
    known = {k: v for k, v in fingerprint.items() if k not in ("base_model_name_or_path", "base_revision")}
    digest = hashlib.sha256(json.dumps([settings.positions, settings.layers, settings.dtype, known]).encode())
    for e in examples:
        digest.update(json.dumps([e.row_id, e.temperature]).encode())
        digest.update(np.asarray(e.input_ids, dtype=np.int32).tobytes())
        digest.update(np.asarray(e.supervised, dtype=bool).tobytes())
    return digest.hexdigest()


def shard_path(directory: Path, index: int) -> Path:
    return directory / f"features-{index:05d}.safetensors"


def stored_digest(path: Path) -> str | None:
    """The digest that a shard carries; None without the shard."""
    if not path.exists():
        return None
    with safe_open(path, framework="pt") as file:
        return (file.metadata() or {}).get("digest")


@dataclass(frozen=True)
class FeatureReport:
    shards: int
    reused: int
    tokens: int
    """Read by the base in this run, padding included."""
    seconds: float


def write_features(
    base: Base,
    examples: Sequence[Example],
    directory: Path,
    settings: FeatureSettings,
    *,
    batch_tokens: int = 4096,
    rank: int = 0,
    world: int = 1,
    data: DataRecord | None = None,
    on_shard: Callable[[int, int, int], None] | None = None,
) -> FeatureReport:
    """Runs the base over `examples` and writes their states, shard by shard.

    Args:
        rank, world: of several processes, this one writes the shards k with k % world == rank.
        data: the rows that the examples came from.
        on_shard: called after each shard with (its index, tokens read, shards in all).
    """
    directory.mkdir(parents=True, exist_ok=True)
    fingerprint = base.fingerprint()
    size = settings.rows_per_shard
    runs = [examples[i : i + size] for i in range(0, len(examples), size)]
    reused = tokens = 0
    start = time.perf_counter()
    digests = [_digest(run, settings, fingerprint) for run in runs]
    Manifest(tuple(digests), data).write(directory, rank)
    for index, (run, digest) in enumerate(zip(runs, digests, strict=True)):
        if index % world != rank:
            continue
        path = shard_path(directory, index)
        if stored_digest(path) == digest:
            reused += 1
            continue
        found, read = base_states(base, run, settings.layers, batch_tokens)
        tokens += read
        kept = [kept_positions(e, settings) for e in run]
        tensors: dict[str, Tensor] = {
            f"states.{name}": torch.cat([s[torch.from_numpy(k).to(s.device)] for s, k in zip(rows, kept, strict=True)])
            .to("cpu", settings.torch_dtype)
            .contiguous()
            for name, rows in found.items()
        }
        tensors["input_ids"] = torch.tensor([t for e in run for t in e.input_ids], dtype=torch.int32)
        tensors["supervised"] = torch.tensor([t for e in run for t in e.supervised], dtype=torch.bool)
        tensors["lengths"] = torch.tensor([len(e) for e in run], dtype=torch.int32)
        metadata = {
            "digest": digest,
            "rows": json.dumps([[e.row_id, e.temperature] for e in run]),
            "settings": json.dumps({"positions": settings.positions, "layers": settings.layers}),
            "base": json.dumps(fingerprint),
        }
        partial = path.with_suffix(".partial")
        save_file(tensors, partial, metadata)
        os.replace(partial, path)
        if on_shard is not None:
            on_shard(index, tokens, len(runs))
    if rank == 0:
        for stale in sorted(directory.glob("features-*.safetensors"))[len(runs) :]:
            stale.unlink()
    return FeatureReport(len(runs), reused, tokens, time.perf_counter() - start)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: caches the states that a training config asks for."""
    import argparse
    import shutil
    import sys

    from tqdm import tqdm

    from medusa_heads.base import Base
    from train.config import load_config
    from train.data import encode_rows, load_chat_rows
    from train.manifest import record_data
    from train.states import FeatureStore, check_features

    parser = argparse.ArgumentParser(description="Cache the base's hidden states for a training config.")
    parser.add_argument("--config", required=True)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.config, options.overrides)
        if config.features.directory is None:
            raise FeaturesError("features.directory is not set: nowhere to cache states")
        directory = Path(config.features.directory)
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        base = Base.load(config.base, dtype=config.base_dtype, revision=config.base_revision)
        data = record_data(config.data.paths, config.data.max_length or base.max_positions)
        examples, report = encode_rows(base, load_chat_rows(config.data.paths), config.data.max_length)
        print(
            f"{report.rows:,} rows → {report.examples:,} sequences, {report.tokens:,} tokens, "
            f"{report.supervised_tokens:,} supervised; {report.truncated} truncated, {report.dropped} dropped"
        )
        settings = FeatureSettings(
            config.features.positions, config.features.layers, config.features.dtype, config.features.rows_per_shard
        )
        directory.mkdir(parents=True, exist_ok=True)
        size, free = estimate_bytes(examples, settings, base.hidden_size), shutil.disk_usage(directory).free
        print(
            f"states in {directory}: {size / 2**30:.2f} GiB in {settings.dtype}; {free / 2**30:.1f} GiB free",
            flush=True,
        )
        if size > free:
            raise FeaturesError(f"{size / 2**30:.1f} GiB of states do not fit into {free / 2**30:.1f} GiB")
        start = time.perf_counter()
        with tqdm(total=-(-len(examples) // settings.rows_per_shard), unit="shard") as bar:

            def show(index: int, tokens: int, shards: int) -> None:
                bar.update(index + 1 - bar.n)
                bar.set_postfix_str(f"{tokens / (time.perf_counter() - start):.0f} tok/s")

            done = write_features(
                base,
                examples,
                directory,
                settings,
                batch_tokens=config.features.batch_tokens,
                rank=rank,
                world=world,
                data=data,
                on_shard=show,
            )
        print(f"{done.shards} shards, {done.reused} kept; {done.tokens:,} padded tokens in {done.seconds:.0f} s")
        if world == 1:
            store = FeatureStore(directory)
            rows = list(range(0, len(store), max(1, len(store) // 4)))[:4]
            worst = check_features(base, store, rows)
            print(f"against a fresh unpadded forward of {len(rows)} rows: relative distance at most {worst:.4f}")
            if worst > (1e-3 if base.dtype == torch.float32 and settings.dtype == "float32" else 0.1):
                raise FeaturesError(f"cached states differ from a fresh forward by {worst:.3f}")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    import sys

    sys.exit(main())
