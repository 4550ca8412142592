"""Draft models with another tokenizer than the base's. Exact, in two ways.

Both let the draft model read the base's text through its characters (`Retokenizer`). What it drafts becomes tokens of
the base

- `shared`: by drafting only tokens that both vocabularies spell alike. The draft law is the model's own, restricted to
  them and renormalised, so that sampled rows keep drawn drafts with a law ("token-level intersection", Timor et al.
  2025, "Accelerating LLM inference with lossless speculative decoding algorithms for heterogeneous vocabularies");
- `text`: by spelling out what it drafted over its whole vocabulary and reading that with the base's tokenizer ("string-
  level exact match", ibid.). The tokens are then point masses, which is exact whatever they are.

What the mismatch costs is counted while decoding: `Mismatch.report`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from decode.drafters import Draft, DraftRow
from decode.drafters.adaptive import LIKELIEST, Reach
from decode.drafters.model import ModelDrafter, ModelSession, SameTokenizer, vocabulary_difference
from decode.drafters.retokenize import Mismatch, Retokenizer, shared_tokens
from decode.drafters.trie import Trie, draft_of
from decode.tree import Tree
from medusa_heads.base import Base
from medusa_heads.errors import ConfigError, HeadsError

WAYS = ("shared", "text")


def drafter_for(
    model: Base,
    base: Base,
    *,
    way: str | None = None,
    reach: Reach | None = None,
    ids: Sequence[int] | None = None,
) -> ModelDrafter:
    """The drafter of a draft model, by how its tokenizer and the base's differ.

    Args:
        way: `shared` or `text`, for another tokenizer; None: `shared` where the base spells at least half of its
            vocabulary like the draft model, else `text`.
        ids: tokens of the draft model to draft from, where the tokenizers are one; None: all.

    Raises:
        ConfigError: another way, or one for models of one tokenizer.
        HeadsError: a pair that cannot work.
    """
    if way not in (None, *WAYS):
        raise ConfigError(f"a draft model with another tokenizer drafts by {' or '.join(WAYS)}, not by {way!r}")
    difference = vocabulary_difference(model, base)
    if difference is None:
        if way is not None:
            raise ConfigError(f"{model.name!r} has the tokenizer of {base.name!r}: way={way} is for another one")
        return ModelDrafter(model, base, link=SameTokenizer(model, base, ids), reach=reach)
    if model.tokenizer is None or base.tokenizer is None:
        raise HeadsError(f"{model.name!r} cannot draft for {base.name!r}: {difference}")
    if way is None:
        shared, _ = shared_tokens(model, base)
        way = "shared" if 2 * len(shared) >= len(base.tokenizer) else "text"
    return SharedDrafter(model, base, reach=reach) if way == "shared" else TextDrafter(model, base, reach=reach)


class OtherTokenizer:
    """A `Link` through text. Drafts stay in the draft model's own tokens.

    Raises HeadsError where a tokenizer cannot be gone through.
    """

    def __init__(self, model: Base, base: Base):
        for each in (model, base):
            Retokenizer.check(each)
        self.model, self.base = model, base
        self.columns: torch.Tensor | None = None
        self.rows: torch.Tensor | None = None

    def reader(self) -> Retokenizer:
        return Retokenizer(self.base, self.model)

    def to_draft(self, token: int) -> int:
        return token


class SharedVocabulary(OtherTokenizer):
    """The same, with drafts among the tokens that both vocabularies spell alike, as the base's tokens."""

    def __init__(self, model: Base, base: Base):
        super().__init__(model, base)
        theirs, ours = shared_tokens(model, base)
        if not ours:
            raise HeadsError(
                f"{model.name!r} cannot draft for {base.name!r}: their vocabularies have no token in common"
            )
        self.columns, self.rows = torch.tensor(theirs), torch.tensor(ours)
        self.ours = dict(zip(ours, theirs, strict=True))

    def to_draft(self, token: int) -> int:
        return self.ours.get(token, 0)


