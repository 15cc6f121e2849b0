"""The attention of one layer at the end of a long context, dense or hybrid, as a program that can be timed by part.

The cache holds random latents, and the chunk's rows are the last ones of the context: what a step in the middle of a
long prompt does, without the prompt.  Kernels are told apart by named scopes around the functions of `model.sparse`.
"""

import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.cache import Cache, cache_spec
from jaxinfer.checkpoint.random import random_parameters
from jaxinfer.configs.attention import Dense, Hybrid
from jaxinfer.configs.kv_format import FLOAT_FORMATS
from jaxinfer.configs.model import ModelConfig
from jaxinfer.engine.anchors import Anchors
from jaxinfer.engine.batching import Batcher
from jaxinfer.engine.request import Request, Sequence
from jaxinfer.engine.step import Capacity, PrefillSegment
from jaxinfer.kernels.selection import retrieve
from jaxinfer.kernels.selection.index import Projections, group_index
from jaxinfer.model import attention as dense
from jaxinfer.model import sparse
from jaxinfer.model.attention import rotations
from jaxinfer.model.batch import PrefillBatch, batch_specs, local
from jaxinfer.model.params import Tree, apart, together, use
from jaxinfer.model.precision import Precision
from jaxinfer.model.rope import rope_table
from jaxinfer.model.transformer import Transformer, parameter_specs
from jaxinfer.model.voters import voters
from jaxinfer.sharding.layout import Layout
from jaxinfer.sharding.mesh import MeshShape
from jaxinfer.sharding.rules import Plan, Rules

