"""Drafting with an independent model: any smaller causal LM, with a cache of its own.

It reads the base's text (through a `Link`, which says how its tokens and the base's belong together), then drafts a
chain, or a tree of which every depth is one pass over all rows' nodes. Rows that are sampled get drawn drafts with
their law (Leviathan et al. 2023; Chen et al. 2023), the others the likeliest tokens.

What the base kept of a draft is kept in the cache too; what the cache has beyond the text is cut off before the next
draft, and what it lacks is read then, so that rounds in which nothing is drafted cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from decode.cache import TreeCache
from decode.drafters import Draft, DraftRow
from decode.drafters.adaptive import Reach, Record, remember
from decode.drafters.growth import grow
from decode.drafters.passes import TreePasses, read_texts
from decode.drafters.projection import draft_projection
from decode.drafters.seen import SeenText
from decode.drafters.specs import check_kinds
from medusa_heads.base import Base, BaseOutput
from medusa_heads.draft_model import drafting_of
from medusa_heads.errors import ConfigError, HeadsError

Reader = Callable[[list[int]], list[int]]
"""The base's tokens of a text, as the draft model's. One a row; texts grow or are cut, mostly."""


class Link(Protocol):
    """How the tokens of a draft model and of a base belong together."""

    columns: Tensor | None
    """(R,) ids of the draft model that may be drafted; None: all of them."""
    rows: Tensor | None
    """(R,) on the CPU, the base's token of each; None: they are the base's own ids, all of them."""

    def reader(self) -> Reader: ...

    def to_draft(self, token: int) -> int:
        """A drafted token of the base, as the draft model's; for one that cannot have been drafted, any."""
        ...


class SameTokenizer:
    """One tokenizer; the vocabularies may be padded to different sizes, or have added tokens beyond the shared ones.

    Args:
        ids: tokens to draft from, for a model that was trained to draft some of them; None: all that are shared.

    Raises HeadsError where an id means different tokens, or where the base lacks one of `ids`.
    """

    def __init__(self, model: Base, base: Base, ids: Sequence[int] | None = None):
        difference = vocabulary_difference(model, base)
        if difference is not None:
            raise HeadsError(f"the draft model {model.name!r} has another tokenizer than {base.name!r}: {difference}")
        self.columns: Tensor | None
        self.rows: Tensor | None
        self.known = model.vocab_size
        shared = min(model.vocab_size, base.vocab_size)
        if ids is not None:
            if max(ids) >= shared:
                raise HeadsError(
                    f"{model.name!r} drafts token {max(ids)}, and the vocabulary that it shares with {base.name!r} has "
                    f"{shared}"
                )
            self.columns = self.rows = torch.tensor(ids)
            return
        self.columns = None if model.vocab_size == shared else torch.arange(shared)
        self.rows = None if base.vocab_size == shared else torch.arange(shared)

    def reader(self) -> Reader:
        """Tokens that only the base has are left out of what the draft model reads."""
        return lambda text: [token for token in text if token < self.known]

    def to_draft(self, token: int) -> int:
        return token


def vocabulary_difference(model: Base, base: Base) -> str | None:
    """What keeps two models from sharing ids; None where every id that both know is the same token, and an id that one
    of them knows alone is an added token or padding. Without both tokenizers, the sizes must be equal."""
    if model.tokenizer is None or base.tokenizer is None:
        if model.vocab_size == base.vocab_size:
            return None
        return f"vocabularies of {model.vocab_size} and {base.vocab_size} tokens, and no tokenizers to compare"
    ours, theirs = ({i: token for token, i in m.tokenizer.get_vocab().items()} for m in (model, base))
    for i in sorted(ours.keys() & theirs.keys()):
        if ours[i] != theirs[i]:
            return f"token {i} is {ours[i]!r}, not {theirs[i]!r}"
    for known, other, owner in ((ours, theirs, model), (theirs, ours, base)):
        added = set(owner.tokenizer.get_added_vocab().values())
        for i in sorted(known.keys() - other.keys() - added):
            return f"token {i}, {known[i]!r}, is known to {owner.name!r} alone"
    return None


class ModelDrafter:
    """A draft model for a base.

    Args:
        model: the draft model, wrapped as a base.
        link: how its tokens belong to the base's; None: one tokenizer, checked.
        reach: how far to draft.
    """

    layers: Sequence[int] = ()

    def __init__(self, model: Base, base: Base, *, link: Link | None = None, reach: Reach | None = None):
        self.model = model
        self.base = base
        self.link = link or SameTokenizer(model, base)
        self.reach = reach or Reach()
        self.columns = None if self.link.columns is None else self.link.columns.to(model.device)
        self.rows = None if self.link.rows is None else self.link.rows.to(model.device)
        read, all_rows = model.num_parameters, model.vocab_size
        self.own_rows: nn.Module | None = None
        """The projection of the drafted tokens alone, where they are few enough for a copy of their rows."""
        if self.columns is not None and 2 * len(self.columns) <= all_rows:
            self.own_rows = draft_projection(model, self.columns)
            read -= (all_rows - len(self.columns)) * model.hidden_size
        cost = self.reach.pass_cost
        self.pass_cost = min(0.9, read / base.num_parameters) if cost is None else cost

    def project(self, states: Tensor) -> Tensor:
        """Logits (..., R) of the tokens that are drafted from."""
        if self.own_rows is not None:
            return self.own_rows(states)
        logits = self.model.project(states)
        return logits if self.columns is None else logits[..., self.columns]

    @classmethod
    def from_pretrained(
        cls, name: str | Path, base: Base, *, dtype: Any = None, device: Any = None, **reach: Any
    ) -> ModelDrafter:
        """A model by directory, Hub id, `.gguf` file or embedded name, on the base's device and in its dtype unless
        others are given. For another tokenizer than the base's see `decode.drafters.crossmodel`.

        One that was trained to draft for the base (`train.draft_model`) says how far and which tokens; `reach` goes
        before what it says."""
        from decode.drafters.crossmodel import drafter_for

        way = reach.pop("way", None)
        reach_of(reach)  # what is wrong is said before the model is loaded
        model = Base.load(str(name), dtype=dtype or base.dtype, device=device or base.device)
        drafting = drafting_of(model.config, str(name))
        ids = None
        if drafting is not None:
            ids = drafting.draft_ids
            reach = {"depth": drafting.depth, "width": drafting.width, "nodes": drafting.nodes} | reach
        return drafter_for(model, base, way=way, reach=reach_of(reach), ids=ids)

    def start(self, rows: Sequence[DraftRow]) -> ModelSession:
        return ModelSession(self, rows)


