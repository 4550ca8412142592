"""The first project's Medusa checkpoints, and those that follow its names: the server TGI and the merged models.

`medusa_lm_head.pt` of v0.1 holds heads with projections of their own, and its config can give a wrong number of heads;
the later trainer leaves `medusa_lm_head.safetensors` without projections, which the base's own serves. TGI reads the
same names from that file: with projections (its V1) or without (its V2, heads of one block). Merged models
(Medusa-1.0) hold the base too, and the heads under `medusa_head.`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medusa_heads.config import HeadsConfig, MedusaConfig
from medusa_heads.errors import HeadsError
from medusa_heads.formats.adapting import State, Written, with_own_projections, without_choice
from medusa_heads.formats.checkpoint import Checkpoint
from medusa_heads.formats.medusa_blocks import SEQUENCE, Outline, assemble, outline, prefixed
from medusa_heads.formats.reading import Reading, base_name, vocabulary, whole_number

if TYPE_CHECKING:
    from medusa_heads.base import Base

MERGED_PREFIX = "medusa_head."
TGI_FILE = "medusa_lm_head.safetensors"


FAMILY = "medusa"


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


def sequence_tensors(state: State) -> dict[str, Tensor]:
    """Medusa heads under the first project's names."""
    config = _medusa(state.config)
    names = SEQUENCE.block_names(config.num_heads, config.num_layers)
    if config.own_projection:
        names |= SEQUENCE.projection_names(config.num_heads, config.num_layers)
    return {theirs: state.tensors[ours] for theirs, ours in names.items()}


def sequence_config(state: State) -> dict[str, Any]:
    config = _medusa(state.config)
    return {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "base_model_name_or_path": config.base_model_name_or_path,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
    }


def _medusa(config: HeadsConfig) -> MedusaConfig:
    if not isinstance(config, MedusaConfig):
        raise HeadsError(f"this format holds Medusa heads, not {config.family} heads")
    return config


def write(state: State, base: Base | None, all_rows: bool) -> Written:
    """`medusa_lm_head.pt` for the first project's own code: v0.1 where heads own projections, else its later trainer's
    content. Its modules repeat one block, so heads of several different ones are refused."""
    title = "the first project's Medusa format"
    config = _medusa(state.config)
    state, notes = without_choice(state, title, all_rows)
    blocks = [[state.tensors[f"heads.{i}.{j}.linear.weight"] for j in range(config.num_layers)]
              for i in range(config.num_heads)]  # fmt: skip
    if any(not torch.equal(block, head[0]) for head in blocks for block in head[1:]):
        raise HeadsError(f"{title} repeats one block in each head; these heads have {config.num_layers} different ones")
    written = sequence_config(state) | ({} if config.own_projection else {"version": "2"})
    return Written(written, sequence_tensors(state), "medusa_lm_head.pt", state.tensors, notes)


def write_tgi(state: State, base: Base | None, all_rows: bool) -> Written:
    """`medusa_lm_head.safetensors` for TGI: without projections (V2) where it can be, which takes heads of one block
    that share the base's; else with them (V1)."""
    _medusa(state.config)
    state, notes = without_choice(state, "TGI", all_rows)
    if not state.config.own_projection and state.config.num_layers == 1:  # type: ignore[attr-defined]
        return Written(sequence_config(state), sequence_tensors(state), TGI_FILE, state.tensors, notes)
    return _write_v1(state, base, "TGI's format for heads of several blocks", notes)


def write_tensorrt(state: State, base: Base | None, all_rows: bool) -> Written:
    """What TensorRT-LLM's converter for Medusa reads: the first project's names, each head with its projection."""
    _medusa(state.config)
    state, notes = without_choice(state, "TensorRT-LLM", all_rows)
    return _write_v1(state, base, "TensorRT-LLM's format", notes)


def _write_v1(state: State, base: Base | None, title: str, notes: tuple[str, ...]) -> Written:
    state, more = with_own_projections(state, base, title)
    return Written(sequence_config(state), sequence_tensors(state), TGI_FILE, state.tensors, (*notes, *more))
