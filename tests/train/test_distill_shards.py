"""The store: whole rows whatever happens to the process or the disk, and readable by `datasets`."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from medusa_heads.errors import UserError
from train.shards import LineWriter, ShardWriter, read_rows, shard_paths, sole_writer, write_beside


def fill(directory: Path, numbers: range, rows_per_shard: int = 3) -> None:
    with ShardWriter(directory, rows_per_shard) as writer:
        for number in numbers:
            writer.append({"id": str(number), "text": "ä\u2028\r\n"})


def ids(directory: Path) -> list[int]:
    return [int(row["id"]) for row in read_rows(directory)]


def test_rows_roll_over_into_shards_and_a_later_writer_goes_on(tmp_path: Path) -> None:
    fill(tmp_path, range(4))
    fill(tmp_path, range(4, 8))
    assert ids(tmp_path) == list(range(8))
    assert [p.name for p in shard_paths(tmp_path)] == [f"shard-0000{i}.jsonl" for i in range(3)]
    assert [p.read_bytes().count(b"\n") for p in shard_paths(tmp_path)] == [3, 3, 2]
    assert {row["text"] for row in read_rows(tmp_path)} == {"ä\u2028\r\n"}


@pytest.mark.parametrize("torn", ['{"id": "9", "te', '{"id": "9"}', "ä"])
def test_a_torn_last_line_is_not_a_row_and_goes_with_the_next_writer(tmp_path: Path, torn: str) -> None:
    fill(tmp_path, range(2))
    with shard_paths(tmp_path)[-1].open("a", encoding="utf-8") as file:
        file.write(torn)
    assert ids(tmp_path) == [0, 1]
    fill(tmp_path, range(2, 4))
    assert ids(tmp_path) == [0, 1, 2, 3]


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "shard-00000.jsonl").write_text('{"id": "1"}\n\0\0\0\n{"id": "2"}\n')
    with pytest.raises(UserError, match=r"shard-00000\.jsonl:2"):
        list(read_rows(tmp_path))


FULL_DISK = """
import resource, sys
from pathlib import Path
from train.shards import ShardWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
with ShardWriter(Path(sys.argv[1])) as writer:
    try:
        for number in range(100):
            writer.append({"id": str(number), "text": "x" * 90})
    except OSError as error:
        assert error.filename == str(Path(sys.argv[1]) / "shard-00000.jsonl")
        resource.setrlimit(resource.RLIMIT_FSIZE, (1050, resource.RLIM_INFINITY))
        writer.append({"id": "short"})
        sys.exit(7)
"""


def test_a_disk_that_is_full_in_the_middle_of_a_row_leaves_whole_rows(tmp_path: Path) -> None:
    """The limit on the file's size makes the system take a part of a row and then refuse, as a full disk does."""
    assert resource.RLIMIT_FSIZE is not None
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    text = shard_paths(tmp_path)[0].read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert text.endswith("\n") and len(text) < 1000
    assert [row["id"] for row in rows] == [*map(str, range(len(rows) - 1)), "short"]


def test_a_row_that_cannot_be_encoded_leaves_nothing(tmp_path: Path) -> None:
    with ShardWriter(tmp_path) as writer:
        writer.append({"id": "1"})
        with pytest.raises(UnicodeEncodeError):
            writer.append({"id": "\ud800"})
        writer.append({"id": "2"})
    assert ids(tmp_path) == [1, 2]


def test_a_small_file_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_beside(path, "old")

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_beside(path, "new")
    assert path.read_text() == "old"


def test_two_runs_cannot_write_to_one_directory(tmp_path: Path) -> None:
    with sole_writer(tmp_path), pytest.raises(UserError, match="another run"), sole_writer(tmp_path):
        pass
    with sole_writer(tmp_path):
        pass


def test_a_line_writer_counts_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"a"')
    with LineWriter(path) as writer:
        assert writer.rows == 1
        writer.append({"a": 2})
    assert path.read_text() == '{"a": 1}\n{"a": 2}\n'
