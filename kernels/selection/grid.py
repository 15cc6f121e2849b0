"""The grid that selections lie on: it begins with the sequence, so that chunks, batches and meshes cannot move it.

Integer arithmetic only: every function takes Python ints, numpy arrays or traced jax arrays alike.
"""


def window_start(position, *, window: int, block: int, query_block: int, dense_below: int):
    """The first position in the window of the query at `position`.

    `window` tokens before its query block begin at most, rounded down to a key block, so that the blocks before the
    window are whole: `max(q0 - window, 0) // block * block` with `q0` the first position of the query block.  It is 0
    for query blocks that begin before `dense_below`.
    """
    start = position // query_block * query_block
    behind = start - window
    whole = behind * (behind > 0) // block * block
    return whole * (start >= dense_below)


def eligible_blocks(start, *, sinks: int, block: int):
    """(first, end) of the key blocks that may be retrieved or hot: those between the sinks and the window's `start`."""
    return sinks // block, start // block
