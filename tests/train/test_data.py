from __future__ import annotations

import json

import pytest

from tests.train.helpers import TEMPLATES, chat_base
from train.data import (
    DataError,
    choose_rows,
    encode_row,
    encode_rows,
    end_of_turn_id,
    held_out,
    load_chat_rows,
    truncate,
)

ANSWERS = ["The answer is 4.", "the the the", "Question? [INST] model\nassistant", "  indented\n\n", "é世 café"]


def decoded(base, ids):
    return base.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def supervised_runs(example):
    """Runs of supervised tokens, as lists of ids."""
    runs, previous = [], False
    for token, flag in zip(example.input_ids, example.supervised, strict=True):
        if flag:
            runs[-1].append(token) if previous else runs.append([token])
        previous = flag
    return runs


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("answer", ANSWERS)
def test_the_mask_decodes_to_the_answer_and_its_end_of_turn(family, answer):
    base = chat_base(family)
    end = end_of_turn_id(base)
    assert base.tokenizer.convert_ids_to_tokens(end) == TEMPLATES[family][1]
    messages = [{"role": "user", "content": "the answer?"}, {"role": "assistant", "content": answer}]
    (example,) = encode_row(base, {"id": "a", "messages": messages, "finished": True}, end)
    (run,) = supervised_runs(example)
    assert run[-1] == end
    text = decoded(base, run[:-1])
    assert text == answer or text == " " + answer
    prompt = base.render_chat(messages[:1], add_generation_prompt=True)
    assert list(example.input_ids[: -len(run)]) == prompt


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_cut_answer_has_no_end_of_turn(family):
    base = chat_base(family)
    end = end_of_turn_id(base)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "cut in the mid"}]
    (example,) = encode_row(base, {"id": "a", "messages": messages, "finished": False}, end)
    (run,) = supervised_runs(example)
    assert decoded(base, run).removeprefix(" ") == "cut in the mid"
    assert example.supervised[-1] and end != example.input_ids[-1]


@pytest.mark.parametrize("family", TEMPLATES)
def test_every_turn_is_supervised_once_also_where_texts_repeat(family):
    base = chat_base(family)
    end = end_of_turn_id(base)
    turns = ["same", "same", "same"]
    messages = [m for t in turns for m in ({"role": "user", "content": "same"}, {"role": "assistant", "content": t})]
    examples = encode_row(base, {"id": "a", "messages": messages, "finished": False}, end)
    runs = [run for e in examples for run in supervised_runs(e)]
    assert [decoded(base, r).replace(TEMPLATES[family][1], "").removeprefix(" ") for r in runs] == turns
    assert [r[-1] == end for r in runs] == [True, True, False]


