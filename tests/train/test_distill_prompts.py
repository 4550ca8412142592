"""Reading prompts: the forms of a row, ids that never change, duplicates, and errors that name the row."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from train.prompts import Prompt, PromptError, drop_duplicates, parse_row, read_dataset, read_jsonl


def test_the_three_forms_of_a_row() -> None:
    assert parse_row({"question_id": 81, "turns": ["a", "b"]}, "x", "f") == Prompt("81", ("a", "b"), None, "f")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "another model's answer"},
        {"role": "user", "content": "b"},
    ]
    assert parse_row({"id": "m", "messages": messages, "source": "s"}, "x") == Prompt("m", ("a", "b"), "Be brief.", "s")
    assert parse_row({"id": 0, "prompt": "a"}, "x").id == "0"


def test_null_columns_of_a_dataset_row_are_as_good_as_missing() -> None:
    row = {"id": None, "question_id": 7, "turns": None, "messages": None, "prompt": "a", "source": None}
    assert parse_row(row, "x", "where") == Prompt("7", ("a",), None, "where")


def test_an_id_made_from_the_text_is_stable_and_tells_texts_apart() -> None:
    same = [parse_row({"turns": ["a", "b"]}, where).id for where in ("x", "y")]
    others = [parse_row(row, "x").id for row in ({"turns": ["a b"]}, {"turns": ["b", "a"]}, {"turns": ["a"]})]
    assert same == ["2e36513984243e49"] * 2
    assert len({*same, *others}) == 4


@pytest.mark.parametrize(
    "row",
    [
        [],
        {},
        {"text": "a"},
        {"turns": []},
        {"turns": ["a", " \n"]},
        {"turns": [1]},
        {"turns": "a string is no list of turns"},
        {"messages": [{"role": "assistant", "content": "a"}]},
        {"messages": [{"content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"messages": [{"role": "system", "content": 3}, {"role": "user", "content": "a"}]},
    ],
)
def test_a_row_that_is_no_prompt_is_an_error_that_names_it(row: object) -> None:
    with pytest.raises(PromptError, match=r"prompts\.jsonl:12"):
        parse_row(row, "prompts.jsonl:12")


def test_jsonl_plain_and_gzip(tmp_path: Path) -> None:
    text = '{"id": 1, "prompt": "a"}\n\n{"id": 2, "prompt": "é", "source": "s"}\n'
    plain, packed = tmp_path / "p.jsonl", tmp_path / "p.jsonl.gz"
    plain.write_text(text, encoding="utf-8")
    packed.write_bytes(gzip.compress(text.encode()))
    assert list(read_jsonl(plain)) == [Prompt("1", ("a",), None, "p.jsonl"), Prompt("2", ("é",), None, "s")]
    assert [p.turns for p in read_jsonl(packed)] == [("a",), ("é",)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": ', "p.jsonl:2: not JSON"),
        ("p.jsonl", b"\xff\xfe", "cannot read"),
        ("p.jsonl.gz", b"not gzip", "cannot read"),
        ("p.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n' * 99, mtime=0)[:30], "cannot read"),
        ("missing.jsonl", None, "cannot read"),
    ],
)
def test_an_unreadable_file_is_one_clear_line(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(PromptError, match=message) as caught:
        list(read_jsonl(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_duplicates_fall_whatever_their_case_space_and_id() -> None:
    prompts = [
        Prompt("1", ("What is  it?",)),
        Prompt("2", ("what is it? ",)),
        Prompt("3", ("What is it?",), "Be brief."),
        Prompt("4", ("What is", "it?")),
    ]
    kept, dropped = drop_duplicates(prompts)
    assert ([p.id for p in kept], dropped) == (["1", "3", "4"], 1)


def test_one_id_for_two_texts_is_an_error() -> None:
    with pytest.raises(PromptError, match="'1'"):
        drop_duplicates([Prompt("1", ("a",)), Prompt("1", ("b",))])


def test_datasets_from_files_and_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    rows = [{"id": "1", "turns": ["a", "b"]}, {"id": "2", "turns": ["c"]}]
    wanted = [("1", ("a", "b")), ("2", ("c",))]
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = datasets.Dataset.from_list(rows)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"test": data}).save_to_disk(tmp_path / "dict")
    for kind in ("files", "one", "dict"):
        assert [(p.id, p.turns) for p in read_dataset(str(tmp_path / kind), "test")] == wanted, kind
    for kind in ("files", "dict", "missing"):
        with pytest.raises(PromptError, match=f"'train' of the dataset .*{kind}"):
            list(read_dataset(str(tmp_path / kind), "train"))
