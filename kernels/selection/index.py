"""The index of the first level of retrieval: a few numbers that stand for some neighbouring tokens.

A logit is a product `q . k` of an absorbed query and a latent, hundreds of numbers long, but queries and keys of one
layer do not use all directions alike.  With their second moments `Q` and `K`, the product of rank `d` that is off least
in the mean square follows from the singular value decomposition of `Q^1/2 K^1/2 = U S V'`:
`q . k ~ (q K^1/2 V_d S_d^-1/2) . (k Q^1/2 U_d S_d^-1/2)`.

Numbers saved so are spent on smaller groups: a mean of many keys hides the one that a head looks for.  Where all
directions count alike, `d` of `D` numbers for `g` tokens separate one key from the others as well as `D` numbers for
`g D / d`; on the bundled model 40 of 320 numbers for 4 tokens found every needle in the first place where the 320 of
32 tokens had it in the middle of all blocks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxinfer.kernels.selection.means import group_means

_NOISE = 1e-6
"""Moments are known to float32's precision: what is smaller, relative to the largest, is none."""


class Projections(NamedTuple):
    """Of one layer `[D, d]`, or of all, stacked, `[layers, D, d]`, in the type of the model."""

    keys: jax.Array
    queries: jax.Array


def group_index(latents: Float[Array, "... S D"], projection: Float[Array, "D d"], group: int) -> jax.Array:
    """The index `[..., S / group, d]` of latents: their `group_means`, projected.

    Summed in float32 and rounded to the type of the latents.
    """
    means = group_means(latents, group)
    return jnp.einsum(
        "...d,de->...e", means, projection.astype(means.dtype), preferred_element_type=jnp.float32
    ).astype(latents.dtype)


def query_index(q: Float[Array, "... D"], projection: Float[Array, "D d"]) -> jax.Array:
    """Absorbed queries as the index is multiplied with, `[..., d]`, in the type of `q`."""
    return jnp.einsum("...d,de->...e", q, projection.astype(q.dtype), preferred_element_type=q.dtype)


def projections(query_moments: np.ndarray, key_moments: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The projections of keys and of queries, float64 `[D, size]` each, from second moments `[D, D]`.

    Directions beyond the rank of the product of both are zeros.  `size` is at most `D`.
    """
    of_queries, of_keys = _root(query_moments), _root(key_moments)
    left, singular, right = np.linalg.svd(of_queries @ of_keys)
    singular = singular[:size]
    there = singular > _NOISE * max(singular[0], np.finfo(np.float64).tiny)
    scale = np.where(there, singular, np.inf) ** -0.5
    return of_queries @ left[:, :size] * scale, of_keys @ right.T[:, :size] * scale


def _root(moments: np.ndarray) -> np.ndarray:
    """The symmetric square root."""
    values, vectors = np.linalg.eigh(moments)
    return vectors * np.sqrt(np.where(values > _NOISE * values[-1], values, 0)) @ vectors.T
