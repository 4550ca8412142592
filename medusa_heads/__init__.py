"""Trained heads for speculative decoding: what is trained, saved, loaded and shared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medusa_heads.base import Base
    from medusa_heads.config import EagleConfig, HydraConfig, MedusaConfig
    from medusa_heads.eagle import EagleHeads
    from medusa_heads.families import load_heads
    from medusa_heads.medusa import MedusaHeads

__version__ = "0.1.0"
__all__ = [
    "Base",
    "EagleConfig",
    "EagleHeads",
    "HydraConfig",
    "MedusaConfig",
    "MedusaHeads",
    "__version__",
    "load_heads",
]

_HOMES = {
    "Base": "base",
    "EagleConfig": "config",
    "EagleHeads": "eagle",
    "HydraConfig": "config",
    "MedusaConfig": "config",
    "MedusaHeads": "medusa",
    "load_heads": "families",
}


def __getattr__(name: str) -> Any:
    """Imports torch and transformers only when something of them is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
