"""One JSON line for each sample that is done, so that an interrupted run goes on where it stopped."""

import json
from pathlib import Path
from typing import Any

from jaxinfer.resume import whole_lines

KEY = ("setting", "baseline", "task", "length", "depth", "sample")
"""What identifies a record. `baseline` is the setting compared with, in records of comparisons."""


class Records:
    """The records of a file, and those added to it."""

    def __init__(self, path: Path):
        """Reads what an earlier run has written; a last line that was not written to its end is cut off.

        Raises ValueError if another line is no record: the file may be something else, and is left alone.
        """
        self._path = path
        self.all: list[dict[str, Any]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self.all += [_parse(line, f"{path}, line {number}") for number, line in whole_lines(path)]
        self._keys = {_key(record) for record in self.all}

    def __contains__(self, key: dict[str, Any]) -> bool:
        return _key(key) in self._keys

    def add(self, record: dict[str, Any]) -> None:
        """Appends a record to the file."""
        with self._path.open("a") as file:
            file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        self.all.append(record)
        self._keys.add(_key(record))


def _key(record: dict[str, Any]) -> str:
    return json.dumps([record.get(name) for name in KEY], sort_keys=True)


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
        if not isinstance(record, dict) or not {"setting", "task", "length", "depth", "sample"} <= set(record):
            raise ValueError(line)
    except ValueError:
        raise ValueError(
            f"{where}: expected a record of an evaluation, got {line[:60]!r}; will not append to it"
        ) from None
    return record
