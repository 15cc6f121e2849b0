"""Ranges of layers, as options name them."""


def layer_range(text: str) -> tuple[int, int]:
    """Reads "3" or "0-3": the first layer, and the one after the last.  Raises ValueError for anything else."""
    first, _, last = text.partition("-")
    last = last or first
    if not (first.isdecimal() and last.isdecimal()) or int(first) > int(last):
        raise ValueError(f"expected layers such as 3 or 0-3, got {text!r}")
    return int(first), int(last) + 1
