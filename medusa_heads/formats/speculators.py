"""EAGLE-3 heads of vLLM's library speculators: the layer under `layers.0`, its config under `transformer_layer_config`,
the base under `speculators_config.verifier`. Layers are numbered by the states that enter them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from medusa_heads.errors import HeadsError
from medusa_heads.formats.checkpoint import Checkpoint
from medusa_heads.formats.eagle3 import fused_layers, read_named
from medusa_heads.formats.reading import Reading, facts

if TYPE_CHECKING:
    from medusa_heads.base import Base

TYPE = "speculators_model_type"


def recognises(checkpoint: Checkpoint) -> bool:
    return TYPE in checkpoint.config


def base_of(checkpoint: Checkpoint) -> str | None:
    verifier = _object(_object(checkpoint.config, "speculators_config"), "verifier")
    name = verifier.get("name_or_path")
    return name if isinstance(name, str) else None


def _object(config: Any, key: str) -> dict[str, Any]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def read(checkpoint: Checkpoint, base: Base | None = None) -> Reading:
    config, where = checkpoint.config, checkpoint.file
    if config[TYPE] != "eagle3":
        raise HeadsError(f"{where}: speculators of type {config[TYPE]!r} are not read; eagle3 is")
    layer = _object(config, "transformer_layer_config")
    if layer.get("model_type", "llama") not in ("llama", "qwen3"):
        raise HeadsError(f"{where}: a draft layer of {layer['model_type']} is not read")
    if config.get("norm_output"):
        raise HeadsError(f"{where}: norm_output is set: heads that pass on normed states are not read")
    before = config.get("norm_before_residual")
    if not isinstance(before, bool):
        raise HeadsError(
            f"{where}: norm_before_residual is {before!r}: where it is missing, vLLM takes true and speculators false"
        )
    hidden = layer.get("hidden_size")
    if config.get("target_hidden_size") not in (None, hidden):
        raise HeadsError(f"{where}: a draft of {hidden} features on a base of {config['target_hidden_size']}")
    name = base_of(checkpoint)
    layers, note = fused_layers(config, facts(checkpoint, base, name).num_layers, checkpoint)
    return read_named(checkpoint, base, "speculators EAGLE-3", layer, layers, name, (note,), before)
