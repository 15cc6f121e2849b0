"""How a matrix product is cut into tiles: a choice measured on the card where there is one, else a model's.

`tiles.json` holds, for each kind of device, its figures and the measured choices: `python -m tests.gpu.check_gemm`
measures, `python -m tests.gpu.adopt_tiles` writes them.
"""

import dataclasses
import functools
import json
import math
from pathlib import Path

import jax

SHARED_MEMORY = 227 * 1024 - 1024
"""Bytes of shared memory that a kernel's own buffers may take; the compiler adds barriers and alignment."""
DEFAULT_DEVICE = "NVIDIA H200"
"""What is assumed where no GPU is present: programs can be lowered without one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """Tiles of a product on Hopper; a step over K is always 128 bytes.

    Attributes:
        m: rows of a thread block: 128 or 192 (each of two or three math warpgroups takes 64 rows), or 64 (each of two
            takes half the columns).
        n: columns of a thread block, a multiple of 32, or 64 where m = 64.
        stages: steps over K held in shared memory at a time.
        raster: row tiles that are taken together while all columns pass, so that both operands stay in L2.
    """

    m: int
    n: int
    stages: int
    raster: int = 8

    def __post_init__(self):
        if self.m not in (64, 128, 192) or self.n % (64 if self.m == 64 else 32):
            raise ValueError(f"expected m = 128 or 192 and n % 32 = 0, or m = 64 and n % 64 = 0, got {self}")
        if self.stages < 2 or self.raster < 1:
            raise ValueError(f"expected stages >= 2, raster >= 1, got {self}")

    @property
    def warpgroups(self) -> int:
        """Warpgroups that multiply."""
        return 3 if self.m == 192 else 2

    @property
    def width(self) -> int:
        """Columns of a math warpgroup."""
        return self.n // 2 if self.m == 64 else self.n


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """What is static of a product `x [m, k] @ w[n, k].T`: sizes, types, which optional operands there are.

    Attributes:
        scheme: of the scales, `row` or `block`, or None for unscaled operands.
        groups: number of experts, None for a dense product.
    """

    m: int
    n: int
    k: int
    dtype: jax.numpy.dtype
    out_dtype: jax.numpy.dtype
    scheme: str | None = None
    bias: bool = False
    residual: bool = False
    groups: int | None = None

    @property
    def step(self) -> int:
        """Numbers of K in a step of 128 bytes."""
        return 128 // self.dtype.itemsize

    @property
    def promoted(self) -> bool:
        """Whether every 128 steps of K get an accumulator of their own (see `mosaic.matmul`)."""
        return self.dtype == jax.numpy.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Device:
    """A kind of GPU: multiprocessors, 8-bit tensor rate (10^12/s), bandwidths of L2 and memory (10^12 B/s)."""

    multiprocessors: int
    tera_ops: float
    l2_terabytes: float
    memory_terabytes: float
    measured: list


@functools.cache
def _devices() -> dict[str, Device]:
    return {
        kind: Device(**entry) for kind, entry in json.loads(Path(__file__).with_name("tiles.json").read_text()).items()
    }


def device() -> Device:
    """The GPU in use, an H200 where there is none; one that is not in the table is an H200 with its own count."""
    if jax.default_backend() != "gpu":
        return _devices()[DEFAULT_DEVICE]
    gpu = jax.devices()[0]
    kind = next((known for known in _devices() if gpu.device_kind == known), DEFAULT_DEVICE)
    return dataclasses.replace(_devices()[kind], multiprocessors=gpu.core_count)


def output_columns(problem: Problem, tiles: Tiles) -> int:
    """Columns of the output that are stored at a time: 128 bytes, or 64 where those do not divide the tile."""
    return math.gcd(tiles.width, 128 // problem.out_dtype.itemsize)


def output_slots(problem: Problem, tiles: Tiles) -> int:
    """Buffers of a math warpgroup for columns on their way out: for all of a tile's where they fit, else fewer."""
    slots = math.ceil(tiles.width / output_columns(problem, tiles))
    fitting = (s for s in (slots, 2, 1) if _shared_memory_bytes(problem, tiles, s) <= SHARED_MEMORY)
    return next(fitting, 1)


