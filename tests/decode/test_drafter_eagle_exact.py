"""Texts drafted with EAGLE and Hydra heads are the base's own; a head that knows a text by heart drafts it all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decode.drafters.eagle import EagleDrafter
from decode.drafters.hydra import HydraDrafter
from decode.dynamic import DynamicTree
from decode.engine import Decoder
from decode.prefix import Prefix
from decode.settings import GenerationSettings
from decode.tree import Tree
from medusa_heads.base import Base
from medusa_heads.eagle import EagleHeads
from tests.conftest import FAMILIES, tiny_base
from tests.decode.eagle_heads import KINDS, random_heads

RULE = DynamicTree(depth=3, width=3, nodes=9)
PROMPT = [5, 17, 40, 8, 61, 33, 12, 70, 21]


def greedy_by_hand(base: Base, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(base.model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_the_base_token_for_token(family: str, kind: str) -> None:
    base = tiny_base(family)
    base.eos_token_ids = ()
    heads = random_heads(base, kind)
    drafter = (EagleDrafter if kind.startswith("eagle") else HydraDrafter)(heads, base, RULE)
    result = Decoder(base, drafter, guard=None).generate(PROMPT, GenerationSettings(max_new_tokens=16))
    assert result.token_ids == greedy_by_hand(base, PROMPT, 16)
    assert result.stats.tree_nodes > 4 * result.stats.rounds


def overfitted(base: Base, version: int, text: list[int], start: int, steps: int = 250, depth: int = 3) -> EagleHeads:
    """A head that knows one text by heart, unrolled on its own outputs as it is when it drafts."""
    ids = torch.tensor([text])
    heads = noisy_start(EagleHeads.for_base(base, version=version))
    output = base.forward(ids, layers=heads.layers)
    ends = list(range(start, len(text) - depth - 1))
    optimizer = torch.optim.Adam(heads.parameters(), lr=0.01)
    for _ in range(steps):
        fused = heads.fuse(output)[0]
        loss: Any = 0.0
        features = torch.stack(
            [torch.nn.functional.pad(fused[: end + 1], (0, 0, 0, len(text) - end - 1)) for end in ends]
        )
        rows = torch.arange(len(ends))
        for step in range(depth):
            places = torch.arange(len(text))[None].expand(len(ends), -1)
            embeddings = base.embed(torch.roll(ids, -1, dims=1)).expand(len(ends), -1, -1)
            last = torch.tensor(ends) + step
            following = heads(embeddings, features, places)[rows, last]
            loss = loss + torch.nn.functional.cross_entropy(heads.head_logits(following, base), ids[0, last + 2])
            features = features.index_put((rows, last + 1), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return heads.eval()


def noisy_start(heads: EagleHeads) -> EagleHeads:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in heads.layer.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=0.1)
    return heads.train()


@pytest.mark.parametrize("version", [1, 3])
def test_overfitted_heads_accept_the_full_depth(version: int) -> None:
    base = tiny_base()
    base.eos_token_ids = ()
    truth = greedy_by_hand(base, PROMPT, 28)
    heads = overfitted(base, version, PROMPT + truth, len(PROMPT) - 1)
    settings = GenerationSettings(max_new_tokens=21)
    for tree in (Tree.chain(4), DynamicTree(3, 2, 7)):
        decoder = Decoder(base, EagleDrafter(heads, base, tree), guard=None)
        result = decoder.generate(PROMPT, settings)
        assert result.token_ids == truth[:21]
        assert result.stats.acceptance_histogram == [0, 0, 0, 5]
    # The cache is right behind accepted drafts too: a turn that goes on from it drafts as well as before.
    prefix = Prefix()
    first = decoder.generate(PROMPT, GenerationSettings(max_new_tokens=9), prefix=prefix)
    second = decoder.generate(PROMPT + first.token_ids, GenerationSettings(max_new_tokens=9), prefix=prefix)
    assert first.token_ids + second.token_ids == truth[:18]
    assert second.stats.acceptance_histogram == [0, 0, 0, 2]


def test_an_eos_inside_an_accepted_draft_ends_the_text() -> None:
    base = tiny_base()
    base.eos_token_ids = ()
    truth = greedy_by_hand(base, PROMPT, 28)
    heads = overfitted(base, 3, PROMPT + truth, len(PROMPT) - 1)
    place = next(i for i in range(6, 20) if truth[i] not in truth[:i] and i % 4 in (2, 3))
    settings = GenerationSettings(max_new_tokens=25, eos_token_ids=(truth[place],))
    result = Decoder(base, EagleDrafter(heads, base, Tree.chain(4)), guard=None).generate(PROMPT, settings)
    assert result.token_ids == truth[: place + 1] and result.finish_reason == "eos"
