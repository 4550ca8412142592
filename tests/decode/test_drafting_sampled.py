"""Drafts that the Medusa heads draw: exact by enumeration through the drafter's own code, laws, batches, budgets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from decode.drafters import Draft, DraftRow
from decode.drafters.medusa import MedusaDrafter, MedusaSession
from decode.engine import Decoder
from decode.sampling import SamplingParams
from decode.settings import GenerationSettings
from decode.tree import Tree
from decode.verify import Chooser, draw_siblings, verify_sampled
from medusa_heads.base import Base, BaseOutput
from medusa_heads.medusa import MedusaHeads
from tests.decode.small import small_base
from tests.decode.test_verify_exact import Prefix, assert_same_joint, emitted_tokens

Enumerate = Callable[[Callable[[Chooser], Hashable]], dict[Hashable, float]]
PROMPT = [1, 3, 0, 2]
TREE = Tree((-1, 0, 0, 1, 1, 2), (0, 0, 1, 0, 2, 0))
"""Node 4 takes the third candidate of its depth; drawn, it is the second draw."""


def heads_for(base: Base, num_heads: int = 2, draft_ids: Tensor | None = None, own: bool = False) -> MedusaHeads:
    heads = MedusaHeads.for_base(base, num_heads, 1, own, draft_ids)
    source = torch.Generator().manual_seed(1)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=source)
    return heads


def drafted(session: MedusaSession, base: Base, prompt: list[int], nodes: int | None = None) -> Draft:
    """The session's draft behind a prompt whose last token is the root."""
    output = base.forward(torch.tensor([prompt[:-1]]))
    session.observe(output, torch.tensor([prompt[:-1]]), [range(len(prompt) - 1)])
    return session.draft([prompt[-1]], nodes)


def memoised_law(base: Base, temperature: float) -> Callable[[Prefix], Tensor]:
    known: dict[Prefix, Tensor] = {}

    def law(prefix: Prefix) -> Tensor:
        if prefix not in known:
            with torch.no_grad():
                logits = base.model(torch.tensor([prefix])).logits[0, -1]
            probabilities = torch.softmax(logits / temperature, dim=-1).double()
            known[prefix] = probabilities / probabilities.sum()
        return known[prefix]

    return law


TREES = {
    "siblings": Tree.from_rank_paths([(0,), (1,), (2,)]),
    "depth 2": TREE,
    "depth 3": Tree.from_rank_paths([(0,), (0, 0), (1,), (1, 0), (1, 0, 0)]),
}


def one_round(
    drafter: MedusaDrafter,
    base: Base,
    prompt: list[int],
    temperature: float,
    law: Callable[[Prefix], Tensor],
    chooser: Chooser,
) -> Prefix:
    session = drafter.start([DraftRow(prompt, temperature, cast(torch.Generator, chooser))])
    draft = drafted(session, base, prompt)
    drawn, tokens = draft.trees[0], draft.tokens[0].tolist()
    assert draft.laws is not None and draft.laws[0] is not None

    def node_law(node: int) -> Tensor:
        return law((*prompt, *(tokens[n] for n in drawn.path(node)[1:])))

    return emitted_tokens(tokens, verify_sampled(drawn, draft.tokens[0], draft.laws[0], node_law, chooser))


@pytest.mark.parametrize("temperature", [1.0, 1.5])
@pytest.mark.parametrize("draft_ids", [None, torch.tensor([3, 0, 2])], ids=["whole", "part of the vocabulary"])
@pytest.mark.parametrize("name", sorted(TREES))
def test_a_round_has_the_law_of_the_base(
    enumerate_law: Enumerate, name: str, draft_ids: Tensor | None, temperature: float
) -> None:
    """Every draw of the heads and every decision of the rule, the same path's laws by plain passes of the model."""
    size, tree = (4 if draft_ids is not None or name == "siblings" else 3), TREES[name]
    base = small_base(size)
    drafter = MedusaDrafter(heads_for(base, 3, draft_ids), base, tree)
    prompt = [token % size for token in PROMPT]
    law = memoised_law(base, temperature)
    emitted = enumerate_law(lambda chooser: one_round(drafter, base, prompt, temperature, law, chooser))
    assert len(emitted) > size, "some drafts are accepted, in more than one way"
    assert_same_joint(emitted, law, size, tree.depth + 1, tuple(prompt))


