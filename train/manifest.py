"""What a cache of hidden states should hold, in a file beside its shards.

It is written before the first shard, so that a cache whose making or remaking was killed tells so: shards that it
names are missing, or carry the digests of what was there before.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from train.data import row_files

NAME = "features.json"


@dataclass(frozen=True)
class DataRecord:
    """The rows that a cache was made of, as the disk held them."""

    paths: tuple[str, ...]
    """Where they were then."""
    sha256: str
    """Of all their files' bytes, in order."""
    max_length: int | None
    """Tokens of a row that were kept; None: all."""

    def same_rows(self, other: DataRecord) -> bool:
        """Whether both are the same rows, cut alike, wherever they lie."""
        return (self.sha256, self.max_length) == (other.sha256, other.max_length)


def record_data(paths: Sequence[str], max_length: int | None) -> DataRecord:
    """Reads all files of `paths`. What is appended to them afterwards makes another record.

    Raises:
        DataError: a path that does not exist.
    """
    digest = hashlib.sha256()
    for name in paths:
        for path in row_files(Path(name)):
            with path.open("rb") as file:
                while block := file.read(2**20):
                    digest.update(block)
    return DataRecord(tuple(paths), digest.hexdigest(), max_length)


@dataclass(frozen=True)
class Manifest:
    """A cache as it should be."""

    shards: tuple[str, ...]
    """The shards' digests, in order."""
    data: DataRecord | None
    """None where the examples came from no files."""

    def write(self, directory: Path, rank: int = 0) -> None:
        """Replaces the directory's manifest in one step; processes of other ranks may write the same one meanwhile."""
        beside = directory / f".{NAME}.{rank}"
        beside.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        os.replace(beside, directory / NAME)


def read_manifest(directory: Path) -> Manifest | None:
    """None where there is none: a cache of a version that wrote none."""
    try:
        found = json.loads((directory / NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    data = found["data"]
    record = None if data is None else DataRecord(tuple(data["paths"]), data["sha256"], data["max_length"])
    return Manifest(tuple(found["shards"]), record)
