"""EAGLE-3 heads by the names of the first project, SpecForge, ModelOpt and, with `layers.0` for `midlayer`,
speculators.

Which states are fused is written in two ways under one key: by what *enters* a layer (vLLM, speculators, the first
project) or by what *leaves* it (SGLang, SpecForge, ModelOpt), one number less. `fused_layers` tells them apart where it
can and refuses where it cannot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medusa_heads.config import EagleConfig
from medusa_heads.errors import BaseNeeded, HeadsError
from medusa_heads.formats.adapting import State, Written, projection_rows
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
FUSED = "eagle_aux_hidden_state_layer_ids"
OWN_FUSED = "states_entering_layers"
"""This project's own key beside theirs, of one meaning."""


FAMILY = "eagle"


def recognises(checkpoint: Checkpoint) -> bool:
    return "speculators_model_type" not in checkpoint.config and _is_named(checkpoint.names)


def _is_named(names: frozenset[str]) -> bool:
    return "fc.weight" in names and any(f"{prefix}hidden_norm.weight" in names for prefix in ("midlayer.", "layers.0."))


def base_of(checkpoint: Checkpoint) -> str | None:
    return base_name(checkpoint)


def read(checkpoint: Checkpoint, base: Base | None = None) -> Reading:
    architecture = (checkpoint.config.get("architectures") or [None])[0]
    title = "EAGLE-3, SpecForge or ModelOpt" if architecture == "LlamaForCausalLMEagle3" else "EAGLE-3"
    _refuse_variants(checkpoint)
    known = facts(checkpoint, base, base_of(checkpoint))
    layers, note = fused_layers(checkpoint.config, known.num_layers, checkpoint)
    before = checkpoint.config.get("norm_before_residual") is True
    return read_named(checkpoint, base, title, checkpoint.config, layers, base_of(checkpoint), (note,), before)


def _refuse_variants(checkpoint: Checkpoint) -> None:
    """Switches of SpecForge that change the head into another function than is built here."""
    nested = checkpoint.config.get("eagle_config")
    both = {**checkpoint.config, **(nested if isinstance(nested, dict) else {})}
    if both.get("norm_output", True) is not True:
        raise HeadsError(f"{checkpoint.file}: norm_output is off: a head without a norm before its projection")
    if both.get("parallel_draft_step", 1) != 1:
        raise HeadsError(f"{checkpoint.file}: heads that draft several tokens in parallel are not read")
    if both.get("use_aux_hidden_state", True) is not True:
        raise HeadsError(f"{checkpoint.file}: use_aux_hidden_state is off, which is not EAGLE-3")


def fused_layers(config: Mapping[str, Any], num_layers: int | None, checkpoint: Checkpoint) -> tuple[list[int], str]:
    """The layers whose entering states are fused, and what to say of it.

    Args:
        num_layers: of the base, None where it is not known.
    """
    own, nested = config.get(OWN_FUSED), config.get("eagle_config")
    if own is not None:
        return _layer_list(own, checkpoint), "fuses the states entering layers " + _listed(own)
    inner = nested.get(FUSED) if isinstance(nested, dict) else None
    said = config.get(FUSED) or inner
    default = None if num_layers is None else [2, num_layers // 2, num_layers - 3]
    if not said:
        if default is None or min(default) < 0:
            raise BaseNeeded(
                f"{checkpoint.file}: the config does not say which states are fused, and the base's number of layers, "
                "which the default depends on, is not known: load the head with its base"
            )
        return default, f"fuses the states entering layers {_listed(default)}, which is the default"
    layers = _layer_list(said, checkpoint)
    if config.get(FUSED) or layers == default:  # the plain key is vLLM's alone
        return layers, "fuses the states entering layers " + _listed(layers)
    after = [layer + 1 for layer in layers]
    if after == default:
        return after, f"fuses the states leaving layers {_listed(layers)}"
    raise HeadsError(
        f"{checkpoint.file}: {FUSED} {layers} is ambiguous: states that enter these layers to vLLM, that leave them to "
        f'SGLang; say which by a key "{OWN_FUSED}" in config.json'
    )


def _layer_list(value: Any, checkpoint: Checkpoint) -> list[int]:
    if not isinstance(value, list) or not value or any(type(i) is not int or i < 0 for i in value):
        raise HeadsError(f"{checkpoint.directory / 'config.json'}: {value!r} is no list of layers")
    return value


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))


