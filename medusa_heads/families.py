"""Heads of any family by name: which module belongs to which config."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from medusa_heads.config import HeadsConfig

_HOMES = {"medusa": "MedusaHeads", "eagle": "EagleHeads", "hydra": "HydraHeads"}


def heads_class(config: HeadsConfig) -> Any:
    """The module of a family: `MedusaHeads`, `EagleHeads` or `HydraHeads`."""
    return getattr(import_module(f"medusa_heads.{config.family}"), _HOMES[config.family])


def load_heads(name: str | Path, **options: Any) -> Any:
    """Heads of whichever family a directory, an embedded name or a Hub id holds; `options` as in `from_pretrained`."""
    from medusa_heads.hub import heads_directory, open_heads

    fetching = ("revision", "subfolder", "token", "cache_dir", "local_files_only", "force_download")
    directory = heads_directory(name, **{key: options.pop(key) for key in fetching if key in options})
    reading = open_heads(directory, options.get("base"))
    return heads_class(reading.config).from_reading(reading, **options)
