"""Stores that do not fill whole sectors of memory."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu


def store_some(ref: Any, values: jax.Array) -> None:
    """`ref[...] = values` for few or scattered numbers of global memory.

    JAX refuses these from 0.12 on unless it is told that they are meant; before, it had no way to be told.
    """
    if (store := getattr(plgpu, "store", None)) is None:
        ref[...] = values
    else:
        store(ref, values, optimized=False)
