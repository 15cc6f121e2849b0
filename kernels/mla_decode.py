"""Absorbed attention of one or a few queries per sequence over the paged latent cache."""

from jaxtyping import Array, Float, Int

from jaxinfer.kernels import dispatch
from jaxinfer.kernels.latents import Latents, QuantizedLatents
from jaxinfer.kernels.mosaic import decode_parts as parts
from jaxinfer.kernels.mosaic import mla_decode as mosaic
from jaxinfer.kernels.mosaic import mla_decode_8bit as mosaic_8bit
from jaxinfer.kernels.mosaic.decode_parts import Schedule
from jaxinfer.kernels.reference import mla_decode as reference
from jaxinfer.kernels.tiles import device


def mla_decode(
    q: Float[Array, "B T H latent"],
    cache: Latents,
    layer: Int[Array, ""],
    page_table: Int[Array, "B N"],
    lengths: Int[Array, " B"],
    *,
    kv_rank: int,
    scale: float,
    schedule: Schedule | None = None,
    implementation: dispatch.Implementation | None = None,
) -> tuple[Float[Array, "B T H kv_rank"], Float[Array, "B T H"]]:
    """Multi-head latent attention with the key expansion absorbed in the query (arXiv 2405.04434, section 2.1.2).

    Token t of the T of a sequence sees its first `length - (T - 1 - t)` keys: the last T keys are the tokens' own.

    Args:
        q: `[B, T, H, kv_rank + rope]` queries in the space of the latents.
        cache: `[layers, pages, page_size, kv_rank + rope]` or the arrays of `QuantizedLatents`, read where it lies.
            With int8, the `kv_rank` numbers of each query are rounded to int8 as well, with a scale for each head, so
            that both operands are what tensor cores take; 8-bit floats are multiplied out to the type of `q`.
        layer: int32, the layer read.
        page_table: `[B, N]` int32, the pages of each sequence in order; entries past its length may hold anything.
        lengths: `[B]` int32, keys of each sequence in its pages, 0 to `N * page_size`; what lies beyond may be NaN.
        kv_rank: how many of a latent's numbers are values, the first ones.
        scale: factor on the scores.
        schedule: that of these lengths, or of longer ones that the page table has room for, and of `T H` rows (see
            `decode_schedule`); None computes it.
        implementation: None chooses (see `dispatch`).

    Returns: output `[B, T, H, kv_rank]`, the attended latent, and log-sum-exp `[B, T, H]`, both float32; a token
    without keys has 0 and -inf.
    Raises: ValueError if Mosaic is asked for and cannot take the operands.
    """
    arguments = q, cache, layer, page_table, lengths
    if isinstance(cache, QuantizedLatents):
        kernel, reason = mosaic_8bit, mosaic_8bit.reason_against(q, cache, kv_rank)
    else:
        kernel, reason = mosaic, mosaic.reason_against(q, cache, kv_rank)
    if dispatch.choose("mla_decode", implementation, reason) == "reference":
        return reference.mla_decode(*arguments, kv_rank=kv_rank, scale=scale)
    processors = device().multiprocessors
    return kernel.mla_decode(*arguments, kv_rank=kv_rank, scale=scale, multiprocessors=processors, schedule=schedule)


def decode_schedule(lengths: Int[Array, " B"], rows: int) -> Schedule:
    """How the kernels cut their work: the same for all layers of a step, and several small kernels to compute.

    Args:
        lengths: as `mla_decode` has them.
        rows: tokens of a sequence times heads.
    """
    return parts.schedule(lengths, parts.count(rows, device().multiprocessors))
