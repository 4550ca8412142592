"""Trees tuned to a machine: kept in the user's cache, found again by machine, heads, base and dtype.

`medusa-decode tune` writes a profile; loading heads without a tree of one's own takes the profile's, else the tree that
training chose. A profile holds one choice: `"tree"`, a static tree, or `"dynamic"`, the limits within which a drafter
grows a tree of its own each round. What such a drafter draws from has a profile of its own beside it (`drawn`).
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decode.dynamic import DynamicTree
from decode.machine import describe_machine
from decode.tree import Tree
from medusa_heads.embedded import cache_dir
from medusa_heads.errors import ConfigError, HeadsError
from medusa_heads.hub import weights_file

if TYPE_CHECKING:
    from medusa_heads.base import Base

MACHINE_KEYS = ("processor", "cores", "threads", "system", "device")


def profile_key(directory: Path, base: Base, drawn: bool = False) -> dict[str, Any]:
    """What a profile belongs to: the machine (threads in use included), the heads' weights, the base and its dtype;
    with `drawn`, the sampled texts of a drafter that grows its trees."""
    machine = describe_machine(base.device)
    weights = weights_file(directory)
    if not weights.is_file():
        raise HeadsError(f"{directory} has no {weights.name}")
    return {
        **{name: machine[name] for name in MACHINE_KEYS},
        "heads": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "base": base.weights_hash,
        "dtype": str(base.dtype).removeprefix("torch."),
        "attention": str(base.config._attn_implementation),
        **({"drawn": True} if drawn else {}),
    }


def profile_path(key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / "profiles" / f"{digest}.json"


def write_profile(
    directory: Path, base: Base, choice: Tree | DynamicTree, facts: dict[str, Any], *, drawn: bool = False
) -> Path:
    """Keeps a choice and what led to it. The file appears whole or not at all."""
    key = profile_key(directory, base, drawn)
    path = profile_path(key)
    chosen = {"tree" if isinstance(choice, Tree) else "dynamic": choice.to_dict()}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(prefix=f".{path.stem}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"key": key, **facts, **chosen}, file, indent=1)
        os.replace(scratch, path)
    finally:
        Path(scratch).unlink(missing_ok=True)
    return path


def read_profile(directory: Path, base: Base, *, drawn: bool = False) -> Tree | DynamicTree | None:
    """What was tuned for these heads on this machine; None where nothing was. A damaged profile is an error."""
    path = profile_path(profile_key(directory, base, drawn))
    if not path.is_file():
        return None
    try:
        profile = json.loads(path.read_text(encoding="utf-8"))
        if "dynamic" in profile:
            return DynamicTree.from_dict(profile["dynamic"])
        return Tree.from_dict(profile["tree"])
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        raise HeadsError(
            f"the profile {path} is damaged ({error}): delete it, or run medusa-decode tune again"
        ) from None


def tuned_tree(directory: Path, base: Base) -> Tree | None:
    """The static tree of the profile; None where there is no profile. Limits in its place are an error: whoever asks
    cannot grow a tree."""
    choice = read_profile(directory, base)
    if isinstance(choice, DynamicTree):
        raise HeadsError(f"the profile of {directory} has no tree but limits of a dynamic one: tune it again")
    return choice