def reach_of(options: dict[str, Any]) -> Reach:
    """A `Reach` from a user's options. Raises ConfigError for one that is none."""
    kinds = {field.name: str(field.type) for field in fields(Reach)}
    unknown = sorted(set(options) - set(kinds))
    if unknown:
        raise ConfigError(f"unknown options of a draft: {', '.join(unknown)}; there are {', '.join(kinds)}")
    check_kinds("a draft", options, kinds)
    return Reach(**options)


class ModelSession:
    """State of one call: the text of each row, the draft model's cache, and the nodes that its last draft read."""

    def __init__(self, drafter: ModelDrafter, rows: Sequence[DraftRow]):
        self.drafter = drafter
        self.seen = SeenText(len(rows))
        self.records = [Record(row) for row in rows]
        self.readers = [drafter.link.reader() for _ in rows]
        self.cache = TreeCache(drafter.model.num_layers, len(rows))
        self.known: list[list[int]] = [[] for _ in rows]
        """Tokens of the draft model that its cache has committed."""
        self.passes: TreePasses | None = None

    def observe(self, output: BaseOutput, tokens: Tensor, paths: Sequence[Sequence[int]]) -> None:
        self.seen.observe(tokens, paths)

    def draft(self, roots: Sequence[int], nodes: int | None = None) -> Draft:
        drafter, reach = self.drafter, self.drafter.reach
        texts = [[*seen, root] for seen, root in zip(self.seen.ids, roots, strict=True)]
        for record, text in zip(self.records, texts, strict=True):
            record.learn(text)
        most = reach.most_nodes if nodes is None else min(nodes, reach.most_nodes)
        contexts = [reader(text) for reader, text in zip(self.readers, texts, strict=True)]
        growths = [
            record.growth(
                root,
                reach,
                drafter.pass_cost,
                most if self._has_room(context) else 1,
                drafter.link.rows,
                drafter.base.vocab_size,
            )
            for record, root, context in zip(self.records, roots, contexts, strict=True)
        ]

        def step(parents: list[list[int]] | None, tokens: list[list[int]]) -> Tensor:
            return self._step(contexts, parents, tokens)

        return remember(self.records, growths, grow(step, growths, drafter.rows, drafter.base.device))

    def _has_room(self, context: list[int]) -> bool:
        """Whether the draft model's own context holds the text and a whole draft behind it."""
        limit = self.drafter.model.max_positions
        return bool(context) and (limit is None or len(context) + self.drafter.reach.depth <= limit)

    def _step(self, contexts: list[list[int]], parents: list[list[int]] | None, tokens: list[list[int]]) -> Tensor:
        """Logits (B, M, R); see `growth.Step`. The first step brings the cache up to the text."""
        model = self.drafter.model
        if parents is None:
            self._settle(contexts)
            pieces = [c[len(k) :] if self._has_room(c) else [] for c, k in zip(contexts, self.known, strict=True)]
            states = read_texts(model, self.cache, pieces)
            for known, piece in zip(self.known, pieces, strict=True):
                known += piece
            self.passes = TreePasses(model, self.cache, project=self.drafter.project)
            return self.drafter.project(states)[:, None]
        assert self.passes is not None
        first = not self.passes.nodes[0]
        drafted = [[self.drafter.link.to_draft(token) for token in row] for row in tokens]
        return self.passes.read(None if first else parents, drafted)

    def _settle(self, contexts: list[list[int]]) -> None:
        """Commits what the last draft's nodes have of each text and cuts off what is not of it. The last token stays to
        be read: its state is needed."""
        paths: list[list[int]] = []
        for row, (context, known) in enumerate(zip(contexts, self.known, strict=True)):
            goes_on = self.passes is not None and context[: len(known)] == known
            path = self.passes.path(row, context[len(known) : -1]) if goes_on and self.passes is not None else []
            known += context[len(known) : len(known) + len(path)]
            paths.append(path)
        self.cache.commit(paths)
        self.passes = None
        for row, (context, known) in enumerate(zip(contexts, self.known, strict=True)):
            shared = common_length(known, context[:-1])
            self.cache.truncate(shared, row)
            del known[shared:]

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.seen.keep_rows(rows)
        self.cache.release()  # where the nodes lie depends on rows that may have left: they are read again
        self.passes = None
        self.cache.keep_rows(rows)
        self.records = [self.records[row] for row in rows]
        self.readers = [self.readers[row] for row in rows]
        self.known = [self.known[row] for row in rows]

    def resume(self, row: DraftRow, length: int) -> None:
        """The cache is kept as far as the new text goes on from it; what was learnt of another answer is forgotten."""
        self.seen.truncate(length)
        self.records = [Record(row)]


def common_length(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens at the beginning that two texts share."""
    length = min(len(ours), len(theirs))
    if ours[:length] == theirs[:length]:
        return length
    return next(i for i in range(length) if ours[i] != theirs[i])
