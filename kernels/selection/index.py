"""The index of the first level of retrieval: a few numbers that stand for some neighbouring tokens.

A logit is a product `q . k` of an absorbed query and a latent, hundreds of numbers long, but queries and keys of one
layer do not use all directions alike.  With their second moments `Q` and `K`, the product of rank `d` that is off least
in the mean square follows from the singular value decomposition of `Q^1/2 K^1/2 = U S V'`:
`q . k ~ (q K^1/2 V_d S_d^-1/2) . (k Q^1/2 U_d S_d^-1/2)`.

Numbers saved so are spent on smaller groups: a mean of many keys hides the one that a head looks for.  Where all
directions count alike, `d` of `D` numbers for `g` tokens separate one key from the others as well as `D` numbers for
`g D / d`; on the bundled model 40 of 320 numbers for 4 tokens found every needle in the first place where the 320 of
32 tokens had it in the middle of all blocks.

They are e4m3, which holds 2^-9 to 448, without a scale of each group: projections make the root mean square of every
number of a key 1 to 2 instead, which leaves three bits of exponent for larger ones and as many for smaller ones, such
as means are.  Queries, which are projected where they are needed, have a scale each.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxinfer.kernels.reference.quantize import cast, scale_of
from jaxinfer.kernels.selection.means import group_means

TYPE = jnp.float8_e4m3fn
"""Of the index and of what it is multiplied with.  Conversion saturates (JAX's own makes NaN of what is too large)."""
_HEADROOM = 16
"""What the largest number of a query is below the largest e4m3: products stay far below the largest float16, in which
`mosaic.block_scores` adds them up.  Numbers lose precision from 2^-10 of the largest downwards instead of 2^-14."""
_LEAST = 1e-30
"""Largest number of a query whose scale is still fitted to it."""

_NOISE = 1e-6
"""Moments are known to float32's precision: what is smaller, relative to the largest, is none."""


class Projections(NamedTuple):
    """Of one layer `[D, d]`, or of all, stacked, `[layers, D, d]`, in the type of the model."""

    keys: jax.Array
    queries: jax.Array


def group_index(latents: Float[Array, "... S D"], projection: Float[Array, "D d"], group: int) -> jax.Array:
    """The index `[..., S / group, d]` of latents, e4m3: their `group_means`, projected and summed in float32."""
    return cast(_project(group_means(latents, group), projection), TYPE)


def query_index(q: Float[Array, "... D"], projection: Float[Array, "D d"]) -> tuple[jax.Array, jax.Array]:
    """Absorbed queries as the index is multiplied with: `[..., d]` e4m3, and the scale of each `[...]`, float32.

    The scale is a power of two with which the largest number of a query is above 14 and at most 28.
    """
    found = _project(q, projection)
    largest = jnp.maximum(jnp.max(jnp.abs(found), axis=-1), _LEAST)
    scale = _HEADROOM * scale_of(largest, TYPE, power_of_two=True)
    return cast(found / scale[..., None], TYPE), scale


def _project(rows, projection):
    return jnp.einsum("...d,de->...e", rows, projection.astype(rows.dtype), preferred_element_type=jnp.float32)


def projections(query_moments: np.ndarray, key_moments: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The projections of keys and of queries, float64 `[D, size]` each, from second moments `[D, D]`.

    Directions beyond the rank of the product of both are zeros.  `size` is at most `D`.  Every number of projected keys
    has a root mean square of at least 1 and below 2, by a power of two that its counterpart of queries is divided by.
    """
    of_queries, of_keys = _root(query_moments), _root(key_moments)
    left, singular, right = np.linalg.svd(of_queries @ of_keys)
    singular = singular[:size]
    there = singular > _NOISE * max(singular[0], np.finfo(np.float64).tiny)
    scale = np.where(there, singular, np.inf) ** -0.5
    keys, queries = of_queries @ left[:, :size] * scale, of_keys @ right.T[:, :size] * scale
    mean_square = np.einsum("de,dc,ce->e", keys, key_moments, keys)
    _, exponent = np.frexp(np.sqrt(np.where(there, mean_square, 1)))
    return np.ldexp(keys, 1 - exponent), np.ldexp(queries, exponent - 1)


def _root(moments: np.ndarray) -> np.ndarray:
    """The symmetric square root."""
    values, vectors = np.linalg.eigh(moments)
    return vectors * np.sqrt(np.where(values > _NOISE * values[-1], values, 0)) @ vectors.T
