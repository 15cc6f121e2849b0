"""Routed experts through grouped matrix products: rows sorted by expert, as many at a time as memory is meant for."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.kernels.grouped_gemm import grouped_gemm
from jaxinfer.kernels.moe_rows import sum_rows, take_rows
from jaxinfer.kernels.quantized import Activation, Quantized, Weight, grouped_product, swiglu_for

ROWS = 65536
"""Rows (pairs of token and expert) that are computed at a time: those of 8,192 tokens with eight experts each.

As many windows of rows are computed as the routing fills; of several, the results are copied into one array.
"""


def grouped_moe_experts(
    x: Activation,
    experts: jax.Array,
    weights: jax.Array,
    gate_up: Weight,
    down: Weight,
    layer: jax.Array | int,
    dtype,
) -> jax.Array:
    """See `jaxinfer.kernels.moe.moe_experts`.

    A routing weight is a factor on a row of the down projection: where rows have scales, it goes into the row's.  The
    sum over a token's experts gathers their rows in the order of the router's choice: no order of additions is left to
    chance.
    """
    tokens, per_token = experts.shape
    num_experts = down.shape[1]
    first_expert = layer * num_experts
    pairs = tokens * per_token
    rows = min(pairs, ROWS)
    windows = -(-pairs // rows)
    local = jnp.where((experts >= 0) & (experts < num_experts), experts, num_experts).reshape(-1)
    by_expert, order = lax.sort((local, jnp.arange(pairs, dtype=jnp.int32)), num_keys=1)
    ends = jnp.searchsorted(by_expert, jnp.arange(num_experts), side="right", method="compare_all")
    starts = jnp.concatenate((jnp.zeros(1, ends.dtype), ends[:-1]))

    def window(index, results):
        first = index * rows
        pair = order.at[first + jnp.arange(rows)].get(mode="clip")
        counts = jnp.clip(ends - first, 0, rows) - jnp.clip(starts - first, 0, rows)
        count = jnp.sum(counts, dtype=jnp.int32)
        taken = _take(x, pair // per_token, count)
        factor = weights.reshape(-1)[pair]
        if isinstance(down, Quantized):
            hidden = swiglu_for(down, _product(taken, gate_up, counts, first_expert, dtype), count)
            scale = hidden.scale * (factor if hidden.scheme == "row" else factor[:, None])
            y = grouped_product(Quantized(hidden.values, scale, hidden.scheme), down, counts, first_expert, dtype)
        else:
            gate, up = jnp.split(_product(taken, gate_up, counts, first_expert, jnp.float32), 2, axis=1)
            hidden = (jax.nn.silu(gate) * up).astype(down.dtype)
            y = _product(hidden, down, counts, first_expert, jnp.float32) * factor[:, None]
        return lax.dynamic_update_slice_in_dim(results, y, first, 0)

    results = lax.empty((windows * rows, x.shape[1]), dtype if isinstance(down, Quantized) else jnp.float32)
    if windows == 1:
        results = window(0, results)
    else:
        results = lax.fori_loop(0, (ends[-1] + rows - 1) // rows, window, results)

    place = jnp.zeros(pairs, jnp.int32).at[order].set(jnp.arange(pairs, dtype=jnp.int32), unique_indices=True)
    # What lies behind the last group may be anything.
    return sum_rows(results, place.reshape(tokens, per_token), ends[-1].astype(jnp.int32))


def _take(x: Activation, index: jax.Array, count: jax.Array) -> Activation:
    if isinstance(x, Quantized):
        return Quantized(take_rows(x.values, index, count), x.scale[index], x.scheme)
    return take_rows(x, index, count)


def _product(x: Activation, w: Weight, counts: jax.Array, first_expert, dtype) -> jax.Array:
    """Rows times the weights `[L, E, ..., K]` of their experts, `[rows, N]` of `dtype`."""
    if isinstance(x, Quantized) and isinstance(w, Quantized):
        return grouped_product(x, w, counts, first_expert, dtype)
    assert not isinstance(x, Quantized) and not isinstance(w, Quantized)
    matrices = w.reshape(w.shape[0] * w.shape[1], -1, x.shape[1])
    if x.dtype == jnp.bfloat16:
        return grouped_gemm(x, matrices, counts, first_group=first_expert, out_dtype=dtype)
    own = lax.dynamic_slice_in_dim(matrices, first_expert, counts.shape[0])
    return lax.ragged_dot(x, own.swapaxes(1, 2), counts, precision=lax.Precision.HIGHEST)
