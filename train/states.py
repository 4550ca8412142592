"""Hidden states as a training step reads them: mapped from the cache of `train.features`, or computed on the fly."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from train.batches import PackedBatch, SequenceBatch, count_targets, span_positions
from train.data import Example
from train.features import FeaturesError, base_states, shard_path, stored_digest
from train.manifest import DataRecord, Manifest, read_manifest

if TYPE_CHECKING:
    from medusa_heads.base import Base


class StateSource(ABC):
    """Examples with the states of their spans: what a training step reads. Rows are numbered from 0."""

    def __init__(self, examples: Sequence[Example]):
        self.examples = list(examples)
        self.spans = [span_positions(e.input_ids, e.supervised) for e in self.examples]
        self.sizes = [len(positions) for positions, _, _ in self.spans]
        """Positions of each row that predict a supervised token."""

    def __len__(self) -> int:
        return len(self.examples)

    def pairs(self, rows: Sequence[int], num_heads: int) -> list[int]:
        """How many targets each head has in `rows`."""
        return count_targets(np.concatenate([self.spans[r][2] for r in rows]), num_heads)

    @abstractmethod
    def batch(self, rows: Sequence[int]) -> PackedBatch:
        """The spans of `rows`, end to end."""

    @abstractmethod
    def require(self, names: Sequence[str]) -> None:
        """Raises FeaturesError unless whole rows of these states can be had."""

    @abstractmethod
    def row_states(self, rows: Sequence[int], names: Sequence[str]) -> list[list[Tensor]]:
        """For each of `names` (`last`, `layer_3`), the states (T_r, h) of each whole row."""

    def sequences(self, rows: Sequence[int], names: Sequence[str]) -> SequenceBatch:
        """The spans of `rows`, end to end, and the whole rows with the states `names`."""
        wanted = list(dict.fromkeys(("last", *names)))
        found = dict(zip(wanted, self.row_states(rows, wanted), strict=True))
        lengths = [len(self.examples[r]) - 1 for r in rows]
        starts = np.cumsum([0, *lengths])[:-1]
        spans = [self.spans[r] for r in rows]
        packed = pack_spans(
            [s[torch.from_numpy(k[0]).to(s.device)] for s, k in zip(found["last"], spans, strict=True)],
            spans,
            self.no_states(),
        )
        nothing = np.zeros(0, dtype=np.int64)
        following = [np.asarray(self.examples[r].input_ids[1:], dtype=np.int64) for r in rows]
        where = [start + k[0] for start, k in zip(starts, spans, strict=True)]
        return SequenceBatch(
            packed.states,
            packed.next_ids,
            packed.remaining,
            tuple(torch.cat([self.no_states(), *(s[:-1] for s in found[name])]) for name in names),
            torch.from_numpy(np.concatenate([nothing, *following])),
            torch.from_numpy(np.concatenate([nothing, *where])),
            lengths,
            list(rows),
        )

    @abstractmethod
    def no_states(self) -> Tensor:
        """(0, h), in the dtype and on the device of the states."""


class FeatureStore(StateSource):
    """Cached states of many examples, mapped into memory.

    Raises:
        FeaturesError: no shards, shards missing, or shards of different bases, settings or data side by side. Caches of
            older versions, which have no manifest, may lack shards at their end unnoticed.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        paths = sorted(self.directory.glob("features-*.safetensors"))
        if not paths:
            raise FeaturesError(f"{directory} holds no cached states: run `python -m train.features` first")
        manifest = read_manifest(self.directory)
        if manifest is not None:
            self._check_whole(paths, manifest)
        self.data = manifest.data if manifest is not None else None
        """The rows that the cache was made of, where it says so."""
        self._states: list[dict[str, Tensor]] = []
        self._where: list[tuple[int, int]] = []
        self.fingerprint: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}
        super().__init__([example for shard, path in enumerate(paths) for example in self._open(shard, path)])
        self._locate()

    def _check_whole(self, paths: Sequence[Path], manifest: Manifest) -> None:
        wanted = {shard_path(self.directory, i): digest for i, digest in enumerate(manifest.shards)}
        missing = sorted(set(wanted) - set(paths))
        foreign = [path for path in paths if stored_digest(path) != wanted.get(path)]
        if missing or foreign:
            raise FeaturesError(
                f"{self.directory} is not whole: of {len(wanted)} shards {len(missing)} are missing and "
                f"{len(foreign)} are of another cache; `python -m train.features` makes what it lacks"
            )

    def check_data(self, data: DataRecord) -> None:
        """Raises FeaturesError where the cache says that it was made of other rows than `data`, or cut otherwise."""
        if self.data is None or self.data.same_rows(data):
            return
        made_of, asked = (
            f"{', '.join(d.paths)}, rows of at most {d.max_length} tokens, sha256 {d.sha256[:12]}"
            for d in (self.data, data)
        )
        raise FeaturesError(
            f"{self.directory} was made of other data ({made_of}) than are asked for ({asked}): run "
            "`python -m train.features` for these"
        )

    def _open(self, shard: int, path: Path) -> list[Example]:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            names = [n for n in file.keys() if n.startswith("states.")]  # noqa: SIM118
            self._states.append({n.removeprefix("states."): file.get_tensor(n) for n in names})
            ids, supervised = file.get_tensor("input_ids").tolist(), file.get_tensor("supervised").tolist()
            lengths = file.get_tensor("lengths").tolist()
        fingerprint, settings = json.loads(metadata["base"]), json.loads(metadata["settings"])
        if shard == 0:
            self.fingerprint, self.settings = fingerprint, settings
        elif settings != self.settings or fingerprint["weights_hash"] != self.fingerprint["weights_hash"]:
            raise FeaturesError(f"{path} was written with {settings}, by another run than shard 0 ({self.settings})")
        ends = np.cumsum(lengths)
        return [
            Example(row_id, tuple(ids[end - length : end]), tuple(supervised[end - length : end]), temperature)
            for (row_id, temperature), length, end in zip(json.loads(metadata["rows"]), lengths, ends, strict=True)
        ]

    def _locate(self) -> None:
        """Where each row's states lie: (shard, first state)."""
        shard = start = 0
        for row in range(len(self)):
            if start == len(self._states[shard]["last"]):
                shard, start = shard + 1, 0
            self._where.append((shard, start))
            start += self._stored(row)
        stored = sum(len(states["last"]) for states in self._states)
        expected = sum(map(self._stored, range(len(self))))
        if shard != len(self._states) - 1 or stored != expected:
            raise FeaturesError(f"{self.directory} holds {stored} states where its rows have {expected}")

    def _stored(self, row: int) -> int:
        return len(self.examples[row]) if self.settings["positions"] == "all" else self.sizes[row]

    def states(self, row: int, name: str = "last") -> Tensor:
        """(S, h) stored states of one row, a view of the mapped file."""
        shard, start = self._where[row]
        return self._states[shard][name][start : start + self._stored(row)]

    def batch(self, rows: Sequence[int]) -> PackedBatch:
        """The spans of `rows`, end to end."""
        states = []
        for row in rows:
            found = self.states(row)
            if self.settings["positions"] == "all":
                found = found[torch.from_numpy(self.spans[row][0])]
            states.append(found)
        return pack_spans(states, [self.spans[row] for row in rows], self.no_states())

    def row_states(self, rows: Sequence[int], names: Sequence[str]) -> list[list[Tensor]]:
        self.require(names)
        return [[self.states(row, name) for row in rows] for name in names]

    def require(self, names: Sequence[str]) -> None:
        missing = sorted(set(names) - set(self._states[0]))
        if self.settings["positions"] != "all" or missing:
            held = f"positions: {self.settings['positions']}, layers: {self.settings['layers']}"
            lacks = f" and the states {', '.join(missing)}" if missing else ""
            raise FeaturesError(
                f"these heads read whole rows (features.positions: all){lacks}; {self.directory} was cached with {held}"
            )

    def no_states(self) -> Tensor:
        return self._states[0]["last"][:0]

    def check_base(self, base: Base) -> None:
        """Raises FeaturesError where the states come from another base than `base`."""
        there, here = self.fingerprint, base.fingerprint()
        for key in ("weights_hash", "hidden_size", "vocab_size", "tokenizer_hash"):
            if there[key] != here[key]:
                raise FeaturesError(
                    f"{self.directory}: {key} {there[key]} of {there['base_model_name_or_path']!r} is not "
                    f"{here[key]} of {base.name!r}"
                )


