"""Multi-head latent attention (arXiv 2405.04434): expanded over a ring of latents in prefill, absorbed in decode."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxinfer.cache import Cache
from jaxinfer.configs.attention import Dense
from jaxinfer.configs.model import ModelConfig
from jaxinfer.kernels.cache_write import cache_write
from jaxinfer.kernels.latents import expand, take_pages
from jaxinfer.kernels.mla_cost import absorbed_is_cheaper
from jaxinfer.kernels.mla_decode import decode_schedule, mla_decode
from jaxinfer.kernels.mla_prefill import mla_prefill
from jaxinfer.kernels.quantized import Activation, Weight
from jaxinfer.kernels.rope import apply_rope
from jaxinfer.kernels.rope import rope as apply_rope_to_queries
from jaxinfer.model import sparse, sparse_decode
from jaxinfer.model.batch import DecodeBatch, PrefillBatch
from jaxinfer.model.linear import einsum, linear, normalised, read_by
from jaxinfer.model.params import weight
from jaxinfer.model.policies import Policies
from jaxinfer.model.precision import Precision
from jaxinfer.model.rope import softmax_scale
from jaxinfer.sharding.collectives import all_gather, all_reduce, merge, merge_over, ring
from jaxinfer.sharding.layout import Layout
from jaxinfer.sharding.rules import Plan

Rotations = tuple[jax.Array, jax.Array]
"""Cosines and sines of each token's position, float32 `[T, rope / 2]`."""
LONG_CONTEXT = 65536
"""Keys for which few queries choose their form: with fewer either is quick, and beyond the choice is the same."""


def rotations(tables: tuple[jax.Array, jax.Array], positions: jax.Array) -> Rotations:
    """The rows of `positions [T]` in tables `[positions, rope / 2]`: the same for all layers."""
    cos, sin = (table.at[positions].get(mode="clip") for table in tables)
    return cos, sin


def decode_schedules(batch: DecodeBatch, heads: int, layout: Layout, plan: Plan, policies: Policies) -> tuple:
    """The schedule of `mla_decode` under each of the distinct policies: the same for all layers of a step."""
    others = [axis for axis in plan.axes("heads", heads) if axis != "cp"]
    rows = heads // math.prod(lax.axis_size(axis) for axis in others)
    return tuple(decode_schedule(_whole_lengths(batch, policy, layout), rows) for policy in policies.distinct)


def _whole_lengths(batch, policy, layout):
    """How many keys on this rank each sequence reads that reads all of its context under the policy; else 0."""
    positions = batch.positions
    if not isinstance(policy, Dense):
        positions = jnp.where(sparse.reads_all(positions, policy), positions, -1)
    return layout.local_length(positions + 1, lax.axis_index("cp"), batch.homes)


def absorbs_prefill(tokens: int, heads: int, config: ModelConfig) -> bool:
    """Whether `tokens` queries on each rank read what is cached in the absorbed form, as decode does: the last words of
    a long prompt, or the next turn of a conversation about it (see `kernels.mla_cost`).

    Only where both forms have kernels: the reference of decode copies the keys of every query.
    """
    if jax.default_backend() != "gpu":
        return False
    return absorbed_is_cheaper(
        tokens,
        LONG_CONTEXT,
        heads=heads,
        nope=config.qk_nope_head_dim,
        rope=config.qk_rope_head_dim,
        v=config.v_head_dim,
        kv_rank=config.kv_lora_rank,
    )


