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
from medusa_heads.errors import BaseNeeded, HeadsError
from medusa_heads.formats.adapting import State, Written, without_choice
from medusa_heads.formats.checkpoint import Checkpoint
from medusa_heads.formats.llama_layer import layer_names, llama_config, llama_state, read_shape
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


FAMILY = "eagle"


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
        raise BaseNeeded(f"{checkpoint.file}: nothing tells the size of the vocabulary: load the head with its base")
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


def write(state: State, base: Base | None, all_rows: bool, for_vllm: bool) -> Written:
    """EAGLE-1 for vLLM, or for the first project's code and those that follow it (SGLang).

    The first project's needs the base's embedding in the file, and takes a bias of `fc` but no projection; vLLM has it
    the other way round.
    """
    title = "vLLM's EAGLE-1" if for_vllm else "the first project's EAGLE-1"
    state, notes = without_choice(state, title, all_rows)
    config = state.config
    assert isinstance(config, EagleConfig)
    if for_vllm and config.fc_bias:
        raise HeadsError(f"{title} drops the bias of fc, which this head has")
    if not for_vllm and config.own_projection:
        raise HeadsError(f"{title} uses the base's projection; this head has one of its own")
    state = llama_state(state)
    tensors = {_theirs(name): tensor for name, tensor in state.tensors.items()}
    written = llama_config(config.shape, config.hidden_size, config.vocab_size, title)
    written |= {"architectures": ["LlamaForCausalLM"], "base_model_name_or_path": config.base_model_name_or_path}
    if not for_vllm:
        if base is None:
            raise BaseNeeded(f"{title} holds a copy of the base's embedding: name the base (--base)")
        written["bias"] = config.fc_bias
        embedding = base.model.get_input_embeddings().weight
        tensors[EMBEDDING] = embedding.detach().to("cpu", copy=True).contiguous()
    return Written(written, tensors, "model.safetensors", state.tensors, notes)


def _theirs(name: str) -> str:
    return f"layers.0.{name.removeprefix('layer.')}" if name.startswith("layer.") else name
