"""What a reader makes of a foreign checkpoint, and the checks that readers share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medusa_heads.config import HeadsConfig
from medusa_heads.errors import BaseNeeded, HeadsError
from medusa_heads.formats.checkpoint import Checkpoint

if TYPE_CHECKING:
    from medusa_heads.base import Base


@dataclass(frozen=True)
class Reading:
    """Heads in this project's own terms, and what they were taken for."""

    format: str
    """For people: "Medusa v0.1", "EAGLE-3 (SpecForge)" …"""
    config: HeadsConfig
    tensors: Mapping[str, Tensor]
    """By the names of the family's module."""
    where: Path
    """The weights, for error messages."""
    notes: tuple[str, ...] = field(default=())
    """What a user should know: where file and config disagree, what could not be checked."""

    def __str__(self) -> str:
        return "; ".join((f"{self.where.parent}: read as {self.format}", *self.notes))


def expect_shape(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], where: Path) -> None:
    """Raises HeadsError unless the tensor is of floats in this shape."""
    tensor = tensors[name]
    if tuple(tensor.shape) != shape:
        raise HeadsError(f"{where}: {name} has shape {tuple(tensor.shape)}; by the other tensors it should be {shape}")
    if not tensor.is_floating_point():
        raise HeadsError(f"{where}: {name} has dtype {tensor.dtype}, not a floating-point one")


def refuse_leftovers(names: Iterable[str], format: str, where: Path) -> None:
    """Raises HeadsError if tensors are left that a format does not know."""
    rest = sorted(names)
    if rest:
        more = f" and {len(rest) - 3} more" if len(rest) > 3 else ""
        raise HeadsError(f"{where}: not {format}: unexpected tensors {', '.join(rest[:3])}{more}")


def whole_number(checkpoint: Checkpoint, name: str) -> int | None:
    """A positive integer of the config, None where it has none. Raises HeadsError if it is anything else."""
    value = checkpoint.config.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise HeadsError(f"{checkpoint.directory / 'config.json'}: {name} is {value!r}, not a positive integer")
    return value


def text(checkpoint: Checkpoint, name: str) -> str | None:
    """A string of the config. Raises HeadsError if it is anything else."""
    value = checkpoint.config.get(name)
    if value is not None and not isinstance(value, str):
        raise HeadsError(f"{checkpoint.directory / 'config.json'}: {name} is {value!r}, not a string")
    return value or None


def base_name(checkpoint: Checkpoint) -> str | None:
    """The base that a checkpoint says it belongs to."""
    return text(checkpoint, "base_model_name_or_path")


@dataclass(frozen=True)
class Facts:
    """What is known of the base of a checkpoint; None for what is not."""

    vocab_size: int | None
    num_layers: int | None


def facts(checkpoint: Checkpoint, base: Base | None, name: str | None) -> Facts:
    """Of the base at hand; else of the one that the checkpoint names, by its config, if it lies on this machine. The
    network is not asked."""
    if base is not None:
        return Facts(base.vocab_size, base.num_layers)
    config = local_config(checkpoint.named_base or name)
    if config is None:
        return Facts(whole_number(checkpoint, "vocab_size"), None)
    layers, rows = getattr(config, "num_hidden_layers", None), getattr(config, "vocab_size", None)
    return Facts(whole_number(checkpoint, "vocab_size") or rows, layers)


def vocabulary(checkpoint: Checkpoint, base: Base | None) -> int:
    """Rows of the base's projection, for heads that share it and so do not show it. Raises HeadsError where nothing
    tells."""
    name = base_name(checkpoint)
    known = facts(checkpoint, base, name).vocab_size
    if known is None:
        raise BaseNeeded(
            f"{checkpoint.file}: these heads share the projection of their base ({name or 'unnamed'}) and do not say "
            "how many rows it has: load them with the base"
        )
    return known


def local_config(name: str | None) -> Any:
    """The text config of a base that lies on this machine, or None."""
    if name is None:
        return None
    from transformers import AutoConfig

    from medusa_heads.embedded import converted

    name = str(converted(name) or name)
    try:
        return AutoConfig.from_pretrained(name, local_files_only=True).get_text_config()
    except (OSError, ValueError):
        return None


def same_weights(stored: Tensor, own: Tensor) -> bool:
    """Whether a stored copy of the base's weights is this base's own, up to rounding to a half precision.

    Either side may have been rounded to bfloat16 (8 bits of mantissa) or float16 from the same numbers.
    """
    if stored.shape != own.shape:
        return False
    tolerance = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}
    rounding = max(tolerance.get(side.dtype, 2.0**-20) for side in (stored, own))
    if stored.dtype == own.dtype:
        rounding = 0.0
    a, b = stored.float(), own.detach().to("cpu").float()
    return bool(((a - b).abs() <= rounding * b.abs() + rounding * 1e-4).all())


def copied_embedding(checkpoint: Checkpoint, name: str, hidden: int, base: Base | None) -> tuple[int, str]:
    """Rows of a checkpoint's embedding, which must be a copy of the base's, and what to say of it.

    Raises HeadsError where the base is at hand and its embedding is another: the head would read other inputs than it
    was trained on.
    """
    stored = checkpoint.tensors([name])[name]
    if stored.dim() != 2 or stored.shape[1] != hidden or not stored.is_floating_point():
        raise HeadsError(
            f"{checkpoint.file}: {name} is {stored.dtype} of shape {tuple(stored.shape)}, not (V, {hidden})"
        )
    if base is None:
        return len(stored), "its embedding is taken for a copy of the base's, which is not at hand to compare"
    if not same_weights(stored, base.model.get_input_embeddings().weight):
        raise HeadsError(
            f"{checkpoint.file}: its embedding is not that of the base {base.name!r}: the head is for another base, or "
            "its embedding was trained, which is not read"
        )
    return len(stored), "its embedding is a copy of the base's"
