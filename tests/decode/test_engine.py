"""The decoder gives what the base gives: every family, any tree, single and in batches."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList

from decode.drafters.medusa import MedusaDrafter
from decode.engine import Decoder
from decode.prefix import Prefix
from decode.sampling import SamplingParams
from decode.settings import GenerationSettings
from decode.support import check_tree_support
from decode.tree import Tree, search_tree
from medusa_heads.base import Base
from medusa_heads.errors import ConfigError, UnsupportedModelError
from medusa_heads.medusa import MedusaHeads
from tests.conftest import FAMILIES, VOCAB, tiny_base, tiny_recurrent_model, tiny_tokenizer

TREE = search_tree([[0.5, 0.3, 0.2], [0.4, 0.3], [0.4, 0.2]], 14)
PROMPT = [5, 17, 40, 8, 61, 33, 12, 70, 21]


def noisy_heads(base: Base, seed: int = 0, scale: float = 0.02) -> MedusaHeads:
    torch.manual_seed(seed)
    heads = MedusaHeads.for_base(base, num_heads=3, num_layers=1)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=scale)
    return heads.eval()


def greedy_by_hand(base: Base, prompt: list[int], count: int) -> list[int]:
    """The base's own greedy text, by whole forward passes without any cache."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(base.model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in base.eos_token_ids:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_the_base_token_for_token(family: str) -> None:
    base = tiny_base(family)
    decoder = Decoder(base, MedusaDrafter(noisy_heads(base), base, TREE))
    result = decoder.generate(PROMPT, GenerationSettings(max_new_tokens=24, eos_token_ids=()))
    base.eos_token_ids = ()
    assert result.token_ids == greedy_by_hand(base, PROMPT, 24)
    assert result.stats.new_tokens == 24 and result.finish_reason == "length"


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gpt2", "gemma3"])
def test_perfect_drafts_are_accepted_and_change_nothing(family: str) -> None:
    """Drafts that are right fill the cache by tree paths; a position or mask that is off would show at once."""
    base = tiny_base(family)
    base.eos_token_ids = ()
    truth = greedy_by_hand(base, PROMPT, 40)
    decoder = Decoder(base, Oracle(truth, PROMPT, base))
    result = decoder.generate(PROMPT, GenerationSettings(max_new_tokens=30))
    assert result.token_ids == truth[:30]
    assert result.stats.acceptance_histogram[3] >= 6, "all three drafted tokens of a round are accepted"
    assert result.stats.base_forwards == 1 + 8, "one for the prompt and its token, then four tokens a pass"


class Oracle:
    """Drafts the true continuation on the second branch of a tree, so that committing has to move nodes."""

    layers = ()
    tree = Tree((-1, 0, 0, 1, 2, 4), (0, 0, 1, 0, 0, 0))

    def __init__(self, truth: list[int], prompt: list[int], base: Base):
        self.text = prompt + truth
        self.seen = 0

    def start(self, rows: list[object]) -> Oracle:
        self.seen = 0
        return self

    def observe(self, output: object, tokens: torch.Tensor, paths: list[list[int]]) -> None:
        self.seen += len(paths[0])

    def draft(self, roots: list[int], nodes: int | None = None) -> object:
        from decode.drafters import Draft

        nxt = [*self.text[self.seen + 1 : self.seen + 4], 0, 0, 0][:3]
        wrong = (nxt[0] + 1) % VOCAB
        return Draft([self.tree], torch.tensor([[roots[0], wrong, nxt[0], nxt[1], nxt[1], nxt[2]]]))

    def keep_rows(self, rows: list[int]) -> None: ...

    def resume(self, row: object, length: int) -> None: ...


def test_plain_decoding_counts_one_pass_a_token(base: Base) -> None:
    result = Decoder(base).generate(PROMPT, GenerationSettings(max_new_tokens=10, eos_token_ids=()))
    assert result.stats.base_forwards == 10 and result.stats.tau == 1.0


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_stops_at_exactly_max_new_tokens(base: Base, count: int) -> None:
    truth = greedy_by_hand(base, PROMPT, 40)
    decoder = Decoder(base, Oracle(truth, PROMPT, base))
    result = decoder.generate(PROMPT, GenerationSettings(max_new_tokens=count, eos_token_ids=()))
    assert result.token_ids == truth[:count]
    stats = result.stats
    drafted = sum(n * rounds for n, rounds in enumerate(stats.acceptance_histogram))
    assert stats.new_tokens == count
    assert (stats.base_forwards, drafted) == {1: (1, 0), 2: (2, 1), 3: (2, 2), 5: (2, 3)}[count]


