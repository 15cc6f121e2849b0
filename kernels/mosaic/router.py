"""Logits of a router in float32 on Hopper's tensor cores through Pallas Mosaic GPU.

A number is split in two of float16, `a ~ high + low`, and three products stand for one: `high high + high low +
low high`.  What is left out is 2^-22 of a product at most.  So that nothing leaves the range of float16, the numbers
are multiplied by powers of two first: one for each expert, and one for each row and step of 32 numbers.

Clusters of two thread blocks.  Each has 128 rows of x and reads the weight, step after step, copied once for both; one
warpgroup copies, two multiply 64 rows each.  Rows arrive in float32 and are split in registers.
Tensor cores cut off what an addition leaves below the last bit, always towards zero: over a whole row that would be
1e-5 of a logit.  So no accumulator lives longer than a step; its sum is added in float32, one half of the columns after
the other.

Few rows do not occupy all multiprocessors: then K is divided among clusters, and their results are added up outside.
"""

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxinfer.kernels.mosaic.roles import copy_beside
from jaxinfer.kernels.mosaic.stores import store_some

ROWS = 64
"""Rows of a math warpgroup."""
STEP = 32
"""Numbers of a row that are multiplied at a time."""
_WARPGROUPS, _CLUSTER = 2, 2
TOGETHER = ROWS * _WARPGROUPS * _CLUSTER
"""Rows of a cluster."""
_FEWEST = 256
"""Rows for which a product in float32 takes what splitting the weight and adding up parts of K do: an estimate."""
_STAGES = 4
_MOST_COLUMNS = 256
"""Of a tile: half as many accumulators, and as many sums, lie in the registers of a warpgroup."""
_ALIGNMENT = 8
_REGISTERS = 240, 24
"""Of a thread of the math warpgroups, and of the copying one."""
_PART_STEPS = 2
"""What beginning and ending a part of K costs, in steps: for the choice of their number."""
_WGMMA = plgpu.Layout.WGMMA
_EXPONENT = 0x7F800000
"""Bits of a float32's exponent."""
_LARGEST = 14
"""Exponent of the largest numbers that are multiplied: float16 has 15."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shape:
    """How the work is cut: tiles of columns, parts of K."""

    rows: int
    dim: int
    tiles: int
    half: int
    """Columns of half a tile."""
    parts: int

    @property
    def columns(self) -> int:
        return self.tiles * 2 * self.half

    @property
    def groups(self) -> int:
        """Of rows that a cluster takes together."""
        return -(-self.rows // TOGETHER)

    @property
    def steps(self) -> int:
        return self.dim // STEP

    @property
    def part(self) -> int:
        """Steps of a part; the last may have fewer."""
        return -(-self.steps // self.parts)


def reason_against(x: jax.Array | jax.ShapeDtypeStruct, w: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why the kernel cannot take operands like these, None if it can."""
    if x.dtype != jnp.float32 or w.dtype != jnp.float32:
        return f"x is {x.dtype} and w {w.dtype}, not float32"
    if x.shape[0] < _FEWEST:
        return f"{x.shape[0]} rows are fewer than {_FEWEST}: splitting the weight takes as long as the product"
    if x.shape[1] % STEP:
        return f"rows of {x.shape[1]} numbers are no multiple of {STEP}"
    return None


