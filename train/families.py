"""New heads as a training config asks for them, with the trainer of their family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

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


def make_trainer(config: TrainingConfig, base: Base, examples: Sequence[Example]) -> HeadsTrainer:
    """New heads in float32; a draft vocabulary is chosen from the training examples. For a draft model the base must
    not be packed yet."""
    from medusa_heads.draft_model import DraftModel, spread_layers
    from medusa_heads.eagle import EagleHeads
    from medusa_heads.hydra import HydraHeads
    from medusa_heads.medusa import MedusaHeads

    asked = config.heads
    draft_ids = None if asked.draft_vocab_size is None else choose_draft_ids(examples, asked.draft_vocab_size)
    if asked.family == "draft_model":
        layers = asked.layers or spread_layers(min(asked.num_layers, base.num_layers), base.num_layers)
        if len(layers) != asked.num_layers:
            raise ConfigError(f"a draft model of {asked.num_layers} layers has more than the base's {base.num_layers}")
        return DraftTrainer(DraftModel(base, layers, draft_ids), base, config)
    if asked.family == "eagle":
        eagle = EagleHeads.for_base(
            base,
            version=asked.version,
            layers=asked.layers,
            own_projection=asked.own_projection,
            draft_ids=draft_ids,
        )
        return EagleTrainer(eagle.float(), base, config)
    if asked.family == "hydra":
        hydra = HydraHeads.for_base(
            base,
            num_heads=asked.num_heads,
            num_layers=asked.num_layers,
            prefix_attention=asked.prefix_attention,
            own_projection=asked.own_projection,
            draft_ids=draft_ids,
        )
        return HydraTrainer(hydra.float(), base, config)
    medusa = MedusaHeads.for_base(
        base,
        num_heads=asked.num_heads,
        num_layers=asked.num_layers,
        own_projection=asked.own_projection,
        draft_ids=draft_ids,
    )
    return MedusaTrainer(medusa.float(), base, config)
