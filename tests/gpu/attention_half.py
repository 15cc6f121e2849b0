"""The attention half of DeepSeek-V3 layers as a program: what checks on GPUs time, from its norm to its residual."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.cache import Cache, cache_spec
from jaxinfer.configs.attention import DENSE
from jaxinfer.configs.kv_format import FORMATS
from jaxinfer.configs.model import ModelConfig
from jaxinfer.engine.batching import Batcher
from jaxinfer.engine.step import Capacity, PrefillSegment
from jaxinfer.model.attention import Attention, rotations
from jaxinfer.model.batch import DecodeBatch, PrefillBatch, batch_specs, local
from jaxinfer.model.linear import normalised
from jaxinfer.model.params import Tree, specs, use
from jaxinfer.model.policies import Policies
from jaxinfer.model.precision import Precision
from jaxinfer.sharding.layout import Layout
from jaxinfer.sharding.mesh import MeshShape
from jaxinfer.sharding.rules import Plan, Rules

PAGE = 64


@dataclass(frozen=True)
class Stored:
    """A sequence as `Batcher` wants it: tokens, and the pages on each rank that hold its latents."""

    token_ids: np.ndarray
    pages: list[list[int]]
    home: int = 0


@dataclass(frozen=True, kw_only=True)
class Half:
    """Stacked attention halves on a mesh `cp = ranks`.

    Attributes:
        mesh: of the axes of `sharding.mesh`.
        kv: name of the format of the cache.
        tile_tokens: keys that prefill attends at a time, on each rank.
    """

    config: ModelConfig
    mesh: Mesh
    layers: int
    precision: str = "bf16"
    kv: str = "bf16"
    tile_tokens: int = 4096

    @property
    def ranks(self) -> int:
        return self.mesh.shape["cp"]

    @property
    def rules(self) -> Rules:
        return Rules(MeshShape(cp=self.ranks))

    @property
    def layout(self) -> Layout:
        return Layout(self.ranks, PAGE, PAGE)

    @property
    def attention(self) -> Attention:
        return Attention(self.config, Precision.named(self.precision, self.config, jnp.dtype(jnp.bfloat16)))

    def weights(self) -> Tree:
        """Shapes and shardings of the weights, norm of the input included."""
        tree = specs(self.attention, self.layers, self.rules, self.mesh)
        norm = jax.ShapeDtypeStruct(
            (self.layers, self.config.hidden_size), jnp.bfloat16, sharding=NamedSharding(self.mesh, PartitionSpec())
        )
        return tree | {"attn_norm": norm}

    def cache(self, pages: int) -> Cache:
        """Shapes of a cache of so many pages on each rank."""
        formats = [FORMATS[self.kv]] * self.config.num_layers
        return cache_spec(self.config, self.rules, self.mesh, pages, PAGE, formats)

    def prefill_batch(self, tokens: int, context: int) -> tuple[PrefillBatch, int]:
        """The last `tokens` on each rank of a prompt of `context` on each, and the pages on a rank."""
        batcher, sequences, pages = self._stored([context * self.ranks], tokens)
        segment: Any = PrefillSegment(
            sequence=sequences[0], start=(context - tokens) * self.ranks, count=tokens * self.ranks
        )
        return batcher.prefill([[segment]], tokens).batch, pages

    def decode_batch(self, sequences: int, context: int) -> tuple[DecodeBatch, int]:
        """One token of each sequence with `context` tokens on each rank, itself included."""
        batcher, stored, pages = self._stored([context * self.ranks] * sequences, 1)
        found: Any = stored
        return batcher.decode([found], sequences), pages

    def _stored(self, lengths: list[int], chunk: int) -> tuple[Batcher, list[Stored], int]:
        """Sequences of these lengths in pages of random order, and the number of pages of a rank."""
        needed = [self.layout.pages_needed(length, 0, 0) for length in lengths]
        pages = sum(needed)
        order = np.random.default_rng(0).permutation(pages)
        ends = np.cumsum(needed)
        sequences = [
            Stored(np.zeros(length, np.int64), [order[end - count : end].tolist()] * self.ranks)
            for length, count, end in zip(lengths, needed, ends, strict=True)
        ]
        capacity = Capacity(
            replicas=1,
            layout=self.layout,
            pages_per_rank=pages,
            chunk_size=max(chunk, PAGE),
            max_segments=1,
            max_num_seqs=len(lengths),
            max_context=max(lengths),
            vocab_size=1,
        )
        return Batcher(capacity, self.tile_tokens), sequences, pages

    def program(self, batch: PrefillBatch | DecodeBatch, cache: Cache) -> Callable:
        """`(weights, cache, x, rope, batch) -> (cache, x)`: all layers, in a scan as the model has them.

        x is the residual stream, float32: `[ranks, T, d]` in prefill, `[B, d]` in decode; rope cosines and sines.
        Jitted; takes cache and x over.
        """
        prefill = isinstance(batch, PrefillBatch)
        plan, layout, attention = (Plan.prefill if prefill else Plan.decode)(self.rules), self.layout, self.attention
        policies, eps = Policies.of(DENSE, self.layers), self.config.rms_norm_eps

        def step(weights, cache, x, rope, batch):
            batch = local(batch)
            x = x[0] if prefill else x
            angles = rotations(rope, batch.positions)

            def layer(carry, inputs):
                (x, cache), (weights, index) = carry, inputs
                module = use(attention, {k: w for k, w in weights.items() if k != "attn_norm"}, plan)
                h = normalised(module.reader, x, weights["attn_norm"], eps, module.dtype)
                run = module.prefill if prefill else module.decode
                out, cache = run(h, cache, index, batch, angles, layout, plan, policies)
                return (x + out, cache), None

            (x, cache), _ = lax.scan(layer, (x, cache), (weights, jnp.arange(self.layers)))
            return cache, x[None] if prefill else x

        spec = partial(jax.tree.map, lambda array: array.sharding.spec)
        held, stream = spec(cache), PartitionSpec("cp") if prefill else PartitionSpec()
        spread = jax.shard_map(
            step,
            mesh=self.mesh,
            in_specs=(spec(self.weights()), held, stream, PartitionSpec(), batch_specs(batch, self.rules)),
            out_specs=(held, stream),
            check_vma=False,
        )
        return jax.jit(spread, donate_argnums=(1, 2))

    def operands(self, batch: PrefillBatch | DecodeBatch, pages: int) -> tuple:
        """Shapes and shardings of the program's operands."""
        prefill = isinstance(batch, PrefillBatch)
        d, rope = self.config.hidden_size, self.config.qk_rope_head_dim
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        tokens = batch.tokens.shape[1:] if prefill else batch.tokens.shape[-1:]
        stream = NamedSharding(self.mesh, PartitionSpec("cp")) if prefill else everywhere
        table = jax.ShapeDtypeStruct((self.config.max_positions, rope // 2), jnp.float32, sharding=everywhere)
        places = jax.tree.map(lambda s: NamedSharding(self.mesh, s), batch_specs(batch, self.rules))
        return (
            self.weights(),
            self.cache(pages),
            jax.ShapeDtypeStruct((*tokens, d), jnp.float32, sharding=stream),
            (table, table),
            jax.tree.map(lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), batch, places),
        )
