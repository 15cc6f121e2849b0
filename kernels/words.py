"""Narrow numbers as words of four bytes, for kernels of XLA's that read and write one element for each thread."""

import jax
import jax.numpy as jnp
from jax import lax


def words(array: jax.Array) -> jax.Array:
    """The numbers `[..., n]` as int32, where they are narrower and fill whole ones."""
    size = 4 // array.dtype.itemsize
    if size < 2 or array.shape[-1] % size:
        return array
    return lax.bitcast_convert_type(array.reshape(*array.shape[:-1], -1, size), jnp.int32)


def from_words(array: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What `words` was given."""
    return array if array.dtype == dtype else lax.bitcast_convert_type(array, dtype).reshape(*array.shape[:-1], -1)
