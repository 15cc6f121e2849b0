"""Which implementation of an operation runs, decided from shapes and types when a function is traced."""

import functools
import logging
from importlib.util import find_spec
from typing import Literal

import jax

Kernel = Literal["mosaic", "triton"]
Implementation = Literal["mosaic", "triton", "reference"]

BY_DEFAULT: dict[str, tuple[Kernel, ...]] = {"swiglu_quantize": ("triton", "mosaic")}
"""Which kernels run on a Hopper GPU where none is asked for: the first of these that takes the operands; Mosaic's alone
for operations that are not named.

Triton's SwiGLU takes 4 to 12 % less time than Mosaic's (docs/benchmarks/gemm.md), which runs where jax-triton is not
installed; of the other forms of quantisation Mosaic's are as fast or faster.
"""


def choose(
    op: str, implementation: Implementation | None, reason_against: str | dict[Kernel, str | None] | None
) -> Implementation:
    """The implementation that is asked for, else a kernel where nothing speaks against it, else the reference.

    Args:
        op: the operation, for the log.
        implementation: what the caller asks for; None leaves the choice (see `BY_DEFAULT`).
        reason_against: why Mosaic cannot take these shapes and types, None if it can; of an operation with several
            kernels this for each of them.

    Raises: ValueError if a kernel is asked for that cannot take them, that needs what is not installed, or that the
        operation does not have.
    """
    against = reason_against if isinstance(reason_against, dict) else {"mosaic": reason_against}
    if implementation == "reference":
        _log(op, "reference", "asked for")
        return "reference"
    if implementation is not None:
        if implementation not in against:
            raise ValueError(f"{op}: expected implementation {' or '.join(against)} or reference, got {implementation}")
        if (absent := why_absent(implementation)) is not None:
            raise ValueError(f"expected what the {implementation.capitalize()} {op} needs: {absent}")
        if (reason := against[implementation]) is not None:
            raise ValueError(f"expected operands that the {implementation.capitalize()} {op} takes: {reason}")
        _log(op, implementation, "asked for")
        return implementation
    reason = _no_hopper()
    for kernel in BY_DEFAULT.get(op, ("mosaic",)) if reason is None else ():
        if kernel in against and (why_absent(kernel) or against[kernel]) is None:
            _log(op, kernel, "the backend is a Hopper GPU")
            return kernel
    _log(op, "reference", reason or str(against["mosaic"]))
    return "reference"


def why_absent(kernel: Kernel) -> str | None:
    """What has to be installed for kernels of this kind, None if nothing."""
    needed = ("jax_triton", "triton") if kernel == "triton" else ()
    missing = [name for name in needed if find_spec(name) is None]
    return f"{' and '.join(missing)}, not installed (pip install 'jaxinfer[triton]')" if missing else None


def _no_hopper() -> str | None:
    if jax.default_backend() != "gpu":
        return f"the backend is {jax.default_backend()}, not a GPU"
    capability = jax.devices()[0].compute_capability
    return None if capability == "9.0" else f"expected compute capability 9.0, the GPU has {capability}"


@functools.cache
def _log(op: str, choice: str, reason: str) -> None:
    """Logs every choice once: the cache remembers those that were."""
    logging.getLogger(__name__).info("%s: %s (%s)", op, choice, reason)