def test_one_list_for_all_depths_would_not_be_exact(enumerate_law: Enumerate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of a depth may share their draws; depths may not."""
    base, tree, prompt = small_base(3), TREES["depth 2"], [1, 0, 2]
    drafter, law = MedusaDrafter(heads_for(base, 3), base, tree), memoised_law(base, 1.0)

    def copied(q: Tensor, count: int, chooser: Any) -> list[int]:
        if not hasattr(chooser, "first"):
            chooser.first = draw_siblings(q, 3, chooser)
        return chooser.first[:count]

    monkeypatch.setattr("decode.drafters.medusa.draw_siblings", copied)
    emitted = enumerate_law(lambda chooser: one_round(drafter, base, prompt, 1.0, law, chooser))
    with pytest.raises(AssertionError):
        assert_same_joint(emitted, law, 3, tree.depth + 1, tuple(prompt))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("draft_ids", [None, torch.tensor([5, 0, 2, 3])])
def test_the_law_handed_over_is_the_heads_own(draft_ids: Tensor | None, own: bool) -> None:
    base = small_base(6)
    heads = heads_for(base, draft_ids=draft_ids, own=own)
    session = MedusaDrafter(heads, base, TREE).start([DraftRow(PROMPT, 1.3, torch.Generator().manual_seed(0))])
    draft = drafted(session, base, PROMPT)
    assert draft.trees[0] == Tree(TREE.parents, (0, 0, 1, 0, 1, 0)), "siblings are numbered as they were drawn"
    assert draft.laws is not None
    laws: Any = draft.laws[0]
    with torch.no_grad():
        state = base.forward(torch.tensor([PROMPT[:-1]])).last_hidden_state[0, -1]
        logits = heads.head_logits(heads(state), base)
    for node, depth in enumerate(TREE.depths):
        if not TREE.children[node]:
            assert laws[node] is None
            continue
        expected = torch.softmax(logits[depth] / 1.3, dim=-1)
        if draft_ids is not None:
            expected = torch.zeros(6).index_copy_(0, draft_ids, expected)
        assert laws[node].dtype == torch.float32
        torch.testing.assert_close(laws[node], expected)
    assert laws[1].data_ptr() == laws[2].data_ptr(), "nodes of a depth share their law's memory"
    tokens = draft.tokens[0].tolist()
    assert tokens[0] == PROMPT[-1]
    assert tokens[1] != tokens[2] and tokens[3] != tokens[4] and tokens[3] == tokens[5]


def test_first_draws_follow_the_law() -> None:
    """The first two of a depth, over many rounds: frequencies against q and against q without the first."""
    base, rounds = small_base(4), 4000
    drafter = MedusaDrafter(heads_for(base, 1), base, Tree((-1, 0, 0), (0, 0, 1)))
    session = drafter.start([DraftRow(PROMPT, 1.0, torch.Generator().manual_seed(3))])
    draft = drafted(session, base, PROMPT)
    assert draft.laws is not None
    laws: Any = draft.laws[0]
    q = laws[0].double()
    pairs = torch.zeros(4, 4)
    for _ in range(rounds):
        first, second = session.draft([2]).tokens[0, 1:].tolist()
        pairs[first, second] += 1
    for first, second in itertools.permutations(range(4), 2):
        expected = float(q[first] * q[second] / (1.0 - q[first]))
        deviation = 4.5 * (expected * (1.0 - expected) / rounds) ** 0.5
        assert pairs[first, second] / rounds == pytest.approx(expected, abs=deviation)


def test_rows_of_a_batch_are_drafted_each_in_its_way_and_as_alone() -> None:
    base = small_base(6)
    drafter = MedusaDrafter(heads_for(base), base, TREE)
    states = torch.randn(3, 1, 16, generator=torch.Generator().manual_seed(2))
    temperatures = [1.0, 0.0, 1.5]

    def rows() -> list[DraftRow]:
        return [DraftRow([1], t, torch.Generator().manual_seed(7 + i)) for i, t in enumerate(temperatures)]

    session = drafter.start(rows())
    session.observe(BaseOutput(states), torch.zeros(3, 1), [[0]] * 3)
    together = [session.draft([4, 5, 3]) for _ in range(3)]
    assert [tree is TREE for tree in together[0].trees] == [False, True, False]
    for i, row in enumerate(rows()):
        alone = drafter.start([row])
        alone.observe(BaseOutput(states[i, None]), torch.zeros(1, 1), [[0]])
        for draft in together:
            own = alone.draft([[4, 5, 3][i]])
            assert torch.equal(own.tokens[0], draft.tokens[i]) and own.trees[0] == draft.trees[i]
            assert draft.laws is not None
            laws: Any = draft.laws[i]
            if temperatures[i] == 0.0:
                assert laws is None and own.laws is None
            else:
                assert own.laws is not None
                own_laws: Any = own.laws[0]
                torch.testing.assert_close(laws[0], own_laws[0])
    session.keep_rows([1])
    assert session.draft([5]).laws is None
    assert len({tuple(draft.tokens[0].tolist()) for draft in together}) > 1, "each round draws anew"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_budget_prunes_the_tree_and_asks_no_deeper_head(temperature: float) -> None:
    base = small_base(6)
    tree = Tree.from_rank_paths([(0,), (1,), (0, 0), (0, 0, 0)])
    drafter = MedusaDrafter(heads_for(base, 3), base, tree)
    session = drafter.start([DraftRow(PROMPT, temperature, torch.Generator().manual_seed(0))])
    assert drafted(session, base, PROMPT, nodes=9).trees[0] == tree
    for nodes in (1, 2, 3, 4):
        draft = session.draft([2], nodes)
        assert draft.trees[0] == tree.pruned(nodes) and draft.tokens.shape == (1, nodes)
        if temperature > 0.0 and nodes > 1:
            assert draft.laws is not None
            laws: Any = draft.laws[0]
            assert [law is not None for law in laws] == [bool(c) for c in draft.trees[0].children]
        else:
            assert draft.laws is None
    asked: list[int] = []
    handles = [block.register_forward_hook(lambda *_, i=i: asked.append(i)) for i, block in enumerate(drafter.blocks)]
    session.draft([2], 3)
    for handle in handles:
        handle.remove()
    assert asked == list(range(tree.pruned(3).depth))


def test_a_session_resumed_draws_as_its_new_row_asks() -> None:
    base = small_base(6)
    drafter = MedusaDrafter(heads_for(base), base, TREE)
    session = drafter.start([DraftRow(PROMPT, 1.0, torch.Generator().manual_seed(0))])
    assert drafted(session, base, PROMPT).laws is not None
    session.resume(DraftRow(PROMPT, 0.0, torch.Generator()), 2)
    with pytest.raises(RuntimeError, match="before the base has seen a token"):
        session.draft([2])
    assert drafted(session, base, PROMPT).laws is None
    first, second = (torch.Generator().manual_seed(5) for _ in range(2))
    session.resume(DraftRow(PROMPT, 1.0, first), 2)
    again = drafter.start([DraftRow(PROMPT, 1.0, second)])
    assert torch.equal(drafted(session, base, PROMPT).tokens, drafted(again, base, PROMPT).tokens)


@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_seeds_reproduce_and_a_batch_equals_its_rows(temperature: float) -> None:
    base = small_base(6)
    decoder = Decoder(base, MedusaDrafter(heads_for(base), base, TREE))
    prompts = [PROMPT, [5], PROMPT * 3]
    sampling = SamplingParams(temperature=temperature)
    settings = [
        GenerationSettings(max_new_tokens=30, seed=4, sampling=sampling),
        GenerationSettings(max_new_tokens=25),
        GenerationSettings(max_new_tokens=20, seed=9, sampling=sampling, drafting="likeliest"),
    ]
    before = torch.random.get_rng_state()
    together = decoder.generate_batch(prompts, settings)
    for prompt, own, row in zip(prompts, settings, together, strict=True):
        assert decoder.generate(prompt, own).token_ids == row.token_ids
    assert torch.equal(before, torch.random.get_rng_state())
    other = GenerationSettings(max_new_tokens=30, seed=5, sampling=sampling)
    assert decoder.generate(PROMPT, other).token_ids != together[0].token_ids
    assert sum(n * rounds for n, rounds in enumerate(together[0].stats.acceptance_histogram)) > 3


def test_top_k_1_equals_greedy_with_drawn_drafts() -> None:
    base = small_base(6)
    decoder = Decoder(base, MedusaDrafter(heads_for(base), base, TREE))
    greedy = decoder.generate(PROMPT, GenerationSettings(max_new_tokens=40))
    warm = GenerationSettings(max_new_tokens=40, seed=1, sampling=SamplingParams(temperature=1.5, top_k=1))
    assert decoder.generate(PROMPT, warm).token_ids == greedy.token_ids
