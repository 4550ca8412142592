"""Draft models of another tokenizer: what they read, what becomes of their drafts, what is refused and counted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from decode.drafters.crossmodel import SharedDrafter, TextDrafter, drafter_for
from decode.drafters.model import ModelDrafter, vocabulary_difference
from decode.drafters.retokenize import WINDOW, Retokenizer, counterparts, shared_tokens
from decode.drafters.trie import Trie
from decode.engine import Decoder
from decode.settings import GenerationSettings
from medusa_heads.base import Base
from medusa_heads.errors import ConfigError, HeadsError
from tests.conftest import GROUPED, VOCAB, tiny_base, tiny_model, tiny_tokenizer
from tests.decode.drafters import CHAIN, MERGES, PROMPT, foreign, greedy_by_hand, other_tokenizer, permuted, translated

BASE, FOREIGN = tiny_base(), foreign()
TEXTS = st.lists(st.integers(1, VOCAB - 1), max_size=5 * WINDOW)


@given(text=TEXTS, step=st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_a_growing_text_is_read_as_it_would_be_at_once(text: list[int], step: int) -> None:
    reader = Retokenizer(BASE, FOREIGN)
    for end in range(0, len(text) + 1, step):
        assert reader(text[:end]) == Retokenizer(BASE, FOREIGN).convert(text[:end])
    assert reader(text[: len(text) // 2]) == reader.convert(text[: len(text) // 2]), "a text may be cut"


def test_what_lies_far_back_is_not_read_again() -> None:
    reader, read = Retokenizer(BASE, FOREIGN), []
    convert = Retokenizer.convert
    reader.convert = lambda ids: (read.append(len(ids)), convert(reader, ids))[1]  # type: ignore[method-assign]
    text = BASE.tokenizer.encode("the abc => " * 60)
    for end in range(1, len(text)):
        reader(text[:end])
    assert max(read) <= 2 * WINDOW


def test_drafts_come_back_in_the_bases_tokens() -> None:
    reader = Retokenizer(BASE, FOREIGN)
    reader(BASE.tokenizer.encode("see "))
    drafted = FOREIGN.tokenizer.encode("the ab")
    assert len(drafted) == 3
    found = reader.back([*drafted, FOREIGN.tokenizer.eos_token_id])
    assert BASE.tokenizer.decode([token for token, _ in found[:-1]]) == "the ab"
    assert [taken for _, taken in found] == [1, 1, 1, 2, 3, 3, 4]
    assert found[-1][0] == BASE.tokenizer.eos_token_id, "the end of a text is one in both"


def test_special_tokens_go_by_name_or_by_their_part() -> None:
    there = counterparts(BASE, FOREIGN)
    assert there[1] == permuted(1) and there[2] == permuted(2)
    reader = Retokenizer(BASE, FOREIGN)
    assert reader([1, *BASE.tokenizer.encode("the"), 2]) == [permuted(1), *FOREIGN.tokenizer.encode("the"), permuted(2)]


def test_shared_tokens_spell_the_same() -> None:
    theirs, ours = shared_tokens(FOREIGN, BASE)
    assert ours == sorted(ours) and len(ours) == VOCAB
    assert [permuted(i) for i in ours] == theirs


def test_a_model_with_the_bases_law_in_another_vocabulary_is_always_right() -> None:
    for kind in (SharedDrafter, TextDrafter):
        drafter = kind(translated(BASE), BASE, reach=CHAIN)
        result = Decoder(BASE, drafter, guard=None).generate(
            PROMPT, GenerationSettings(max_new_tokens=26, eos_token_ids=())
        )
        assert result.token_ids == greedy_by_hand(BASE, PROMPT, 26)
        histogram = result.stats.acceptance_histogram
        plain_text = not any(token < 3 for token in result.token_ids)
        assert histogram[4] >= (5 if plain_text else 3), histogram


def test_what_the_mismatch_costs_is_counted() -> None:
    """A base of which some tokens cannot be drafted: its rounds end there."""
    draft = translated(BASE)
    drafter = SharedDrafter(draft, BASE, reach=CHAIN)
    truth = greedy_by_hand(BASE, PROMPT, 26)
    lost = truth[9]
    keep = [i for i in range(VOCAB) if i != lost]
    drafter.shared = frozenset(keep)
    drafter.link.columns = drafter.columns = torch.tensor([permuted(i) for i in keep])
    drafter.link.rows = drafter.rows = torch.tensor(keep)
    result = Decoder(BASE, drafter, guard=None).generate(PROMPT, GenerationSettings(26, eos_token_ids=()))
    assert result.token_ids == truth
    report = drafter.mismatch.report()
    assert report["way"] == "shared" and "another tokenizer" in report["difference"]
    assert 0 < report["lost_by_mismatch"] <= truth.count(lost)
    assert report["lost_share"] == report["lost_by_mismatch"] / report["rounds"]


def test_characters_that_were_right_in_other_tokens_are_counted() -> None:
    """The base writes what the draft model would as one token in two: read alone, `the` is one token of the base."""
    merged = Base.from_model(tiny_model(), other_tokenizer(MERGES), name="merged")
    session = TextDrafter(translated(BASE), merged).start([])
    trie = Trie(0)
    trie.add(0, merged.tokenizer.encode("the")[0], 0.9)
    spelled = [merged.tokenizer.get_vocab()[c] for c in "the"]
    assert session._only_spelled_otherwise(trie, spelled[:1])  # type: ignore[attr-defined]
    assert not session._only_spelled_otherwise(trie, merged.tokenizer.encode("the"))  # type: ignore[attr-defined]
    assert not session._only_spelled_otherwise(trie, merged.tokenizer.encode("x"))  # type: ignore[attr-defined]


def test_the_way_is_chosen_by_the_vocabularies() -> None:
    same = Base.from_model(tiny_model(seed=4), BASE.tokenizer, name="same")
    assert type(drafter_for(same, BASE)) is ModelDrafter
    assert type(drafter_for(foreign(), BASE)) is SharedDrafter
    assert type(drafter_for(foreign(), BASE, way="text")) is TextDrafter
    with pytest.raises(ConfigError, match="is for another one"):
        drafter_for(same, BASE, way="text")
    with pytest.raises(ConfigError, match="shared or text, not by 'both'"):
        drafter_for(foreign(), BASE, way="both")


def test_one_tokenizer_with_padding_or_added_tokens_is_the_same() -> None:
    for size in (VOCAB - 2, VOCAB + 32):
        tokenizer = tiny_tokenizer()
        if size > VOCAB:
            tokenizer.add_tokens(["<extra>"], special_tokens=True)
        torch.manual_seed(2)
        model = LlamaForCausalLM(LlamaConfig(**{**GROUPED, "vocab_size": size})).eval()
        draft = Base.from_model(model, tokenizer, name="padded")
        assert vocabulary_difference(draft, BASE) is None
        result = Decoder(BASE, ModelDrafter(draft, BASE, reach=CHAIN), guard=None).generate(
            [*PROMPT, VOCAB - 1], GenerationSettings(max_new_tokens=16, eos_token_ids=())
        )
        assert result.token_ids == greedy_by_hand(BASE, [*PROMPT, VOCAB - 1], 16)


def lossy_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1, "cat": 2}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_a_pair_that_cannot_work_is_refused_with_the_reason() -> None:
    without = Base.from_model(foreign().model, None, name="nameless")
    with pytest.raises(HeadsError, match="no tokenizers to compare"):
        drafter_for(without, BASE)
    with pytest.raises(HeadsError, match=r"token 0 is .*, not '<unk>'"):
        ModelDrafter(foreign(), BASE)
    lossy = Base.from_model(tiny_model(), lossy_tokenizer(), name="lossy")
    for way in ("shared", "text"):
        with pytest.raises(HeadsError, match="drafts cannot go through text"):
            drafter_for(lossy, BASE, way=way)
