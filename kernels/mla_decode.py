"""Absorbed attention of one query per sequence over the paged latent cache."""

from jaxtyping import Array, Float, Int

from jaxinfer.kernels.reference import mla_decode as reference


def mla_decode(
    q: Float[Array, "B H latent"],
    cache: Float[Array, "layers pages page_size latent"],
    layer: Int[Array, ""],
    page_table: Int[Array, "B N"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
) -> tuple[Float[Array, "B H latent"], Float[Array, "B H"]]:
    """Multi-head latent attention with the key expansion absorbed in the query (arXiv 2405.04434, section 2.1.2).

    Args:
        q: `[B, H, kv_rank + rope]` queries in the space of the latents.
        cache: `[layers, pages, page_size, kv_rank + rope]`.
        layer: int32, the layer read.
        page_table: `[B, N]` int32, the pages of each sequence in order; entries past its length may hold anything.
        lengths: `[B]` int32, keys of each sequence in its pages, 0 to `N * page_size`.
        scale: factor on the scores.

    Returns: output `[B, H, kv_rank + rope]`, of which the first `kv_rank` numbers are the attended latent, and
    log-sum-exp `[B, H]`, both float32; a sequence without keys has 0 and -inf.
    """
    return reference.mla_decode(q, cache, layer, page_table, lengths, scale=scale)
