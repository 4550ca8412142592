"""EAGLE-1 and EAGLE-2 heads, which are the same: the first project's, and vLLM's.

One Llama layer without an input norm, fed by `fc` from the next token's embedding and the base's last state. The
embedding is a frozen copy of the base's and the base's projection is used, so neither is part of the head. vLLM's older
layout nests the layer's config under `model` and puts `model.` before names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import Tensor

from medusa_heads.config import EagleConfig
from medusa_heads.errors import HeadsError
from medusa_heads.formats.checkpoint import Checkpoint
from medusa_heads.formats.llama_layer import layer_names, read_shape
from medusa_heads.formats.reading import (
    Reading,
    base_name,
    copied_embedding,
    expect_shape,
    facts,
    refuse_leftovers,
)

if TYPE_CHECKING:
    from medusa_heads.base import Base

EMBEDDING = "embed_tokens.weight"
PROJECTION = "lm_head.weight"


def recognises(checkpoint: Checkpoint) -> bool:
    names = plain_names(checkpoint.names)
    return {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names.keys() and not any(
        name.startswith(("layers.0.hidden_norm", "midlayer.")) for name in names
    )


def base_of(checkpoint: Checkpoint) -> str | None:
    return base_name(checkpoint)


def plain_names(names: frozenset[str]) -> dict[str, str]:
    """Names without vLLM's `model.` or `model.model.` → names in the file."""
    return {_stripped(name): name for name in sorted(names)}


def _stripped(name: str) -> str:
    while name.startswith("model."):
        name = name.removeprefix("model.")
    return name


def layer_config(checkpoint: Checkpoint) -> tuple[Mapping[str, Any], bool]:
    """The config of the draft layer, and whether it is nested as vLLM's `model_type: eagle` has it."""
    nested = checkpoint.config.get("model")
    if checkpoint.config.get("model_type") != "eagle":
        return checkpoint.config, False
    if not isinstance(nested, dict):
        raise HeadsError(f"{checkpoint.directory / 'config.json'}: model_type is eagle, but model is {nested!r}")
    return nested, True


def read(checkpoint: Checkpoint, base: Base | None = None) -> Reading:
    """The head. Its copy of the embedding is compared with the base's, where one is at hand."""
    config, nested = layer_config(checkpoint)
    theirs = plain_names(checkpoint.names)
    if len(theirs) < len(checkpoint.names):
        raise HeadsError(f"{checkpoint.file}: two tensors share a name but for vLLM's prefix")
    _refuse_layers(config, checkpoint)
    title = "EAGLE-1, vLLM" if nested else "EAGLE-1 or EAGLE-2"
    mine = layer_names("layers.0.", frozenset(theirs)) | {"fc.weight": "fc.weight"}
    mine |= {name: name for name in ("fc.bias", PROJECTION) if name in theirs}
    refuse_leftovers(set(theirs) - set(mine) - {EMBEDDING}, title, checkpoint.file)
    stored = checkpoint.tensors(theirs[name] for name in mine)
    tensors = {ours: stored[theirs[name]] for name, ours in mine.items()}
    hidden = len(tensors["fc.weight"])
    expect_shape(tensors, "fc.weight", (hidden, 2 * hidden), checkpoint.file)
    shape = read_shape({**config, "hidden_size": hidden}, tensors, hidden, checkpoint.file)
    notes = []
    vocab = facts(checkpoint, base, base_name(checkpoint)).vocab_size or config.get("vocab_size")
    if EMBEDDING in theirs:
        vocab, note = copied_embedding(checkpoint, theirs[EMBEDDING], hidden, base)
        notes.append(note)
    if vocab is None:
        raise HeadsError(f"{checkpoint.file}: nothing tells the size of the vocabulary: load the head with its base")
    heads = EagleConfig(
        hidden_size=hidden,
        vocab_size=vocab,
        own_projection=PROJECTION in theirs,
        version=1,
        layer=asdict(shape),
        fc_bias="fc.bias" in theirs,
        base_model_name_or_path=base_name(checkpoint),
    )
    return Reading(title, heads, tensors, checkpoint.file, (*notes, *bias_note(config, tensors)))


def _refuse_layers(config: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """One layer is what a head of this family has."""
    layers = config.get("num_hidden_layers", 1)
    if layers != 1:
        raise HeadsError(f"{checkpoint.file}: a draft of {layers} layers; EAGLE heads of one layer are read")


def bias_note(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    said, found = config.get("bias"), "fc.bias" in tensors
    if isinstance(said, bool) and said != found:
        return (f"config.json says bias {str(said).lower()}, the file holds {'one' if found else 'none'}",)
    return ()