_MARK = "part:"
_PARTS: dict[ModuleType, dict[str, str]] = {
    sparse: {
        "_queries": "absorb",
        "write_index": "index",
        "in_order": "gather",
        "_attend_near": "anchors",
        "mla_window": "window",
        "_retrieve": "retrieve",
        "amounts": "record",
        "record": "record",
        "_hot": "hot",
        "_choose": "choose",
        "_attend_far": "values",
        "mla_blocks": "far",
        "merge": "merge",
    },
    retrieve: {
        "group_logits": "level 1",
        "estimated_shares": "level 1",
        "candidate_blocks": "candidates",
        "exact_masses": "level 2",
        "masses_of_blocks": "level 2",
    },
    dense: {"mla_prefill": "dense", "take_pages": "gather", "merge": "merge", "cache_write": "projections"},
}
"""Functions, as the modules that call them name them, and the part that their time counts for; the innermost decides.
Those that a module no longer has are left out."""
_KERNELS = {"copy_pages": "gather", "block_scores": "level 1", "block_votes": "level 1", "block_masses": "level 2"}
"""Kernels with names of their own that are a part by themselves."""
_REST, _UNNAMED = "projections", "unnamed"


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer's attention over a context of up to `longest` tokens, in chunks of `chunk`, on one device."""

    config: ModelConfig
    policy: Dense | Hybrid
    longest: int
    chunk: int
    page_size: int
    tile_tokens: int
    mesh: Mesh
    e4m3: bool = False
    """Whether retrieved blocks are multiplied in e4m3."""

    @property
    def layout(self) -> Layout:
        return Layout(1, self.page_size, self.page_size)

    @property
    def rules(self) -> Rules:
        return Rules(MeshShape())

    @functools.cached_property
    def precision(self) -> Precision:
        named = Precision.named("bf16", self.config, jnp.dtype(jnp.bfloat16), first_ffn=True)
        return dataclasses.replace(named, e4m3_attention=self.e4m3)

    @functools.cached_property
    def model(self) -> Transformer:
        return Transformer(self.config, self.precision, self.policy)

    def params(self) -> Tree:
        """Shapes of the weights of the layer's block."""
        return parameter_specs(self.config, self.rules, self.mesh, self.precision)["dense"]["attention"]

    def cache(self) -> Cache:
        """Shapes of a cache of the longest context."""
        pages, formats = self.longest // self.page_size, [FLOAT_FORMATS["bfloat16"]] * self.config.num_layers
        return cache_spec(self.config, self.rules, self.mesh, pages, self.page_size, formats, self.policy)

    def batch(self, context: int) -> PrefillBatch:
        """The chunk that ends a context of so many tokens, whose pages lie in random order."""
        capacity = Capacity(
            replicas=1,
            layout=self.layout,
            pages_per_rank=self.longest // self.page_size,
            chunk_size=self.chunk,
            max_segments=32,
            max_num_seqs=1,
            max_context=self.longest,
            vocab_size=self.config.vocab_size,
        )
        anchors = None
        if isinstance(self.policy, Hybrid):
            codes = np.zeros(self.config.vocab_size, np.uint8)
            anchors = Anchors(codes, self.policy.anchor_gap, self.policy.anchor_boundaries)
        batcher = Batcher(capacity, self.tile_tokens, self.policy, anchors)
        ids = np.random.default_rng(0).integers(0, self.config.vocab_size, context).tolist()
        order = np.random.default_rng(1).permutation(capacity.pages_per_rank)[: context // self.page_size]
        sequence = Sequence(
            request=Request(id="layer", prompt_ids=ids),
            index=0,
            token_ids=ids,
            num_prompt=context,
            max_new_tokens=1,
            seed=0,
            pages=[order.tolist()],
        )
        segment = PrefillSegment(sequence=sequence, start=context - self.chunk, count=self.chunk)
        return batcher.prefill([[segment]], self.chunk).batch

    def fill(self, salt: jax.Array) -> Cache:
        """Contents of the cache: latents of unit size, their index, and records of any blocks."""
        spec = self.cache()
        latents = numbers(spec.latents[0].shape, salt).astype(spec.latents[0].dtype)
        if not isinstance(self.policy, Hybrid):
            return Cache((latents,))
        index = group_index(latents, self._projections().keys[0], self.policy.group)
        draw = numbers(spec.records.shape[:-1], salt + jnp.uint32(1)) / 12**0.5 + 0.5
        blocks = (draw * (self.longest // self.policy.block)).astype(jnp.int32)
        reads = jnp.zeros(spec.reads.shape, spec.reads.dtype)
        return Cache((latents,), index, jnp.stack((blocks, blocks % 1024), axis=-1), reads)

    def step(self, params: Tree, x: jax.Array, cache: Cache, tables: Tree, batch: PrefillBatch):
        """`x [T, d]`, the normalised input, to float32 `[T, d]`, and the cache."""
        block, plan = self.model.groups["dense"].block.attention, Plan.prefill(self.rules)

        def run(params, x, cache, tables, batch):
            sliced, whole = apart(block, params)
            module = use(block, together(jax.tree.map(lambda array: array[0], sliced), whole), plan)
            batch = local(batch)
            if isinstance(self.policy, Hybrid):
                given = {name: tables[name] for name in ("index", "voters")}
                batch = dataclasses.replace(batch, sparse=dataclasses.replace(batch.sparse, **given))
            angles = rotations((tables["cos"], tables["sin"]), batch.positions)
            return module.prefill(x, cache, jnp.int32(0), batch, angles, self.layout, plan, self.model.policies)

        everywhere = PartitionSpec()
        specs = everywhere, everywhere, everywhere, everywhere, batch_specs(batch, self.rules)
        with named_parts():
            return jax.shard_map(run, mesh=self.mesh, in_specs=specs, out_specs=everywhere, check_vma=False)(
                params, x, cache, tables, batch
            )

    def shapes(self, batch: PrefillBatch) -> tuple[Any, ...]:
        """The arguments of `step`, as shapes where they lie."""
        everywhere = NamedSharding(self.mesh, PartitionSpec())

        def shape(array, dtype=None):
            return jax.ShapeDtypeStruct(np.shape(array), dtype or array.dtype, sharding=everywhere)

        x = jax.ShapeDtypeStruct((self.chunk, self.config.hidden_size), jnp.bfloat16, sharding=everywhere)
        tables = jax.tree.map(shape, jax.eval_shape(self.tables))
        return self.params(), x, self.cache(), tables, jax.tree.map(lambda a: shape(np.asarray(a)), batch)

    def weights(self) -> Tree:
        """Random weights of the attention."""
        specs = parameter_specs(self.config, self.rules, self.mesh, self.precision)
        return random_parameters(specs, self.config)["dense"]["attention"]

    def tables(self) -> Tree:
        """The rotary tables, random projections of the index, and voters that are evenly spread."""
        cos, sin = rope_table(self.config.rope, self.config.qk_rope_head_dim, self.longest)
        rope = {"cos": jnp.asarray(cos), "sin": jnp.asarray(sin)}
        if not isinstance(self.policy, Hybrid):
            return rope
        spread = jax.tree.map(jnp.asarray, voters(self.policy, self.config, None))
        return rope | {"index": self._projections(), "voters": (spread,)}

    def _projections(self) -> Projections:
        shape = (1, self.config.latent_dim, self.policy.index_dim)
        projection = jax.random.normal(jax.random.key(2), shape, jnp.bfloat16) / self.policy.index_dim**0.5
        return Projections(projection, projection)


def numbers(shape: tuple[int, ...], salt: jax.Array) -> jax.Array:
    """Even numbers of variance 1 from a hash of the place: XLA needs no memory beside the result."""
    bits = jnp.broadcast_to(salt, shape).astype(jnp.uint32)
    for dimension in range(len(shape)):
        bits = (bits ^ jax.lax.broadcasted_iota(jnp.uint32, shape, dimension)) * jnp.uint32(2654435761)
        bits = (bits ^ (bits >> 15)) * jnp.uint32(2246822519)
    return ((bits >> 8).astype(jnp.float32) / 2**24 - 0.5) * 12**0.5


def named_parts() -> ExitStack:
    """While it is open, what is traced carries the name of the part that it belongs to."""
    stack = ExitStack()
    for module, parts in _PARTS.items():
        for name, part in parts.items():
            if hasattr(module, name):
                scoped = jax.named_scope(_MARK + part.replace(" ", "_"))(getattr(module, name))
                stack.enter_context(mock.patch.object(module, name, scoped))
    return stack


def part_of_kernels(program: str) -> dict[str, str]:
    """From the text of a compiled program: kernel's name to part.

    XLA names kernels after their instructions; ours have names of their own, the last of the path, which are part of
    what the profiler calls them.
    """
    # Such as zeros that a loop begins with: XLA does not say for what.
    found = {re.sub(r"[.\-]", "_", name): _UNNAMED for name in re.findall(r"%([\w.\-]+) = .* fusion\(", program)}
    for name, path in re.findall(r'%([\w.\-]+) = .*op_name="([^"]*)"', program):
        marks = re.findall(_MARK + r"(\w+)", path)  # inside of vmap(...), too
        part = marks[-1].replace("_", " ") if marks else _REST
        if own := re.search(r"(\w+)/mpmd_map$", path):
            # A hybrid layer's dense part holds the kernel that its window calls, and is not run at such lengths.
            if found.get(own[1], "dense") in ("dense", _UNNAMED):
                found[own[1]] = _KERNELS.get(own[1], part)
        else:
            found[re.sub(r"[.\-]", "_", name)] = part
    return found


def by_part(
    kernels: list[tuple[str, float]], part_of: dict[str, str]
) -> tuple[dict[str, float], dict[str, float], dict[str, dict[str, float]]]:
    """Seconds of each part, longest first, and of the kernels that no part is known of (such as cuBLAS's).

    The latter are named with the part of the kernel before.  And the seconds of the kernels of each part.
    """
    parts: dict[str, float] = defaultdict(float)
    of_part: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    strange: dict[str, float] = defaultdict(float)
    before = "nothing"
    own = sorted(part_of, key=len, reverse=True)
    for name, seconds in kernels:
        part = part_of.get(name) or part_of.get(re.sub(r"_+\d+$", "", name))
        part = part or next((part_of[known] for known in own if len(known) > 3 and known in name), None)
        if part is None:
            strange[f"{name[:60]} after {before}"] += seconds
        else:
            parts[part] += seconds
            of_part[part][name] += seconds
            before = part

    def ordered(table: dict[str, float]) -> dict[str, float]:
        return dict(sorted(table.items(), key=lambda item: -item[1]))

    return ordered(parts), ordered(strange), of_part


def timed_calls(program: Callable, cache: Cache, arguments: Callable[[Cache], tuple]) -> Callable[[int], jax.Array]:
    """Calls of a program that takes the cache over: each goes on with the cache of the one before."""
    held = [cache]

    def call(_: int) -> jax.Array:
        out, held[0] = program(*arguments(held[0]))
        return out

    return call
