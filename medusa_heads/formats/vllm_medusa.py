"""Medusa heads as vLLM serves them: `blocks.{i}.layers.{j}`, `lm_heads.{i}` or one `lm_head` for all, `token_map`.

vLLM skips tensors whose names it does not know, and biases unless `medusa_fc_bias` is true. A projection that all heads
share must lie in the file (`original_lm_head`); it is a copy of the base's.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medusa_heads.config import MedusaConfig
from medusa_heads.errors import HeadsError
from medusa_heads.formats.adapting import State, Written, projection_rows
from medusa_heads.formats.checkpoint import Checkpoint
from medusa_heads.formats.medusa_blocks import Naming, assemble, outline
from medusa_heads.formats.reading import Reading, base_name, same_weights, vocabulary

if TYPE_CHECKING:
    from medusa_heads.base import Base

NAMING = Naming(
    "vLLM Medusa", "blocks.{head}.layers.{layer}.weight", "blocks.{head}.layers.{layer}.bias", "lm_heads.{head}.weight"
)
SHARED = "lm_head.weight"
TOKEN_MAP = "token_map"
LOADER_OPTION = {"enable_weights_track": False}
"""What vLLM 0.32 needs as `--model-loader-extra-config` with a `token_map`: it counts the map among the weights that a
checkpoint must hold, and not among those that it has read."""
UNCHECKED = (
    f"vLLM 0.32 refuses its own token_map unless started with --model-loader-extra-config '{json.dumps(LOADER_OPTION)}'"
)


FAMILY = "medusa"


def recognises(checkpoint: Checkpoint) -> bool:
    return any(NAMING.pattern(NAMING.weight).fullmatch(name) for name in checkpoint.names)


def base_of(checkpoint: Checkpoint) -> str | None:
    return base_name(checkpoint)


def read(checkpoint: Checkpoint, base: Base | None = None) -> Reading:
    """vLLM's heads. A shared projection is taken for the base's own and compared with it where the base is at hand;
    if it differs, each head gets a copy, which is the same function."""
    names, shared = set(checkpoint.names), _shared_name(checkpoint)
    aside = names & {SHARED, TOKEN_MAP} | ({shared} if shared else set())
    shape = outline(NAMING, names - aside, checkpoint.file)
    found = checkpoint.tensors(set(shape.names) | aside)
    tensors, hidden, rows = assemble(shape, found, checkpoint.file)
    notes = []
    if shape.biased and checkpoint.config.get("medusa_fc_bias") is not True:
        notes.append("config.json does not set medusa_fc_bias, so vLLM would drop the biases, which are read here")
    token_map = found.get(TOKEN_MAP)
    if token_map is not None:
        tensors["draft_ids"] = _draft_ids(checkpoint, token_map)
    own = shape.own_projection
    if shared is not None:
        own, note = _is_own(checkpoint, found[shared], token_map, base)
        notes.append(note)
        if own:
            rows = len(found[shared])
            tensors |= {f"lm_heads.{i}.weight": found[shared].clone() for i in range(shape.heads)}
    if own and token_map is not None:
        tensors |= _mapped_rows(checkpoint, tensors, token_map)
    vocab = vocabulary(checkpoint, base) if rows is None or token_map is not None else rows
    config = MedusaConfig(
        hidden_size=hidden,
        vocab_size=vocab,
        own_projection=own,
        draft_vocab_size=None if token_map is None else len(token_map),
        num_heads=shape.heads,
        num_layers=shape.layers,
        base_model_name_or_path=base_name(checkpoint),
    )
    return Reading(NAMING.format, config, tensors, checkpoint.file, tuple(notes))


def _shared_name(checkpoint: Checkpoint) -> str | None:
    """The one projection of all heads, by either of the names that vLLM takes."""
    if checkpoint.config.get("original_lm_head") is not True:
        if SHARED in checkpoint.names:
            raise HeadsError(f"{checkpoint.file} holds {SHARED}, but its config does not set original_lm_head")
        return None
    candidates = [name for name in (SHARED, "lm_heads.0.weight") if name in checkpoint.names]
    if len(candidates) != 1:
        raise HeadsError(
            f"{checkpoint.file}: original_lm_head is set, and {'two' if candidates else 'no'} tensors could be it"
        )
    return candidates[0]


def _draft_ids(checkpoint: Checkpoint, token_map: Tensor) -> Tensor:
    if token_map.dim() != 1 or token_map.is_floating_point() or token_map.dtype == torch.bool:
        raise HeadsError(
            f"{checkpoint.file}: {TOKEN_MAP} is {token_map.dtype} of shape {tuple(token_map.shape)}, not a list of ids"
        )
    said = checkpoint.config.get("truncated_vocab_size")
    if said != len(token_map):
        raise HeadsError(f"{checkpoint.file}: {TOKEN_MAP} has {len(token_map)} ids; truncated_vocab_size is {said}")
    return token_map.to(torch.int64)


def _is_own(
    checkpoint: Checkpoint, projection: Tensor, token_map: Tensor | None, base: Base | None
) -> tuple[bool, str]:
    """Whether the heads' common projection differs from the base's, and what to say of it."""
    if base is None:
        return False, "its common projection is taken for the base's own, which is not at hand to compare"
    theirs = projection
    ours = base.projection_weight.to("cpu")
    if token_map is not None and len(theirs) == len(token_map):
        ours = ours[token_map.long()]
    if same_weights(theirs, ours):
        return False, "its common projection is the base's own"
    return True, f"its common projection is not that of {base.name!r}: each head keeps a copy"


def _mapped_rows(checkpoint: Checkpoint, tensors: dict[str, Tensor], token_map: Tensor) -> dict[str, Tensor]:
    """Projections cut to the mapped rows, as vLLM does at loading."""
    cut = {}
    for name, tensor in tensors.items():
        if name.startswith("lm_heads") and len(tensor) > len(token_map):
            if int(token_map.max()) >= len(tensor):
                raise HeadsError(f"{checkpoint.file}: {TOKEN_MAP} names row {int(token_map.max())} of {len(tensor)}")
            cut[name] = tensor[token_map.long()].clone()
    return cut


def write(state: State, base: Base | None) -> Written:
    """Heads as vLLM 0.32 reads them. vLLM drafts a chain of each head's likeliest token.

    Heads that share the base's projection come with one copy of it, cut to their rows if they draft from chosen ones.
    Raises HeadsError for chosen rows of projections of their own, which vLLM's loader does not take.
    """
    config = state.config
    assert isinstance(config, MedusaConfig)
    rows = config.draft_vocab_size
    if rows is not None and config.own_projection:
        raise HeadsError("vLLM does not load heads with projections of their own over a draft vocabulary")
    names = NAMING.block_names(config.num_heads, config.num_layers)
    notes: tuple[str, ...] = ()
    extra: dict[str, Tensor] = {}
    if config.own_projection:
        names |= NAMING.projection_names(config.num_heads, config.num_layers)
    else:
        extra[SHARED], notes = projection_rows(base, state.tensors.get("draft_ids"), "vLLM's Medusa format")
    if rows is not None:
        extra[TOKEN_MAP] = state.tensors["draft_ids"]
    written: dict[str, Any] = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": rows or config.vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": not config.own_projection,
        "base_model_name_or_path": config.base_model_name_or_path,
    }
    tensors = {theirs: state.tensors[ours] for theirs, ours in names.items()} | extra
    chain = f"vLLM drafts a chain of {config.num_heads} tokens, without a tree"
    if rows is not None:
        notes = (*notes, UNCHECKED)
    return Written(written, tensors, "model.safetensors", state.tensors, (*notes, chain))
