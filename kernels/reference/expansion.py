"""Queries, keys and values of multi-head latent attention in e4m3.

All scales are powers of two: a product of powers of two is exact, so what e4m3's three bits of mantissa round is the
same whatever the scale, and how keys are divided into blocks and ranks does not change the answer (but for numbers
2^-14 of the largest and below).  A scale therefore need not be the tightest.  Those of keys and values, one for each
head, are of what a row of the expansion can give at most (the largest norm of a latent times that of a row of the
weight), known before the product: it is folded into the weight, and the product is rounded where it arises, in one
pass.  A bound 22 times above what is usual (a normal latent of 512) leaves e4m3 numbers of full precision to 1 / 1300
of the usual ones.  Scales for each token of a key or value would change nothing that e4m3 sees, and cannot be folded.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxinfer.kernels.reference.quantize import scale_of

E4M3 = jnp.float8_e4m3fn
_FLOOR = 2.0**-100
_MARGIN = 1.01
"""Of a bound, for the roundings of norms and products."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Operands:
    """`T` queries, `S` keys: a score is `q_scale * (q . k + q_rope . k_rope)`, an output `v_scale` times a mean of `v`.

    Attributes:
        q, q_rope, q_scale: `[T, H, nope]` and `[T, H, rope]` e4m3, `[H, T]` float32.
        k, k_rope: `[S, H, nope]` and `[S, rope]` e4m3; the scales of keys are folded into the queries.
        v, v_scale: `[H, v, S]` e4m3 and `[H]` float32.
    """

    q: jax.Array
    q_rope: jax.Array
    q_scale: jax.Array
    k: jax.Array
    k_rope: jax.Array
    v: jax.Array
    v_scale: jax.Array


def expand(
    q: jax.Array, latents: jax.Array, k_b: jax.Array, v_b: jax.Array, value_latents: jax.Array | None = None
) -> Operands:
    """Rounds to e4m3.

    Args:
        q, latents, k_b, v_b: as `jaxinfer.kernels.mla_prefill` has them, latents finite everywhere.
        value_latents: latents in the order in which values are wanted, None for that of the keys.
    """
    nope, rank = k_b.shape[1:]
    latent, rope = latents[:, :rank], latents[:, rank:]
    norm = jnp.max(_norms(latent))
    values = latent if value_latents is None else value_latents[:, :rank]
    k_weight, k_scale = _scaled(k_b, norm)
    v_weight, v_scale = _scaled(v_b, norm)
    kinds = {"preferred_element_type": jnp.bfloat16}
    k = jnp.einsum("sc,hdc->shd", latent.astype(jnp.bfloat16), k_weight, **kinds).astype(E4M3)
    v = jnp.einsum("hdc,sc->hds", v_weight, values.astype(jnp.bfloat16), **kinds).astype(E4M3)
    rope_scale = _scale(jnp.max(jnp.abs(rope.astype(jnp.float32))))
    k_rope = (rope.astype(jnp.float32) / rope_scale).astype(E4M3)
    wide, wide_rope = (
        q[..., :nope].astype(jnp.float32) * k_scale[:, None],
        q[..., nope:].astype(jnp.float32) * rope_scale,
    )
    largest = jnp.maximum(jnp.max(jnp.abs(wide), axis=-1), jnp.max(jnp.abs(wide_rope), axis=-1))
    q_scale = _scale(largest)
    return Operands(
        q=(wide / q_scale[..., None]).astype(E4M3),
        q_rope=(wide_rope / q_scale[..., None]).astype(E4M3),
        q_scale=q_scale.T,
        k=k,
        k_rope=k_rope,
        v=v,
        v_scale=v_scale,
    )


def _scaled(weight, norm):
    """`[H, d, C]` over the scales of its heads, in bfloat16, and the scales `[H]`."""
    weight = weight.astype(jnp.bfloat16)
    scale = _scale(_MARGIN * norm * jnp.max(_norms(weight), axis=1))
    return weight * (1 / scale)[:, None, None].astype(jnp.bfloat16), scale


def _norms(rows):
    return jnp.sqrt(jnp.sum(jnp.square(rows.astype(jnp.float32)), axis=-1))


def _scale(largest):
    return scale_of(jnp.maximum(largest, _FLOOR), E4M3, power_of_two=True)
