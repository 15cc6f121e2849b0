"""Matrix products as they are measured: `gemm` and `grouped_gemm`."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.bench.operation import Case, Operation, Published, Work, float64, spread
from jaxinfer.kernels.gemm import BLOCK, gemm
from jaxinfer.kernels.grouped_gemm import grouped_gemm
from jaxinfer.kernels.quantize import quantize, quantize_weight
from jaxinfer.kernels.tiles import Problem, choose, device

FORMS = {
    "row": (jnp.float8_e4m3fn, "row"),
    "block": (jnp.float8_e4m3fn, "block"),
    "int8": (jnp.int8, "row"),
    "bf16": (jnp.bfloat16, None),
}
"""Type of the operands and scheme of their scales."""
_ROWS, _COLUMNS = 64, 256
"""Compared, of each result."""
_FEW_ROWS = 128

# DeepGEMM, TFLOP/s.
_DENSE: dict[tuple[int, ...], float] = {
    (8192, 7168, 2048): 1329,
    (4096, 4096, 7168): 1426,
    (8192, 4096, 7168): 1426,
    (4096, 7168, 18432): 1478,
    (4096, 24576, 1536): 1320,
    (4096, 2112, 7168): 1285,
    (128, 7168, 2048): 312,
}
_GROUPED: dict[tuple[int, ...], Published] = {
    (32, 33792, 4096, 7168): Published(name="DeepGEMM", tflops=1292),
    (8, 38912, 7168, 2048): Published(name="DeepGEMM", tflops=1334),
    (32, 8192, 4096, 7168): Published(name="DeepGEMM", tflops=963),
    (32, 1024, 4096, 7168): Published(name="DeepGEMM", terabytes=3.89),
}
_LAYER = (256, 65536, 4096, 7168), (256, 65536, 7168, 2048), (32, 8192, 7168, 2048)
"""The experts of a layer of DeepSeek-V3 and 8,192 tokens, and those of one rank of eight: groups of about 256 rows that
begin anywhere."""


def prepare(form: str, x: jax.Array, w: jax.Array) -> tuple:
    """`x [M, K]` and `w [..., N, K]` and their scales as the products take them."""
    dtype, scheme = FORMS[form]
    if scheme is None:
        return x.astype(dtype), w.astype(dtype), None, None
    x, x_scale = quantize(x, scheme=scheme, dtype=dtype)
    of_weight = functools.partial(quantize_weight, scheme=scheme, dtype=dtype)
    w, w_scale = of_weight(w) if w.ndim == 2 else jax.vmap(of_weight)(w)
    return x, w, x_scale, w_scale


class _Product(Operation):
    forms = tuple(FORMS)

    def cases(self, shape):
        if shape[-1] % BLOCK or shape[-2] % 64:
            raise ValueError(f"{self.name}: expected K a multiple of {BLOCK} and N one of 64, got {shape}")
        return super().cases(shape)

    def _weights(self, case: Case) -> tuple[int, ...]:
        """The groups, as leading dimensions of the weight."""
        return case.shape[:-3]

    def operands(self, case, seed, positive):
        m, n, k = case.shape[-3:]
        key_x, key_w = jax.random.split(jax.random.key(seed))
        x = jax.random.normal(key_x, (m, k), jnp.bfloat16)
        w = jax.random.normal(key_w, (*self._weights(case), n, k), jnp.bfloat16)
        return prepare(case.form, *(jnp.where(positive, jnp.abs(a), a) for a in (x, w)))

    def _sample(self, case: Case, x, w, x_scale, w_scale, y) -> dict[str, jax.Array]:
        """Of rows `x`, `w [columns, K]` or one such for each row."""
        n = case.shape[-2]
        columns = spread(n, _COLUMNS)
        found = {"x": x, "w": w[..., columns, :], "y": y[:, columns]}
        if case.form == "block":
            return found | {"x_scale": x_scale, "w_scale": w_scale[..., columns // BLOCK, :]}
        return found if x_scale is None else found | {"x_scale": x_scale, "w_scale": w_scale[..., columns]}

    def compare(self, case, sample):
        x, w, y = (float64(sample[name]) for name in ("x", "w", "y"))
        if "x_scale" in sample:
            x_scale, w_scale = float64(sample["x_scale"]), float64(sample["w_scale"])
            if case.form == "block":
                x_scale, w_scale = (np.repeat(scale, BLOCK, -1) for scale in (x_scale.T, w_scale))
            else:
                x_scale, w_scale = x_scale[:, None], w_scale[..., None]
            x, w = x * x_scale, w * w_scale
        return y, np.einsum("mk,nk->mn" if w.ndim == 2 else "mk,mnk->mn", x, w, optimize=True)

    def _work(self, case: Case, groups_read: int) -> Work:
        m, n, k = case.shape[-3:]
        dtype, _ = FORMS[case.form]
        size = jnp.dtype(dtype).itemsize
        scales = {"row": m + groups_read * n, "block": (m + groups_read * math.ceil(n / BLOCK)) * k // BLOCK}
        moved = size * k * (m + groups_read * n) + 2 * m * n
        moved += 4 * scales.get("row" if case.form == "int8" else case.form, 0)
        flops = 2.0 * m * n * k
        return Work(flops=flops, bytes=moved, flops_8_bit=flops if size == 1 else 0.0)

    def tiles(self, case):
        m, n, k = case.shape[-3:]
        dtype, scheme = FORMS[case.form]
        groups = self._weights(case)
        problem = Problem(
            m=-(-m // 8) * 8,
            n=n,
            k=k,
            dtype=jnp.dtype(dtype),
            out_dtype=jnp.dtype(jnp.bfloat16),
            scheme=scheme,
            groups=groups[0] if groups else None,
        )
        return dataclasses.asdict(choose(problem, device()))


class Gemm(_Product):
    name = "gemm"
    sizes = ("M", "N", "K")

    def table(self):
        return [Case(self.name, form, shape) for shape in _DENSE for form in FORMS]

    def run(self, case, implementation, *operands):
        return gemm(*operands, implementation=implementation)

    def sample(self, case, operands, result):
        x, w, x_scale, w_scale = operands
        rows = spread(case.shape[0], _ROWS)
        if x_scale is not None:
            x_scale = x_scale[..., rows]
        return self._sample(case, x[rows], w, x_scale, w_scale, result[rows])

    def work(self, case):
        return self._work(case, 1)

    def published(self, case):
        if case.form in ("row", "block") and case.shape in _DENSE:
            return Published(name="DeepGEMM", tflops=_DENSE[case.shape])
        return None

    def peer(self, case, sets):
        from jaxinfer.bench import peers  # loads torch

        m, n, k = case.shape
        return peers.gemm(case.form, m, n, k, sets)


class GroupedGemm(_Product):
    name = "grouped_gemm"
    sizes = ("G", "M", "N", "K")

    def table(self):
        published = [Case(self.name, form, shape) for shape in _GROUPED for form in FORMS]
        return published + [Case(self.name, form, shape) for shape in _LAYER for form in FORMS if form != "bf16"]

    def group_sizes(self, case: Case) -> np.ndarray:
        """int32 `[G]`, uneven, the same for every set; multiples of 128 where DeepGEMM is compared with."""
        groups, m = case.shape[:2]
        unit = 128 if case.shape in _GROUPED and m // groups >= _FEW_ROWS else 1
        rng = np.random.default_rng(0)
        sizes = unit * rng.multinomial(m // unit, rng.dirichlet(np.full(groups, 50.0)))
        sizes[-1] += m - sizes.sum()
        return sizes.astype(np.int32)

    def operands(self, case, seed, positive):
        return (*super().operands(case, seed, positive), jnp.asarray(self.group_sizes(case)))

    def run(self, case, implementation, *operands):
        x, w, x_scale, w_scale, sizes = operands
        return grouped_gemm(x, w, sizes, x_scale, w_scale, implementation=implementation)

    def sample(self, case, operands, result):
        x, w, x_scale, w_scale, _ = operands
        # A row of every group that has one: each brings the columns of a weight along.
        sizes = self.group_sizes(case)
        filled = np.flatnonzero(sizes)
        group = filled[spread(len(filled), 16)]
        rows = np.cumsum(sizes)[group] - 1
        if x_scale is not None:
            x_scale, w_scale = x_scale[..., rows], w_scale[group]
        return self._sample(case, x[rows], w[group], x_scale, w_scale, result[rows])

    def work(self, case):
        return self._work(case, int(np.count_nonzero(self.group_sizes(case))))

    def published(self, case):
        return _GROUPED.get(case.shape) if case.form in ("row", "block") else None

    def peer(self, case, sets):
        from jaxinfer.bench import peers  # loads torch

        _, _, n, k = case.shape
        return peers.grouped_gemm(case.form, self.group_sizes(case), n, k, sets)
