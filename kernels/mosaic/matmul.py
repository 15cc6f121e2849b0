"""The matrix product of all GEMMs on Hopper: `out = x @ w.T`, dense or with rows grouped by expert.

A persistent grid of one thread block per multiprocessor.  One warpgroup copies tiles of both operands into shared
memory, two multiply.  The structure follows DeepGEMM (github.com/deepseek-ai/DeepGEMM) and the warp-specialised
pipelines of `jax.experimental.pallas.ops.gpu`; the loop is written out here because its pipeline has to run on through
the borders of tiles, over a number of tiles that is known on the device only.

e4m3: Hopper's tensor cores keep about 14 bits while they add up e4m3 products, so every 128 steps of K get a fresh
accumulator that is added to a float32 sum in registers (arXiv 2412.19437, section 3.3.2), with the block scales applied
on the way.  int8 (int32, exact) and bfloat16 accumulate over the whole of K.
"""

import dataclasses
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxinfer.kernels.tiles import SHARED_MEMORY, Problem, Tiles, shared_memory_bytes

BLOCK = 128
_WARPGROUP_ROWS = 64
_MEMORY_REGISTERS = 40
_MATH_REGISTERS = 232
_PIECES = (32, 16, 8, 4, 2, 1)
ALIGNMENT = 8
"""Tiles start at multiples of so many rows: the height of a tile of the swizzled layout."""


def matmul(problem: Problem, tiles: Tiles, operands: dict[str, jax.Array], multiprocessors: int) -> jax.Array:
    """Runs the kernel.

    Args:
        operands: `x [M, K]`, `w [N, K]` or `[groups, N, K]`; where the problem has them `x_scale` (`[M]` or
            `[K / 128, M]`, rows of a block scale padded to a multiple of 4), `w_scale` (`[N]` or `[N / 128, K / 128]`,
            with groups in front), `bias [N]` float32, `residual [M, N]` of the type of the output, and for groups
            `schedule` and `row_tiles` (see `grouped_gemm.schedule`).  M is a multiple of 8, N of 64.
    """
    if (size := shared_memory_bytes(problem, tiles)) > SHARED_MEMORY:
        raise ValueError(f"expected tiles of at most {SHARED_MEMORY} bytes of shared memory, {tiles} take {size}")
    epilogue = _epilogue(problem, tiles)
    scratch = {
        "x": plgpu.SMEM(
            (tiles.stages, tiles.m, problem.step), problem.dtype, transforms=_transforms(problem.dtype, problem.step)
        ),
        "w": plgpu.SMEM(
            (tiles.stages, tiles.n, problem.step), problem.dtype, transforms=_transforms(problem.dtype, problem.step)
        ),
        "out": plgpu.SMEM(
            (2, 2, _WARPGROUP_ROWS, epilogue), problem.out_dtype, transforms=_transforms(problem.out_dtype, epilogue)
        ),
        "full": plgpu.Barrier(num_arrivals=3 if problem.scheme == "block" else 2, num_barriers=tiles.stages),
        "empty": (
            plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=2, num_barriers=tiles.stages)
            if tiles.cluster > 1
            else plgpu.Barrier(num_arrivals=2, num_barriers=tiles.stages)
        ),
    }
    if problem.scheme == "block":
        scratch["x_scale"] = plgpu.SMEM((tiles.stages, tiles.m), jnp.float32)
    sides = 0
    if problem.scheme == "row":
        scratch["x_scale"] = plgpu.SMEM((tiles.m,), jnp.float32)
        scratch["w_scale"] = plgpu.SMEM((tiles.n,), jnp.float32)
        sides += 2
    if problem.bias:
        scratch["bias"] = plgpu.SMEM((tiles.n,), jnp.float32)
        sides += 1
    if sides:
        scratch["side_full"] = plgpu.Barrier(num_arrivals=sides)
        scratch["side_empty"] = plgpu.Barrier(num_arrivals=2)
    if problem.residual:
        scratch["residual_full"] = plgpu.Barrier(num_barriers=2)
    if problem.groups is not None:
        scratch["tail"] = plgpu.SMEM((2, _WARPGROUP_ROWS, epilogue), problem.out_dtype)

    def body(operands, out):
        pl.run_scoped(
            lambda scratch: _thread_block(problem, tiles, operands, out, scratch), scratch, collective_axes="wg"
        )

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((problem.m, problem.n), problem.out_dtype),
        grid=(multiprocessors // tiles.cluster,),
        grid_names=("block",),
        cluster=(tiles.cluster,),
        cluster_names=("cluster",),
        num_threads=3,
        thread_name="wg",
        kernel_name="grouped_gemm" if problem.groups is not None else "gemm",
    )(operands)


