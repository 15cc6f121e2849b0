"""`cache_write` for Hopper through Pallas Mosaic GPU: norm, rotation, quantisation and the write, in one kernel.

A thread block of one warpgroup takes a token: its latent lies in the registers of the 128 threads, its rotary key, a
32-bit word of two bfloat16 numbers for each lane, in every warp.  The cache is written in place.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxinfer.kernels.latents import Latents, QuantizedLatents
from jaxinfer.kernels.mosaic.quantize import divide
from jaxinfer.kernels.mosaic.rope import halves, together
from jaxinfer.kernels.mosaic.stores import store_some
from jaxinfer.kernels.reference.quantize import AMAX_FLOOR, BLOCK, scale_of

_LANES, _THREADS = 32, 128
_QUANTIZED = jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2


def reason_against(cache: Latents, latents: jax.Array, kv_rank: int) -> str | None:
    """Why the kernel cannot write these latents to this cache, None if it can."""
    rope = latents.shape[1] - kv_rank
    if latents.dtype != jnp.bfloat16:
        return f"the latents are {latents.dtype}, not bfloat16"
    if latents.shape[0] == 0:
        return "there are no tokens"
    if rope != 2 * _LANES or kv_rank % (4 * _THREADS):
        return f"kv_rank = {kv_rank} and rope = {rope} are no multiple of {4 * _THREADS} and {2 * _LANES}"
    if not isinstance(cache, QuantizedLatents):
        return None if cache.dtype == jnp.bfloat16 else f"the cache is {cache.dtype}, not bfloat16"
    if cache.values.dtype not in _QUANTIZED or cache.rope.dtype != jnp.bfloat16:
        return f"the cache is {cache.values.dtype} with keys of {cache.rope.dtype}"
    if cache.scale.shape[-1] not in (1, kv_rank // BLOCK):
        return f"{cache.scale.shape[-1]} scales are neither one nor one for {BLOCK} numbers"
    return None


def cache_write(cache, layer, page, offset, latents, norm, eps, cos, sin):
    """See `jaxinfer.kernels.cache_write`."""
    rank = norm.shape[0]
    operands = {
        "layer": layer[None],
        "page": page,
        "offset": offset,
        "words": _words(latents),
        "cos": cos,
        "sin": sin,
    }
    if isinstance(cache, QuantizedLatents):
        # Numbers that share a scale lie side by side, and are reduced apart where there are several scales.
        groups = cache.scale.shape[-1]
        lines = (rank,) if groups == 1 else (groups, BLOCK)
        values = cache.values.reshape(*cache.values.shape[:-1], *lines)
        rows = {"values": values, "rope": _words(cache.rope), "scale": cache.scale}
        operands["latents"] = latents if groups == 1 else latents[:, :rank].reshape(-1, *lines)
        operands["norm"] = norm.astype(jnp.float32).reshape(lines)
        write = functools.partial(_write_quantized, rank, eps)
    else:
        rows = {"values": _words(cache)}
        operands["norm"] = norm.astype(jnp.float32).reshape(-1, 2).T
        write = functools.partial(_write, rank, eps)
    pages = jax.tree.leaves(cache)[0].shape[1]
    rows = {name: jax.new_ref(array) for name, array in rows.items()}

    def body(operands, rows):
        token = lax.axis_index("token")
        page = operands["page"][token]

        @pl.when((page >= 0) & (page < pages))
        def _():
            place = operands["layer"][0], page, operands["offset"][token]
            write(operands, {name: ref.at[place] for name, ref in rows.items()}, token)

    plgpu.kernel(body, grid=latents.shape[:1], grid_names=("token",), kernel_name="cache_write")(operands, rows)
    written = {name: jax.freeze(ref) for name, ref in rows.items()}
    if isinstance(cache, QuantizedLatents):
        values = written["values"].reshape(cache.values.shape)
        return QuantizedLatents(values, _numbers(written["rope"]), written["scale"])
    return _numbers(written["values"])


def _words(x: jax.Array) -> jax.Array:
    """An int32 for two bfloat16 numbers side by side: the same memory."""
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.int32)


def _numbers(words: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(words, jnp.bfloat16).reshape(*words.shape[:-1], -1)


def _write(rank, eps, operands, row, token):
    """A row of bfloat16, in words."""
    words = pl.ds(0, rank // 2)
    layout = plgpu.Layout.WG_STRIDED((rank // 2,), 2)

    def load(ref):
        return plgpu.load(ref, layout=layout, optimized=False)

    even, odd = halves(load(operands["words"].at[token, words]))
    factor = _inverse_rms(jnp.sum(even * even + odd * odd), rank, eps)
    of_even, of_odd = (load(operands["norm"].at[place]) for place in range(2))
    row["values"].at[words][...] = together(even * factor * of_even, odd * factor * of_odd)
    row["values"].at[pl.ds(rank // 2, _LANES)][...] = _rotated(operands, rank, token)


def _write_quantized(rank, eps, operands, row, token):
    """A row of 8 bits, its scales, and the rotated key beside."""
    lines, dtype = row["values"].shape, row["values"].dtype
    latents, blocks = operands["latents"].at[token], len(lines) > 1
    if blocks:  # a line for each warp
        tiling = plgpu.Tiling(((_THREADS // _LANES, BLOCK), (BLOCK // _LANES,)))
        layout = plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    else:
        layout, latents = plgpu.Layout.WG_STRIDED(lines, 4), latents.at[pl.ds(0, rank)]

    def load(ref):
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    latent = load(latents)
    squares = latent * latent
    total = jnp.sum(jnp.sum(squares, axis=1)) if blocks else jnp.sum(squares)
    latent = latent * _inverse_rms(total, rank, eps) * load(operands["norm"])
    scale = scale_of(jnp.maximum(jnp.max(jnp.abs(latent), axis=len(lines) - 1), AMAX_FLOOR), dtype, False)
    latent = divide(latent, scale, blocks)
    row["values"][...] = (jnp.round(latent) if dtype == jnp.int8 else latent).astype(dtype)
    if blocks:
        store_some(row["scale"], scale)
    else:
        row["scale"][0] = scale
    row["rope"][...] = _rotated(operands, rank, token)


def _inverse_rms(total, rank, eps):
    return lax.rsqrt(total * (1 / rank) + eps)


def _rotated(operands, rank, token):
    """The words of the rotated key, the same in every warp."""
    tiling = plgpu.Tiling(((_THREADS // _LANES, _LANES), (1,)))
    layout = plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1).reduce(0)

    def load(ref):
        return plgpu.load(ref, layout=layout, optimized=False)

    even, odd = halves(load(operands["words"].at[token, pl.ds(rank // 2, _LANES)]))
    cos, sin = load(operands["cos"].at[token]), load(operands["sin"].at[token])
    return together(even * cos - odd * sin, even * sin + odd * cos)
