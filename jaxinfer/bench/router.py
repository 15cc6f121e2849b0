"""Logits of a router as they are measured: the kernel, and beside it the norm and the product in float32."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.bench.operation import Operation, Work, float64, spread
from jaxinfer.kernels.router import router_logits

_EPSILON = 1e-6
_ROWS = 64
_PRODUCTS = {"split": 3, "float32": 1}
"""Products for each one of float32; the floor of both is that of bfloat16's rate."""


class Router(Operation):
    """Of DeepSeek-V3 (a prompt's tokens, and few), Kimi K2 and DeepSeek-V2-Lite."""

    name = "router"
    sizes = ("T", "E", "d")
    forms = tuple(_PRODUCTS)
    autotuned = True

    def table(self):
        shapes = (8192, 256, 7168), (1024, 256, 7168), (256, 256, 7168), (8192, 384, 7168), (8192, 64, 2048)
        return [case for shape in shapes for case in self.cases(shape)]

    def operands(self, case, seed, positive):
        tokens, experts, d = case.shape
        keys = jax.random.split(jax.random.key(seed), 3)
        x = jax.random.normal(keys[0], (tokens, d))
        w = jax.random.normal(keys[1], (experts, d)) / d**0.5
        norm = 1 + 0.1 * jax.random.normal(keys[2], (d,), jnp.bfloat16)
        return *(jnp.where(positive, jnp.abs(a), a) for a in (x, w)), norm

    def run(self, case, implementation, *operands):
        x, w, norm = operands
        implementation = "reference" if case.form == "float32" else implementation
        return router_logits(x, w, norm, _EPSILON, implementation=implementation)

    def sample(self, case, operands, result):
        x, w, norm = operands
        rows = spread(case.shape[0], _ROWS)
        return {"x": x[rows], "w": w, "norm": norm, "y": result[rows]}

    def compare(self, case, sample: dict[str, np.ndarray]):
        x, w, norm, y = (float64(sample[name]) for name in ("x", "w", "norm", "y"))
        return y, x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + _EPSILON) * norm @ w.T

    def work(self, case):
        tokens, experts, d = case.shape
        flops = 2.0 * tokens * experts * d
        moved = 4.0 * (tokens * d + experts * d + tokens * experts) + 2 * d
        return Work(flops=flops, bytes=moved, more_flops=(_PRODUCTS[case.form] - 1) * flops)