def pack_spans(
    states: Sequence[Tensor], spans: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], nothing: Tensor
) -> PackedBatch:
    """Lays rows end to end. `nothing` (0, h) is what no rows give."""
    if not states:
        empty = torch.zeros(0, dtype=torch.long)
        return PackedBatch(nothing, empty, empty)
    next_ids = torch.from_numpy(np.concatenate([s[1] for s in spans]))
    remaining = torch.from_numpy(np.concatenate([s[2] for s in spans]))
    return PackedBatch(torch.cat(list(states)), next_ids, remaining)


class LiveStates(StateSource):
    """States computed inside the training step instead of read: nothing on disk, one base forward a step."""

    def __init__(self, base: Base, examples: Sequence[Example], batch_tokens: int = 4096):
        super().__init__(examples)
        self.base = base
        self.batch_tokens = batch_tokens
        self.tokens = 0
        """Read by the base so far, padding not counted."""
        self.seconds = 0.0
        """Spent in the base's forward so far."""

    def batch(self, rows: Sequence[int]) -> PackedBatch:
        """The spans of `rows`, end to end, by a fresh forward of the base."""
        spans = [self.spans[r] for r in rows]
        (found,) = self.row_states(rows, ("last",))
        states = [s[torch.from_numpy(k[0]).to(s.device)] for s, k in zip(found, spans, strict=True)]
        return pack_spans(states, spans, self.no_states())

    def require(self, names: Sequence[str]) -> None:
        """Any states can be computed."""

    def row_states(self, rows: Sequence[int], names: Sequence[str]) -> list[list[Tensor]]:
        start = time.perf_counter()
        layers = [int(name.removeprefix("layer_")) for name in names if name != "last"]
        found, _ = base_states(self.base, [self.examples[r] for r in rows], layers, self.batch_tokens)
        if self.base.device.type == "cuda":
            torch.cuda.synchronize(self.base.device)
        self.seconds += time.perf_counter() - start
        self.tokens += sum(len(self.examples[r]) for r in rows)
        return [found[name] for name in names]

    def no_states(self) -> Tensor:
        return torch.zeros(0, self.base.hidden_size, dtype=self.base.dtype, device=self.base.device)


