"""Sampled text with EAGLE and Hydra heads has the base's law: by enumeration through the drafters' own code, and over
long texts by the G-test of `test_sampling_law`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decode import rows, verify
from decode.drafters import DraftRow
from decode.drafters.eagle import EagleDrafter
from decode.drafters.hydra import HydraDrafter
from decode.dynamic import DynamicTree
from decode.engine import Decoder
from decode.tree import Tree
from decode.verify import Chooser, verify_sampled
from medusa_heads.base import Base
from tests.decode.eagle_heads import KINDS, random_heads
from tests.decode.small import small_base
from tests.decode.test_sampling_law import HOT, LEVEL, SAMPLING, WARM, p_values, uniforms, write

PROMPT = [1, 0, 2, 1]
SMALL = Tree.from_rank_paths([(0,), (1,), (0, 0)])
TREE = Tree.from_rank_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])


def drafter_of(base: Base, kind: str, tree: DynamicTree | Tree, drawn: Tree | None = None, ids: Any = None) -> Any:
    heads = random_heads(base, kind, scale=0.3, draft_ids=ids)
    return (EagleDrafter if kind.startswith("eagle") else HydraDrafter)(heads, base, tree, drawn)


@pytest.mark.parametrize("ids", [None, torch.tensor([2, 0])], ids=["all rows", "some rows"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_tokens_have_the_law_of_the_base_by_enumeration(
    enumerate_law: Callable[[Callable[[Chooser], Hashable]], dict[Hashable, float]], kind: str, ids: Tensor | None
) -> None:
    base = small_base(3, layers=3)
    drafter = drafter_of(base, kind, SMALL, ids=ids)
    output = base.forward(torch.tensor([PROMPT[:-1]]), layers=tuple(drafter.layers))
    laws: dict[tuple[int, ...], Tensor] = {}

    def law_after(path: tuple[int, ...]) -> Tensor:
        if path not in laws:
            laws[path] = base.model(torch.tensor([[*PROMPT, *path]])).logits[0, -1].softmax(-1)
        return laws[path]

    def two_tokens(chooser: Chooser) -> tuple[int, ...]:
        session = drafter.start([DraftRow(tuple(PROMPT), 1.4, chooser)])  # type: ignore[arg-type]
        session.observe(output, torch.tensor([PROMPT[:-1]]), [range(len(PROMPT) - 1)])
        draft = session.draft([PROMPT[-1]])
        tree, tokens = draft.trees[0], draft.tokens[0]
        assert tree == SMALL and draft.laws is not None

        def law(node: int) -> Tensor:
            return law_after(tuple(int(tokens[n]) for n in tree.path(node)[1:]))

        verdict = verify_sampled(tree, tokens, draft.laws[0], law, chooser)
        text = (*(int(tokens[node]) for node in verdict.path[1:]), verdict.next_token)
        while len(text) < 2:
            text = (*text, chooser.draw(law_after(text).double()))
        return text[:2]

    with torch.no_grad():
        found = enumerate_law(two_tokens)
    expected = {(a, b): float(law_after(())[a] * law_after((a,))[b]) for a, b in itertools.product(range(3), repeat=2)}
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "hydra-prefix"])
@pytest.mark.parametrize("drawn", [False, True], ids=["likeliest in dynamic trees", "drawn"])
def test_long_texts_have_the_law_of_the_base(kind: str, drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    def counted(*given: Any) -> verify.Verdict:
        used.append(0)
        return verify_sampled(*given)

    monkeypatch.setattr(rows, "verify_sampled", counted)
    base, prompt = small_base(6, layers=3, positions=600), [1, 2, 3]
    drafter = drafter_of(base, kind, DynamicTree(3, 3, 9), TREE)
    sampling = [WARM, HOT] if drawn else [SAMPLING]
    texts = write(Decoder(base, drafter, guard=None), prompt, 200, 100, 100, 1000, sampling)
    parts = [uniforms(base, prompt, texts[i :: len(sampling)], own) for i, own in enumerate(sampling)]
    assert min(p_values(np.concatenate(parts))) > LEVEL
    assert bool(used) == drawn
