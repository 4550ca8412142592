"""What has been measured, line by line on disk, so that a run may be cut at any time and continued.

The first line holds the configuration; a run with another one is refused. Each session adds a line about the machine
and its versions, each measurement a row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medusa_heads.errors import ConfigError

Row = dict[str, Any]


class Log:
    """The file `rows.jsonl` of a run's directory."""

    def __init__(self, path: Path, config: Mapping[str, Any]):
        self.path = path
        self.config = json.loads(json.dumps(dict(config)))
        self.rows: list[Row] = []
        self.sessions: list[Row] = []
        if path.exists() and path.stat().st_size:
            self._read()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append({"config": self.config})

    def _read(self) -> None:
        lines = self.path.read_bytes().split(b"\n")
        whole, tail = lines[:-1], lines[-1]
        if tail:  # cut while it was being written: as if it had never been
            with self.path.open("rb+") as file:
                file.truncate(sum(len(line) + 1 for line in whole))
        if not whole:
            self._append({"config": self.config})
            return
        try:
            entries = [json.loads(line) for line in whole]
        except json.JSONDecodeError as error:
            raise ConfigError(f"{self.path} is damaged: {error}") from None
        found = entries[0].get("config")
        if found != self.config:
            raise ConfigError(f"{self.path} belongs to another configuration: {differences(found or {}, self.config)}")
        for entry in entries[1:]:
            (self.sessions if "session" in entry else self.rows).append(entry.get("session", entry))

    def add_session(self, session: Mapping[str, Any]) -> None:
        self.sessions.append(dict(session))
        self._append({"session": dict(session)})

    def add(self, row: Mapping[str, Any]) -> None:
        self.rows.append(dict(row))
        self._append(row)

    def _append(self, entry: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """`key: theirs, now ours` for each key that differs."""
    keys = [key for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key)]
    return "; ".join(f"{key} was {theirs.get(key)!r}, now {ours.get(key)!r}" for key in keys)
