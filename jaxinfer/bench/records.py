"""One JSON line for each case that was measured, so that an interrupted run goes on where it stopped."""

import json
from pathlib import Path
from typing import Any

from jaxinfer.resume import whole_lines

KEY = ("case", "implementation", "device", "jax", "sources", "settings")
"""What identifies a record; `sources` is the fingerprint of the kernels' code."""


class Records:
    """The records of a file, and those added to it."""

    def __init__(self, path: Path):
        """Reads what an earlier run has written; raises ValueError if a line is no record."""
        self._path = path
        self.all: list[dict[str, Any]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        for number, line in whole_lines(path):
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict) or not set(KEY) <= set(record):
                raise ValueError(f"{path}, line {number}: expected a record of a kernel, got {line[:60]!r}")
            self.all.append(record)

    def find(self, key: dict[str, Any]) -> dict[str, Any] | None:
        """The last record with this key, None if there is none."""
        return next((record for record in reversed(self.all) if all(record[name] == key[name] for name in KEY)), None)

    def add(self, record: dict[str, Any]) -> None:
        """Appends a record to the file."""
        with self._path.open("a") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
        self.all.append(record)