class SharedDrafter(ModelDrafter):
    """A draft model whose law is restricted to the shared vocabulary."""

    def __init__(self, model: Base, base: Base, *, reach: Reach | None = None):
        link = SharedVocabulary(model, base)
        super().__init__(model, base, link=link, reach=reach)
        self.mismatch = Mismatch(model, base, "shared")
        self.shared = frozenset(link.ours)

    def start(self, rows: Sequence[DraftRow]) -> ModelSession:
        return _SharedSession(self, rows)


class _SharedSession(ModelSession):
    drafter: SharedDrafter

    def draft(self, roots: Sequence[int], nodes: int | None = None) -> Draft:
        for record, root in zip(self.records, roots, strict=True):
            if record.trie is not None:
                self.drafter.mismatch.count(root not in self.drafter.shared)
        return super().draft(roots, nodes)


class TextDrafter(ModelDrafter):
    """A draft model whose drafts are read through their text, and are point masses."""

    def __init__(self, model: Base, base: Base, *, reach: Reach | None = None):
        super().__init__(model, base, link=OtherTokenizer(model, base), reach=reach)
        self.mismatch = Mismatch(model, base, "text")

    def start(self, rows: Sequence[DraftRow]) -> ModelSession:
        return _TextSession(self, [replace(row, temperature=0.0) for row in rows])


class _TextSession(ModelSession):
    """Its trees are grown in the draft model's tokens; what the records learn from is in the base's."""

    drafter: TextDrafter

    def draft(self, roots: Sequence[int], nodes: int | None = None) -> Draft:
        for record, seen, root in zip(self.records, self.seen.ids, roots, strict=True):
            if record.trie is not None:
                truth = [*seen, root][record.drafted_at :]
                self.drafter.mismatch.count(self._only_spelled_otherwise(record.trie, truth))
        grown = super().draft(roots, nodes)
        assert grown.reach is not None
        tries = []
        for row, (root, record, reader) in enumerate(zip(roots, self.records, self.readers, strict=True)):
            assert isinstance(reader, Retokenizer) and grown.reach[row] is not None
            tree, tokens = grown.trees[row], grown.tokens[row].tolist()
            record.trie = _in_base_tokens(root, tree, tokens, grown.reach[row] or (), reader)
            tries.append(record.trie)
        limit = self.drafter.reach.most_nodes if nodes is None else min(nodes, self.drafter.reach.most_nodes)
        return draft_of(tries, limit, 0.0, self.drafter.base.device)

    def resume(self, row: DraftRow, length: int) -> None:
        super().resume(replace(row, temperature=0.0), length)

    def _only_spelled_otherwise(self, trie: Trie, truth: Sequence[int]) -> bool:
        """Whether a draft has the characters of the token at which it ended, and not that token."""
        accepted = trie.follow(truth)
        if len(accepted) == len(truth):
            return False
        decode = self.drafter.base.tokenizer.decode
        before, right = (len(decode(truth[:n])) for n in (len(accepted), len(accepted) + 1))
        wanted = decode(truth[: len(accepted) + 1])
        if right == before:
            return False
        paths = ([trie.tokens[node] for node in trie.path(leaf)] for leaf in range(1, trie.size))
        return any(decode(path).startswith(wanted) for path in paths)


def _in_base_tokens(root: int, tree: Tree, tokens: Sequence[int], reach: Sequence[float], reader: Retokenizer) -> Trie:
    """A tree in the draft model's tokens, path by path in the base's. A token has the chance of the shortest drafted
    path that spells it out."""
    trie = Trie(root)
    for leaf in (node for node in range(1, tree.size) if not tree.children[node]):
        path, node = tree.path(leaf)[1:], 0
        for token, count in reader.back([tokens[n] for n in path]):
            chance = reach[path[count - 1]]
            above = trie.reach[node]
            node = trie.add(node, token, min(1.0, chance / above) if above > 0.0 else 0.0, LIKELIEST)
    return trie
