"""Rotary embedding of queries for Hopper through Pallas Mosaic GPU, in place: only what is rotated is read and written.

A thread block of one warpgroup rotates all heads of a token.  A pair of bfloat16 numbers is one 32-bit word, so that a
head's rotary part of 64 numbers is 128 bytes, a word for each thread of a warp.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

_WARPS, _LANES = 4, 32
_MOST = 256
"""Heads whose words the registers hold."""


def reason_against(x: jax.Array, pairs: int) -> str | None:
    """Why the kernel cannot rotate the last `pairs` pairs of `x [T, H, dim]`, None if it can."""
    tokens, heads, dim = x.shape
    if x.dtype != jnp.bfloat16:
        return f"the numbers are {x.dtype}, not bfloat16"
    if pairs != _LANES or dim % (2 * _LANES):
        return f"{pairs} of {dim / 2:g} pairs are rotated, not {_LANES} of a multiple of {_LANES}"
    if tokens == 0 or heads % _WARPS or heads > _MOST:
        return f"{tokens} tokens of {heads} heads are no multiple of {_WARPS} up to {_MOST}"
    return None


def rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """See `jaxinfer.kernels.rope.rope`."""
    tokens, heads, dim = x.shape
    pairs = cos.shape[1]
    words = jax.new_ref(lax.bitcast_convert_type(x.reshape(tokens, heads, dim // 2, 2), jnp.int32))
    tiling = plgpu.Tiling(((_WARPS, _LANES), (1,)))
    layout = plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)

    def body(words, cos, sin):
        token = lax.axis_index("token")
        rotated = words.at[token, :, pl.ds(dim // 2 - pairs, pairs)]

        def of_token(table):
            row = plgpu.load(table.at[token], layout=layout.reduce(0), optimized=False)
            return lax.broadcast_in_dim(row, (heads, pairs), [1])

        cos, sin = of_token(cos), of_token(sin)
        even, odd = halves(plgpu.load(rotated, layout=layout, optimized=False))
        rotated[...] = together(even * cos - odd * sin, even * sin + odd * cos)

    plgpu.kernel(body, grid=(tokens,), grid_names=("token",), kernel_name="rope")(words, cos, sin)
    return lax.bitcast_convert_type(jax.freeze(words), jnp.bfloat16).reshape(x.shape)


def halves(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first and the second bfloat16 of each int32, as float32."""
    first, second = words << 16, words & jnp.int32(-(1 << 16))
    return lax.bitcast_convert_type(first, jnp.float32), lax.bitcast_convert_type(second, jnp.float32)


def together(first: jax.Array, second: jax.Array) -> jax.Array:
    """Float32 numbers rounded to bfloat16, two to an int32."""
    return lax.shift_right_logical(_rounded(first), 16) | (_rounded(second) & jnp.int32(-(1 << 16)))


def _rounded(x: jax.Array) -> jax.Array:
    """The bits of `x`, of which the upper half is the nearest bfloat16, ties to even."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    nearest = bits + jnp.int32(0x7FFF) + (lax.shift_right_logical(bits, 16) & jnp.int32(1))
    # The sum would carry some NaNs into zeros.
    return jnp.where(x == x, nearest, jnp.int32(0x7FC00000))
