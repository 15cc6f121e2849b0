"""What a benchmark knows of an operation: its shapes, random operands, the exact answer, the work and the peer."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxinfer.kernels.dispatch import Implementation

L2_BYTES = 60e6
"""Of an H200; inputs that together have four times as much leave nothing in it that the next run could use."""
MOST_SETS = 16


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table: an operation, its form (types, scales) and the sizes that `Operation.sizes` names."""

    op: str
    form: str
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.op} {self.form} {'x'.join(map(str, self.shape))}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What a run has to do.

    Attributes:
        flops: that are counted in TFLOP/s; 0 for what only moves memory.
        bytes: read and written, each once.
        flops_8_bit: how many of them multiply 8-bit numbers, the others 16-bit ones.
        more_flops: further ones of 16 bits that the operation, not its peer, has to do; the floor has them.
    """

    flops: float
    bytes: float
    flops_8_bit: float = 0.0
    more_flops: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A figure of another library on one NVIDIA H200, the median of random data (measured 2026-11-29)."""

    name: str
    tflops: float | None = None
    terabytes: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """torch's kernel for the same work, or for `work`; `run(i)` starts one run on the i-th set of operands."""

    name: str
    run: Callable[[int], Any]
    work: Work | None = None


class Operation(ABC):
    """An operation of `jaxinfer.kernels`, as it is measured.

    Attributes:
        sizes: the names of the sizes of a shape, `("M", "N", "K")`.
        forms: those that are measured for every shape.
        autotuned: whether XLA times kernels of its own when it compiles, which then must not run beside others.
        of_kernel: whether peers do what the largest kernel does, and not the whole operation.
    """

    name: str
    sizes: tuple[str, ...]
    forms: tuple[str, ...]
    autotuned = False
    of_kernel = False

    @abstractmethod
    def table(self) -> list[Case]:
        """The cases that are measured by default."""

    def cases(self, shape: tuple[int, ...]) -> list[Case]:
        """The cases of a shape; raises ValueError for one that cannot be."""
        if len(shape) != len(self.sizes) or min(shape) < 1:
            raise ValueError(f"expected a shape {self.name}:{'x'.join(self.sizes)}, got {'x'.join(map(str, shape))}")
        return [Case(self.name, form, shape) for form in self.forms]

    def left_out(self, case: Case, implementation: Implementation | None) -> str | None:
        """Why the case is not measured on this machine with this implementation, None if it is."""
        return None

    @abstractmethod
    def operands(self, case: Case, seed: jax.Array, positive: jax.Array) -> tuple:
        """Operands of normal random numbers, or where `positive` their magnitudes; traced."""

    @abstractmethod
    def run(self, case: Case, implementation: Implementation | None, *operands) -> Any:
        """The operation itself; traced."""

    @abstractmethod
    def sample(self, case: Case, operands: tuple, result: Any) -> dict[str, jax.Array]:
        """The part of operands and result that is compared; traced."""

    @abstractmethod
    def compare(self, case: Case, sample: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """What was computed and, of the same operands, the exact answer, both float64."""

    @abstractmethod
    def work(self, case: Case) -> Work:
        """What one run has to do."""

    def tiles(self, case: Case) -> dict | None:
        """How the kernel cuts the work, where that is chosen from a table."""
        return None

    def peer(self, case: Case, sets: int) -> Peer | None:
        """torch's kernel on the GPU with so many sets of operands of its own; None where it has none."""
        return None

    def published(self, case: Case) -> Published | None:
        return None


def sets_of(size: float) -> int:
    """How many sets of operands of so many bytes are rotated, so that none is still in the L2 when its turn comes."""
    return max(1, min(MOST_SETS, round(4 * L2_BYTES / size + 0.5)))


def spread(size: int, count: int) -> np.ndarray:
    """At most `count` indices below `size`, the first and the last among them."""
    return np.unique(np.linspace(0, size - 1, min(size, count)).astype(np.int32))


def float64(array: np.ndarray) -> np.ndarray:
    """Also of the 8-bit and bfloat16 types."""
    return array.astype(np.float32).astype(np.float64)