def no_keys(tokens: int, heads: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Attention that has seen no key yet: output `[T, H, size]` and log-sum-exp `[T, H]`, the identity of `merge`."""
    return jnp.zeros((tokens, heads, size), jnp.float32), jnp.full((tokens, heads), -jnp.inf, jnp.float32)


class Attention(nnx.Module):
    """The attention of one layer, on this rank's heads."""

    def __init__(self, config: ModelConfig, precision: Precision):
        self.config, self.dtype, self.e4m3 = config, precision.dtype, precision.e4m3_attention
        dtype, matrix, latent = precision.dtype, precision.matrix, precision.pieces("latent")
        d, heads = config.hidden_size, config.num_heads
        qk, nope, v = config.qk_head_dim, config.qk_nope_head_dim, config.v_head_dim
        q_rank, kv_rank = config.q_lora_rank, config.kv_lora_rank
        if q_rank is None:
            self.q = matrix((heads, qk, d), ("heads", None, None))
        else:
            self.q_a = matrix((q_rank, d), (latent, None))
            self.q_a_norm = weight((q_rank,), (None,), dtype)
            self.q_b = matrix((heads, qk, q_rank), ("heads", None, None))
        self.latent_axis = latent
        self.kv_a = matrix((config.latent_dim, d), (latent, None))
        self.kv_a_norm = weight((kv_rank,), (None,), dtype)
        self.k_b = weight((heads, nope, kv_rank), ("heads", None, None), dtype)
        self.v_b = weight((heads, v, kv_rank), ("heads", None, None), dtype)
        self.o = matrix((d, heads, v), (None, "heads", None), columns=2)

    @property
    def reader(self) -> Weight:
        """A weight that reads the layer's input, in the form that all of them want."""
        return self.kv_a

    def prefill(
        self,
        x: Activation,
        cache: Cache,
        layer: jax.Array,
        batch: PrefillBatch,
        rope: Rotations,
        layout: Layout,
        plan: Plan,
        policies: Policies,
    ) -> tuple[jax.Array, Cache]:
        """Attends this rank's tokens `x [T, d]` to the earlier tokens that the policy chooses, on all cp ranks.

        Writes the tokens' latents to the cache first: they lie on this rank.  Returns float32 `[T, d]` and the cache.
        """
        q, cache = self._project(x, cache, layer, batch, rope, plan, policies)
        q = apply_rope_to_queries(q, *rope)
        cache = sparse.write_index(cache, layer, batch, policies)
        heads = plan.axes("heads", self.config.num_heads)

        def attend(policy, part):
            if isinstance(policy, Dense):
                return self._read_all(q, part, batch, layout, batch.positions, batch.num_tiles)[0], part
            positions = jnp.where(sparse.reads_all(batch.positions, policy), batch.positions, -1)
            dense = self._read_all(q, part, batch, layout, positions, batch.num_dense_tiles)
            voters, scale = batch.sparse.voters[policies.distinct.index(policy)], softmax_scale(self.config)
            out, _, part, _ = sparse.attend(
                q, self.k_b, self.v_b, dense, part, batch, layout, policy, voters, heads, scale, self._unit()
            )
            return out, part

        out, cache = policies.call(cache, layer, attend)
        return self._output(out, plan), cache

    def _unit(self) -> jax.Array | None:
        """A power of two that no gain of the latents' norm passes, where they are multiplied in e4m3."""
        if not self.e4m3:
            return None
        # Not exp2 of a logarithm, which need not be a power of two to the last bit.
        gain = jnp.max(jnp.abs(self.kv_a_norm.astype(jnp.float32)))
        _, exponent = jnp.frexp(jnp.maximum(gain, jnp.finfo(jnp.float32).tiny))
        return jnp.ldexp(jnp.float32(1), exponent)

    def _read_all(self, q, cache, batch, layout, positions, num_tiles):
        """Attention of the queries at `positions` (-1: none) to every earlier position, and its log-sum-exp."""
        absorb = absorbs_prefill(q.shape[0], self.v_b.shape[0], self.config)
        read = self._read_tiles_absorbed if absorb else self._read_tiles_expanded
        return read(q, cache, batch, layout, positions, num_tiles)

    def _read_tiles_expanded(self, q, cache, batch, layout, positions, num_tiles):
        """Every tile of cached latents goes once around the cp ring, and the partial results merge by log-sum-exp."""
        scale = softmax_scale(self.config)
        tile_tokens = batch.tile_pages.shape[1] * layout.page_size

        def tile(index, partial):
            segment, start = batch.tile_segment[index], batch.tile_start[index]
            pages = take_pages(cache.latents, cache.place, batch.tile_pages[index])
            block = jax.tree.map(lambda array: array.reshape(tile_tokens, -1), pages)

            def visit(partial, block, source):
                seen = layout.local_length(positions + 1, source, batch.homes[segment])
                limit = jnp.where(batch.segments == segment, jnp.clip(seen - start, 0, tile_tokens), 0)
                latents = expand(block, self.dtype)
                out, lse = mla_prefill(q, latents, self.k_b, self.v_b, limit, scale=scale, e4m3=self.e4m3)
                return merge(partial[0], partial[1], out, lse)

            return ring(visit, partial, block, "cp")

        return lax.fori_loop(0, num_tiles, tile, no_keys(q.shape[0], q.shape[1], self.config.v_head_dim))

    def _read_tiles_absorbed(self, q, cache, batch, layout, positions, num_tiles):
        """Every rank reads its own tiles of latents for the queries of all ranks, as decode does."""
        nope, kv_rank = self.config.qk_nope_head_dim, self.config.kv_lora_rank
        tile_tokens = batch.tile_pages.shape[1] * layout.page_size
        q = all_gather(self._absorbed(q[..., :nope], q[..., nope:]), ("cp",), 0)
        positions, segments = (all_gather(array, ("cp",), 0) for array in (positions, batch.segments))

        def tile(index, partial):
            segment, start = batch.tile_segment[index], batch.tile_start[index]
            seen = layout.local_length(positions + 1, lax.axis_index("cp"), batch.homes[segment])
            limit = jnp.where(segments == segment, jnp.clip(seen - start, 0, tile_tokens), 0)
            pages = jnp.broadcast_to(batch.tile_pages[index], (q.shape[0], batch.tile_pages.shape[1]))
            where = cache.place, pages, limit
            kinds = {"kv_rank": kv_rank, "scale": softmax_scale(self.config)}
            out, lse = mla_decode(q[:, None], cache.latents, *where, **kinds)
            return merge(partial[0], partial[1], out[:, 0], lse[:, 0])

        out, lse = lax.fori_loop(0, num_tiles, tile, no_keys(q.shape[0], q.shape[1], kv_rank))
        out, lse = merge_over(out, lse, "cp", scatter=0)
        return einsum("thc,hvc->thv", out.astype(self.dtype), self.v_b).astype(jnp.float32), lse

    def decode(
        self,
        x: Activation,
        cache: Cache,
        layer: jax.Array,
        batch: DecodeBatch,
        rope: Rotations,
        layout: Layout,
        plan: Plan,
        policies: Policies,
    ) -> tuple[jax.Array, Cache]:
        """Attends one token per sequence, `x [B, d]`, the same on all cp ranks, to the keys that each rank holds.

        Returns float32 `[B, d]` and the cache.
        """
        q, cache = self._project(x, cache, layer, batch, rope, plan, policies)
        cache = sparse_decode.write_index(cache, layer, batch, policies)
        q_nope, q_rope = jnp.split(q, (self.config.qk_nope_head_dim,), axis=-1)
        q = self._absorbed(q_nope, apply_rope(q_rope, *(part[:, None] for part in rope)))
        head_axes = plan.axes("heads", self.config.num_heads)
        heads_over_cp = "cp" in head_axes
        q = all_gather(q, ("cp",) if heads_over_cp else (), 1)
        others = tuple(axis for axis in head_axes if axis != "cp")
        kinds = {"kv_rank": self.config.kv_lora_rank, "scale": softmax_scale(self.config)}

        def read_all(policy, part):
            lengths = _whole_lengths(batch, policy, layout)
            schedule = batch.schedules[policies.distinct.index(policy)]
            where = part.place, batch.page_table, lengths
            out, lse = mla_decode(q[:, None], part.latents, *where, **kinds, schedule=schedule)
            return out[:, 0], lse[:, 0]

        def attend(policy, part):
            dense = read_all(policy, part)
            if isinstance(policy, Dense):
                return dense, part
            *chosen, part = sparse_decode.attend(q, part, batch, layout, policy, others, **kinds)
            return merge(*dense, *chosen), part

        (out, lse), cache = policies.call(cache, layer, attend)
        attended, _ = merge_over(out, lse, "cp", scatter=1 if heads_over_cp else None)
        # Else XLA may round the kernel's partial results as well, and take a slice of them after.
        attended = lax.optimization_barrier(attended.astype(self.dtype))
        return self._output(einsum("bhc,hvc->bhv", attended, self.v_b), plan), cache

    def _absorbed(self, q_nope, q_rope):
        """Queries `[T, H, kv_rank + rope]` in the space of the latents."""
        # XLA on CPU has no bfloat16 product for "thn,hnc->thc".
        absorbed = einsum("thn,hnc->htc", q_nope, self.k_b).swapaxes(0, 1)
        return jnp.concatenate((absorbed, q_rope), axis=-1)

    def _project(self, x, cache, layer, batch, rope, plan, policies):
        """Queries `[T, H, nope + rope]` of this rank's heads, not rotated, and the cache with the tokens' latents."""
        config = self.config
        if config.q_lora_rank is None:
            q = linear(x, self.q, self.dtype)
        else:
            q_latent = self._latent(x, self.q_a, config.q_lora_rank, plan)
            q_latent = normalised(self.q_b, q_latent, self.q_a_norm, config.latent_norm_eps, self.dtype)
            q = linear(q_latent, self.q_b, self.dtype)
        q = q.reshape(q.shape[0], -1, config.qk_head_dim)
        # XLA would make one product of the two that read x, and for that a copy of both weights.
        latents = self._latent(lax.optimization_barrier(x), self.kv_a, config.latent_dim, plan)
        norm = self.kv_a_norm, config.latent_norm_eps

        def put(held, place, page):
            return cache_write(held, place, page, batch.write_offset, latents, *norm, *rope)

        return q, policies.write(cache, layer, batch.write_page, put)

    def _latent(self, x, projection, size, plan):
        return all_gather(linear(x, projection, self.dtype), plan.axes(self.latent_axis, size), 1)

    def _output(self, out, plan):
        """Outputs of the heads, `[T, H, v]`, to float32 `[T, d]`."""
        rows = read_by(self.o, out.reshape(out.shape[0], -1), self.dtype)
        return all_reduce(linear(rows, self.o, jnp.float32), plan.axes("heads", self.config.num_heads))