def _cut(rows: int, dim: int, experts: int, multiprocessors: int) -> _Shape:
    """As few parts of K as keep the multiprocessors occupied."""
    tiles = -(-experts // _MOST_COLUMNS)
    half = -(-experts // (2 * _ALIGNMENT * tiles)) * _ALIGNMENT
    clusters, steps = max(multiprocessors // _CLUSTER, 1), dim // STEP
    items = -(-rows // TOGETHER) * tiles

    def time(parts):
        return -(-items * parts // clusters) * (-(-steps // parts) + _PART_STEPS)

    parts = min(range(1, min(clusters, steps) + 1), key=time)
    # None is left without a step.
    parts = -(-steps // -(-steps // parts))
    rows = -(-rows // ROWS) * ROWS
    return _Shape(rows=rows, dim=dim, tiles=tiles, half=half, parts=parts)


def _powers(largest):
    """For each largest magnitude the power of two that makes it less than 2^15, and its inverse."""
    bits = lax.bitcast_convert_type(largest, jnp.int32) & _EXPONENT
    # Both are normal numbers; tiny rows stay tiny.
    inverse = jnp.maximum(bits, (_LARGEST + 1) << 23) - (_LARGEST << 23)
    return tuple(lax.bitcast_convert_type(found, jnp.float32) for found in ((2 * 127 << 23) - inverse, inverse))


def _split_weight(w: jax.Array, columns: int) -> tuple[jax.Array, jax.Array]:
    """Float16 `[2, columns, d]`, high and low parts of rows over powers of two, and those powers `[E]`."""
    power, inverse = _powers(jnp.max(jnp.abs(w), axis=1))
    w = jnp.pad(w * power[:, None], ((0, columns - w.shape[0]), (0, 0)))
    # Rounded in float32: XLA may leave out a cast to float16 and back.
    high = lax.reduce_precision(w, 5, 10)
    # One kernel that writes both, where `stack` would be two.
    is_low = lax.broadcasted_iota(jnp.int32, (2, *w.shape), 0) == 1
    return jnp.where(is_low, w - high, high).astype(jnp.float16), inverse


def router_logits(x: jax.Array, w: jax.Array, norm: jax.Array, eps: float, *, multiprocessors: int) -> jax.Array:
    """See `jaxinfer.kernels.router.router_logits`; `multiprocessors` is the number of thread blocks at a time."""
    (rows, dim), experts = x.shape, w.shape[0]
    shape = _cut(rows, dim, experts, multiprocessors)
    parts, powers = _split_weight(w * norm.astype(jnp.float32), shape.columns)
    # Swizzled copies want whole tiles of 8 rows.
    operands = {"x": jnp.pad(x, ((0, -rows % _ALIGNMENT), (0, 0))), "w": parts}
    sums, squares = _multiply(shape, operands)
    scale = lax.rsqrt(jnp.sum(squares, axis=0)[:rows] / dim + eps)
    return jnp.sum(sums, axis=0)[:rows, :experts] * powers * scale[:, None]


def _multiply(shape, operands):
    """For each part of K the products `[parts, rows, columns]` and the sums of the squares of x `[parts, rows]`."""

    def tiles(dimensions, dtype, swizzle):
        tiling = plgpu.TilingTransform((_ALIGNMENT, STEP))  # pyright: ignore[reportAbstractUsage]
        transforms = tiling, plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]
        return plgpu.SMEM(dimensions, dtype, transforms=transforms)

    scratch = {
        "x": tiles((_STAGES, _WARPGROUPS * ROWS, STEP), jnp.float32, 128),
        "w": tiles((_STAGES, 2, 2 * shape.half, STEP), jnp.float16, 64),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
        "empty": plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=_WARPGROUPS, num_barriers=_STAGES),
    }

    def body(operands, sums, squares):
        pl.run_scoped(
            lambda scratch: _thread_block(shape, operands, sums, squares, scratch), scratch, collective_axes="wg"
        )

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((shape.parts, shape.rows, shape.columns), jnp.float32),
            jax.ShapeDtypeStruct((shape.parts, shape.rows), jnp.float32),
        ),
        grid=(shape.parts, shape.groups, shape.tiles),
        grid_names=("part", "group", "tile"),
        cluster=(_CLUSTER,),
        cluster_names=("cluster",),
        num_threads=_WARPGROUPS + 1,
        thread_name="wg",
        kernel_name="router_logits",
        compiler_params=plgpu.CompilerParams(approx_math=False, reduction_scratch_bytes=0),
    )(operands)


def _thread_block(shape, operands, sums, squares, scratch):
    copy_beside(
        lambda warpgroup: _add(shape, sums, squares, scratch, warpgroup),
        lambda: _copy(shape, operands, scratch),
        warpgroups=_WARPGROUPS,
        registers=_REGISTERS,
    )


def _steps(shape):
    """The first step of this part of K and their number."""
    first = lax.axis_index("part") * shape.part
    return first, jnp.minimum(shape.part, shape.steps - first)


def _rows():
    """The first of the 128 rows of this thread block."""
    return (lax.axis_index("group") * _CLUSTER + lax.axis_index("cluster")) * _WARPGROUPS * ROWS


def _copy(shape, operands, scratch):
    """The copying warpgroup: step after step of the rows of x, and of the weight for both thread blocks."""
    rows = pl.ds(_rows(), _WARPGROUPS * ROWS)
    columns = pl.ds(lax.axis_index("tile") * 2 * shape.half, 2 * shape.half)
    first, count = _steps(shape)

    def await_free(step):
        plgpu.barrier_wait(scratch["empty"].at[lax.rem(step, jnp.int32(_STAGES))])

    @pl.loop(0, count)
    def _step(index):
        slot = lax.rem(index, jnp.int32(_STAGES))
        pl.when(index >= _STAGES)(lambda: await_free(index))
        k, full = pl.ds((first + index) * STEP, STEP), scratch["full"].at[slot]
        plgpu.copy_gmem_to_smem(operands["x"].at[rows, k], scratch["x"].at[slot], full)
        plgpu.copy_gmem_to_smem(operands["w"].at[:, columns, k], scratch["w"].at[slot], full, collective_axes="cluster")

    # A barrier may not be given up before its last phase has been seen.
    pl.loop(jnp.maximum(count - _STAGES, 0), count)(await_free)


def _add(shape, sums, squares, scratch, warpgroup):
    """A math warpgroup: 64 rows."""
    own = pl.ds(warpgroup * ROWS, ROWS)

    def by_row(numbers, columns):
        return lax.broadcast_in_dim(numbers, (ROWS, columns), [0])

    def split(slot):
        """High and low parts of x, the inverse of the powers of its rows, and the sums of their squares."""
        x = plgpu.load(scratch["x"].at[slot, own], layout=_WGMMA)
        power, inverse = _powers(jnp.max(jnp.abs(x), axis=1))
        square = jnp.sum(x * x, axis=1)
        x = x * by_row(power, STEP)
        high = lax.optimization_barrier(x.astype(jnp.float16))
        return high, (x - high.astype(jnp.float32)).astype(jnp.float16), inverse, square

    def zeros(*dimensions):
        layout = _WGMMA if len(dimensions) > 1 else _WGMMA.reduce(1)
        return plgpu.layout_cast(jnp.zeros(dimensions, jnp.float32), layout)

    def product(high, low, slot, half):
        columns = pl.ds(half * shape.half, shape.half)
        w_high, w_low = (scratch["w"].at[slot, part, columns].transpose((1, 0)) for part in range(2))

        def multiply(accumulator):
            # The small ones first: what is cut off is of the sum's size.
            plgpu.wgmma(accumulator, low, w_high)
            plgpu.wgmma(accumulator, high, w_low)
            plgpu.wgmma(accumulator, high, w_high)
            return accumulator[...]

        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, shape.half), jnp.float32))

    def step(index, so_far):
        *totals, total_square = so_far
        slot = lax.rem(index, jnp.int32(_STAGES))
        plgpu.barrier_wait(scratch["full"].at[slot])
        high, low, inverse, square = split(slot)
        factor = by_row(inverse, shape.half)
        totals = [total + product(high, low, slot, half) * factor for half, total in enumerate(totals)]
        # Orders the reads before the next copy into the stage.
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch["empty"].at[slot])
        return *totals, total_square + square

    _, count = _steps(shape)
    start = zeros(ROWS, shape.half), zeros(ROWS, shape.half), zeros(ROWS)
    *totals, total_square = lax.fori_loop(0, count, step, start)
    first = _rows() + warpgroup * ROWS

    @pl.when(first < shape.rows)
    def _store():
        part, tile, rows = lax.axis_index("part"), lax.axis_index("tile"), pl.ds(first, ROWS)
        for half, total in enumerate(totals):
            store_some(sums.at[part, rows, pl.ds((tile * 2 + half) * shape.half, shape.half)], total)

        @pl.when(tile == 0)
        def _():
            store_some(squares.at[part, rows], total_square)
