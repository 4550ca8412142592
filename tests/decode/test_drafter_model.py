"""A draft model's own cache, its limits, and how far it drafts."""

from __future__ import annotations

import pytest
import torch

from decode.drafters import DraftRow
from decode.drafters.adaptive import Reach, Record
from decode.drafters.growth import FilledGrowth, LikeliestGrowth
from decode.drafters.model import ModelDrafter, ModelSession, SameTokenizer
from decode.engine import Decoder
from decode.settings import GenerationSettings
from medusa_heads.base import Base
from medusa_heads.errors import ConfigError, HeadsError
from tests.conftest import tiny_base, tiny_model, tiny_tokenizer
from tests.decode.drafters import BUSHY, CHAIN, PROMPT, greedy_by_hand, relative

ROW = DraftRow((1,), 0.0, torch.Generator())


def test_a_draft_model_that_is_the_base_is_always_right() -> None:
    base = tiny_base()
    twin = Base.from_model(tiny_model(), tiny_tokenizer(), name="twin")
    decoder = Decoder(base, ModelDrafter(twin, base, reach=CHAIN), guard=None)
    result = decoder.generate(PROMPT, GenerationSettings(max_new_tokens=26, eos_token_ids=()))
    assert result.token_ids == greedy_by_hand(base, PROMPT, 26)
    assert result.stats.acceptance_histogram == [0, 0, 0, 0, 5] and result.stats.base_forwards == 6


@pytest.mark.parametrize("reach", [CHAIN, BUSHY], ids=["chain", "tree"])
@torch.inference_mode()  # as the engine is, whose session this goes on with
def test_the_cache_equals_one_rebuilt_from_the_text(reach: Reach) -> None:
    """After rounds that keep some of a draft, the draft model's keys are those of the text alone."""
    base = tiny_base()
    drafter = ModelDrafter(relative(base), base, reach=reach)
    sessions: list[ModelSession] = []
    start = drafter.start
    drafter.start = lambda rows: sessions.append(start(rows)) or sessions[-1]  # type: ignore[method-assign,func-returns-value]
    result = Decoder(base, drafter, guard=None).generate(PROMPT, GenerationSettings(30, eos_token_ids=()))
    assert sum(n > 0 for n in result.stats.acceptance_histogram) >= 2, "kept in more than one way"
    (session,) = sessions
    session.draft([result.token_ids[-1]])
    text = session.known[0]
    assert text == [*PROMPT, *result.token_ids][: len(text)] and session.cache.lengths == [len(text)]
    rebuilt = drafter.start([ROW])
    rebuilt.observe(None, torch.tensor([text[:-1]]), [range(len(text) - 1)])
    rebuilt.draft([text[-1]])
    for ours, theirs in zip(session.cache.layers, rebuilt.cache.layers, strict=True):
        assert torch.allclose(ours.keys[:, :, : len(text)], theirs.keys[:, :, : len(text)], atol=1e-5)
        assert torch.allclose(ours.values[:, :, : len(text)], theirs.values[:, :, : len(text)], atol=1e-5)


def test_a_round_reads_the_new_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_base()
    draft = relative(base)
    drafter = ModelDrafter(draft, base, reach=CHAIN)
    read: list[int] = []
    forward = draft.forward
    draft.forward = lambda ids, **rest: (read.append(ids.shape[1]), forward(ids, **rest))[1]  # type: ignore[method-assign]
    Decoder(base, drafter, guard=None).generate(PROMPT * 3, GenerationSettings(30, eos_token_ids=()))
    assert read[0] == 3 * len(PROMPT) + 1 and max(read[1:]) <= 2


def test_where_the_draft_models_context_ends_nothing_is_drafted() -> None:
    base = tiny_base()
    short = relative(base)
    short.config.max_position_embeddings = 20
    assert short.max_positions == 20 and base.max_positions == 256
    result = Decoder(base, ModelDrafter(short, base, reach=CHAIN), guard=None).generate(
        PROMPT, GenerationSettings(30, eos_token_ids=())
    )
    assert result.token_ids == greedy_by_hand(base, PROMPT, 30)
    assert 0 < result.stats.tree_nodes - result.stats.rounds <= 4 * 8, "drafts of the first tokens alone"


def test_a_vocabulary_of_its_own_is_all_that_is_multiplied_and_counted() -> None:
    base = tiny_base()
    model = relative(base)
    states = torch.randn(2, 3, base.hidden_size)
    for ids in ([40, 3, 77, 9, 0, 95, 12, 60], list(range(95, 20, -1))):
        drafter = ModelDrafter(model, base, link=SameTokenizer(model, base, ids))
        assert torch.allclose(drafter.project(states), model.project(states)[..., ids], atol=1e-5)
        few = 2 * len(ids) <= base.vocab_size
        spared = (base.vocab_size - len(ids)) * base.hidden_size if few else 0
        assert drafter.pass_cost == min(0.9, (model.num_parameters - spared) / base.num_parameters)
        assert (drafter.own_rows is not None) == few
        text = Decoder(base, drafter, guard=None).generate(PROMPT, GenerationSettings(20, eos_token_ids=())).token_ids
        assert text == greedy_by_hand(base, PROMPT, 20)
    with pytest.raises(HeadsError, match=r"drafts token 96, and the vocabulary that it shares .* has 96"):
        SameTokenizer(model, base, [4, 96])


def test_a_draft_goes_on_as_long_as_a_pass_pays() -> None:
    record = Record(ROW)
    growth = record.growth(1, Reach(depth=5, pass_cost=0.0), 0.4, 6, None, 96)
    assert isinstance(growth, LikeliestGrowth) and growth.rule.step_floor == pytest.approx(0.4)
    for _ in range(30):
        record.history.count("likeliest", 0.5, False)
    careful = record.growth(1, Reach(depth=5), 0.4, 6, None, 96)
    assert isinstance(careful, LikeliestGrowth) and careful.rule.step_floor > 0.8
    drawn = Record(DraftRow((1,), 1.0, torch.Generator()))
    reach = Reach(depth=6, nodes=7)
    before = drawn.drawn_tree(reach, 0.2, 7)
    for _ in range(30):
        drawn.history.count(("drawn", 0), 0.6, True)
    assert before.depth < drawn.drawn_tree(reach, 0.2, 7).depth == 6
    for _ in range(80):
        drawn.history.count(("drawn", 0), 0.6, False)
    assert drawn.drawn_tree(reach, 0.2, 7).depth == 1
    assert isinstance(drawn.growth(1, reach, 0.2, 7, None, 96), FilledGrowth)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"depth": 0}, "depth of a draft must be at least 1"),
        ({"width": 0}, "width of a draft must be at least 1"),
        ({"nodes": 0}, "at least its root"),
        ({"node_floor": 1.5}, "node_floor is a probability"),
        ({"pass_cost": -1.0}, "pass_cost cannot be"),
    ],
)
def test_impossible_limits_are_refused(options: dict[str, float], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Reach(**options)  # type: ignore[arg-type]
