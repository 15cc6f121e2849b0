"""The matrix product of all GEMMs on Hopper: `out = x @ w.T`, dense or with rows grouped by expert.

A persistent grid of one thread block per multiprocessor.  One warpgroup copies tiles of both operands into shared
memory, two or three multiply.  The structure follows DeepGEMM (github.com/deepseek-ai/DeepGEMM) and the
warp-specialised pipelines of `jax.experimental.pallas.ops.gpu`; the loop is written out here because its pipeline has
to run on through the borders of tiles, over a number of tiles that is known on the device only.

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

from jaxinfer.kernels.tiles import (
    SHARED_MEMORY,
    Problem,
    Tiles,
    last_wave,
    output_columns,
    output_slots,
    shared_memory_bytes,
)

BLOCK = 128
_WARPGROUP_ROWS = 64
_MEMORY_REGISTERS = 24
_MATH_REGISTERS = {2: 240, 3: 160}
"""By the number of math warpgroups."""
_PIECES = (32, 16, 8, 4, 2, 1)
SCALE_COLUMNS = 4
"""Block scales of a weight, for as many blocks of K, that are copied at a time: 16 bytes, the least of a copy."""
_SCALE_LINES = 8
"""Lines of such scales in a stage, of which tiles use the first few: stages have to be 128 bytes apart."""
ALIGNMENT = 8
"""Tiles start at multiples of so many rows: the height of a tile of the swizzled layout."""


def matmul(problem: Problem, tiles: Tiles, operands: dict[str, jax.Array], multiprocessors: int) -> jax.Array:
    """Runs the kernel.

    Args:
        operands: `x [M, K]`, `w [N, K]` or `[groups, N, K]`; where the problem has them `x_scale` (`[M]` or
            `[K / 128, M]`, rows of a block scale padded to a multiple of 4), `w_scale` (`[N]` or `[N / 128, K / 128]`,
            with groups in front), `bias [N]` float32, `residual [M, N]` of the type of the output, and for groups
            `schedule` and `row_tiles` (see `grouped_gemm.schedule`).  M is a multiple of 8, N of 64.  The last
            dimension of block scales of `w` is padded to a multiple of 4.
    """
    if problem.groups is not None and tiles.width < _tail_columns(problem):
        raise ValueError(f"expected {_tail_columns(problem)} columns of a warpgroup or more for groups, got {tiles}")
    if (size := shared_memory_bytes(problem, tiles)) > SHARED_MEMORY:
        raise ValueError(f"expected tiles of at most {SHARED_MEMORY} bytes of shared memory, {tiles} take {size}")
    epilogue = output_columns(problem, tiles)
    scratch = {
        "x": plgpu.SMEM(
            (tiles.stages, tiles.m, problem.step), problem.dtype, transforms=_transforms(problem.dtype, problem.step)
        ),
        "w": plgpu.SMEM(
            (tiles.stages, tiles.n, problem.step), problem.dtype, transforms=_transforms(problem.dtype, problem.step)
        ),
        "out": plgpu.SMEM(
            (tiles.warpgroups, output_slots(problem, tiles), _WARPGROUP_ROWS, epilogue),
            problem.out_dtype,
            transforms=_transforms(problem.out_dtype, epilogue),
        ),
        "full": plgpu.Barrier(num_arrivals=4 if problem.scheme == "block" else 2, num_barriers=tiles.stages),
        "empty": plgpu.Barrier(num_arrivals=tiles.warpgroups, num_barriers=tiles.stages),
    }
    if problem.scheme == "block":
        scratch["x_scale"] = plgpu.SMEM((tiles.stages, tiles.m), jnp.float32)
        scratch["w_scale"] = plgpu.SMEM((tiles.stages, _SCALE_LINES, SCALE_COLUMNS), jnp.float32)
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
        scratch["side_empty"] = plgpu.Barrier(num_arrivals=tiles.warpgroups)
    if problem.residual:
        scratch["residual_full"] = plgpu.Barrier(num_barriers=tiles.warpgroups)
    if problem.groups is not None:
        scratch["tail"] = plgpu.SMEM((tiles.warpgroups, _WARPGROUP_ROWS, _tail_columns(problem)), problem.out_dtype)

    def body(operands, out):
        pl.run_scoped(
            lambda scratch: _thread_block(problem, tiles, operands, out, scratch, multiprocessors),
            scratch,
            collective_axes="wg",
        )

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((problem.m, problem.n), problem.out_dtype),
        grid=(multiprocessors,),
        grid_names=("block",),
        num_threads=tiles.warpgroups + 1,
        thread_name="wg",
        kernel_name="grouped_gemm" if problem.groups is not None else "gemm",
    )(operands)


def _transforms(dtype, columns):
    tiling = plgpu.TilingTransform((ALIGNMENT, columns))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(columns * dtype.itemsize)  # pyright: ignore[reportAbstractUsage]
    return tiling, swizzle


def _part(area):
    """Columns of a warpgroup that share a scale of the weight's blocks; tiles start at multiples of them."""
    return math.gcd(area.tiles.n, area.width, BLOCK)


