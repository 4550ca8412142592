"""Drafting with a part of the base: its first layers, then its own final norm and projection.

Nothing is added to the base, and nothing that is committed is computed twice: the layers of the draft are layers of the
base, so that they read the keys and values which the base's own passes left in its cache. A drafted token's own go
behind them, where the base's next pass over the tree writes anyway (Elhoushi et al. 2024, "LayerSkip", has the exit;
heads that were not trained for it, such as most bases', exit badly before their last layers).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers.cache_utils import Cache

from decode.cache import TreeCache
from decode.drafters import Draft, DraftRow
from decode.drafters.adaptive import Reach, Record, remember
from decode.drafters.growth import grow
from decode.drafters.passes import TreePasses
from decode.drafters.seen import SeenText
from medusa_heads.base import Base, BaseOutput


class EarlyExitDrafter:
    """The base's first `exit_layer` layers as its draft model."""

    layers: Sequence[int] = ()

    def __init__(self, base: Base, exit_layer: int, *, reach: Reach | None = None):
        self.base = base
        self.part = base.first_layers(exit_layer)
        self.reach = reach or Reach()
        cost = self.reach.pass_cost
        self.pass_cost = min(0.9, self.part.num_parameters / base.num_parameters) if cost is None else cost

    def start(self, rows: Sequence[DraftRow]) -> EarlyExitSession:
        return EarlyExitSession(self, rows)


class EarlyExitSession:
    """State of one call: the base's cache, which the engine shares, and what was drafted."""

    def __init__(self, drafter: EarlyExitDrafter, rows: Sequence[DraftRow]):
        self.drafter = drafter
        self.seen = SeenText(len(rows))
        self.records = [Record(row) for row in rows]
        self.cache: TreeCache | None = None
        self.shared: Cache | None = None
        """The base's cache, cut to the layers of the draft."""

    def share(self, cache: TreeCache) -> None:
        self.cache = cache
        self.shared = Cache(layers=cache.layers[: self.drafter.part.num_layers])

    def observe(self, output: BaseOutput, tokens: Tensor, paths: Sequence[Sequence[int]]) -> None:
        self.seen.observe(tokens, paths)

    def draft(self, roots: Sequence[int], nodes: int | None = None) -> Draft:
        if self.cache is None:
            raise RuntimeError("a draft was asked for before the base's cache was shared")
        drafter, reach = self.drafter, self.drafter.reach
        for record, seen, root in zip(self.records, self.seen.ids, roots, strict=True):
            record.learn([*seen, root])
        most = reach.most_nodes if nodes is None else min(nodes, reach.most_nodes)
        limit = drafter.base.max_positions
        if limit is not None and self.cache.start + reach.depth >= limit:
            most = 1
        growths = [
            record.growth(root, reach, drafter.pass_cost, most, None, drafter.base.vocab_size)
            for record, root in zip(self.records, roots, strict=True)
        ]
        passes = TreePasses(drafter.part, self.cache, self.shared)
        try:
            draft = grow(passes.read, growths, None, drafter.base.device)
        finally:
            self.cache.release()
        return remember(self.records, growths, draft)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.seen.keep_rows(rows)
        self.records = [self.records[row] for row in rows]

    def resume(self, row: DraftRow, length: int) -> None:
        self.seen.truncate(length)
        self.records = [Record(row)]
