"""What tells one way of drafting from another of the same name: so that a run which was cut is not gone on with
retrained heads or other trees."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt")
SMALL_FILES = ("config.json", "tree.json")


def weights_digest(way: str, heads: str | None = None) -> str:
    """Of the files of all heads and local draft models in a way of drafting.

    Args:
        way: as `--drafter` of medusa-decode takes it.
        heads: what 'heads' in it stands for; None: the embedded heads of the default base.
    """
    from decode.drafters.specs import OWN_HEADS, parse_all
    from medusa_heads.embedded import DEFAULT_EMBEDDED
    from medusa_heads.hub import heads_directory

    digest = hashlib.sha256()
    for kind, value, _ in parse_all(way):
        if kind == "heads":
            digest_files(heads_directory((heads or DEFAULT_EMBEDDED) if value == OWN_HEADS else value), digest)
        elif kind == "model" and Path(value).is_dir():
            digest_files(Path(value), digest)
    return digest.hexdigest()[:16]


def digest_files(directory: Path, digest: Any) -> None:
    """Adds the names and bytes of a directory's weights, config and tree."""
    for file in sorted({file for pattern in (*WEIGHT_FILES, *SMALL_FILES) for file in directory.glob(pattern)}):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while block := stream.read(2**24):
                digest.update(block)


def trees_of(drafter: Any) -> Any:
    """What limits a drafter's trees: a static tree, limits of dynamic ones, a list for a combination; None where
    nothing is stored with it."""
    if parts := getattr(drafter, "drafters", None):
        return [trees_of(part) for part in parts]
    choice = getattr(drafter, "choice", None)
    tree = getattr(drafter, "tree", None) if choice is None else choice.likeliest
    return None if tree is None else tree.to_dict()
