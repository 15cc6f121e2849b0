"""Operands on a GPU for checks and timings of matrix products, made and judged by torch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch  # pyright: ignore[reportMissingImports]

from jaxinfer.bench.operation import Case
from jaxinfer.bench.products import GroupedGemm, prepare

E4M3 = jnp.float8_e4m3fn
ROTATED = 4
L2_BYTES = 60e6

_prepared = jax.jit(prepare, static_argnums=0)


def data(kind: str, shape: tuple[int, ...], seed: int) -> jax.Array:
    generator = torch.Generator("cuda").manual_seed(seed)
    if kind == "positive":
        values = torch.rand(shape, device="cuda", generator=generator) * 0.9 + 0.1
    else:
        values = torch.randn(shape, device="cuda", generator=generator)
        values = values * values.abs() ** 3 if kind == "heavy" else values
    torch.cuda.synchronize()
    return jax.dlpack.from_dlpack(values)


def operands(form: str, kind: str, m: int, n: int, k: int, groups: int | None = None) -> tuple:
    front = () if groups is None else (groups,)
    return _prepared(form, data(kind, (m, k), m + k), data(kind, (*front, n, k), n + k))


def shapes_of(form: str, m: int, n: int, k: int, groups: int | None = None) -> tuple:
    front = () if groups is None else (groups,)
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((m, k), (*front, n, k)))
    return jax.eval_shape(functools.partial(prepare, form), x, w)


def wide(q: jax.Array, scale: jax.Array | None, weight: bool) -> torch.Tensor:
    """The dequantised operand in float64, on the GPU."""
    if scale is None:
        return torch.from_dlpack(q).double()
    values = torch.from_dlpack(q.astype(jnp.float32)).double()
    scales = torch.from_dlpack(scale).double()
    if scales.ndim == 1:
        return values * scales[:, None]
    if weight:
        spread = scales.repeat_interleave(128, 0)[: values.shape[0]]
        return values * spread.repeat_interleave(128, 1)
    return values * scales.T.repeat_interleave(128, 1)


def random_bits(form: str, *shape: int) -> jax.Array:
    """Numbers of a normal distribution in the type of a form, made by torch: nothing to compile."""
    values = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    if form == "int8":
        values = (values * 30).clamp(-127, 127).to(torch.int8)
    elif form != "bf16":
        values = values.to(torch.float8_e4m3fn).view(torch.int8)
    torch.cuda.synchronize()
    values = jax.dlpack.from_dlpack(values)
    return values if form in ("int8", "bf16") else jax.lax.bitcast_convert_type(values, E4M3)


def random_operands(form: str, groups: int | None, m: int, n: int, k: int) -> list[tuple]:
    """Several sets of operands for timing; a weight that fills the L2 is shared by all."""
    _, w, *scales = shapes_of(form, m, n, k, groups)
    rng = np.random.default_rng(0)
    sizes = ()
    if groups is not None:
        sizes = (jnp.asarray(GroupedGemm().group_sizes(Case("grouped_gemm", form, (groups, m, n, k)))),)
    weight, found = None, []
    for _ in range(ROTATED):
        if weight is None or weight.nbytes < L2_BYTES:
            weight = random_bits(form, *w.shape)
        made = [None if s is None else jnp.asarray(rng.uniform(0.5, 1.5, s.shape), jnp.float32) for s in scales]
        found.append((random_bits(form, m, k), weight, *sizes, *made))
    torch.cuda.empty_cache()
    return found
