"""Hydra heads of the first project: `hydra_lm_head.pt`, heads under `hydra_mlp`, projections with biases of their own,
and for Hydra++ a whole one-layer Llama before them (`prefix_embeding_layer`, their spelling).

The file says nothing of the prefix layer's shape, which is the base's. It holds two embeddings: the base's, which must
be a copy of it, and one inside the prefix layer that is never used and named as left out. Dropouts stand between the
blocks and shift their numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import Tensor

from medusa_heads.config import HydraConfig, LayerShape
from medusa_heads.errors import BaseNeeded, HeadsError
from medusa_heads.formats.checkpoint import Checkpoint
from medusa_heads.formats.llama_layer import layer_names, read_shape
from medusa_heads.formats.reading import (
    Reading,
    base_name,
    copied_embedding,
    expect_shape,
    local_config,
    refuse_leftovers,
)

if TYPE_CHECKING:
    from medusa_heads.base import Base

BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)")
PROJECTION = re.compile(r"hydra_lm_head\.(\d+)\.(?:1\.)?(weight|bias)")
PREFIX = "prefix_embeding_layer."
EMBEDDING = "input_embed_fn.weight"
UNUSED = (f"{PREFIX}embed_tokens.weight", f"{PREFIX}layers.0.self_attn.rotary_emb.inv_freq")
"""A table that their forward never reads, and one that older transformers stored and computes."""


FAMILY = "hydra"


def recognises(checkpoint: Checkpoint) -> bool:
    return any(name.startswith("hydra_mlp.") for name in checkpoint.names)


def base_of(checkpoint: Checkpoint) -> str | None:
    return base_name(checkpoint)


def read(checkpoint: Checkpoint, base: Base | None = None) -> Reading:
    """The heads. Hydra++ needs the base, or its config on this machine, for the shape of the prefix layer."""
    config, where = checkpoint.config, checkpoint.file
    prefixed = any(name.startswith(PREFIX) for name in checkpoint.names)
    title = "Hydra++" if prefixed else "Hydra"
    _refuse_variants(checkpoint, prefixed)
    names, heads, layers = _names(checkpoint, title)
    prefix = _prefix_names(checkpoint.names) if prefixed else {}
    unused = checkpoint.names & set(UNUSED)
    refuse_leftovers(checkpoint.names - set(names) - set(prefix) - unused - {EMBEDDING}, title, where)
    stored = checkpoint.tensors(set(names) | set(prefix))
    tensors = {ours: stored[theirs] for theirs, ours in names.items()}
    hidden = len(tensors["heads.0.0.linear.weight"])
    rows = len(tensors["lm_heads.0.weight"])
    for name in tensors:
        expect_shape(tensors, name, _shape(name, hidden, rows), where)
    shape = None
    if prefixed:
        parts = {ours: stored[theirs] for theirs, ours in prefix.items()}
        shape = asdict(_prefix_shape(checkpoint, base, parts, hidden))
        tensors |= {f"prefix.{name}": tensor for name, tensor in parts.items()}
    copied: tuple[str, ...] = ()
    vocab = rows
    if EMBEDDING in checkpoint.names:
        vocab, note = copied_embedding(checkpoint, EMBEDDING, hidden, base)
        copied = (note,)
    if vocab != rows:
        raise HeadsError(f"{where}: projections of {rows} rows and an embedding of {vocab}")
    said = config.get("hydra_num_heads")
    notes = [] if said in (None, heads) else [f"config.json says {said} heads, the tensors are of {heads}"]
    notes += [f"{name}, which their forward does not use, is left out" for name in sorted(unused)]
    heads_config = HydraConfig(
        hidden_size=hidden,
        vocab_size=rows,
        own_projection=True,
        num_heads=heads,
        num_layers=layers,
        prefix_attention=prefixed,
        layer=shape,
        prefix_norm=prefixed,
        entry_bias=True,
        projection_bias=True,
        base_model_name_or_path=base_name(checkpoint),
    )
    return Reading(title, heads_config, tensors, where, (*copied, *notes))


def _refuse_variants(checkpoint: Checkpoint, prefixed: bool) -> None:
    config, where = checkpoint.config, checkpoint.file
    arch = config.get("hydra_head_arch", "mlp")
    if arch != ("prefix-mlp" if prefixed else "mlp"):
        raise HeadsError(f"{where}: hydra_head_arch {arch!r} does not go with these tensors, or is not read")
    if config.get("grounded_heads") is not True:
        raise HeadsError(
            f"{where}: heads that do not read the tokens drafted before them (grounded_heads) are not read"
        )
    if config.get("hidden_state_offset", 0) != 0:
        raise HeadsError(f"{where}: heads on an earlier state (hidden_state_offset) are not read")


def _names(checkpoint: Checkpoint, title: str) -> tuple[dict[str, str], int, int]:
    """Their names of heads and projections → ours, the number of heads and of layers."""
    names, places = {}, set()
    for name in checkpoint.names:
        if match := BLOCK.fullmatch(name):
            places.add(int(match[2]))
    order = {place: i for i, place in enumerate(sorted(places))}
    for name in checkpoint.names:
        if match := BLOCK.fullmatch(name):
            names[name] = f"heads.{int(match[1])}.{order[int(match[2])]}.{match[3]}.{match[4]}"
        elif match := PROJECTION.fullmatch(name):
            names[name] = f"lm_heads.{int(match[1])}.{match[2]}"
    heads = 1 + max(int(ours.split(".")[1]) for ours in names.values())
    expected = {f"lm_heads.{i}.{part}" for i in range(heads) for part in ("weight", "bias")}
    for i in range(heads):
        for j in range(len(order)):
            kinds = ("linear", "res_connection") if j == 0 else ("linear",)
            expected |= {f"heads.{i}.{j}.{kind}.{part}" for kind in kinds for part in ("weight", "bias")}
    found = set(names.values())
    if found != expected or len(found) < len(names):
        odd = min(expected ^ found, default="a tensor that is there twice")
        state = "is missing" if odd in expected - found else "is unexpected"
        raise HeadsError(f"{checkpoint.file}: {title} of {heads} heads and {len(order)} layers, but {odd} {state}")
    return names, heads, len(order)


def _shape(name: str, hidden: int, rows: int) -> tuple[int, ...]:
    """Shape of a tensor of ours: the first block of head i reads the state and i + 1 embeddings."""
    kind, head, *rest = name.split(".")
    if kind == "lm_heads":
        return (rows, hidden) if rest[0] == "weight" else (rows,)
    width = (int(head) + 2) * hidden if rest[0] == "0" else hidden
    return (hidden, width) if rest[-1] == "weight" else (hidden,)


def _prefix_names(names: frozenset[str]) -> dict[str, str]:
    return layer_names(f"{PREFIX}layers.0.", names) | {
        f"{PREFIX}layers.0.input_layernorm.weight": "input_layernorm.weight",
        f"{PREFIX}norm.weight": "norm.weight",
    }


def _prefix_shape(checkpoint: Checkpoint, base: Base | None, parts: Mapping[str, Tensor], hidden: int) -> LayerShape:
    """The prefix layer's shape by the base's config, checked against its tensors."""
    for name in ("input_layernorm.weight", "norm.weight"):
        expect_shape(parts, name, (hidden,), checkpoint.file)
    known: Any = base.config if base is not None else local_config(checkpoint.named_base or base_name(checkpoint))
    if known is None:
        raise BaseNeeded(
            f"{checkpoint.file}: the prefix layer has the shape of the base's layers ({base_name(checkpoint)}), which "
            "are not known: load the heads with the base"
        )
    return read_shape(known.to_dict(), parts, hidden, checkpoint.file)
