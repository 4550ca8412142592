"""What is told of a tree from a text is what decoding that text with the tree gives."""

from __future__ import annotations

import pytest
import torch

from decode.calibration import CALIBRATION, HELD_OUT, Text, path_probabilities, read_answers, tokens_per_round
from decode.drafters.medusa import MedusaDrafter
from decode.engine import Decoder
from decode.settings import GenerationSettings
from decode.tree import Tree
from decode.tuning import Option, RoundCost, cost_of_rounds, options_from_paths, revalued
from medusa_heads.base import Base
from medusa_heads.errors import ConfigError
from medusa_heads.medusa import MedusaHeads

TREES = (Tree.chain(1), Tree.chain(3), Tree.from_rank_paths([(0,), (1,), (2,), (0, 0), (0, 3), (1, 0), (1, 0, 2)]))
NEW_TOKENS = 40


@pytest.fixture(scope="module")
def heads(base: Base) -> MedusaHeads:
    torch.manual_seed(0)
    heads = MedusaHeads.for_base(base, num_heads=3, num_layers=1)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.3)
    return heads


@pytest.fixture(scope="module")
def texts(base: Base, heads: MedusaHeads) -> list[Text]:
    drafter = MedusaDrafter(heads, base, Tree.chain(4))
    return read_answers(base, drafter, CALIBRATION[:4], new_tokens=NEW_TOKENS)


@pytest.mark.parametrize("tree", TREES)
def test_the_walk_over_a_text_has_the_rounds_of_decoding_it(
    base: Base, heads: MedusaHeads, texts: list[Text], tree: Tree
) -> None:
    decoder = Decoder(base, MedusaDrafter(heads, base, tree), guard=None)
    tokens = rounds = 0
    for text in texts:
        stats = decoder.generate(text.prompt_ids, GenerationSettings(NEW_TOKENS)).stats
        tokens, rounds = tokens + stats.new_tokens - 1, rounds + stats.rounds
    assert tokens_per_round(tree, texts) == tokens / rounds
    if tree.size > 3:
        assert tokens > rounds, "some draft is right, or the test shows nothing"


def test_a_draft_vocabulary_ranks_by_its_own_rows(base: Base) -> None:
    torch.manual_seed(1)
    heads = MedusaHeads.for_base(base, num_heads=2, num_layers=1, draft_ids=torch.arange(0, base.vocab_size, 2))
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.3)
    tree = Tree.from_rank_paths([(0,), (1,), (2,), (0, 0)])
    drafter = MedusaDrafter(heads, base, tree)
    found = read_answers(base, drafter, CALIBRATION[:4], new_tokens=NEW_TOKENS)
    decoder = Decoder(base, drafter, guard=None)
    stats = [decoder.generate(text.prompt_ids, GenerationSettings(NEW_TOKENS)).stats for text in found]
    assert tokens_per_round(tree, found) == sum(s.new_tokens - 1 for s in stats) / sum(s.rounds for s in stats)


def test_paths_are_counted_with_their_beginnings() -> None:
    text = Text([1], [(0, 1), (), (0,), (2, 0, 0)])
    assert dict(path_probabilities([text])) == {(0,): 0.5, (0, 1): 0.25, (2,): 0.25, (2, 0): 0.25, (2, 0, 0): 0.25}


def test_rounds_begin_where_the_one_before_has_ended() -> None:
    """Ranks at 0 … 5; the walk with a chain visits 0, 2 (one accepted), 3, and 5."""
    text = Text([1], [(0,), (0, 0), (1,), (0, 1), (0, 0), ()])
    assert tokens_per_round(Tree.chain(3), [text]) == 6 / 4
    assert tokens_per_round(Tree.chain(1), [text]) == 1.0


def test_prompts_that_check_are_not_those_that_calibrate() -> None:
    assert not set(CALIBRATION) & set(HELD_OUT) and len(CALIBRATION) == len(HELD_OUT) >= 10


def test_answers_too_short_to_tell_anything_are_an_error(base: Base, heads: MedusaHeads) -> None:
    with pytest.raises(ConfigError, match="none of the calibration prompts"):
        read_answers(base, MedusaDrafter(heads, base, Tree.chain(2)), CALIBRATION[:1], new_tokens=1)


def test_costs_of_rounds_hold_for_the_trees_measured_and_move_with_depth() -> None:
    cost = cost_of_rounds({1: 1.0, 4: 1.5}, {1: 0, 4: 2}, {1: 0.1, 2: 0.3})
    assert cost.seconds(1, 0) == 1.0 and cost.seconds(4, 2) == pytest.approx(1.5)
    assert cost.seconds(4, 1) == pytest.approx(1.3)


def test_options_keep_their_trees_and_costs_when_they_are_valued_anew() -> None:
    options = options_from_paths([((0,), 0.5), ((1,), 0.2)], RoundCost({1: 1.0, 3: 2.0}))
    anew = revalued(options, lambda tree: float(tree.size))
    assert anew == [Option(option.tree, float(option.tree.size), option.seconds) for option in options]