def _transforms(dtype, columns):
    tiling = plgpu.TilingTransform((ALIGNMENT, columns))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(columns * dtype.itemsize)  # pyright: ignore[reportAbstractUsage]
    return tiling, swizzle


def _part(tiles):
    """Columns that share a scale of the weight's blocks; tiles start at multiples of them."""
    return math.gcd(tiles.n, tiles.width, BLOCK)


def _epilogue(problem, tiles):
    """Columns of the output that are stored at a time: 128 bytes, or 64 where those do not divide the tile."""
    return math.gcd(_part(tiles), 128 // problem.out_dtype.itemsize)


@dataclasses.dataclass(frozen=True)
class _Tile:
    """One tile of the output: where it starts, which of its rows are wanted, whose weights it takes."""

    row: jax.Array
    column: jax.Array
    first: jax.Array | None = None
    """The wanted rows of the tile, None for all: from `first` up to, not including, `last`."""
    last: jax.Array | None = None
    group: jax.Array | None = None


def _tiles(problem, tiles, operands):
    """The number of tiles and the function that finds the tile of an index and of a place in the cluster."""
    column_tiles = math.ceil(problem.n / (tiles.n * tiles.cluster))
    if problem.groups is None:
        row_tiles = math.ceil(problem.m / tiles.m)
    else:
        row_tiles = operands["row_tiles"][0]

    def tile(index):
        row_tile, column_tile = plgpu.planar_snake(index, (row_tiles, column_tiles), 0, tiles.raster)
        column = (column_tile * tiles.cluster + lax.axis_index("cluster")) * tiles.n
        if problem.groups is None:
            return _Tile(row_tile * tiles.m, column)
        group, row, first, last = (operands["schedule"][i, row_tile] for i in range(4))
        return _Tile(pl.multiple_of(row, ALIGNMENT), column, first, last, group)

    return row_tiles * column_tiles, tile


def _thread_block(problem, tiles, operands, out, scratch):
    warpgroup = lax.axis_index("wg")

    @pl.when(warpgroup == 2)
    def _():
        plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")
        _copy(problem, tiles, operands, scratch)

    @pl.when(warpgroup < 2)
    def _():
        plgpu.set_max_registers(_MATH_REGISTERS, action="increase")
        _multiply(problem, tiles, operands, out, scratch, warpgroup)


def _copy(problem, tiles, operands, scratch):
    """The copying warpgroup: fills the stages, one step over K after the other, tile after tile."""
    steps = math.ceil(problem.k / problem.step)
    count, tile_at = _tiles(problem, tiles, operands)
    has_sides = "side_full" in scratch

    def copy_tile(info, carry):
        tile = tile_at(info.index[0])
        w = operands["w"] if tile.group is None else operands["w"].at[tile.group]
        rows, columns = pl.ds(tile.row, tiles.m), pl.ds(tile.column, tiles.n)

        def step(k, done):
            slot = lax.rem(done, jnp.int32(tiles.stages))

            @pl.when(done >= tiles.stages)
            def _():
                plgpu.barrier_wait(scratch["empty"].at[slot])

            inner = pl.ds(k * problem.step, problem.step)
            full = scratch["full"].at[slot]
            shared = "cluster" if tiles.cluster > 1 else None
            plgpu.copy_gmem_to_smem(operands["x"].at[rows, inner], scratch["x"].at[slot], full, collective_axes=shared)
            plgpu.copy_gmem_to_smem(w.at[columns, inner], scratch["w"].at[slot], full)
            if problem.scheme == "block":
                plgpu.copy_gmem_to_smem(operands["x_scale"].at[k, rows], scratch["x_scale"].at[slot], full)
            return done + 1

        carry = lax.fori_loop(0, steps, step, carry)
        if has_sides:
            # Needed at the end of the tile: the wait is over long before the stages run empty.
            @pl.when(info.local_index > 0)
            def _():
                plgpu.barrier_wait(scratch["side_empty"])

            full = scratch["side_full"]
            if problem.scheme == "row":
                scale = operands["w_scale"] if tile.group is None else operands["w_scale"].at[tile.group]
                plgpu.copy_gmem_to_smem(operands["x_scale"].at[rows], scratch["x_scale"], full)
                plgpu.copy_gmem_to_smem(scale.at[columns], scratch["w_scale"], full)
            if problem.bias:
                plgpu.copy_gmem_to_smem(operands["bias"].at[columns], scratch["bias"], full)
        return carry

    done = plgpu.nd_loop((count,), collective_axes="block", init_carry=jnp.int32(0))(copy_tile)

    # No thread block may end while the other of its cluster still signals to it.
    def drain(step, _):
        plgpu.barrier_wait(scratch["empty"].at[lax.rem(step, jnp.int32(tiles.stages))])

    lax.fori_loop(jnp.maximum(done - tiles.stages, 0), done, drain, None)
    if has_sides:

        @pl.when(done > 0)
        def _():
            plgpu.barrier_wait(scratch["side_empty"])


def _multiply(problem, tiles, operands, out, scratch, warpgroup):
    """A math warpgroup: 64 rows of each tile, or all 64 rows and half the columns."""
    steps = math.ceil(problem.k / problem.step)
    count, tile_at = _tiles(problem, tiles, operands)
    by_rows = tiles.m == 2 * _WARPGROUP_ROWS
    width = tiles.width
    first_row = warpgroup * _WARPGROUP_ROWS if by_rows else 0
    first_column = 0 if by_rows else warpgroup * width
    rows = pl.ds(first_row, _WARPGROUP_ROWS)
    columns = pl.ds(first_column, width)
    part = _part(tiles)
    parts = width // part
    shape = (_WARPGROUP_ROWS, width)

    def wgmma(accumulator, slot):
        x = scratch["x"].at[slot, rows]
        w = scratch["w"].at[slot, columns]
        plgpu.wgmma(accumulator, x, w.transpose((1, 0)))

    def slot_of(step):
        return lax.rem(step, jnp.int32(tiles.stages))

    def promoted(tile, done):
        """The product in float32, block after block of K, as `parts` pieces of the columns."""

        def block_scales(k):
            if problem.scheme != "block":
                return []
            scales = operands["w_scale"] if tile.group is None else operands["w_scale"].at[tile.group]
            last = scales.shape[0] - 1
            start = tile.column + first_column
            return [scales[jnp.minimum((start + i * part) // BLOCK, last), k] for i in range(parts)]

        def step(k, sums):
            slot = slot_of(done + k)
            w_scales = block_scales(k)
            plgpu.barrier_wait(scratch["full"].at[slot])

            def block(accumulator):
                wgmma(accumulator, slot)
                x_scale = None
                if problem.scheme == "block":
                    # While the tensor cores work.  The commit orders this read before the next copy into the stage.
                    x_scale = plgpu.load(scratch["x_scale"].at[slot, rows], layout=plgpu.Layout.WGMMA.reduce(1))
                    plgpu.commit_smem()
                return accumulator[...], x_scale

            product, x_scale = pl.run_scoped(block, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
            plgpu.barrier_arrive(scratch["empty"].at[slot])
            pieces = [product[:, i * part : (i + 1) * part] for i in range(parts)]
            if problem.scheme == "block":
                scales = [lax.broadcast_in_dim(x_scale * s, (_WARPGROUP_ROWS, part), [0]) for s in w_scales]
                pieces = [piece * scale for piece, scale in zip(pieces, scales, strict=True)]
            return [a + b for a, b in zip(sums, pieces, strict=True)]

        zero = plgpu.layout_cast(jnp.zeros((_WARPGROUP_ROWS, part), jnp.float32), plgpu.Layout.WGMMA)
        return lax.fori_loop(0, steps, step, [zero] * parts)

    def accumulated(done):
        """The product in one accumulator, as `parts` pieces of the columns, float32."""

        def product(accumulator):
            def step(k, _):
                slot = slot_of(done + k)
                plgpu.barrier_wait(scratch["full"].at[slot])
                wgmma(accumulator, slot)
                # The products of the step before are finished, so its stage may be filled again.
                plgpu.wgmma_wait(1)

                @pl.when(k > 0)
                def _():
                    plgpu.barrier_arrive(scratch["empty"].at[slot_of(done + k - 1)])

            lax.fori_loop(0, steps, step, None)
            return accumulator[...]

        result = pl.run_scoped(
            product, plgpu.WGMMAAccumulatorRef(shape, jnp.int32 if problem.dtype == jnp.int8 else jnp.float32)
        ).astype(jnp.float32)
        plgpu.barrier_arrive(scratch["empty"].at[slot_of(done + steps - 1)])
        return [result[:, i * part : (i + 1) * part] for i in range(parts)]

    @plgpu.nd_loop((count,), collective_axes="block", init_carry=jnp.int32(0))
    def _tile(info, carry):
        tile = tile_at(info.index[0])
        pieces = promoted(tile, carry) if problem.promoted else accumulated(carry)
        pieces = _finish(problem, scratch, pieces, rows, first_column, part)
        _store(problem, tiles, operands, out, scratch, pieces, tile, warpgroup, first_row, first_column)
        return carry + steps

    plgpu.wait_smem_to_gmem(0)


def _finish(problem, scratch, pieces, rows, first_column, part):
    """Applies the scales of rows and channels, and the bias."""
    if "side_full" not in scratch:
        return pieces
    plgpu.barrier_wait(scratch["side_full"])
    shape = (_WARPGROUP_ROWS, part)

    def of_columns(name, index):
        values = scratch[name].at[pl.ds(first_column + index * part, part)]
        return lax.broadcast_in_dim(plgpu.load(values, layout=plgpu.Layout.WGMMA.reduce(0)), shape, [1])

    if problem.scheme == "row":
        x_scale = plgpu.load(scratch["x_scale"].at[rows], layout=plgpu.Layout.WGMMA.reduce(1))
        x_scale = lax.broadcast_in_dim(x_scale, shape, [0])
        pieces = [piece * x_scale * of_columns("w_scale", i) for i, piece in enumerate(pieces)]
    if problem.bias:
        pieces = [piece + of_columns("bias", i) for i, piece in enumerate(pieces)]
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch["side_empty"])
    return pieces


def _store(problem, tiles, operands, out, scratch, pieces, tile, warpgroup, first_row, first_column):
    """Stores the pieces, a few columns at a time; what lies outside the output is dropped by the copy."""
    width = _epilogue(problem, tiles)
    part = pieces[0].shape[1]
    rows = pl.ds(tile.row + first_row, _WARPGROUP_ROWS)

    def chunks():
        for index, piece in enumerate(pieces):
            for start in range(0, part, width):
                yield index * part + start, piece[:, start : start + width]

    def whole():
        for number, (offset, values) in enumerate(chunks()):
            slot = scratch["out"].at[warpgroup, number % 2]
            target = (rows, pl.ds(tile.column + first_column + offset, width))
            # The copy that used this slot before has read it (of the tile before, it may be the last one).
            plgpu.wait_smem_to_gmem(min(number, 1), wait_read_only=True)
            if problem.residual:
                full = scratch["residual_full"].at[warpgroup]
                plgpu.copy_gmem_to_smem(operands["residual"].at[target], slot, full)
                plgpu.barrier_wait(full)
                values = values + plgpu.load(slot, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
            slot[...] = values.astype(problem.out_dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(slot, out.at[target])

    if problem.groups is None:
        whole()
        return
    start = jnp.clip(tile.first - first_row, 0, _WARPGROUP_ROWS)
    count = jnp.clip(tile.last - first_row, 0, _WARPGROUP_ROWS) - start
    pl.when(count == _WARPGROUP_ROWS)(whole)

    @pl.when((count > 0) & (count < _WARPGROUP_ROWS))
    def _():
        # The other rows belong to other groups: the wanted go in pieces of 32, 16, ..., as the bits of their count say.
        for offset, values in chunks():
            slot = scratch["tail"].at[warpgroup]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            slot[...] = values.astype(problem.out_dtype)
            plgpu.commit_smem()
            columns = pl.ds(tile.column + first_column + offset, width)
            for size in _PIECES:
                piece = start + (count & ~(2 * size - 1))

                @pl.when((count & size) != 0)
                def _(size=size, piece=piece, columns=columns, slot=slot):
                    target = out.at[pl.ds(tile.row + first_row + piece, size), columns]
                    plgpu.copy_smem_to_gmem(slot.at[pl.ds(piece, size)], target)
