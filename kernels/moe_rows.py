"""Rows of tokens on their way to their experts and back."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jaxinfer.kernels import dispatch
from jaxinfer.kernels.mosaic import moe_rows as mosaic


def take_rows(
    x: Shaped[Array, "T d"],
    index: Int[Array, " N"],
    count: Int[Array, ""],
    *,
    implementation: dispatch.Implementation | None = None,
) -> Shaped[Array, "N d"]:
    """Rows `x[index]`, of which the first `count` are wanted: the others may hold anything.

    Args: `x [T, d]` of any type; `index [N]` int32, the first `count` of it in `0 .. T-1`; `count` int32.
    Raises: ValueError if Mosaic is asked for and cannot take them.
    """
    if dispatch.choose("take_rows", implementation, mosaic.reason_against(x)) == "mosaic":
        return mosaic.take_rows(x, index, count)
    return x.at[index].get(mode="clip")


def sum_rows(
    x: Float[Array, "N d"],
    index: Int[Array, "T k"],
    count: Int[Array, ""],
    *,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "T d"]:
    """For each token the sum of those of its `k` rows that are among the first `count`, in their order.

    No order of additions is left to chance, as it would be if rows were added where they belong.

    Args: `x [N, d]` of a floating type, rows from `count` on may hold anything; `index [T, k]` int32, not negative.
    Returns: float32 `[T, d]`, 0 for a token without rows.
    Raises: ValueError if Mosaic is asked for and cannot take them.
    """
    if dispatch.choose("sum_rows", implementation, mosaic.reason_against(x)) == "mosaic":
        return mosaic.sum_rows(x, index, count)
    total = jnp.zeros((index.shape[0], x.shape[1]), jnp.float32)
    for row in index.T:
        total = total + jnp.where((row < count)[:, None], x.at[row].get(mode="clip"), 0).astype(jnp.float32)
    return total
