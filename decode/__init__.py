"""The decoder: candidate trees, one-pass verification, drafters, the generation engine and `medusa-decode`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decode.engine import Decoder
    from decode.hf import speculate
    from decode.sampling import SamplingParams
    from decode.settings import GenerationSettings

__all__ = ["Decoder", "GenerationSettings", "SamplingParams", "speculate"]

_HOMES = {"Decoder": "engine", "GenerationSettings": "settings", "SamplingParams": "sampling", "speculate": "hf"}


def __getattr__(name: str) -> Any:
    """Imports torch and transformers only when something of them is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
