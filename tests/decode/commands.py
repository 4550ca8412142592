"""Running `medusa-decode` in this process, and its rows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from decode.cli import app

ROWS = [
    {"question_id": 81, "category": "writing", "turns": ["hello", "and then?"]},
    {"id": "p", "prompt": "ünïcode"},
    {"id": "m", "messages": [{"role": "user", "content": "a"}]},
]


def run(*arguments: object, text: str | None = None) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=text)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_one_line(result: Any, pattern: str) -> None:
    """Exit code 2, nothing on standard output, and one line on standard error that matches."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert re.search(pattern, result.stderr), result.stderr
