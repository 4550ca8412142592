"""The first project's Medusa checkpoints, and those that follow its names: the server TGI and the merged models.

`medusa_lm_head.pt` of v0.1 holds heads with projections of their own, and its config can give a wrong number of heads;
the later trainer leaves `medusa_lm_head.safetensors` without projections, which the base's own serves. TGI reads the
same names from that file: with projections (its V1) or without (its V2, heads of one block). Merged models
(Medusa-1.0) hold the base too, and the heads under `medusa_head.`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from medusa_heads.config import MedusaConfig
from medusa_heads.errors import HeadsError
from medusa_heads.formats.checkpoint import Checkpoint
from medusa_heads.formats.medusa_blocks import SEQUENCE, Outline, assemble, outline, prefixed
from medusa_heads.formats.reading import Reading, base_name, vocabulary, whole_number

if TYPE_CHECKING:
    from medusa_heads.base import Base

MERGED_PREFIX = "medusa_head."


def recognises(checkpoint: Checkpoint) -> bool:
    return any(SEQUENCE.pattern(SEQUENCE.weight).fullmatch(name) for name in checkpoint.names) or is_merged(checkpoint)


def is_merged(checkpoint: Checkpoint) -> bool:
    return any(name.startswith(MERGED_PREFIX) for name in checkpoint.names)


def base_of(checkpoint: Checkpoint) -> str | None:
    """A merged model is its own base."""
    return str(checkpoint.directory) if is_merged(checkpoint) else base_name(checkpoint)


def read(checkpoint: Checkpoint, base: Base | None = None) -> Reading:
    """Heads under the first project's names. What the config says of their number counts less than the tensors."""
    merged = is_merged(checkpoint)
    naming = prefixed(SEQUENCE, MERGED_PREFIX) if merged else SEQUENCE
    names = [n for n in checkpoint.names if n.startswith(MERGED_PREFIX)] if merged else checkpoint.names
    shape = outline(naming, names, checkpoint.file)
    tensors, hidden, rows = assemble(shape, checkpoint.tensors(shape.names), checkpoint.file)
    config = MedusaConfig(
        hidden_size=hidden,
        vocab_size=rows or vocabulary(checkpoint, base),
        own_projection=shape.own_projection,
        num_heads=shape.heads,
        num_layers=shape.layers,
        base_model_name_or_path=base_of(checkpoint),
    )
    title = _title(checkpoint, merged, shape.own_projection)
    return Reading(title, config, tensors, checkpoint.file, _notes(checkpoint, shape))


def _title(checkpoint: Checkpoint, merged: bool, own_projection: bool) -> str:
    if merged:
        return "Medusa-1.0, merged with its base"
    if checkpoint.file.suffix == ".safetensors":
        return "Medusa, TGI V1" if own_projection else "Medusa, later trainer or TGI V2"
    return "Medusa v0.1" if own_projection else "Medusa v0.1 names without projections"


def _notes(checkpoint: Checkpoint, shape: Outline) -> tuple[str, ...]:
    notes = []
    heads, layers = whole_number(checkpoint, "medusa_num_heads"), whole_number(checkpoint, "medusa_num_layers")
    if heads not in (None, shape.heads):
        notes.append(f"config.json says {heads} heads, the tensors are of {shape.heads}: the tensors count")
    if layers not in (None, shape.layers):
        if not shape.own_projection:
            raise HeadsError(
                f"{checkpoint.file}: config.json says {layers} blocks a head, the tensors are of {shape.layers}: "
                "ambiguous, as blocks that are one module can have been stored once"
            )
        notes.append(f"config.json says {layers} blocks a head, the tensors are of {shape.layers}: the tensors count")
    if shape.shared_block:
        notes.append(f"each head's {shape.layers} blocks are one, of which the file holds a single copy")
    return tuple(notes)
