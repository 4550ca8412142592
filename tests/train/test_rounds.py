"""The unrolled attention against a full mask, and against what decoding computes token by token."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from medusa_heads.base import BaseOutput
from medusa_heads.eagle import EagleHeads
from medusa_heads.hydra import HydraHeads
from tests.conftest import FAMILIES, tiny_base
from tests.train.test_features import random_examples
from train import rounds
from train.batches import SequenceBatch
from train.config import TrainingConfig, build
from train.eagle import EagleTrainer
from train.hydra import HydraTrainer
from train.rounds import group_rows, join_own_keys, shared_attention
from train.states import LiveStates


def batch_of(lengths, spans):
    """Rows whose positions `spans[row]` are supervised; no states."""
    starts = [sum(lengths[:r]) for r in range(len(lengths))]
    where = [start + t for start, span in zip(starts, spans, strict=True) for t in span]
    nothing = torch.zeros(0, dtype=torch.long)
    return SequenceBatch(
        torch.zeros(len(where), 1),
        nothing,
        nothing,
        (),
        nothing,
        torch.tensor(where),
        lengths,
        list(range(len(lengths))),
    )


LENGTHS, SPANS = [7, 3, 9], [range(3, 7), range(0, 3), [2, 3, 6, 7, 8]]


def naive(q, k, v, batch, own_keys, own_values):
    """One query at a time over an explicit list of the keys it sees; each query head has its own copy of a key head."""
    copies = q.shape[1] // k.shape[1]
    starts = [sum(LENGTHS[:r]) for r in range(3)]
    rows = []
    for p, place in enumerate(batch.where.tolist()):
        start = max(s for s in starts if s <= place)
        keys = torch.cat([k[start : place + 1], *(own[p : p + 1] for own in own_keys)]).repeat_interleave(copies, 1)
        values = torch.cat([v[start : place + 1], *(own[p : p + 1] for own in own_values)]).repeat_interleave(copies, 1)
        law = torch.softmax(torch.einsum("hd,shd->hs", q[p], keys) / q.shape[-1] ** 0.5, -1)
        rows.append(torch.einsum("hs,shd->hd", law, values))
    return torch.stack(rows)


@pytest.mark.parametrize("own", [0, 1, 3])
@pytest.mark.parametrize("group_tokens", [1, 16, 1000])
def test_the_joined_attention_equals_one_over_all_visible_keys_with_its_gradient(monkeypatch, own, group_tokens):
    monkeypatch.setattr(rounds, "GROUP_TOKENS", group_tokens)
    torch.manual_seed(0)
    batch = batch_of(LENGTHS, SPANS)
    count, total = len(batch.where), sum(LENGTHS)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    q, k, v = draw(count, 4, 6), draw(total, 2, 6), draw(total, 2, 6)
    keys, values = [draw(count, 2, 6) for _ in range(own)], [draw(count, 2, 6) for _ in range(own)]
    groups = group_rows(batch)
    assert len(groups) == {1: 3, 16: 2, 1000: 1}[group_tokens]
    got = join_own_keys(*shared_attention(q, k, v, groups), q, keys, values)
    wanted = naive(q, k, v, batch, keys, values)
    torch.testing.assert_close(got, wanted)
    pull = torch.randn_like(wanted)
    inputs = [q, k, v, *keys, *values]
    for a, b in zip(torch.autograd.grad(got, inputs, pull), torch.autograd.grad(wanted, inputs, pull), strict=True):
        torch.testing.assert_close(a, b)


def test_no_score_is_kept_for_the_backward_pass():
    batch = batch_of([64], [range(32, 64)])
    q, k = torch.randn(32, 4, 8, requires_grad=True), torch.randn(64, 2, 8, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        shared_attention(q, k, k, group_rows(batch))
    assert max(kept) == q.numel() == 32 * 4 * 8


def shaken(heads, seed=0):
    """New heads pass their input on; random weights make every part count."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return heads.eval()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("version", [1, 3])
def test_unrolled_training_equals_decoding_token_by_token(family, version):
    """Of every round: the base's states up to its beginning go through the head in one pass with a cache, then one
    token a step on the head's own features."""
    base, steps = tiny_base(family), 4
    heads = shaken(EagleHeads.for_base(base, version=version)).double()
    source = LiveStates(base, random_examples(4))
    trainer = EagleTrainer(heads, base, build(TrainingConfig, {"output": "x", "heads": {"family": "eagle"}}))
    batch = trainer.read(source, [2, 1])
    with torch.no_grad():
        features = heads.fuse(BaseOutput(batch.features[0].double(), tuple(x.double() for x in batch.features)))
        trained = trainer.head_states(batch, depth=steps)
        place = 0
        for row, fused in zip([2, 1], features.split(batch.lengths), strict=True):
            ids = torch.tensor(source.examples[row].input_ids)
            positions, _, remaining = source.spans[row]
            for begin, left in zip(positions.tolist(), remaining.tolist(), strict=True):
                cache = DynamicCache()
                embeddings = base.embed(ids[1 : begin + 2]).double()[None]
                out = heads(embeddings, fused[None, : begin + 1], torch.arange(begin + 1)[None], None, cache)[:, -1:]
                for step in range(min(left + 1, steps)):
                    if step:
                        embedding = base.embed(ids[begin + 1 + step]).double()[None, None]
                        visible = torch.ones(1, 1, begin + 1 + step, dtype=torch.bool)
                        out = heads(embedding, out, torch.tensor([[begin + step]]), visible, cache)
                    torch.testing.assert_close(trained[step, place], heads.states(out)[0, 0])
                place += 1
        assert place == trained.shape[1]


def test_hydra_prefix_attention_in_training_equals_decoding():
    base = tiny_base("qwen3")
    heads = shaken(HydraHeads.for_base(base, num_heads=3, prefix_attention=True))
    source = LiveStates(base, random_examples(3))
    config = build(TrainingConfig, {"output": "x", "heads": {"family": "hydra", "num_heads": 3}})
    trained = HydraTrainer(heads, base, config)
    with torch.no_grad():
        states = trained.head_states(trained.read(source, [1, 0, 2]))
        place = 0
        for row in [1, 0, 2]:
            ids = torch.tensor([source.examples[row].input_ids])
            last = base.forward(ids).last_hidden_state
            prefix = heads.prefix(last, torch.arange(ids.shape[1])[None])[0]
            positions, _, remaining = source.spans[row]
            for at, left in zip(positions.tolist(), remaining.tolist(), strict=True):
                for i in range(min(3, left)):
                    embeddings = base.embed(ids[0, at + 1 : at + 2 + i])
                    wanted = heads.head(i, prefix[at], embeddings)
                    torch.testing.assert_close(states[i, place], wanted, rtol=1e-3, atol=1e-4)
                place += 1
