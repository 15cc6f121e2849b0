"""The interpreter of Mosaic kernels, with what JAX 0.11.2 leaves out of it: products whose first operand lies in
registers, and assignments to an accumulator."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import callback, core
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
from jax._src.pallas.mosaic_gpu.interpret.shared_memory import GPULoggingInfo, HostAllocationKey

from jaxinfer.kernels.mosaic.attention_e4m3 import value_order
from jaxinfer.kernels.reference.expansion import E4M3
from tests.kernels import products

_interpret = jaxpr_interpret.JaxprInterpreter.interpret


@contextmanager
def interpreted(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs Mosaic kernels on the CPU and fails if two of their threads race."""
    monkeypatch.setattr(jaxpr_interpret.JaxprInterpreter, "interpret", _equations)
    with products.interpreted(capsys):
        yield


def as_e4m3(weights: jax.Array) -> jax.Array:
    """What `attention_e4m3.as_e4m3` does, which the interpreter cannot."""
    groups = jnp.minimum(weights, 448.0).astype(E4M3).reshape(len(weights), -1, 16)
    return jnp.stack([groups[..., i] for i in value_order().tolist()], axis=-1).reshape(weights.shape)


def _equations(self, jaxpr, token, *args):
    """Interprets equation by equation: the two of this file here, the others as JAX does."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), args, strict=True))

    def read(atom):
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        given = [read(atom) for atom in equation.invars]
        if equation.primitive is primitives.wgmma_accumulator_store_p:
            token = _store(self, token, given[0], given[1])
            out = [given[1]]
        elif equation.primitive is primitives.wgmma_ref_p and isinstance(equation.invars[1].aval, core.ShapedArray):
            token, out = _product(self, token, equation, *given), []
        else:
            variables = list(dict.fromkeys(a for a in equation.invars if not isinstance(a, core.Literal)))
            kept = [v for v in equation.outvars if not isinstance(v, core.DropVar)]
            single = jaxpr.replace(
                debug_info=jaxpr.debug_info.with_unknown_names(),
                constvars=[],
                invars=variables,
                eqns=[equation],
                outvars=kept,
                effects=equation.effects,
            )
            token, found = _interpret(self, single, token, *(values[v] for v in variables))
            values.update(zip(kept, found, strict=True))
            continue
        values.update((v, x) for v, x in zip(equation.outvars, out, strict=True) if not isinstance(v, core.DropVar))
    return token, [read(atom) for atom in jaxpr.outvars]


def _store(self, token, key, value):
    def store(token, location, thread, key, value):
        memory = gpu_callbacks._get_shared_memory()
        key, info = _key(key), GPULoggingInfo(location, thread, None)
        memory.store_buffer_content(key, memory.access(key, ()), np.asarray(value), thread, logging_info=info)
        return token

    return callback.io_callback(
        store, gpu_callbacks.TOKEN_SHAPE_DTYPE, token, self.mesh_location, self.thread, key, value
    )


def _product(self, token, equation, accumulator, a, b, *leaves):
    b, transforms = jaxpr_interpret.resolve_ref(
        equation.invars[2].aval, b, jax.tree.unflatten(equation.params["b_transforms_tree"], leaves)
    )

    def multiply(token, location, thread, accumulator, a, b, transforms):
        memory = gpu_callbacks._get_shared_memory()
        info = GPULoggingInfo(location, thread, None)
        transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
        accumulator, b = _key(accumulator), _key(b)
        b, _, _ = memory.get_buffer_content(b, memory.access(b, transforms), thread, logging_info=info)
        whole = memory.access(accumulator, ())
        before, _, _ = memory.get_buffer_content(accumulator, whole, thread, logging_info=info)
        after = before + np.matmul(np.asarray(a), b, dtype=before.dtype)
        memory.store_buffer_content(accumulator, whole, after, thread, logging_info=info)
        return token

    return callback.io_callback(
        multiply,
        gpu_callbacks.TOKEN_SHAPE_DTYPE,
        token,
        self.mesh_location,
        self.thread,
        accumulator,
        a,
        b,
        transforms,
    )


def _key(array):
    return HostAllocationKey.from_array(array)
