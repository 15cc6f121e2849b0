"""Attention of a chunk of queries over one block of latent keys, heads expanded."""

import jax
from jaxtyping import Array, Float, Int

from jaxinfer.kernels import dispatch
from jaxinfer.kernels.dispatch import Implementation
from jaxinfer.kernels.mosaic import mla_prefill as mosaic
from jaxinfer.kernels.mosaic import mla_prefill_e4m3 as mosaic_e4m3
from jaxinfer.kernels.reference import mla_prefill as reference


def mla_prefill(
    q: Float[Array, "T H qk"],
    latents: Float[Array, "S latent"],
    k_b: Float[Array, "H nope kv_rank"],
    v_b: Float[Array, "H v kv_rank"],
    key_limit: Int[Array, " T"],
    *,
    scale: float,
    e4m3: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "T H v"], Float[Array, "T H"]]:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1) with keys and values expanded from the latents.

    Args:
        q: `[T, H, nope + rope]` queries, rotary part last and already rotated.
        latents: `[S, kv_rank + rope]` normalised latents, then the shared rotated key.
        k_b: `[H, nope, kv_rank]` expands a latent to the keys of each head.
        v_b: `[H, v, kv_rank]` expands a latent to the values of each head.
        key_limit: `[T]` int32, how many of the block's first keys each query sees, 0 to S.  Latents from the largest
            limit on may hold anything: they are never read.
        scale: factor on the scores, positive.
        e4m3: rounds queries, keys and values, and in Mosaic the weights of the softmax, to e4m3 for their products; all
            sums are float32.  Scales are powers of two (see `reference.expansion`).
        implementation: None chooses (see `dispatch`).

    Returns: output `[T, H, v]` and log-sum-exp `[T, H]`, both float32; a query that sees no key has 0 and -inf.
    Raises: ValueError if Mosaic is asked for and cannot take the operands.
    """
    kernel = mosaic_e4m3 if e4m3 else mosaic
    reason = kernel.reason_against(q, latents, k_b, v_b)
    if dispatch.choose("mla_prefill", implementation, reason) == "mosaic":
        return kernel.mla_prefill(q, latents, k_b, v_b, key_limit, scale=scale)
    if e4m3:
        return reference.mla_prefill_e4m3(q, latents, k_b, v_b, key_limit, scale=scale)
    return reference.mla_prefill(q, latents, k_b, v_b, key_limit, scale=scale)


def workspace(
    q: jax.ShapeDtypeStruct,
    latents: jax.ShapeDtypeStruct,
    k_b: jax.ShapeDtypeStruct,
    v_b: jax.ShapeDtypeStruct,
    *,
    e4m3: bool = False,
) -> int:
    """Bytes that `mla_prefill` needs beside operands and results of these shapes and types.

    Mosaic: keys and values of all heads, the rotary key shared; of e4m3 also in bfloat16, of which they are made, and
    the queries.  Reference: those in two types, the rotary key once for each head, and the scores of a block of
    queries.
    """
    itemsize, keys, (heads, nope, _), v = q.dtype.itemsize, latents.shape[0], k_b.shape, v_b.shape[1]
    reason = (mosaic_e4m3 if e4m3 else mosaic).reason_against(q, latents, k_b, v_b)
    if dispatch.choose("mla_prefill", None, reason) == "mosaic":
        if e4m3:
            return (keys + mosaic_e4m3.KEYS) * heads * (nope + v) * 3 + q.size + 4 * latents.size * itemsize
        return keys * heads * (nope + v) * itemsize + 2 * latents.size * itemsize
    expanded = 2 * keys * heads * (q.shape[2] + v) * (itemsize + 4)
    scores = 3 * min(reference.SCORE_BYTES, q.shape[0] * heads * keys * 4)
    return expanded + scores + 4 * latents.size * (itemsize + 4)
