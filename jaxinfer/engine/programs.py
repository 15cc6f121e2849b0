"""The compiled programs of an engine: every step that touches the device, sharded over the mesh."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxinfer.cache import Cache
from jaxinfer.engine.sampling import sample, score, unpack_rows
from jaxinfer.model.batch import Form, unpack
from jaxinfer.model.params import Tree
from jaxinfer.model.transformer import Transformer
from jaxinfer.sharding.collectives import all_reduce
from jaxinfer.sharding.layout import Layout
from jaxinfer.sharding.rules import Plan, Rules

_LIBRARY_PRODUCTS = {"xla_gpu_enable_triton_gemm": False}
"""Layers are scanned.  cuBLAS takes a layer's slice of the stacked weights where it lies, for XLA's own products it is
copied first, which autotuning does not count: decode of 64 tokens took 714 us a layer of DeepSeek-V3, 544 with cuBLAS.
"""


class Programs:
    """Jitted functions over global arrays; each is compiled once per shape of its batch.

    Attributes:
        prefill: `(params, cache, tables, packed, form) -> (cache, hidden [R, cp, T, d])` with a `PrefillBatch` as
            `model.batch.pack` packs it; takes the cache over.
        rows: `(params, hidden, rank [R, W], index [R, W]) -> logits [R, W, vocab]`, float32: the logits of W rows of a
            prefill's output, each named by its rank and its index there; index -1 gives a row of no meaning.
        decode: `(params, cache, tables, packed, form) -> (cache, logits [R, B, vocab])`, likewise of a `DecodeBatch`.
        sample: `jaxinfer.engine.sampling.sample`, of rows that are packed.
        score: `jaxinfer.engine.sampling.score`.
    """

    def __init__(self, model: Transformer, params: Tree, rules: Rules, mesh: Mesh, layout: Layout, cache: Cache):
        specs = partial(jax.tree.map, _spec)
        self._model, self._rules, self._mesh, self._layout = model, rules, mesh, layout
        self._params, self._cache = specs(params), specs(cache)
        self._plans = {"prefill": Plan.prefill(rules), "decode": Plan.decode(rules)}
        self._full_precision = params["embed"].dtype == jnp.float32
        self._replica = rules.axes("replica", rules.mesh.replicas) or None
        self._context = rules.axes("context", rules.mesh.cp) or None
        options = _LIBRARY_PRODUCTS if mesh.devices.flat[0].platform != "cpu" else None
        self.prefill = jax.jit(self._prefill, donate_argnums=1, static_argnums=4, compiler_options=options)
        self.rows = jax.jit(self._rows)
        self.decode = jax.jit(self._decode, donate_argnums=1, static_argnums=4, compiler_options=options)
        self.sample = jax.jit(lambda logits, rows, rules: sample(logits, unpack_rows(rows), rules))
        self.score = jax.jit(score)

    def _spread(self, step: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return jax.shard_map(step, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def _precision(self):
        """Float32 weights mean reference arithmetic: a GPU would otherwise round the operands to TF32."""
        return jax.default_matmul_precision("highest") if self._full_precision else nullcontext()

    def _prefill(self, params, cache, tables, packed, form: Form):
        def step(params, cache, tables, packed):
            batch = unpack(packed, form)
            hidden, cache = self._model.hidden(params, cache, tables, batch, self._layout, self._plans["prefill"])
            return cache, hidden[None, None]

        by_rank = PartitionSpec(self._replica, self._context)
        specs = self._params, self._cache, PartitionSpec(), by_rank
        with self._precision():
            return self._spread(step, specs, (self._cache, by_rank))(params, cache, tables, packed)

    def _rows(self, params, hidden, rank, index):
        def step(params, hidden, rank, index):
            here = (rank[0] == lax.axis_index("cp")) & (index[0] >= 0)
            rows = jnp.where(here[:, None], hidden[0, 0].at[index[0]].get(mode="clip"), 0)
            return self._model.logits(params, all_reduce(rows, ("cp",)), self._plans["prefill"])[None]

        by_replica = PartitionSpec(self._replica)
        specs = self._params, PartitionSpec(self._replica, self._context), by_replica, by_replica
        with self._precision():
            return self._spread(step, specs, by_replica)(params, hidden, rank, index)

    def _decode(self, params, cache, tables, packed, form: Form):
        def step(params, cache, tables, packed):
            plan, batch = self._plans["decode"], unpack(packed, form)
            hidden, cache = self._model.hidden(params, cache, tables, batch, self._layout, plan)
            return cache, self._model.logits(params, hidden, plan)[None]

        specs = self._params, self._cache, PartitionSpec(), PartitionSpec(self._replica, self._context)
        with self._precision():
            return self._spread(step, specs, (self._cache, PartitionSpec(self._replica)))(params, cache, tables, packed)


def _spec(array: Any) -> PartitionSpec:
    return array.sharding.spec
