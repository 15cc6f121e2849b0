"""Attention of a chunk of queries over one block of latent keys, heads expanded."""

from jaxtyping import Array, Float, Int

from jaxinfer.kernels import dispatch
from jaxinfer.kernels.dispatch import Implementation
from jaxinfer.kernels.mosaic import mla_prefill as mosaic
from jaxinfer.kernels.reference import mla_prefill as reference


def mla_prefill(
    q: Float[Array, "T H qk"],
    latents: Float[Array, "S latent"],
    k_b: Float[Array, "H nope kv_rank"],
    v_b: Float[Array, "H v kv_rank"],
    key_limit: Int[Array, " T"],
    *,
    scale: float,
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
        implementation: None chooses (see `dispatch`).

    Returns: output `[T, H, v]` and log-sum-exp `[T, H]`, both float32; a query that sees no key has 0 and -inf.
    Raises: ValueError if Mosaic is asked for and cannot take the operands.
    """
    reason = mosaic.reason_against(q, latents, k_b, v_b)
    if dispatch.choose("mla_prefill", implementation, reason) == "mosaic":
        return mosaic.mla_prefill(q, latents, k_b, v_b, key_limit, scale=scale)
    return reference.mla_prefill(q, latents, k_b, v_b, key_limit, scale=scale)