def last_wave(problem: Problem, tiles: Tiles, multiprocessors: int) -> tuple[int, int]:
    """How many tiles stay whole, and into how many parts the others are cut.

    Tiles that do not fill the last wave are cut by columns, if that many parts fit into it; a part is less efficient
    than a whole tile, and takes about `1 / 4 + 3 / 4 / parts` of its time.
    """
    count = math.ceil(problem.m / tiles.m) * math.ceil(problem.n / tiles.n)
    rest = count % multiprocessors
    most = tiles.n // output_columns(problem, tiles) if tiles.m > 64 else 1
    parts = max((p for p in range(1, most + 1) if most % p == 0 and rest * p <= multiprocessors), default=1)
    return (count, 1) if rest == 0 or count < multiprocessors or parts == 1 else (count - rest, parts)


def shared_memory_bytes(problem: Problem, tiles: Tiles) -> int:
    """Shared memory of the buffers of a thread block."""
    return _shared_memory_bytes(problem, tiles, output_slots(problem, tiles))


def _shared_memory_bytes(problem: Problem, tiles: Tiles, slots: int) -> int:
    row, block = problem.scheme == "row", problem.scheme == "block"
    stage = (tiles.m + tiles.n) * 128 + (tiles.m * 4 + 128) * block
    row_bytes = slots * output_columns(problem, tiles) * problem.out_dtype.itemsize
    stores = tiles.warpgroups * 64 * (row_bytes + 128 * (problem.groups is not None))
    sides = 4 * ((tiles.m + tiles.n) * row + tiles.n * problem.bias)
    return tiles.stages * stage + stores + sides


def candidates(problem: Problem) -> list[Tiles]:
    """Sensible tiles: as many stages as fit, accumulators that stay in the registers."""
    widths = {128: (64, 96, 128, 160, 192), 64: (128, 256) if problem.groups else (64, 128, 256)}
    if problem.promoted:
        widths[192] = (128,)
    else:
        widths[128] += (256,)
    found = []
    for m, sizes in widths.items():
        for n in sizes:
            fitting = [
                tiles
                for stages in range(2, 9)
                if shared_memory_bytes(problem, tiles := Tiles(m=m, n=n, stages=stages)) <= SHARED_MEMORY
                and output_slots(problem, tiles) > 1
            ]
            found += fitting[-1:]
    return found


def seconds(problem: Problem, tiles: Tiles, on: Device) -> float:
    """A model of the time: waves of tiles, each bound by arithmetic or L2, and all by memory."""
    groups = problem.groups or 1
    if problem.groups is None:
        whole, parts = last_wave(problem, tiles, on.multiprocessors)
    else:
        # Half a tile more in each group that has rows, and one at least.
        row_tiles = max(problem.m / tiles.m + min(groups, problem.m) / 2, min(groups, problem.m))
        whole, parts = math.ceil(row_tiles * math.ceil(problem.n / tiles.n)), 1
    waves = math.ceil(whole / on.multiprocessors) + (0 if parts == 1 else 1 / 4 + 3 / 4 / parts)
    rate = on.tera_ops * 1e12 / problem.dtype.itemsize / on.multiprocessors
    arithmetic = 2 * tiles.m * tiles.n * problem.step / rate
    # What power leaves of the tensor cores' rate, and the part of a promotion that is not hidden.
    arithmetic = arithmetic / 0.95 + 1.25e-7 if problem.promoted else arithmetic / 0.85
    loads = (tiles.m + tiles.n) * 128 * on.multiprocessors / (on.l2_terabytes * 1e12)
    work = waves * (problem.k / problem.step * max(arithmetic, loads) + 1e-6)
    moved = problem.dtype.itemsize * problem.k * (problem.m + problem.n * min(groups, problem.m))
    moved += problem.out_dtype.itemsize * problem.m * problem.n
    memory = moved / (on.memory_terabytes * 1e12)
    # The lesser of the two is not hidden entirely.
    return max(work, memory) + 0.2 * min(work, memory)


def choose(problem: Problem, on: Device) -> Tiles:
    """The measured tiles for the next number of rows not below, and less than twice it, else the best of the model."""
    kind = {
        "dtype": problem.dtype.name,
        "scheme": problem.scheme,
        "groups": problem.groups,
        "n": problem.n,
        "k": problem.k,
    }
    fitting = [
        entry for entry in on.measured if kind.items() <= entry.items() and problem.m <= entry["m"] < 2 * problem.m
    ]
    for entry in sorted(fitting, key=lambda entry: entry["m"]):
        tiles = Tiles(**entry["tiles"])
        if shared_memory_bytes(problem, tiles) <= SHARED_MEMORY:
            return tiles
    return min(candidates(problem), key=lambda tiles: seconds(problem, tiles, on))