def read_named(
    checkpoint: Checkpoint,
    base: Base | None,
    title: str,
    config: Mapping[str, Any],
    layers: Sequence[int],
    named_base: str | None,
    notes: Sequence[str],
    norm_before_residual: bool = False,
) -> Reading:
    """The head by its tensors' names.

    Args:
        config: of the draft layer.
        layers: whose entering states are fused.
    """
    names, where = checkpoint.names, checkpoint.file
    if config.get("num_hidden_layers", 1) != 1:
        raise HeadsError(f"{where}: a draft of {config['num_hidden_layers']} layers; heads of one layer are read")
    prefix = "midlayer." if "midlayer.hidden_norm.weight" in names else "layers.0."
    state_norm = "joined" if "input_norm.weight" in names else "each" if "fc_norm.0.weight" in names else None
    mine = layer_names(prefix, names) | {
        "fc.weight": "fc.weight",
        "norm.weight": "norm.weight",
        f"{prefix}hidden_norm.weight": "hidden_norm.weight",
        f"{prefix}input_layernorm.weight": "input_norm.weight",
        "lm_head.weight": "lm_head.weight",
    }
    if state_norm == "joined":
        mine["input_norm.weight"] = "state_norms.0.weight"
    elif state_norm == "each":
        mine |= {f"fc_norm.{i}.weight": f"state_norms.{i}.weight" for i in range(len(layers))}
    own = "lm_head.weight" in names
    if not own:
        del mine["lm_head.weight"]
    refuse_leftovers(names - set(mine) - {EMBEDDING, "d2t", "t2d"}, title, where)
    stored = checkpoint.tensors(mine)
    tensors = {ours: stored[theirs] for theirs, ours in mine.items()}
    hidden = len(tensors["norm.weight"])
    expect_shape(tensors, "fc.weight", (hidden, len(layers) * hidden), where)
    for name in ("hidden_norm.weight", "input_norm.weight"):
        expect_shape(tensors, name, (hidden,), where)
    shape = read_shape({**config, "hidden_size": hidden}, tensors, 2 * hidden, where)
    vocab, rows, notes = _vocabularies(checkpoint, base, config, named_base, tensors, hidden, list(notes))
    if own:
        expect_shape(tensors, "lm_head.weight", (rows or vocab, hidden), where)
    heads = EagleConfig(
        hidden_size=hidden,
        vocab_size=vocab,
        own_projection=own,
        draft_vocab_size=rows,
        version=3,
        layers=tuple(layers),
        layer=asdict(shape),
        norm_before_residual=norm_before_residual,
        state_norm=state_norm,
        base_model_name_or_path=named_base,
    )
    return Reading(title, heads, tensors, where, tuple(notes))


def _vocabularies(
    checkpoint: Checkpoint,
    base: Base | None,
    config: Mapping[str, Any],
    named_base: str | None,
    tensors: dict[str, Tensor],
    hidden: int,
    notes: list[str],
) -> tuple[int, int | None, list[str]]:
    """Rows of the base's vocabulary, of the draft's (None where they are the same), and the notes; puts the draft's
    rows among the tensors."""
    names = checkpoint.names
    vocab = facts(checkpoint, base, named_base).vocab_size or config.get("vocab_size")
    if EMBEDDING in names:
        vocab, note = copied_embedding(checkpoint, EMBEDDING, hidden, base)
        notes.append(note)
    maps = checkpoint.tensors(names & {"d2t", "t2d"})
    if "t2d" in maps:
        said, vocab = vocab, len(maps["t2d"])
        if said is not None and said != vocab:
            raise HeadsError(f"{checkpoint.file}: t2d is over {vocab} tokens, the base's vocabulary has {said}")
    if type(vocab) is not int or vocab < 1:
        raise BaseNeeded(f"{checkpoint.file}: nothing tells the size of the vocabulary: load the head with its base")
    if "d2t" not in maps:
        if "t2d" in maps:
            raise HeadsError(f"{checkpoint.file} holds t2d without d2t")
        return vocab, None, notes
    ids = draft_ids(maps["d2t"], maps.get("t2d"), vocab, checkpoint)
    if len(ids) == vocab and torch.equal(ids, torch.arange(vocab)):
        return vocab, None, notes
    tensors["draft_ids"] = ids
    return vocab, len(ids), notes


