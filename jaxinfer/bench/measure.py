"""One case, measured in this process: `python -m jaxinfer.bench.measure` is the worker of `workers`."""

import dataclasses
import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.bench import workers
from jaxinfer.bench.attention import Decode, Prefill
from jaxinfer.bench.operation import Case, Operation, sets_of
from jaxinfer.bench.pages import CopyPages
from jaxinfer.bench.products import Gemm, GroupedGemm
from jaxinfer.bench.quantization import Quantize
from jaxinfer.bench.router import Router
from jaxinfer.bench.selection import Selection
from jaxinfer.bench.sparse import Blocks
from jaxinfer.bench.timing import alone, measure
from jaxinfer.kernels.dispatch import Implementation

OPERATIONS: dict[str, Operation] = {
    op.name: op
    for op in (Gemm(), GroupedGemm(), Quantize(), Prefill(), Decode(), Blocks(), Selection(), Router(), CopyPages())
}


def measure_case(
    op: str,
    form: str,
    shape: list[int],
    *,
    implementation: Implementation | None,
    repeats: int,
    check: bool,
    peers: bool,
    lock: str,
    held_seconds: float,
) -> dict[str, Any]:
    """Compiles and times a case, compares a part of its result with float64, and times torch's kernel.

    The errors are ||y - exact|| / ||exact|| of normal data and, where a bias shows, the mean of y - exact over the mean
    of |exact| of positive data.

    Args:
        op, form, shape: of the `Case`.
        lock, held_seconds: a file that the workers of a run lock to have the device for themselves, and how long.

    Returns: the figures of a record (see `kernels`).
    """
    case, operation = Case(op, form, tuple(shape)), OPERATIONS[op]
    torch_peers = _load_torch() if peers else None
    hold = functools.partial(alone, lock, held_seconds)
    programs = _compile(operation, case, implementation, hold)
    with hold():
        answer = _run(programs, repeats, check)
        if torch_peers is not None:
            answer["peer"] = _peer(operation, case, programs.sets, torch_peers, repeats)
            answer["spent"] = "CUDA" in (answer["peer"] or {}).get("failed", "")
            torch_peers.release()
    if check:
        answer |= _errors(operation, case, answer.pop("samples"))
    return answer | _known(operation, case) | {"compile_seconds": programs.compile_seconds}


@dataclasses.dataclass(frozen=True)
class _Programs:
    """Compiled: operands of a seed, the operation on them, and the part of both that is compared.

    `sets` of operands are rotated.
    """

    make: Callable[..., tuple]
    run: Callable[..., Any]
    sample: Callable[..., dict[str, jax.Array]]
    sets: int
    compile_seconds: float


def _compile(
    operation: Operation,
    case: Case,
    implementation: Implementation | None,
    hold: Callable[[], AbstractContextManager[None]],
) -> _Programs:
    seed = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool_)
    make = jax.jit(functools.partial(operation.operands, case)).lower(*seed).compile()
    with hold() if operation.autotuned else nullcontext():
        begin = time.perf_counter()
        run = jax.jit(functools.partial(operation.run, case, implementation)).lower(*make.out_info).compile()
        took = time.perf_counter() - begin
    sample = jax.jit(functools.partial(operation.sample, case)).lower(make.out_info, run.out_info).compile()
    sets = sets_of(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(make.out_info)))
    return _Programs(make, run, sample, sets, took)


def _run(programs: _Programs, repeats: int, check: bool) -> dict[str, Any]:
    """The figures of `timing`, and `samples` of normal and of positive operands."""
    sets = [programs.make(jnp.int32(i), jnp.bool_(False)) for i in range(programs.sets)]
    timing = measure(lambda i: programs.run(*sets[i % len(sets)]), jax.block_until_ready, repeats)
    answer = dataclasses.asdict(timing)
    if check:
        every = sets[0], programs.make(jnp.int32(programs.sets), jnp.bool_(True))
        answer["samples"] = [jax.device_get(programs.sample(one, programs.run(*one))) for one in every]
    return answer


def _errors(operation: Operation, case: Case, samples: list[dict[str, np.ndarray]]) -> dict[str, float]:
    (got, exact), (got_positive, exact_positive) = (operation.compare(case, sample) for sample in samples)
    if not (np.isfinite(got).all() and np.isfinite(got_positive).all()):
        raise FloatingPointError("expected a finite result")
    return {
        "error": float(np.linalg.norm(got - exact) / np.linalg.norm(exact)),
        "signed_error": float((got_positive - exact_positive).mean() / np.abs(exact_positive).mean()),
    }


def _known(operation: Operation, case: Case) -> dict[str, Any]:
    return {**dataclasses.asdict(operation.work(case)), "tiles": operation.tiles(case)}


def _load_torch() -> Any:
    """The module `peers`; None without a torch that has CUDA."""
    if find_spec("torch") is None:
        return None
    from jaxinfer.bench import peers  # loads torch: before the device is held

    return peers if peers.available() else None


def _peer(operation: Operation, case: Case, sets: int, torch_peers: Any, repeats: int) -> dict[str, Any] | None:
    """A peer that cannot do it says so, and the case stands."""
    try:
        peer = operation.peer(case, sets)
        if peer is None:
            return None
        timing = measure(peer.run, torch_peers.wait, repeats)
        flops = (peer.work or operation.work(case)).flops
        return {"name": peer.name, "flops": flops, "seconds": timing.seconds, "clock": timing.clock}
    except RuntimeError as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}


if __name__ == "__main__":
    workers.work(measure_case)
