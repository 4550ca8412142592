"""New heads as a training config asks for them, with the trainer of their family."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from medusa_heads.errors import ConfigError
from train.data import Example
from train.draft_model import DraftTrainer
from train.eagle import EagleTrainer
from train.hydra import HydraTrainer
from train.states import choose_draft_ids
from train.trainer import HeadsTrainer, MedusaTrainer

if TYPE_CHECKING:
    from medusa_heads.base import Base
    from train.config import TrainingConfig

ORIGIN = ("base_model_name_or_path", "base_revision")
"""Keys of a heads' config that say where its base came from; that it is the same one is checked by hashes."""


TRAINERS: dict[str, Callable[[Any, Base, TrainingConfig], HeadsTrainer]] = {
    "medusa": MedusaTrainer,
    "hydra": HydraTrainer,
    "eagle": EagleTrainer,
    "draft_model": DraftTrainer,
}


def make_trainer(config: TrainingConfig, base: Base, examples: Sequence[Example]) -> HeadsTrainer:
    """Heads in float32, new or those of `heads.start`; a draft vocabulary is chosen from the training examples, or is
    that of the heads gone on from. For a draft model the base must not be packed yet."""
    asked = config.heads
    if asked.start is not None:
        heads = go_on_from(config, asked.start, base)
    else:
        size = asked.draft_vocab_size
        heads = new_heads(config, base, None if size is None else choose_draft_ids(examples, size))
    return TRAINERS[asked.family](heads, base, config)


def new_heads(config: TrainingConfig, base: Base, draft_ids: Tensor | None) -> Any:
    from medusa_heads.draft_model import DraftModel, spread_layers
    from medusa_heads.eagle import EagleHeads
    from medusa_heads.hydra import HydraHeads
    from medusa_heads.medusa import MedusaHeads

    asked = config.heads
    shared: dict[str, Any] = {"own_projection": asked.own_projection, "draft_ids": draft_ids}
    if asked.family == "draft_model":
        layers = asked.layers or spread_layers(min(asked.num_layers, base.num_layers), base.num_layers)
        if len(layers) != asked.num_layers:
            raise ConfigError(f"a draft model of {asked.num_layers} layers has more than the base's {base.num_layers}")
        return DraftModel(base, layers, draft_ids)
    if asked.family == "eagle":
        return EagleHeads.for_base(base, version=asked.version, layers=asked.layers, **shared).float()
    sizes: dict[str, Any] = {"num_heads": asked.num_heads, "num_layers": asked.num_layers, **shared}
    if asked.family == "hydra":
        return HydraHeads.for_base(base, prefix_attention=asked.prefix_attention, **sizes).float()
    return MedusaHeads.for_base(base, **sizes).float()


def go_on_from(config: TrainingConfig, start: str, base: Base) -> Any:
    """Trained heads in float32, with their draft vocabulary, if they are of the family and shape that the config says.

    Args:
        start: a directory, an embedded name or a Hub id.

    Raises:
        ConfigError: they are not; the message says in what.
        HeadsError: they belong to another base.
    """
    from medusa_heads.families import load_heads

    found = load_heads(start, base=base)
    if found.config.family != config.heads.family:
        raise ConfigError(f"heads.start: {start} holds heads of family {found.config.family}")
    size = config.heads.draft_vocab_size
    if found.config.draft_vocab_size != size:
        raise ConfigError(f"heads.start: {start} drafts from {found.config.draft_vocab_size} rows, not {size}")
    heads = new_heads(config, base, found.draft_ids)
    there = dataclasses.asdict(found.config)
    differing = [
        f"{key}: {there[key]!r}, not {value!r}"
        for key, value in dataclasses.asdict(heads.config).items()
        if there[key] != value and key not in ORIGIN
    ]
    if differing:
        raise ConfigError(f"heads.start: {start} differs in {'; '.join(differing)}")
    heads.load_state_dict(found.state_dict())
    return heads
