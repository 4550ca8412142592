"""Where a run's hidden states come from: cached shards, or the base itself."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from train.data import encode_rows, load_chat_rows
from train.manifest import record_data
from train.states import FeatureStore, LiveStates, StateSource

if TYPE_CHECKING:
    from medusa_heads.base import Base
    from train.config import TrainingConfig

LOG = logging.getLogger(__name__)


def open_source(config: TrainingConfig, base: Base) -> StateSource:
    """The cache that `config.features.directory` names, checked against base and data; without one, live states.

    Raises:
        FeaturesError: no whole cache there, or one of another base or of other data than `config.data` names.
        DataError: rows that cannot be encoded.
    """
    if config.features.directory is not None:
        store = FeatureStore(config.features.directory)
        store.check_base(base)
        _check_data(store, config, base)
        return store
    examples, _ = encode_rows(base, load_chat_rows(config.data.paths), config.data.max_length)
    return LiveStates(base, examples, config.features.batch_tokens)


def _check_data(store: FeatureStore, config: TrainingConfig, base: Base) -> None:
    """A cache is all that training needs: it may lie where its data do not, or be older than the record of them."""
    paths = config.data.paths
    if store.data is None or not paths:
        return
    missing = [name for name in paths if not Path(name).exists()]
    if missing:
        LOG.warning("%s is not there: nothing says whether %s was made of it", ", ".join(missing), store.directory)
        return
    store.check_data(record_data(paths, config.data.max_length or base.max_positions))
