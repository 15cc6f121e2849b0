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

from jaxinfer.kernels.tiles import SHARED_MEMORY, Problem, Tiles, output_columns, output_slots, shared_memory_bytes

BLOCK = 128
_WARPGROUP_ROWS = 64
_MEMORY_REGISTERS = 24
_MATH_REGISTERS = 240
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
    if problem.groups is not None and tiles.cluster > 1 and tiles.shared == "w":
        raise ValueError(f"expected thread blocks that share rows, since groups differ in weights, got {tiles}")
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
            (2, output_slots(problem, tiles), _WARPGROUP_ROWS, epilogue),
            problem.out_dtype,
            transforms=_transforms(problem.out_dtype, epilogue),
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
    if tiles.order:
        scratch["turn"] = plgpu.Barrier(num_barriers=2)
    if tiles.skew:
        scratch["start"] = plgpu.Barrier()
    if problem.residual:
        scratch["residual_full"] = plgpu.Barrier(num_barriers=2)
    if problem.groups is not None:
        scratch["tail"] = plgpu.SMEM((2, _WARPGROUP_ROWS, _tail_columns(problem)), problem.out_dtype)

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


def _tail_columns(problem):
    """Columns of a part of a tile that are stored at a time: rows of 128 bytes, so that a copy may begin at any row."""
    return 128 // problem.out_dtype.itemsize


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
    tall, wide = (1, tiles.cluster) if tiles.shared == "x" else (tiles.cluster, 1)
    column_tiles = math.ceil(problem.n / (tiles.n * wide))
    if problem.groups is None:
        row_tiles = math.ceil(problem.m / (tiles.m * tall))
    else:
        row_tiles = operands["row_tiles"][0]
    place = lax.axis_index("cluster")

    def tile(index):
        row_tile, column_tile = plgpu.planar_snake(index, (row_tiles, column_tiles), 0, tiles.raster)
        column = (column_tile * wide + (place if wide > 1 else 0)) * tiles.n
        if problem.groups is None:
            return _Tile((row_tile * tall + (place if tall > 1 else 0)) * tiles.m, column)
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
            for name, source in (("x", operands["x"].at[rows, inner]), ("w", w.at[columns, inner])):
                shared = "cluster" if tiles.cluster > 1 and tiles.shared == name else None
                plgpu.copy_gmem_to_smem(source, scratch[name].at[slot], full, collective_axes=shared)
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
    shape = (_WARPGROUP_ROWS, width)

    def wgmma(accumulator, slot, columns=columns):
        x = scratch["x"].at[slot, rows]
        w = scratch["w"].at[slot, columns]
        plgpu.wgmma(accumulator, x, w.transpose((1, 0)))

    def slot_of(step):
        return lax.rem(step, jnp.int32(tiles.stages))

    def release(step):
        plgpu.barrier_arrive(scratch["empty"].at[slot_of(step)])

    def stagger(done, k):
        """The second warpgroup begins some steps after the first."""
        if tiles.skew:
            early = (warpgroup == 0) & (done == 0) & (k == min(tiles.skew, steps - 1))
            pl.when(early)(lambda: plgpu.barrier_arrive(scratch["start"]))
            late = (warpgroup == 1) & (done == 0) & (k == 0)
            pl.when(late)(lambda: plgpu.barrier_wait(scratch["start"]))

    def row_scales(slot):
        """Block scales of the rows.  The commit orders this read before the next copy into the stage."""
        if problem.scheme != "block":
            return None
        scales = plgpu.load(scratch["x_scale"].at[slot, rows], layout=plgpu.Layout.WGMMA.reduce(1))
        plgpu.commit_smem()
        return scales

    def column_scales(tile, first, parts, part, k):
        """Block scales of the columns from `first`, one for each part of them."""
        if problem.scheme != "block":
            return None
        scales = operands["w_scale"] if tile.group is None else operands["w_scale"].at[tile.group]
        last = scales.shape[0] - 1
        start = tile.column + first
        return [scales[jnp.minimum((start + i * part) // BLOCK, last), k] for i in range(parts)]

    def add(sums, product, x_scale, w_scales):
        """Adds the parts of a block's product, scaled, to float32 sums."""
        part = product.shape[1] // len(sums)
        pieces = [product[:, i * part : (i + 1) * part] for i in range(len(sums))]
        if x_scale is not None:
            scales = [lax.broadcast_in_dim(x_scale * s, (_WARPGROUP_ROWS, part), [0]) for s in w_scales]
            pieces = [piece * scale for piece, scale in zip(pieces, scales, strict=True)]
        return [a + b for a, b in zip(sums, pieces, strict=True)]

    def zeros(columns):
        return plgpu.layout_cast(jnp.zeros((_WARPGROUP_ROWS, columns), jnp.float32), plgpu.Layout.WGMMA)

    def promoted(tile, done):
        """The product in float32, block after block of K."""
        part = math.gcd(_part(tiles), width) if problem.scheme == "block" else width
        parts = width // part

        def step(k, sums):
            slot = slot_of(done + k)
            w_scales = column_scales(tile, first_column, parts, part, k)
            stagger(done, k)
            plgpu.barrier_wait(scratch["full"].at[slot])
            if tiles.order:
                plgpu.barrier_wait(scratch["turn"].at[warpgroup])

            def block(accumulator):
                wgmma(accumulator, slot)
                if tiles.order == 1:
                    plgpu.barrier_arrive(scratch["turn"].at[1 - warpgroup])
                # While the tensor cores work.
                x_scale = row_scales(slot)
                return accumulator[...], x_scale

            product, x_scale = pl.run_scoped(block, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
            if tiles.order == 2:
                plgpu.barrier_arrive(scratch["turn"].at[1 - warpgroup])
            release(done + k)
            return add(sums, product, x_scale, w_scales)

        return jnp.concatenate(lax.fori_loop(0, steps, step, [zeros(part)] * parts), axis=1)

    def promoted_in_halves(tile, done):
        """The same with an accumulator for each half of the columns: one is added up while the other is filled."""
        half = width // 2
        part = math.gcd(_part(tiles), half) if problem.scheme == "block" else half
        parts = half // part
        shape = plgpu.WGMMAAccumulatorRef((_WARPGROUP_ROWS, half), jnp.float32)
        firsts = first_column, first_column + half

        depth = math.gcd(tiles.halves, steps)

        def several(number, sums):
            """Products of `depth` steps, one half always under way while the one before is added up."""
            first = done + number * depth

            def product(*accumulators):
                found, pending = list(sums), None
                for turn in range(2 * depth + 1):
                    if turn < 2 * depth:
                        step, side = divmod(turn, 2)
                        slot = slot_of(first + step)
                        w_scales = column_scales(tile, firsts[side], parts, part, number * depth + step)
                        if side == 0:
                            plgpu.barrier_wait(scratch["full"].at[slot])
                        if step > 0:
                            accumulators[side][...] = zeros(half)
                        wgmma(accumulators[side], slot, pl.ds(firsts[side], half))
                        if side == 0:
                            x_scale = row_scales(slot)
                    if pending is not None:
                        last_step, last_side, last_scales = pending
                        wait = 1 if turn < 2 * depth else 0
                        block = plgpu.wgmma_accumulator_load(accumulators[last_side], wait_n=wait)
                        block = lax.optimization_barrier(block)
                        if last_side == 1:
                            release(first + last_step)
                        found[last_side] = add(found[last_side], block, *last_scales)
                    if turn < 2 * depth:
                        pending = step, side, (x_scale, w_scales)
                return found

            return pl.run_scoped(product, shape, shape)

        left, right = lax.fori_loop(0, steps // depth, several, [[zeros(part)] * parts] * 2)
        return jnp.concatenate([*left, *right], axis=1)

    def accumulated(done):
        """The product in one accumulator, as float32."""

        def product(accumulator):
            def step(k, _):
                slot = slot_of(done + k)
                stagger(done, k)
                plgpu.barrier_wait(scratch["full"].at[slot])
                wgmma(accumulator, slot)
                # The products of the step before are finished, so its stage may be filled again.
                plgpu.wgmma_wait(1)

                @pl.when(k > 0)
                def _():
                    release(done + k - 1)

            lax.fori_loop(0, steps, step, None)
            return accumulator[...]

        result = pl.run_scoped(
            product, plgpu.WGMMAAccumulatorRef(shape, jnp.int32 if problem.dtype == jnp.int8 else jnp.float32)
        ).astype(jnp.float32)
        release(done + steps - 1)
        return result

    if tiles.order:
        # The first turn is the first warpgroup's.
        pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(scratch["turn"].at[0]))

    @plgpu.nd_loop((count,), collective_axes="block", init_carry=jnp.int32(0))
    def _tile(info, carry):
        tile = tile_at(info.index[0])
        if not problem.promoted:
            values = accumulated(carry)
        else:
            values = (promoted_in_halves if tiles.halves else promoted)(tile, carry)
        values = _finish(problem, scratch, values, rows, columns)
        _store(problem, tiles, operands, out, scratch, values, tile, warpgroup, first_row, first_column)
        return carry + steps

    if tiles.order:
        # The last turn is nobody's.
        pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(scratch["turn"].at[0]))
    plgpu.wait_smem_to_gmem(0)


def _finish(problem, scratch, values, rows, columns):
    """Applies the scales of rows and channels, and the bias."""
    if "side_full" not in scratch:
        return values
    plgpu.barrier_wait(scratch["side_full"])

    def side(name, index, axis):
        numbers = plgpu.load(scratch[name].at[index], layout=plgpu.Layout.WGMMA.reduce(1 - axis))
        return lax.broadcast_in_dim(numbers, values.shape, [axis])

    if problem.scheme == "row":
        values = values * side("x_scale", rows, 0) * side("w_scale", columns, 1)
    if problem.bias:
        values = values + side("bias", columns, 1)
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch["side_empty"])
    return values


def _store(problem, tiles, operands, out, scratch, values, tile, warpgroup, first_row, first_column):
    """Stores the values, a few columns at a time; what lies outside the output is dropped by the copy."""
    slots = output_slots(problem, tiles)
    rows = pl.ds(tile.row + first_row, _WARPGROUP_ROWS)

    def chunks(width):
        """Columns that one copy takes; where the width is no multiple, the last two overlap and agree."""
        for start in range(0, tiles.width, width):
            start = min(start, tiles.width - width)
            yield start, values[:, start : start + width]

    def whole():
        width = output_columns(problem, tiles)
        for number, (offset, values) in enumerate(chunks(width)):
            slot = scratch["out"].at[warpgroup, number % slots]
            target = (rows, pl.ds(tile.column + first_column + offset, width))
            # The copy that used this slot before has read it: `slots` copies ago, or the tile before ended with it.
            newer = slots - 1 if tiles.width // width % slots == 0 else min(number, slots - 1)
            plgpu.wait_smem_to_gmem(newer, wait_read_only=True)
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
        width = _tail_columns(problem)
        for offset, values in chunks(width):
            slot = scratch["tail"].at[warpgroup]
            # Columns that overlap those before are written after them.
            plgpu.wait_smem_to_gmem(0, wait_read_only=offset % width == 0)
            slot[...] = values.astype(problem.out_dtype)
            plgpu.commit_smem()
            columns = pl.ds(tile.column + first_column + offset, width)
            for size in _PIECES:
                piece = start + (count & ~(2 * size - 1))

                @pl.when((count & size) != 0)
                def _(size=size, piece=piece, columns=columns, slot=slot):
                    target = out.at[pl.ds(tile.row + first_row + piece, size), columns]
                    plgpu.copy_smem_to_gmem(slot.at[pl.ds(piece, size)], target)
