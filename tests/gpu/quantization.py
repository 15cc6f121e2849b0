"""Cases of `check_gemm` for quantisation: bits, and offsets beyond 2^31 elements."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.kernels.quantize import quantize, rms_norm_quantize, swiglu_quantize
from tests.oracles import FIXTURES

FORMS = "row", "block", "int8"
NAMES = "quantize", "rms_norm_quantize", "swiglu_quantize"


def check_quantize(name: str) -> dict:
    oracle = np.load(FIXTURES / "quant_oracle.npz")
    q, scale = quantize(jnp.asarray(oracle["x"]), scheme="block", power_of_two=name == "ue8m0", implementation="mosaic")
    good = np.array_equal(np.asarray(q).view(np.uint8), oracle[f"fp8_b128_{name}_q"])
    good &= np.array_equal(np.asarray(scale).T, oracle[f"fp8_b128_{name}_s"])
    answer = {"good": bool(good), "said": f"bits equal to the recorded ones: {good}"}
    return answer if good else answer | {"failed": "bits differ"}


def check_quantize_kernel(name: str, form: str, rows: int, columns: int) -> dict:
    """The kernel against numpy (exact) where it only divides, else against the reference on the CPU."""
    from jaxinfer.bench.products import FORMS

    dtype, scheme = FORMS[form]
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(rows, columns)) * rng.uniform(1e-3, 1e3, size=(rows, 1))).astype(jnp.bfloat16)
    weight = rng.uniform(0.5, 2, size=columns).astype(jnp.bfloat16)
    more = (weight, 1e-6) if name == "rms_norm_quantize" else ()
    kind = {"scheme": scheme, "dtype": dtype}
    functions = {f.__name__: f for f in (quantize, rms_norm_quantize, swiglu_quantize)}
    q, scale = functions[name](jnp.asarray(x), *more, **kind, implementation="mosaic")
    with jax.default_device(jax.devices("cpu")[0]):
        wanted, wanted_scale = functions[name](jnp.asarray(x), *more, **kind, implementation="reference")
    bound, scale_bound = 2e-3, 2e-6
    if name == "quantize":
        spread = np.asarray(scale)[:, None] if scheme == "row" else np.repeat(np.asarray(scale).T, 128, 1)
        quotient = np.asarray(x, np.float32) / spread
        wanted, bound, scale_bound = (np.round(quotient) if form == "int8" else quotient).astype(dtype), 0, 0
    differing = float((np.asarray(q).view(np.uint8) != np.asarray(wanted).view(np.uint8)).mean())
    off = float(np.abs(np.asarray(scale) / np.asarray(wanted_scale) - 1).max())
    good = differing <= bound and off <= scale_bound
    answer = {"good": good, "said": f"{differing:.1e} of the codes differ, scales by {off:.1e}"}
    return answer if good else answer | {"failed": "; differs"}


def check_large_quantize(rows: int, columns: int) -> dict:
    """Rows on both sides of the element of number 2^31."""
    from tests.gpu.products import random_bits

    x = random_bits("bf16", rows, columns)
    good = True
    for scheme in ("row", "block"):
        q, scale = quantize(x, scheme=scheme, implementation="mosaic")
        border = 2**31 // columns
        for part in (slice(border - 4, border + 4), slice(rows - 4, rows)):
            wanted, wanted_scale = quantize(x[part], scheme=scheme, implementation="mosaic")
            good &= bool((q[part].view(jnp.int8) == wanted.view(jnp.int8)).all())
            good &= bool((scale[..., part] == wanted_scale).all())
    answer = {"good": good, "said": f"equal to the same rows alone: {good}"}
    return answer if good else answer | {"failed": "; differs"}


def checks() -> dict[str, Callable[[], dict]]:
    found: dict[str, Callable[[], dict]] = {}
    for scales in ("f32", "ue8m0"):
        found[f"check quantize 1x128 {scales}"] = functools.partial(check_quantize, scales)
    for form in FORMS:
        for name in NAMES:
            for rows, columns in ((37, 1024), (256, 7168), (64, 18432)):
                case = functools.partial(check_quantize_kernel, name, form, rows, columns)
                found[f"check quantize kernel {name} {form} {rows}x{columns}"] = case
    found["check quantize kernel, more than 2^31 elements"] = functools.partial(check_large_quantize, 300_008, 7168)
    return found
