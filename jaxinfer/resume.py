"""Files that grow by a line at a time, and what an interrupted run has left of them."""

from collections.abc import Iterator
from pathlib import Path


def whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The number (from 1) and bytes of each line; a last line that was not written to its end is cut off the file.

    If the reader stops before the end, by an exception for example, the file is left as it is.
    """
    with path.open("rb+") as file:
        whole = 0
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            yield number, line
        file.truncate(whole)