def test_an_eos_inside_an_accepted_block_ends_the_text(base: Base) -> None:
    truth = greedy_by_hand(base, PROMPT, 12)
    eos = next(t for i, t in enumerate(truth) if i >= 2 and t not in truth[:i])
    end = truth.index(eos)
    decoder = Decoder(base, Oracle(truth, PROMPT, base))
    result = decoder.generate(PROMPT, GenerationSettings(max_new_tokens=40, eos_token_ids=(eos, 1)))
    assert result.token_ids == truth[: end + 1] and result.finish_reason == "eos"
    assert result.stats.new_tokens == end + 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_batch_of_unequal_prompts_equals_the_rows_one_by_one(temperature: float) -> None:
    base = tiny_base("qwen2")
    decoder = Decoder(base, MedusaDrafter(noisy_heads(base), base, TREE))
    prompts = [PROMPT, PROMPT[:3], PROMPT * 4, [7]]
    settings = GenerationSettings(max_new_tokens=20, seed=11, sampling=SamplingParams(temperature=temperature))
    together = decoder.generate_batch(prompts, settings)
    for i, prompt in enumerate(prompts):
        alone = GenerationSettings(max_new_tokens=20, seed=11 + i, sampling=SamplingParams(temperature=temperature))
        assert together[i].token_ids == decoder.generate(prompt, alone).token_ids
    assert len({len(r.token_ids) for r in together}) > 1 or temperature == 0.0


def test_rows_that_end_early_leave_the_others_alone() -> None:
    base = tiny_base()
    base.eos_token_ids = ()
    truths = [greedy_by_hand(base, p, 30) for p in (PROMPT, PROMPT[:4], PROMPT[2:])]
    eos = truths[1][4]
    expected = [t[: t.index(eos) + 1] if eos in t[:25] else t[:25] for t in truths]
    results = Decoder(base, MedusaDrafter(noisy_heads(base), base, TREE)).generate_batch(
        [PROMPT, PROMPT[:4], PROMPT[2:]], GenerationSettings(max_new_tokens=25, eos_token_ids=(eos,))
    )
    assert [r.token_ids for r in results] == expected
    assert results[1].stats.base_forwards < max(r.stats.base_forwards for r in results)


def test_the_same_seed_gives_the_same_text_and_the_global_state_is_left_alone(base: Base) -> None:
    decoder = Decoder(base, MedusaDrafter(noisy_heads(base), base, TREE))
    settings = GenerationSettings(max_new_tokens=30, seed=5, sampling=SamplingParams(temperature=1.2))
    before = torch.random.get_rng_state()
    first, second = decoder.generate(PROMPT, settings), decoder.generate(PROMPT, settings)
    assert first.token_ids == second.token_ids
    assert torch.equal(before, torch.random.get_rng_state())
    other = decoder.generate(PROMPT, GenerationSettings(max_new_tokens=30, seed=6, sampling=settings.sampling))
    assert other.token_ids != first.token_ids


def test_a_long_prompt_is_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in ("llama", "gemma3"):
        base = tiny_base(family)
        whole = Decoder(base).generate(PROMPT * 6, GenerationSettings(max_new_tokens=8))
        monkeypatch.setattr("decode.engine.PREFILL_CHUNK", 7)
        chunked = Decoder(base).generate(PROMPT * 6, GenerationSettings(max_new_tokens=8))
        monkeypatch.undo()
        assert chunked.token_ids == whole.token_ids
        assert chunked.stats.base_forwards == whole.stats.base_forwards


