"""Streamed text: whole characters only, nothing past a stop string, and in the end the tokenizer's own text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from decode.text import REPLACEMENT, TextStream
from tests.medusa_heads.tiny_wheel import byte_alphabet

MERGES = [("S", "T"), ("ST", "OP"), ("O", "P"), ("e", "n"), ("en", "d"), ("Ġ", "a"), ("Ġ", "â")]


def byte_level() -> PreTrainedTokenizerFast:
    """Token i < 256 is byte i; then some merges, " â" among them, which ends within a character; one special token."""
    tokens = byte_alphabet() + [a + b for a, b in MERGES]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def sentence_pieces() -> PreTrainedTokenizerFast:
    """Spaces as "▁", the first one dropped: a token alone and the same token behind others differ."""
    tokens = ["<unk>", "▁", "▁a", "▁the", "a", "b", "<0xE2>", "<0x82>", "<0xAC>"]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


BYTES = byte_level()
PIECES = sentence_pieces()
END = BYTES.convert_tokens_to_ids("<end>")


def stream(ids: list[int], stop: tuple[str, ...] = (), tokenizer: PreTrainedTokenizerFast = BYTES) -> list[str]:
    """The pieces that come out after each token, the last one after the end."""
    text = TextStream(tokenizer, stop)
    pieces = []
    for token in ids:
        stopped = text.push(token)
        pieces.append(text.take())
        assert stopped == text.stopped
        if stopped:
            break
    text.finish()
    pieces.append(text.take())
    assert "".join(pieces) == text.text
    return pieces


def test_a_character_comes_when_its_last_byte_has() -> None:
    assert stream(list("a€b".encode())) == ["a", "", "", "€", "b", ""]
    assert stream(list("👍🏽".encode())) == ["", "", "", "👍", "", "", "", "🏽", ""]


def test_a_token_that_ends_within_a_character_waits_whole() -> None:
    space_and_lead = BYTES.convert_tokens_to_ids("Ġâ")
    assert stream([ord("x"), space_and_lead, 0x82, 0xAC]) == ["x", "", "", " €", ""]


def test_bytes_that_never_become_a_character_are_text_too() -> None:
    assert "".join(stream([0xE2, 0x82])) == REPLACEMENT
    assert "".join(stream([ord("a"), 0xE2, ord("b")])) == f"a{REPLACEMENT}b"
    assert "".join(stream([0x80, ord("b")])) == f"{REPLACEMENT}b"


def test_a_replacement_character_that_the_model_writes_is_kept() -> None:
    assert "".join(stream(list(f"a{REPLACEMENT}b{REPLACEMENT}".encode()))) == f"a{REPLACEMENT}b{REPLACEMENT}"


def test_special_tokens_leave_no_trace() -> None:
    assert stream([ord("a"), END, ord("b"), END]) == ["a", "", "b", "", ""]
    assert "".join(stream([0xE2, END, 0x82, 0xAC])) == BYTES.decode([0xE2, END, 0x82, 0xAC], skip_special_tokens=True)


def test_a_stop_string_across_tokens_is_never_shown() -> None:
    ids = [*map(ord, "go "), BYTES.convert_tokens_to_ids("ST"), ord("O"), ord("P"), ord("x")]
    assert stream(ids, ("STOP",)) == ["g", "o", " ", "", "", "", ""]


def test_a_stop_string_inside_a_token_cuts_it() -> None:
    assert stream([ord("a"), BYTES.convert_tokens_to_ids("STOP")], ("TO",)) == ["a", "S", ""]


def test_what_only_began_a_stop_string_is_shown_once_it_is_known() -> None:
    assert stream(list(map(ord, "aSTx")), ("STOP",)) == ["a", "", "", "STx", ""]
    assert stream(list(map(ord, "aST")), ("STOP",)) == ["a", "", "", "ST"], "and at the end of the text"
    assert stream(list(map(ord, "aab")), ("aac",)) == ["", "", "aab", ""]
    assert stream(list(map(ord, "aaac")), ("aac",)) == ["", "", "a", "", ""]


def test_the_earliest_of_several_stop_strings_wins() -> None:
    ids = [ord("x"), BYTES.convert_tokens_to_ids("STOP")]
    assert "".join(stream(ids, ("OP", "ST"))) == "x"
    assert "".join(stream(list(map(ord, "one two")), ("two", "e t"))) == "on"


def test_a_stop_string_of_characters_of_many_bytes() -> None:
    assert "".join(stream(list("price €5".encode()), ("€",))) == "price "


def test_stop_strings_must_not_be_empty() -> None:
    with pytest.raises(ValueError, match="empty"):
        TextStream(BYTES, ("a", ""))


def test_a_leading_space_belongs_to_the_token_only_behind_others() -> None:
    ids = [PIECES.convert_tokens_to_ids(t) for t in ("▁a", "b", "▁the", "▁", "▁a")]
    assert stream(ids, tokenizer=PIECES) == ["a", "b", " the", " ", " a", ""]
    euro = [PIECES.convert_tokens_to_ids(t) for t in ("▁a", "<0xE2>", "<0x82>", "<0xAC>", "b")]
    assert "".join(stream(euro, tokenizer=PIECES)) == "a€b"


def test_half_a_character_at_the_end_leaves_the_whole_one_before_it() -> None:
    """The decoder itself turns all bytes of such a run into replacement characters, those already shown included."""
    ids = [PIECES.convert_tokens_to_ids(t) for t in ("▁a", "<0xE2>", "<0x82>", "<0xAC>", "<0xE2>")]
    assert PIECES.decode(ids) == f"a{REPLACEMENT * 4}"
    assert "".join(stream(ids, tokenizer=PIECES)) == f"a€{REPLACEMENT}"
    behind = [*ids, PIECES.convert_tokens_to_ids("b")]
    assert "".join(stream(behind, tokenizer=PIECES)) == f"a€{REPLACEMENT}b"


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.integers(0, len(BYTES) - 1), st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, END])), max_size=14))
def test_pieces_joined_are_the_tokenizers_text(ids: list[int]) -> None:
    assert "".join(stream(ids)) == BYTES.decode(ids, skip_special_tokens=True)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from([[1], [2], [3], [4], [5], [6, 7, 8], [6, 7, 7]]), max_size=8))
def test_pieces_joined_are_the_tokenizers_text_with_byte_fallback(characters: list[list[int]]) -> None:
    ids = [token for character in characters for token in character]
    assert "".join(stream(ids, tokenizer=PIECES)) == PIECES.decode(ids, skip_special_tokens=True)


@settings(max_examples=150, deadline=None)
@given(
    text=st.text("ab€", max_size=12),
    stop=st.lists(st.text("ab€", min_size=1, max_size=3), max_size=2),
)
def test_text_ends_at_the_first_stop_string_to_be_complete(text: str, stop: list[str]) -> None:
    shown = "".join(stream(list(text.encode()), tuple(stop)))
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(s) for s in stop)]
    if not ends:
        assert shown == text
    else:
        hits = [text[: ends[0]].find(s) for s in stop if s in text[: ends[0]]]
        assert shown == text[: min(hits)]
