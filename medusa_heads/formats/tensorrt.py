"""Medusa heads as NVIDIA's ModelOpt stores them (`medusa_heads.{i}.{j}`, beside the base that they were trained with)
and as TensorRT-LLM names them in its own checkpoints (`medusa_heads.{i}.medusa_layers.{j}`, `…{i}.lm_head`).

TensorRT-LLM's converter takes heads under the first project's names: `tensorrt-llm` of `medusa_heads.formats.writing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from medusa_heads.config import MedusaConfig
from medusa_heads.errors import HeadsError
from medusa_heads.formats.checkpoint import Checkpoint
from medusa_heads.formats.medusa_blocks import SEQUENCE, Naming, assemble, outline, prefixed
from medusa_heads.formats.reading import Reading, base_name, vocabulary

if TYPE_CHECKING:
    from medusa_heads.base import Base

PREFIX = "medusa_heads."
MODELOPT = prefixed(SEQUENCE, PREFIX)
TENSORRT = Naming(
    "TensorRT-LLM Medusa",
    PREFIX + "{head}.medusa_layers.{layer}.linear.weight",
    PREFIX + "{head}.medusa_layers.{layer}.linear.bias",
    PREFIX + "{head}.lm_head.weight",
)


FAMILY = "medusa"


def recognises(checkpoint: Checkpoint) -> bool:
    return any(name.startswith(PREFIX) for name in checkpoint.names)


def base_of(checkpoint: Checkpoint) -> str | None:
    """ModelOpt stores heads and base together."""
    together = any(not name.startswith(PREFIX) for name in checkpoint.names)
    return str(checkpoint.directory) if together and not _is_tensorrt(checkpoint) else base_name(checkpoint)


def _is_tensorrt(checkpoint: Checkpoint) -> bool:
    return any(".medusa_layers." in name for name in checkpoint.names)


def read(checkpoint: Checkpoint, base: Base | None = None) -> Reading:
    """The heads; tensors of the base beside them are not looked at."""
    names = [name for name in checkpoint.names if name.startswith(PREFIX)]
    tensorrt = _is_tensorrt(checkpoint)
    shape = outline(TENSORRT if tensorrt else MODELOPT, names, checkpoint.file)
    tensors, hidden, rows = assemble(shape, checkpoint.tensors(shape.names), checkpoint.file)
    notes = [] if not shape.shared_block else [f"each head's {shape.layers} blocks are one, stored once"]
    said = checkpoint.config.get("medusa")
    if isinstance(said, dict) and said.get("num_medusa_layers", shape.layers) != shape.layers:
        raise HeadsError(
            f"{checkpoint.file}: config.json says {said['num_medusa_layers']} blocks a head, the tensors are of "
            f"{shape.layers}"
        )
    config = MedusaConfig(
        hidden_size=hidden,
        vocab_size=rows or vocabulary(checkpoint, base),
        own_projection=shape.own_projection,
        num_heads=shape.heads,
        num_layers=shape.layers,
        base_model_name_or_path=base_of(checkpoint),
    )
    title = "TensorRT-LLM Medusa" if tensorrt else "ModelOpt Medusa"
    return Reading(title, config, tensors, checkpoint.file, tuple(notes))