def check_features(base: Base, store: FeatureStore, rows: Sequence[int]) -> float:
    """Compares stored states of some rows with a fresh forward of each row alone, unpadded.

    Returns:
        The largest relative distance ‖stored − fresh‖ / ‖fresh‖ over all positions.
    """
    worst = 0.0
    for row in rows:
        example = store.examples[row]
        layers = tuple(store.settings["layers"])
        out = base.forward(torch.tensor([example.input_ids], device=base.device), layers=layers)
        keep = slice(None) if store.settings["positions"] == "all" else torch.from_numpy(store.spans[row][0])
        names = ("last", *(f"layer_{i}" for i in layers))
        for name, fresh in zip(names, (out.last_hidden_state, *out.layer_states), strict=True):
            wanted = fresh[0].cpu()[keep].float()
            distance = (store.states(row, name).float() - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-6)
            worst = max(worst, float(distance.max()))
    return worst


def choose_draft_ids(sequences: Sequence[Example], size: int) -> Tensor:
    """The `size` most frequent supervised tokens, most frequent first; ties by id.

    Raises:
        FeaturesError: fewer distinct tokens were seen than rows are asked for.
    """
    generated = np.concatenate(
        [np.asarray(e.input_ids, dtype=np.int64)[np.asarray(e.supervised, dtype=bool)] for e in sequences]
    )
    counts = np.bincount(generated)
    seen = int((counts > 0).sum())
    if seen < size:
        raise FeaturesError(f"the data hold {seen} distinct tokens, fewer than the draft vocabulary of {size}")
    return torch.from_numpy(np.argsort(-counts, kind="stable")[:size].copy())
