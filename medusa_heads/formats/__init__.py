"""Checkpoints of other projects: one file a format, reading and writing.

`read_foreign` recognises a directory by its content: the names of its tensors first, its config second. Each reader
maps every tensor of the heads by name and refuses what is left over; a directory that could be two things is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from medusa_heads.config import OWN_TYPE
from medusa_heads.errors import HeadsError
from medusa_heads.formats import eagle, eagle3, hydra, medusa, speculators, tensorrt, vllm_medusa
from medusa_heads.formats.checkpoint import CONFIG, Checkpoint, open_checkpoints, read_json
from medusa_heads.formats.reading import Reading

if TYPE_CHECKING:
    from medusa_heads.base import Base


class Reader(Protocol):
    """A module of this package."""

    @property
    def FAMILY(self) -> str: ...

    @property
    def recognises(self) -> Callable[[Checkpoint], bool]: ...

    @property
    def read(self) -> Callable[[Checkpoint, Base | None], Reading]: ...

    @property
    def base_of(self) -> Callable[[Checkpoint], str | None]: ...


READERS: tuple[Reader, ...] = (medusa, tensorrt, vllm_medusa, eagle, eagle3, speculators, hydra)


def is_own(directory: Path) -> bool:
    """Whether a directory is in this project's own layout, by its config."""
    path = directory / CONFIG
    return path.is_file() and read_json(path).get("model_type") == OWN_TYPE


def read_foreign(directory: Path, base: Base | None = None, named: str | None = None) -> Reading:
    """Heads of another project, in this project's terms.

    Args:
        base: the base that they are for, where it is at hand: what some formats leave to it is taken from it, and
            copies of its weights in the file are compared with it.
        named: a base whose config is asked instead, if it lies on this machine; default the one that the heads name.

    Raises:
        BaseNeeded: the base has to be told or at hand.
        HeadsError: nothing that is known, more than one thing, or damaged.
    """
    reader, checkpoint = recognise(directory)
    reading = reader.read(replace(checkpoint, named_base=named), base)
    if not checkpoint.skipped:
        return reading
    beside = f"{', '.join(checkpoint.skipped)} beside {checkpoint.file.name} was not read"
    return replace(reading, notes=(*reading.notes, beside))


def base_of_foreign(directory: Path) -> str | None:
    """The base that another project's heads name, or that lies in one file with them."""
    reader, checkpoint = recognise(directory)
    return reader.base_of(checkpoint)


def foreign_facts(directory: Path) -> tuple[str, Path]:
    """Family of another project's heads, and the file of their weights (or of the index of them)."""
    reader, checkpoint = recognise(directory)
    return reader.FAMILY, checkpoint.file


def recognise(directory: Path) -> tuple[Reader, Checkpoint]:
    """The one reader that knows one of the directory's files. Raises HeadsError if there is none, or a second."""
    checkpoints = open_checkpoints(directory, read_json(directory / CONFIG))
    if not checkpoints:
        raise HeadsError(f"{directory} holds no weights under a name that heads are stored by")
    known = [(reader, checkpoint) for checkpoint in checkpoints for reader in READERS if reader.recognises(checkpoint)]
    if not known:
        seen = ", ".join(f"{c.file.name} ({', '.join(sorted(c.names)[:2])} …)" for c in checkpoints)
        raise HeadsError(f"{directory} holds no heads of a known format: {seen}")
    if len(known) > 1:
        takes = ", ".join(f"{c.file.name} as {reader.__name__.rsplit('.', 1)[-1]}" for reader, c in known)  # type: ignore[attr-defined]
        raise HeadsError(f"{directory} could be read in {len(known)} ways ({takes}): move the other files away")
    return known[0]
