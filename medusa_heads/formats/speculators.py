"""EAGLE-3 heads of vLLM's library speculators: the layer under `layers.0`, its config under `transformer_layer_config`,
the base under `speculators_config.verifier`. Layers are numbered by the states that enter them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from medusa_heads.config import EagleConfig
from medusa_heads.errors import BaseNeeded, HeadsError
from medusa_heads.formats.adapting import State, Written
from medusa_heads.formats.checkpoint import Checkpoint
from medusa_heads.formats.eagle3 import FUSED, engine_state, fused_layers, named_tensors, read_named
from medusa_heads.formats.llama_layer import llama_config
from medusa_heads.formats.reading import Reading, facts

if TYPE_CHECKING:
    from medusa_heads.base import Base

TYPE = "speculators_model_type"
VERSION = "0.9.0"
"""Of the library whose layout is written."""
SPECULATIVE_TOKENS = 3
"""What the library's own converter writes."""


FAMILY = "eagle"


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


def write(state: State, base: Base | None) -> Written:
    """A directory that `vllm serve` takes as it is, with the base named in it, and that the library can train on."""
    config = state.config
    assert isinstance(config, EagleConfig)
    title = "the format of speculators"
    if base is None:
        raise BaseNeeded(f"{title} names its base with its architecture: name the base (--base)")
    state, notes = engine_state(state, base, title)
    layer = llama_config(config.shape, config.hidden_size, config.vocab_size, title)
    written = {
        "architectures": ["Eagle3DraftModel"],
        TYPE: "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": SPECULATIVE_TOKENS,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": base.name, "architectures": [type(base.model).__name__]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.state_norm == "joined",
        "fc_norm": config.state_norm == "each",
        "norm_output": False,
        "target_hidden_size": None,
        FUSED: list(config.layers),
    }
    chain = f"vLLM will draft chains of {SPECULATIVE_TOKENS} tokens unless it is told otherwise"
    return Written(written, named_tensors(state, "layers.0."), "model.safetensors", state.tensors, (*notes, chain))