def draft_ids(offsets: Tensor, mask: Tensor | None, vocab: int, checkpoint: Checkpoint) -> Tensor:
    """Token ids of the draft's rows from d2t (row i is token i + d2t[i]), which t2d must agree with."""
    if offsets.dim() != 1 or offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise HeadsError(f"{checkpoint.file}: d2t is {offsets.dtype} of shape {tuple(offsets.shape)}, not offsets")
    ids = offsets.long() + torch.arange(len(offsets))
    if ids.min() < 0 or ids.max() >= vocab or len(ids.unique()) < len(ids):
        raise HeadsError(f"{checkpoint.file}: d2t leads outside the vocabulary of {vocab}, or twice to one token")
    if mask is not None:
        expected = torch.zeros(vocab, dtype=torch.bool)
        expected[ids] = True
        if mask.dtype != torch.bool or not torch.equal(mask, expected):
            raise HeadsError(f"{checkpoint.file}: d2t and t2d name different tokens")
    return ids


def engine_state(state: State, base: Base | None, title: str) -> tuple[State, tuple[str, ...]]:
    """The head as all engines hold it: with a projection of its own, the draft's rows in the order of their ids.

    Trainers that go on from such a file take rows in that order by t2d, so that another would be misread by them.
    """
    notes: tuple[str, ...] = ()
    state = llama_state(state)
    config, tensors = state.config, dict(state.tensors)
    assert isinstance(config, EagleConfig)
    if base is not None and base.num_layers in config.layers:
        raise HeadsError(f"{title} fuses states that enter layers; this head also reads the base's last state")
    if not config.own_projection:
        tensors["lm_head.weight"], notes = projection_rows(base, tensors.get("draft_ids"), title)
    if "draft_ids" in tensors:
        order = tensors["draft_ids"].argsort()
        tensors["draft_ids"] = tensors["draft_ids"][order]
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order].contiguous()
    return state.changed(tensors, own_projection=True), notes


def named_tensors(state: State, prefix: str) -> dict[str, Tensor]:
    """The head under the names of other projects; `prefix` is the draft layer's."""
    config = state.config
    assert isinstance(config, EagleConfig)
    rest = dict(state.tensors)
    ids = rest.pop("draft_ids", None)
    fixed = {
        "hidden_norm.weight": f"{prefix}hidden_norm.weight",
        "input_norm.weight": f"{prefix}input_layernorm.weight",
    }
    named = {}
    for name, tensor in rest.items():
        if name.startswith("layer."):
            named[prefix + name.removeprefix("layer.")] = tensor
        elif name.startswith("state_norms."):
            named["input_norm.weight" if config.state_norm == "joined" else name.replace("state_norms", "fc_norm")] = (
                tensor
            )
        else:
            named[fixed.get(name, name)] = tensor
    if ids is not None:
        named["d2t"] = ids - torch.arange(len(ids))
        named["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        named["t2d"][ids] = True
    return named


def write(state: State, base: Base | None) -> Written:
    """EAGLE-3 for the first project's code and SGLang, which agree on the default layers alone and on no options."""
    config = state.config
    assert isinstance(config, EagleConfig)
    title = "the first project's EAGLE-3"
    if config.norm_before_residual or config.state_norm is not None:
        raise HeadsError(f"{title} has no place for norm_before_residual or norms of the states")
    if base is None:
        raise BaseNeeded(f"{title} fuses layers that depend on the base's number of layers: name the base (--base)")
    default = [2, base.num_layers // 2, base.num_layers - 3]
    if list(config.layers) != default:
        raise HeadsError(
            f"{title} fuses the states entering layers {_listed(default)} of a base of {base.num_layers}; this head "
            f"fuses those of {_listed(config.layers)}"
        )
    state, notes = engine_state(state, base, title)
    written = engine_config(state, "LlamaForCausalLMEagle3", title)
    return Written(written, named_tensors(state, "midlayer."), "model.safetensors", state.tensors, notes)


def write_vllm(state: State, base: Base | None) -> Written:
    """EAGLE-3 for vLLM, which takes the layers' numbers as they are here."""
    config = state.config
    assert isinstance(config, EagleConfig)
    title = "vLLM's EAGLE-3"
    state, notes = engine_state(state, base, title)
    written = engine_config(state, "LlamaForCausalLMEagle3", title) | {
        "eagle_config": {
            FUSED: list(config.layers),
            "use_aux_hidden_state": True,
            "norm_before_fc": config.state_norm == "joined",
        },
        "norm_before_residual": config.norm_before_residual,
        "fc_norm": config.state_norm == "each",
    }
    return Written(written, named_tensors(state, "midlayer."), "model.safetensors", state.tensors, notes)


def engine_config(state: State, architecture: str, title: str) -> dict[str, Any]:
    config = state.config
    assert isinstance(config, EagleConfig)
    return llama_config(config.shape, config.hidden_size, config.vocab_size, title) | {
        "architectures": [architecture],
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "base_model_name_or_path": config.base_model_name_or_path,
        OWN_FUSED: list(config.layers),
    }
