"""The heads themselves: where they start, what they compute, what they cost."""

from __future__ import annotations

import pytest
import torch

from medusa_heads.base import Base
from medusa_heads.config import MedusaConfig
from medusa_heads.medusa import MedusaHeads
from tests.conftest import FAMILIES, VOCAB, tiny_base, tiny_model
from tests.medusa_heads.test_base import perturb_vectors

IDS = torch.tensor([[5, 17, 40, 8, 61, 33], [9, 2, 77, 30, 31, 32]])
DRAFT_IDS = torch.tensor([40, 3, 95, 7, 0, 61])


def randomised(heads: MedusaHeads, seed: int = 0) -> MedusaHeads:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.2)
    return heads.eval()


@pytest.mark.parametrize("own_projection", [False, True])
@pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_new_heads_say_what_the_base_says(family: str, draft_ids: torch.Tensor | None, own_projection: bool) -> None:
    base = tiny_base(family)
    heads = MedusaHeads.for_base(base, 3, 2, own_projection, draft_ids)
    states = base.forward(IDS).last_hidden_state
    logits = heads.head_logits(heads(states), base)
    expected = base.project(states) if draft_ids is None else base.project(states)[..., draft_ids]
    assert logits.shape == (3, 2, 6, VOCAB if draft_ids is None else 6)
    for head in logits:
        torch.testing.assert_close(head, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["phi", "gemma2"])
def test_an_own_projection_begins_as_the_matrix_of_the_base(family: str) -> None:
    """Without its bias (phi) and its cap (gemma2), as its documentation says."""
    base = Base.from_model(perturb_vectors(tiny_model(family)))
    heads = MedusaHeads.for_base(base, 2, own_projection=True, draft_ids=DRAFT_IDS)
    states = base.forward(IDS).last_hidden_state
    for head in heads.head_logits(heads(states), base):
        torch.testing.assert_close(head, states @ base.projection_weight[DRAFT_IDS].T, rtol=1e-4, atol=1e-4)


def test_a_head_is_a_chain_of_residual_silu_blocks() -> None:
    heads = randomised(MedusaHeads(MedusaConfig(hidden_size=8, vocab_size=20, num_heads=2, num_layers=2)))
    x = torch.randn(5, 8)
    weights = heads.state_dict()
    for i, state in enumerate(heads(x)):
        expected = x
        for layer in range(2):
            z = expected @ weights[f"heads.{i}.{layer}.linear.weight"].T + weights[f"heads.{i}.{layer}.linear.bias"]
            expected = expected + z * torch.sigmoid(z)
        torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-5)


def test_heads_share_nothing_with_each_other() -> None:
    heads = MedusaHeads.for_base(tiny_base(), 3, 2, own_projection=True)
    pointers = [p.data_ptr() for p in heads.parameters()]
    assert len(set(pointers)) == len(pointers) == 3 * (2 * 2 + 1)
    randomised(heads)
    states = heads(torch.randn(4, 32))
    assert not torch.allclose(states[0], states[1]) and not torch.allclose(states[1], states[2])


def test_an_own_projection_is_a_copy_of_the_bases() -> None:
    base = tiny_base()
    before = base.projection_weight.clone()
    randomised(MedusaHeads.for_base(base, own_projection=True))
    assert torch.equal(base.projection_weight, before)


def test_parameters_are_the_heads_own_alone() -> None:
    base = tiny_base()
    shared = MedusaHeads.for_base(base, 4, 2, draft_ids=DRAFT_IDS)
    assert shared.num_parameters == 4 * 2 * (32 * 32 + 32)
    own = MedusaHeads.for_base(base, 4, 2, own_projection=True, draft_ids=DRAFT_IDS)
    assert own.num_parameters == shared.num_parameters + 4 * 6 * 32


def test_head_logits_follow_the_draft_vocabulary() -> None:
    base = tiny_base()
    heads = randomised(MedusaHeads.for_base(base, 2, draft_ids=DRAFT_IDS))
    states = heads(base.forward(IDS).last_hidden_state)
    whole = base.project(states)
    torch.testing.assert_close(heads.head_logits(states, base), whole[..., DRAFT_IDS], rtol=1e-4, atol=1e-4)
    assert heads.config.draft_vocab_size == 6 and torch.equal(heads.state_dict()["draft_ids"], DRAFT_IDS)
    assert "draft_ids" not in MedusaHeads.for_base(base).state_dict()


def test_the_config_remembers_the_base() -> None:
    base = tiny_base("qwen3")
    config = MedusaHeads.for_base(base, 5, 3).config
    assert (config.num_heads, config.num_layers, config.draft_vocab_size) == (5, 3, None)
    assert {name: getattr(config, name) for name in base.fingerprint()} == base.fingerprint()


def test_draft_ids_are_checked_against_their_size_and_the_vocabulary() -> None:
    with pytest.raises(ValueError, match=r"shape \(6,\); draft_vocab_size is 5"):
        MedusaHeads(MedusaConfig(hidden_size=8, vocab_size=96, draft_vocab_size=5), DRAFT_IDS)
    config = MedusaConfig(hidden_size=8, vocab_size=96, draft_vocab_size=2)
    for wrong in ([3, 96], [-1, 3], [3, 3]):
        with pytest.raises(ValueError, match="distinct ids within the vocabulary of 96"):
            MedusaHeads(config, torch.tensor(wrong))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_reach_every_head_and_no_weight_of_the_base(family: str) -> None:
    base = tiny_base(family)
    heads = MedusaHeads.for_base(base, 2, draft_ids=DRAFT_IDS).train()
    states = base.forward(IDS).last_hidden_state
    heads.head_logits(heads(states), base).logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in heads.parameters())
    assert all(p.grad is None for p in base.model.parameters())


def test_the_heads_forward_needs_no_batch() -> None:
    heads = randomised(MedusaHeads.for_base(tiny_base()))
    x = torch.randn(2, 3, 32)
    whole = heads(x)
    assert whole.shape == (4, 2, 3, 32)
    torch.testing.assert_close(whole[:, 1, 2], heads(x[1, 2]))


def test_a_model_in_bfloat16_makes_heads_that_train_in_float32() -> None:
    heads = MedusaHeads.for_base(Base.from_model(tiny_model().to(torch.bfloat16)), own_projection=True)
    assert {p.dtype for p in heads.parameters()} == {torch.float32}
