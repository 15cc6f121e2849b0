"""Which queries speak for their query block."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


def probe_rows(q: Float[Array, "Q V D"], valid: Bool[Array, " Q"], count: int) -> Int[Array, " probes"]:
    """The last valid query, and those least like the mean query: these reach furthest (QuoKA, arXiv 2602.08722).

    Likeness is the cosine with the mean of the valid queries, each head for itself, on the mean over the heads `V`;
    of equal ones the earlier query is taken.  Where fewer queries are valid than `count`, the last one is repeated;
    where none is, the rows mean nothing.  Costs `4 V D` floating-point operations a query.

    Returns: rows `[count]` int32, the last valid one first.
    """
    queries = q.shape[0]
    rows = jnp.arange(queries, dtype=jnp.int32)
    last = jnp.max(jnp.where(valid, rows, 0))
    wide = jnp.where(valid[:, None, None], q.astype(jnp.float32), 0)
    mean = jnp.sum(wide, axis=0)
    lengths = jnp.linalg.norm(wide, axis=-1) * jnp.linalg.norm(mean, axis=-1)
    products = jnp.einsum("qvd,vd->qv", wide, mean, precision=lax.Precision.HIGHEST)
    cosine = jnp.mean(products / jnp.where(lengths == 0, 1, lengths), axis=-1)
    others = valid & (rows != last)
    unlike = jnp.where(others, -cosine, -jnp.inf)
    _, chosen = lax.top_k(unlike, count - 1)
    chosen = jnp.where(others[chosen], chosen, last)
    return jnp.concatenate((last[None], chosen)).astype(jnp.int32)
