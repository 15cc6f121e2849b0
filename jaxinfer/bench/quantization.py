"""Quantisation of activations, alone and fused, as it is measured."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.bench.operation import Case, Operation, Work, float64, spread
from jaxinfer.kernels import dispatch
from jaxinfer.kernels.quantize import BLOCK, Scheme, quantize, rms_norm_quantize, swiglu_quantize

_SCHEMES: dict[str, tuple[jnp.dtype, Scheme]] = {
    "row": (jnp.dtype(jnp.float8_e4m3fn), "row"),
    "block": (jnp.dtype(jnp.float8_e4m3fn), "block"),
    "int8": (jnp.dtype(jnp.int8), "row"),
}
_FUNCTIONS = ("plain", "rms_norm", "swiglu")
_BESIDE: dict[str, dispatch.Kernel] = {"plain": "triton", "rms_norm": "triton", "swiglu": "mosaic"}
"""The kernel that users do not get (see `dispatch.BY_DEFAULT`); its forms are named after it and stand beside the
others."""
_EPSILON = 1e-6
_ROWS = 64


class Quantize(Operation):
    """The error is that of rounding to 8 bits itself: the answer is compared with the numbers before it."""

    name = "quantize"
    sizes = ("M", "K")
    forms = tuple(
        f"{function} {scheme}{kernel}"
        for function in _FUNCTIONS
        for scheme in _SCHEMES
        for kernel in ("", f" {_BESIDE[function]}")
    )

    def table(self):
        columns = {"plain": 7168, "rms_norm": 7168, "swiglu": 4096}
        return [Case(self.name, form, (32768, columns[form.split()[0]])) for form in self.forms]

    def cases(self, shape):
        if shape[-1] % (2 * BLOCK):
            raise ValueError(f"quantize: expected K a multiple of {2 * BLOCK}, got {shape}")
        return super().cases(shape)

    def left_out(self, case, implementation):
        function, _, *kernel = case.form.split()
        if not kernel:
            return None
        return (
            dispatch.why_absent(_BESIDE[function]) if implementation is None else f"only {implementation} was asked for"
        )

    def operands(self, case, seed, positive):
        key, key_weight = jax.random.split(jax.random.key(seed))
        x = jax.random.normal(key, case.shape, jnp.bfloat16)
        x = jnp.where(positive, jnp.abs(x), x)
        if not case.form.startswith("rms_norm"):
            return (x,)
        return x, 1 + 0.1 * jax.random.normal(key_weight, case.shape[1:], jnp.bfloat16)

    def run(self, case, implementation, *operands):
        function, form, *kernel = case.form.split()
        dtype, scheme = _SCHEMES[form]
        implementation = kernel[0] if kernel else implementation
        options = {"scheme": scheme, "dtype": dtype, "implementation": implementation}
        if function == "rms_norm":
            x, weight = operands
            return rms_norm_quantize(x, weight, _EPSILON, **options)
        (x,) = operands
        return (swiglu_quantize if function == "swiglu" else quantize)(x, **options)

    def sample(self, case, operands, result):
        rows = spread(case.shape[0], _ROWS)
        q, scale = result
        found = {"x": operands[0][rows], "q": q[rows], "scale": scale[..., rows]}
        return found | {"weight": operands[1]} if len(operands) > 1 else found

    def compare(self, case, sample):
        x, q, scale = (float64(sample[name]) for name in ("x", "q", "scale"))
        if "weight" in sample:
            x = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + _EPSILON) * float64(sample["weight"])
        elif case.form.startswith("swiglu"):
            gate, up = np.split(x, 2, axis=1)
            x = gate / (1 + np.exp(-gate)) * up
        scale = scale[:, None] if scale.ndim == 1 else np.repeat(scale.T, BLOCK, axis=1)
        return q * scale, x

    def work(self, case):
        m, k = case.shape
        written = k // 2 if case.form.startswith("swiglu") else k
        scales = m * written // BLOCK if "block" in case.form else m
        return Work(flops=0.0, bytes=2.0 * m * k + m * written + 4 * scales)
