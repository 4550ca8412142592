"""Padding passes to few shapes changes nothing of what is computed, and keeps the shapes few."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from decode.cache import TreeCache
from decode.drafters import Draft
from decode.engine import Decoder
from decode.fixed import NODES, SLOTS, FixedPasses, padded_nodes
from decode.mask import RunningMask
from decode.settings import GenerationSettings
from decode.tree import Tree
from medusa_heads.attention import FOLDED, register
from medusa_heads.base import Base
from tests.conftest import FAMILIES, VOCAB, tiny_base
from tests.decode.oracle import TREE, Oracle

PROMPT = [5, 17, 40, 8, 61, 33, 12, 70, 21]
TREES = (Tree.chain(1), Tree.chain(3), TREE, Tree.chain(10))


def folded(base: Base) -> Base:
    """With the attention that `Base.load` chooses for grouped queries."""
    register()
    base.model.set_attn_implementation(FOLDED)
    return base


def read(base: Base, rows: int) -> TreeCache:
    """A cache of rows of 9, 8 … committed tokens."""
    cache = TreeCache(base.num_layers, rows, capacity=300)
    ids = torch.tensor([PROMPT] * rows)
    base.forward(ids, position_ids=torch.arange(9).expand(rows, 9), cache=cache)
    cache.commit([range(9 - row) for row in range(rows)])
    return cache


def draft_of(trees: list[Tree], seed: int) -> Draft:
    width = max(tree.size for tree in trees)
    tokens = torch.randint(VOCAB, (len(trees), width), generator=torch.Generator().manual_seed(seed))
    return Draft(trees, tokens)


def unpadded(base: Base, cache: TreeCache, draft: Draft, row: int, layers: tuple[int, ...]) -> list[Tensor]:
    """States of one row's tree, in a pass of its own over exactly what is there."""
    tree, length = draft.trees[row], cache.lengths[row]
    alone = TreeCache(base.num_layers)
    base.forward(torch.tensor([PROMPT[:length]]), position_ids=torch.arange(length)[None], cache=alone)
    alone.commit([range(length)])
    positions = alone.positions(torch.tensor(tree.depths))
    output = base.forward(
        draft.tokens[row : row + 1, : tree.size],
        position_ids=positions,
        attention_mask=alone.visible(tree.ancestor_mask),
        key_positions=alone.key_positions(positions),
        cache=alone,
        layers=layers,
    )
    return [output.last_hidden_state[0], *(state[0] for state in output.layer_states)]


@pytest.mark.parametrize("family", [*FAMILIES, "folded"])
def test_states_are_those_of_the_tree_alone(family: str) -> None:
    """Rows of unequal lengths and trees; larger trees first, so that what they left behind is seen if it is seen."""
    base = folded(tiny_base()) if family == "folded" else tiny_base(family)
    cache = read(base, rows=2)
    passes = FixedPasses(base, cache, RunningMask.for_base(base, cache))
    assert (passes.mask is None) is (family != "folded")
    layers = (0, 1)
    for trees in ([TREES[3], TREES[3]], [TREE, TREES[1]], [TREES[0], TREES[0]], [TREES[1], TREE]):
        draft = draft_of(list(trees), seed=len(trees[0].parents))
        output = passes.over(draft, layers)
        assert output.last_hidden_state.shape[:2] == draft.tokens.shape
        for row, tree in enumerate(trees):
            ours = [output.last_hidden_state, *output.layer_states]
            for state, expected in zip(ours, unpadded(base, cache, draft, row, layers), strict=True):
                torch.testing.assert_close(state[row, : tree.size], expected, rtol=1e-5, atol=1e-5)


def test_padding_is_to_few_sizes() -> None:
    assert [padded_nodes(n) for n in (1, 2, NODES, NODES + 1)] == [1, NODES, NODES, 2 * NODES]


class Shapes:
    """Notes what the base's decoder is given."""

    def __init__(self, base: Base):
        self.seen: list[dict[str, Any]] = []
        decoder: Any = base._decoder
        decoder.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, module: object, args: object, given: dict[str, Any]) -> None:
        if given.get("attention_mask") is not None:
            tensors = {name: given[name] for name in ("input_ids", "position_ids", "attention_mask")}
            self.seen.append({name: (tuple(t.shape), t.stride(), t.data_ptr()) for name, t in tensors.items()})


def test_a_call_has_few_shapes_in_tensors_that_stay() -> None:
    """Rounds keep from one to four tokens: every length differs from the one before."""
    base = folded(tiny_base())
    base.eos_token_ids = ()
    settings = GenerationSettings(max_new_tokens=60)
    text = Decoder(base).generate(PROMPT, settings).token_ids
    base.fixed_shapes = True
    shapes = Shapes(base)
    result = Decoder(base, Oracle([PROMPT + text])).generate(PROMPT, settings)
    assert result.token_ids == text and result.stats.rounds < 45
    by_nodes: dict[int, set[str]] = {}
    rounds = shapes.seen[1:]  # the first is the check of what the base can do
    for given in rounds:
        by_nodes.setdefault(given["input_ids"][0][1], set()).add(repr(given))
    assert len(rounds) > 20 and set(by_nodes) <= {1, NODES}
    assert all(len(kinds) == 1 for kinds in by_nodes.values())


def test_the_window_grows_by_its_step_alone() -> None:
    base = folded(tiny_base())
    base.eos_token_ids = ()
    base.fixed_shapes = True
    shapes = Shapes(base)
    Decoder(base).generate(PROMPT * 26, GenerationSettings(max_new_tokens=22))
    widths = [given["attention_mask"][0][-1] for given in shapes.seen[1:]]
    assert sorted(set(widths)) == widths[:1] == [SLOTS]


def test_a_cache_that_is_too_small_grows() -> None:
    base = tiny_base()
    cache = read(base, rows=1)
    passes = FixedPasses(base, cache, None)
    for _ in range(25):
        passes.over(draft_of([Tree.chain(10)], seed=0), ())
        cache.commit([range(10)])
    assert cache.lengths == [259] and cache._buffers[0].capacity == 2 * 300


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_the_same(family: str) -> None:
    base = tiny_base(family)
    base.eos_token_ids = ()
    prompts = [PROMPT, PROMPT[:4], PROMPT[2:]]
    settings = [GenerationSettings(max_new_tokens=n) for n in (24, 9, 17)]
    plain = [result.token_ids for result in Decoder(base).generate_batch(prompts, settings)]
    base.fixed_shapes = True
    oracle = Oracle([prompt + text for prompt, text in zip(prompts, plain, strict=True)])
    for decoder in (Decoder(base), Decoder(base, oracle)):
        assert [result.token_ids for result in decoder.generate_batch(prompts, settings)] == plain