def test_turns_share_a_sequence_where_the_template_keeps_history():
    base = chat_base("chatml")
    messages = [
        {"role": r, "content": c} for r, c in [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    ]
    (example,) = encode_row(base, {"id": "a", "messages": messages}, end_of_turn_id(base))
    assert (
        decoded(base, example.input_ids) == decoded(base, base.render_chat(messages, add_generation_prompt=False))[:-1]
    )


def test_turns_are_apart_where_the_template_rewrites_history():
    base = chat_base("qwen")
    thought = "<think>x</think>b"
    messages = [
        {"role": r, "content": c} for r, c in [("user", "a"), ("assistant", thought), ("user", "c"), ("assistant", "d")]
    ]
    first, second = encode_row(base, {"id": "a", "messages": messages}, end_of_turn_id(base))
    assert [decoded(base, r[:-1]) for r in supervised_runs(first)] == [thought]
    assert [decoded(base, r[:-1]) for r in supervised_runs(second)] == ["d"]
    assert "think" not in decoded(base, second.input_ids)


def test_an_answer_that_its_tokens_do_not_reproduce_names_its_row():
    base = chat_base("chatml")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Ω"}]
    with pytest.raises(DataError, match="row 'odd'"):
        encode_row(base, {"id": "odd", "messages": messages}, 2)


@pytest.mark.parametrize("row", [{"id": "x"}, {"id": "x", "messages": [{"role": "user", "content": "a"}]}])
def test_rows_without_an_answer_are_named(row):
    with pytest.raises(DataError, match="'x'"):
        encode_row(chat_base("chatml"), row, 2)


@pytest.mark.parametrize(
    ("message", "key"),
    [
        ({"role": "user"}, "content"),
        ({"content": "a"}, "role"),
        ({"role": "user", "content": None}, "content"),
        ("a", "role"),
    ],
)
def test_messages_without_role_or_content_are_named(message, key):
    messages = [message, {"role": "assistant", "content": "b"}]
    with pytest.raises(DataError, match=f"row 'x': message 1 has no {key}"):
        encode_row(chat_base("chatml"), {"id": "x", "messages": messages}, 2)


def test_messages_that_the_template_refuses_name_their_row():
    base = chat_base("chatml")
    base.tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    messages = [{"role": "system", "content": "s"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(DataError, match=r"row 'x': the chat template refuses .*System role not supported"):
        encode_row(base, {"id": "x", "messages": messages}, 2)


def test_truncation_keeps_the_beginning_and_drops_what_has_no_answer_left():
    base = chat_base("chatml")
    messages = [{"role": "user", "content": "a" * 20}, {"role": "assistant", "content": "b" * 20}]
    rows = [{"id": "x", "messages": messages}]
    (whole,), _ = encode_rows(base, rows)
    prompt = whole.supervised.index(True)
    (short,), report = encode_rows(base, rows, max_length=prompt + 3)
    assert short.input_ids == whole.input_ids[: prompt + 3] and sum(short.supervised) == 3
    assert (report.truncated, report.dropped, report.supervised_tokens) == (1, 0, 3)
    none, report = encode_rows(base, rows, max_length=prompt)
    assert none == [] and report.dropped == 1
    assert truncate(whole, prompt + 1) is not None


def test_held_out_rows_are_chosen_by_id_at_about_the_fraction():
    chosen = {i for i in range(4000) if held_out(str(i), 0.1)}
    assert 320 < len(chosen) < 480
    assert chosen <= {i for i in range(4000) if held_out(str(i), 0.2)}
    assert not any(held_out(str(i), 0.0) for i in range(100))


def test_rows_for_a_learning_curve_are_nested_and_within_their_bound():
    ids, sizes = [str(i) for i in range(500)], [1 + i % 7 for i in range(500)]
    quarter, half = (choose_rows(ids, sizes, sum(sizes) // n) for n in (4, 2))
    assert set(quarter) < set(half) and half == sorted(half)
    assert sum(sizes) // 4 - 7 < sum(sizes[r] for r in quarter) <= sum(sizes) // 4
    assert choose_rows(ids, sizes, None) == list(range(500)) == choose_rows(ids, sizes, sum(sizes))
    assert 0 < len(set(quarter) & set(range(250))) < len(quarter)  # from the whole file, not its beginning
    with_more = choose_rows([*ids, "more"], [*sizes, 10**6], sum(sizes) // 4)
    assert set(with_more) <= set(quarter)


def test_rows_come_from_files_and_shard_directories(tmp_path):
    row = {"id": "1", "messages": []}
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "shard-00000.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "f.jsonl").write_text(json.dumps({**row, "id": "2"}) + "\n")
    assert [r["id"] for r in load_chat_rows([tmp_path / "d", tmp_path / "f.jsonl"])] == ["1", "2"]
    with pytest.raises(DataError, match="nowhere"):
        list(load_chat_rows([tmp_path / "nowhere"]))


@pytest.mark.parametrize("name", ["f.jsonl", "d/shard-00000.jsonl"])
@pytest.mark.parametrize("bad", ['{"id": "2", "mess', "[1]", "3"])
def test_a_line_that_is_no_row_is_named(tmp_path, name, bad):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"id": "1"}\n' + bad + "\n")
    with pytest.raises(DataError, match=rf"{path.name}:2 is "):
        list(load_chat_rows([path if name == "f.jsonl" else path.parent]))


def test_a_file_ends_without_an_end_of_line_but_not_within_a_row(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_text('{"id": "1"}\n\n{"id": "2"}')
    assert [row["id"] for row in load_chat_rows([path])] == ["1", "2"]
    for torn in ('{"id": "2', '{"id": "é'):
        path.write_bytes(('{"id": "1"}\n' + torn).encode()[:-1])
        with pytest.raises(DataError, match=r"f\.jsonl:2 is damaged: not JSON"):
            list(load_chat_rows([path]))
        (tmp_path / "d").mkdir(exist_ok=True)
        (tmp_path / "d" / "shard-00000.jsonl").write_bytes(path.read_bytes())
        assert [row["id"] for row in load_chat_rows([tmp_path / "d"])] == ["1"]
