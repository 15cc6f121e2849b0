"""Pages of the arrays of a cache, one after the other."""

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from jaxinfer.kernels import dispatch
from jaxinfer.kernels.dispatch import Implementation
from jaxinfer.kernels.mosaic import copy_pages as mosaic


def copy_pages(
    array: Shaped[Array, "layers pages ..."],
    layer: Int[Array, ""],
    pages: Int[Array, "*taken"],
    count: Int[Array, ""] | None = None,
    *,
    implementation: Implementation | None = None,
) -> Shaped[Array, "..."]:
    """The pages `[*taken, ...]` of one layer.

    Args:
        layer: int32.
        pages: int32; those out of range are the nearest.
        count: int32, how many of them are wanted, the first ones: what stands for others means nothing.  None: all.
        implementation: None chooses (see `dispatch`).

    Raises: ValueError if Mosaic is asked for and cannot take the array.
    """
    pages = jnp.clip(pages, 0, array.shape[1] - 1)
    if dispatch.choose("copy_pages", implementation, mosaic.reason_against(array, pages)) == "mosaic":
        return mosaic.copy_pages(array, layer, pages, jnp.int32(pages.size) if count is None else count)
    return array.at[layer, pages].get(mode="clip")