def test_a_kept_prefix_is_not_computed_again(base: Base) -> None:
    decoder = Decoder(base, MedusaDrafter(noisy_heads(base), base, TREE))
    prefix = Prefix()
    settings = GenerationSettings(max_new_tokens=9, eos_token_ids=())
    first = decoder.generate(PROMPT, settings, prefix=prefix)
    turn = PROMPT + first.token_ids + [9, 10, 11]
    second = decoder.generate(turn, settings, prefix=prefix)
    assert second.token_ids == decoder.generate(turn, settings).token_ids
    # The last emitted token has not been seen by the base: all before it is reused.
    assert second.stats.reused_tokens == len(PROMPT) + len(first.token_ids) - 1
    other = [3, *turn]
    assert decoder.generate(other, settings, prefix=prefix).token_ids == decoder.generate(other, settings).token_ids


def test_the_context_limit_ends_the_text_and_a_longer_prompt_is_refused() -> None:
    base = tiny_base("gpt2")
    limit = base.max_positions
    assert limit == 256
    prompt = (PROMPT * 40)[: limit - 6]
    decoder = Decoder(base, MedusaDrafter(noisy_heads(base), base, TREE))
    result = decoder.generate(prompt, GenerationSettings(max_new_tokens=50, eos_token_ids=()))
    assert result.finish_reason == "context" and len(result.token_ids) == 6
    base.eos_token_ids = ()
    assert result.token_ids == greedy_by_hand(base, prompt, 6)
    with pytest.raises(ConfigError, match="256"):
        decoder.generate(PROMPT * 40)


def test_stop_strings_cut_exactly_and_never_show(base: Base) -> None:
    base = tiny_base()
    truth = greedy_by_hand(base, PROMPT, 30)
    text = base.tokenizer.decode(truth, skip_special_tokens=True)
    stop = text[9:12]
    decoder = Decoder(base, Oracle(truth, PROMPT, base))
    settings = GenerationSettings(max_new_tokens=30, stop=(stop,), eos_token_ids=())
    chunks = list(decoder.stream(PROMPT, settings))
    result = chunks[-1].result
    assert result is not None and result.finish_reason == "stop"
    assert result.text == text[: text.index(stop)] == "".join(c.text for c in chunks)


def test_a_recurrent_base_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedModelError, match=r"order|tree"):
        check_tree_support(Base.from_model(tiny_recurrent_model(), tiny_tokenizer()))


def test_overfitted_heads_accept_the_full_depth() -> None:
    """Heads that know one sample by heart: every round accepts every drafted token."""
    base = tiny_base()
    base.eos_token_ids = ()
    truth = greedy_by_hand(base, PROMPT, 28)
    ids = torch.tensor([PROMPT + truth])
    states = base.forward(ids).last_hidden_state[0]
    heads = MedusaHeads.for_base(base, num_heads=3, num_layers=1).train()
    optimizer = torch.optim.Adam(heads.parameters(), lr=0.03)
    start, end = len(PROMPT) - 1, ids.shape[1] - 4
    for _ in range(400):
        logits = heads.head_logits(heads(states[start:end]), base)
        loss = sum(torch.nn.functional.cross_entropy(logits[i], ids[0, start + 2 + i : end + 2 + i]) for i in range(3))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    decoder = Decoder(base, MedusaDrafter(heads.eval(), base, Tree.chain(4)))
    result = decoder.generate(PROMPT, GenerationSettings(max_new_tokens=21))
    assert result.token_ids == truth[:21]
    assert result.stats.acceptance_histogram == [0, 0, 0, 5]


def test_what_a_call_returns_may_be_changed_in_place() -> None:
    """The engine's own tensors are of torch's inference mode; the caller's are not."""
    inside: list[bool] = []
    note = LogitsProcessorList([lambda ids, scores: (inside.append(scores.is_inference()), scores)[1]])  # type: ignore[list-item]
    settings = GenerationSettings(max_new_tokens=3, output_scores=True, output_logits=True, logits_processor=note)
    result = Decoder(tiny_base()).generate(PROMPT, settings)
    assert inside and all(inside)
    for given in (result.scores, result.logits):
        assert given is not None and not given.is_inference()
        given.add_(1.0)


def test_between_the_chunks_of_a_stream_the_callers_mode_holds() -> None:
    for _ in Decoder(tiny_base()).stream(PROMPT, GenerationSettings(max_new_tokens=3)):
        assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