def _scale_lines(tiles):
    """Blocks of columns that a tile may have a part of."""
    return math.ceil((tiles.n + BLOCK - math.gcd(tiles.n, BLOCK)) / BLOCK)


def _tail_columns(problem):
    """Columns of a part of a tile that are stored at a time: rows of 128 bytes, so that a copy may begin at any row."""
    return 128 // problem.out_dtype.itemsize


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Tile:
    """One tile of the output: where it starts, which of its rows are wanted, whose weights it takes."""

    row: jax.Array
    column: jax.Array
    first: jax.Array | None = None
    """The wanted rows of the tile, None for all: from `first` up to, not including, `last`."""
    last: jax.Array | None = None
    group: jax.Array | None = None


def _sweeps(problem, tiles, operands, multiprocessors):
    """What a thread block goes through: sizes of tiles, their number, and what finds the tile of an index.

    The tiles that would keep only a few of the multiprocessors busy at the end are cut into narrower ones.
    """
    column_tiles = math.ceil(problem.n / tiles.n)
    if problem.groups is None:
        row_tiles = math.ceil(problem.m / tiles.m)
        whole, parts = last_wave(problem, tiles, multiprocessors)
    else:
        row_tiles = operands["row_tiles"][0]
        whole, parts = row_tiles * column_tiles, 1

    def tile(index):
        row_tile, column_tile = plgpu.planar_snake(index, (row_tiles, column_tiles), 0, tiles.raster)
        column = column_tile * tiles.n
        if problem.groups is None:
            return _Tile(row_tile * tiles.m, column)
        group, row, first, last = (operands["schedule"][i, row_tile] for i in range(4))
        return _Tile(pl.multiple_of(row, ALIGNMENT), column, first, last, group)

    sweeps = [(tiles, whole, tile)]
    if parts > 1:
        narrow = dataclasses.replace(tiles, n=tiles.n // parts)

        def part(index):
            found = tile(whole + index // parts)
            return dataclasses.replace(found, column=found.column + lax.rem(index, jnp.int32(parts)) * narrow.n)

        sweeps.append((narrow, (row_tiles * column_tiles - whole) * parts, part))
    return sweeps


def _thread_block(problem, tiles, operands, out, scratch, multiprocessors):
    warpgroup = lax.axis_index("wg")
    sweeps = _sweeps(problem, tiles, operands, multiprocessors)

    @pl.when(warpgroup == tiles.warpgroups)
    def _():
        plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")
        _copy(problem, sweeps, operands, scratch)

    @pl.when(warpgroup < tiles.warpgroups)
    def _():
        plgpu.set_max_registers(_MATH_REGISTERS[tiles.warpgroups], action="increase")
        _multiply(problem, sweeps, operands, out, scratch, warpgroup)


def _copy(problem, sweeps, operands, scratch):
    """The copying warpgroup: fills the stages, one step over K after the other, tile after tile."""
    steps = math.ceil(problem.k / problem.step)
    has_sides = "side_full" in scratch

    def copy_tile(tiles, tile, before):
        def of_group(name):
            return operands[name] if tile.group is None else operands[name].at[tile.group]

        rows, columns = pl.ds(tile.row, tiles.m), pl.ds(tile.column, tiles.n)

        def step(k, done):
            slot = lax.rem(done, jnp.int32(tiles.stages))

            @pl.when(done >= tiles.stages)
            def _():
                plgpu.barrier_wait(scratch["empty"].at[slot])

            inner = pl.ds(k * problem.step, problem.step)
            full = scratch["full"].at[slot]
            plgpu.copy_gmem_to_smem(operands["x"].at[rows, inner], scratch["x"].at[slot], full)
            w_target = scratch["w"].at[slot, pl.ds(0, tiles.n)]
            plgpu.copy_gmem_to_smem(of_group("w").at[columns, inner], w_target, full)
            if problem.scheme == "block":
                plgpu.copy_gmem_to_smem(operands["x_scale"].at[k, rows], scratch["x_scale"].at[slot], full)
                lines = pl.ds(tile.column // BLOCK, _scale_lines(tiles))
                aligned = pl.ds(k // SCALE_COLUMNS * SCALE_COLUMNS, SCALE_COLUMNS)
                target = scratch["w_scale"].at[slot, pl.ds(0, _scale_lines(tiles))]
                plgpu.copy_gmem_to_smem(of_group("w_scale").at[lines, aligned], target, full)
            return done + 1

        done = lax.fori_loop(0, steps, step, before)
        if has_sides:
            # Needed at the end of the tile: the wait is over long before the stages run empty.
            @pl.when(before > 0)
            def _():
                plgpu.barrier_wait(scratch["side_empty"])

            full = scratch["side_full"]
            if problem.scheme == "row":
                plgpu.copy_gmem_to_smem(operands["x_scale"].at[rows], scratch["x_scale"], full)
                plgpu.copy_gmem_to_smem(of_group("w_scale").at[columns], scratch["w_scale"].at[pl.ds(0, tiles.n)], full)
            if problem.bias:
                plgpu.copy_gmem_to_smem(operands["bias"].at[columns], scratch["bias"].at[pl.ds(0, tiles.n)], full)
        return done

    done = jnp.int32(0)
    for tiles, count, tile_at in sweeps:

        def one(info, carry, tiles=tiles, tile_at=tile_at):
            return copy_tile(tiles, tile_at(info.index[0]), carry)

        done = plgpu.nd_loop((count,), collective_axes="block", init_carry=done)(one)

    stages = sweeps[0][0].stages

    # A barrier may not be given up before its last phase has been seen.
    def drain(step, _):
        plgpu.barrier_wait(scratch["empty"].at[lax.rem(step, jnp.int32(stages))])

    lax.fori_loop(jnp.maximum(done - stages, 0), done, drain, None)
    if has_sides:

        @pl.when(done > 0)
        def _():
            plgpu.barrier_wait(scratch["side_empty"])


def _multiply(problem, sweeps, operands, out, scratch, warpgroup):
    """A math warpgroup: 64 rows of each tile, or all 64 rows and half the columns."""
    steps = math.ceil(problem.k / problem.step)
    done = jnp.int32(0)
    for tiles, count, tile_at in sweeps:
        area = _Area(problem, tiles, warpgroup)

        def store(tile, values, area=area):
            # What a loop carries is not known to be a multiple.
            row, column = pl.multiple_of(tile.row, ALIGNMENT), pl.multiple_of(tile.column, area.tiles.n)
            tile = dataclasses.replace(tile, row=row, column=column)
            values = _finish(problem, scratch, values, area)
            _store(problem, area, operands, out, scratch, values, tile)

        def exact(info, carry, area=area, tile_at=tile_at, store=store):
            tile = tile_at(info.index[0])
            store(tile, _accumulated(problem, area, scratch, tile, carry, steps))
            return carry + steps

        def promoted(info, carry, area=area, tile_at=tile_at, store=store):
            """Stores the tile before under the first products of this one."""
            done, before, values = carry
            tile = tile_at(info.index[0])

            def beneath():
                pl.when(info.local_index > 0)(lambda: store(before, values))

            return done + steps, tile, _promoted(problem, area, scratch, tile, done, steps, beneath)

        if problem.promoted:
            carry = done, tile_at(jnp.int32(0)), _zeros(area.width)
            after, tile, values = plgpu.nd_loop((count,), collective_axes="block", init_carry=carry)(promoted)
            pl.when(after > done)(lambda tile=tile, values=values, store=store: store(tile, values))
            done = after
        else:
            done = plgpu.nd_loop((count,), collective_axes="block", init_carry=done)(exact)
    plgpu.wait_smem_to_gmem(0)


class _Area:
    """What a math warpgroup has of each tile: 64 rows and all columns, or all 64 rows and half the columns."""

    def __init__(self, problem, tiles, warpgroup):
        by_rows = tiles.m > _WARPGROUP_ROWS
        self.tiles, self.warpgroup, self.width = tiles, warpgroup, tiles.width
        self.row = warpgroup * _WARPGROUP_ROWS if by_rows else 0
        self.column = 0 if by_rows else warpgroup * tiles.width
        self.rows, self.columns = pl.ds(self.row, _WARPGROUP_ROWS), pl.ds(self.column, tiles.width)
        self.accumulator = plgpu.WGMMAAccumulatorRef(
            (_WARPGROUP_ROWS, tiles.width), jnp.int32 if problem.dtype == jnp.int8 else jnp.float32
        )

    def slot(self, step):
        return lax.rem(step, jnp.int32(self.tiles.stages))

    def wgmma(self, scratch, accumulator, slot):
        w = scratch["w"].at[slot, self.columns]
        plgpu.wgmma(accumulator, scratch["x"].at[slot, self.rows], w.transpose((1, 0)))


def _wanted(problem, area, tile, steps):
    """Steps over K that a warpgroup multiplies in: all, or the first only where none of its rows is stored."""
    if tile.last is None:
        return steps if problem.m % area.tiles.m == 0 else jnp.where(tile.row + area.row < problem.m, steps, 1)
    return jnp.where(area.row < tile.last, steps, 1)


def _pass(area, scratch, start, stop):
    """Lets the stages of these steps be filled again, without a product."""

    def step(k, _):
        plgpu.barrier_wait(scratch["full"].at[area.slot(k)])
        plgpu.barrier_arrive(scratch["empty"].at[area.slot(k)])

    lax.fori_loop(start, stop, step, None)


def _zeros(columns):
    return plgpu.layout_cast(jnp.zeros((_WARPGROUP_ROWS, columns), jnp.float32), plgpu.Layout.WGMMA)


def _promoted(problem, area, scratch, tile, done, steps, beneath):
    """The product in float32, block after block of K; `beneath` runs while the first is computed."""
    blocks = problem.scheme == "block"
    part = _part(area) if blocks else area.width
    starts = range(0, area.width, part)

    def scales_of(k, slot):
        """The scales of the rows and of each part of the columns."""
        rows = plgpu.load(scratch["x_scale"].at[slot, area.rows], layout=plgpu.Layout.WGMMA.reduce(1))
        lines = [(tile.column + area.column + start) // BLOCK - tile.column // BLOCK for start in starts]
        scales = [rows * scratch["w_scale"][slot, line, lax.rem(k, SCALE_COLUMNS)] for line in lines]
        # Orders these reads before the next copy into the stage.
        plgpu.commit_smem()
        return [lax.broadcast_in_dim(scale, (_WARPGROUP_ROWS, part), [0]) for scale in scales]

    def block(k, beneath=lambda: None):
        """The product of one block of K, in parts that have a scale."""
        slot = area.slot(done + k)
        plgpu.barrier_wait(scratch["full"].at[slot])

        def multiply(accumulator):
            area.wgmma(scratch, accumulator, slot)
            scales = scales_of(k, slot) if blocks else None
            beneath()
            return accumulator[...], scales

        product, scales = pl.run_scoped(multiply, area.accumulator)
        plgpu.barrier_arrive(scratch["empty"].at[slot])
        pieces = [product[:, start : start + part] for start in starts]
        return [piece * scale for piece, scale in zip(pieces, scales, strict=True)] if blocks else pieces

    def step(k, sums):
        return [a + b for a, b in zip(sums, block(k), strict=True)]

    wanted = _wanted(problem, area, tile, steps)
    sums = lax.fori_loop(1, wanted, step, block(jnp.int32(0), beneath))
    _pass(area, scratch, done + wanted, done + steps)
    return jnp.concatenate(sums, axis=1)


def _accumulated(problem, area, scratch, tile, done, steps):
    """The product in one accumulator, as float32."""
    wanted = _wanted(problem, area, tile, steps)

    def release(step):
        plgpu.barrier_arrive(scratch["empty"].at[area.slot(step)])

    def product(accumulator):
        def step(k, _):
            slot = area.slot(done + k)
            plgpu.barrier_wait(scratch["full"].at[slot])
            area.wgmma(scratch, accumulator, slot)
            # The products of the step before are finished, so its stage may be filled again.
            plgpu.wgmma_wait(1)

            @pl.when(k > 0)
            def _():
                release(done + k - 1)

        lax.fori_loop(0, wanted, step, None)
        return accumulator[...]

    result = pl.run_scoped(product, area.accumulator).astype(jnp.float32)
    release(done + wanted - 1)
    _pass(area, scratch, done + wanted, done + steps)
    return result


def _finish(problem, scratch, values, area):
    """Applies the scales of rows and channels, and the bias."""
    if "side_full" not in scratch:
        return values
    plgpu.barrier_wait(scratch["side_full"])

    def side(name, index, axis):
        numbers = plgpu.load(scratch[name].at[index], layout=plgpu.Layout.WGMMA.reduce(1 - axis))
        return lax.broadcast_in_dim(numbers, values.shape, [axis])

    if problem.scheme == "row":
        values = values * side("x_scale", area.rows, 0) * side("w_scale", area.columns, 1)
    if problem.bias:
        values = values + side("bias", area.columns, 1)
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch["side_empty"])
    return values


def _store(problem, area, operands, out, scratch, values, tile):
    """Stores the values, a few columns at a time; what lies outside the output is dropped by the copy."""
    slots = scratch["out"].shape[1]
    rows = pl.ds(tile.row + area.row, _WARPGROUP_ROWS)

    def chunks(width):
        """Columns that one copy takes; where the width is no multiple, the last two overlap and agree."""
        for start in range(0, area.width, width):
            start = min(start, area.width - width)
            yield start, values[:, start : start + width]

    def whole():
        width = output_columns(problem, area.tiles)
        for number, (offset, values) in enumerate(chunks(width)):
            slot = scratch["out"].at[area.warpgroup, number % slots]
            target = (rows, pl.ds(tile.column + area.column + offset, width))
            # The copy that used this slot before has read it: `slots` copies ago, or the tile before ended with it.
            newer = slots - 1 if area.width // width % slots == 0 else min(number, slots - 1)
            plgpu.wait_smem_to_gmem(newer, wait_read_only=True)
            if problem.residual:
                full = scratch["residual_full"].at[area.warpgroup]
                plgpu.copy_gmem_to_smem(operands["residual"].at[target], slot, full)
                plgpu.barrier_wait(full)
                values = values + plgpu.load(slot, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
            slot[...] = values.astype(problem.out_dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(slot, out.at[target])

    if problem.groups is None:
        whole()
        return
    start = jnp.clip(tile.first - area.row, 0, _WARPGROUP_ROWS)
    count = jnp.clip(tile.last - area.row, 0, _WARPGROUP_ROWS) - start
    pl.when(count == _WARPGROUP_ROWS)(whole)

    @pl.when((count > 0) & (count < _WARPGROUP_ROWS))
    def _():
        # The other rows belong to other groups: the wanted go in pieces of 32, 16, ..., as the bits of their count say.
        width = _tail_columns(problem)
        for offset, values in chunks(width):
            slot = scratch["tail"].at[area.warpgroup]
            # Columns that overlap those before are written after them.
            plgpu.wait_smem_to_gmem(0, wait_read_only=offset % width == 0)
            slot[...] = values.astype(problem.out_dtype)
            plgpu.commit_smem()
            columns = pl.ds(tile.column + area.column + offset, width)
            for size in _PIECES:
                piece = start + (count & ~(2 * size - 1))

                @pl.when((count & size) != 0)
                def _(size=size, piece=piece, columns=columns, slot=slot):
                    target = out.at[pl.ds(tile.row + area.row + piece, size), columns]
                    plgpu.copy_smem_to_gmem(slot.at[pl.ds(piece, size)], target)
