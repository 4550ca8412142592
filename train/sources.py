"""Where a run's hidden states come from: cached shards, or the base itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.data import encode_rows, load_chat_rows
from train.states import FeatureStore, LiveStates, StateSource

if TYPE_CHECKING:
    from medusa_heads.base import Base
    from train.config import TrainingConfig


def open_source(config: TrainingConfig, base: Base) -> StateSource:
    """The cache that `config.features.directory` names, checked against the base; without one, live states.

    Raises:
        FeaturesError: no cache there, or one of another base.
        DataError: rows that cannot be encoded.
    """
    if config.features.directory is not None:
        store = FeatureStore(config.features.directory)
        store.check_base(base)
        return store
    examples, _ = encode_rows(base, load_chat_rows(config.data.paths), config.data.max_length)
    return LiveStates(base, examples, config.features.batch_tokens)
