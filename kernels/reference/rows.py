"""A function over some rows of arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def map_active(function: Callable[[Any], Any], items: Any, active: jax.Array, batch: int, idle: Any) -> Any:
    """`function` of each active row of a pytree `[n, ...]`, `batch` rows at a time; elsewhere the numbers of `idle`.

    `active` is bool `[n]`.  The time it takes goes with the span from the first active row to the last.
    """
    n = active.shape[0]
    batch = min(batch, n)
    begin = jnp.argmax(active)
    end = jnp.where(jnp.any(active), n - jnp.argmax(active[::-1]), begin)
    rows = jax.tree.map(lambda array: jax.ShapeDtypeStruct((batch, *array.shape[1:]), array.dtype), items)
    shapes = jax.eval_shape(jax.vmap(function), rows)
    empty = jax.tree.map(lambda shape, value: jnp.full((n, *shape.shape[1:]), value, shape.dtype), shapes, idle)

    def step(index, done):
        # The last batch may take rows again that are done: they come out the same.
        start = jnp.minimum(begin + index * batch, n - batch)
        here = jax.tree.map(lambda array: lax.dynamic_slice_in_dim(array, start, batch), items)
        new = jax.vmap(function)(here)
        return jax.tree.map(lambda old, part: lax.dynamic_update_slice_in_dim(old, part, start, 0), done, new)

    done = lax.fori_loop(0, (end - begin + batch - 1) // batch, step, empty)

    def choose(new, old):
        return jnp.where(active.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return jax.tree.map(choose, done, empty)
