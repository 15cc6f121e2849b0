"""Between the levels of retrieval on Hopper: from the best logit of each block, by row, to the votes.

A vote is the largest share that a block has of a voter's softmax for any of its probes.  Persistent thread blocks, as
many of a multiprocessor as have room, take one voter of a query block after another: one warpgroup copies pieces of
the rows of all its probes, the other passes over them twice, for the log-sum-exp and for the votes.  Where the pieces
of a voter fit into shared memory they stay there from the first pass to the second; else they are copied twice.  Only
pieces with blocks that may be retrieved are read.
"""

import dataclasses
import functools
import itertools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxinfer.kernels.tiles import SHARED_MEMORY

MOST_PROBES = 32
"""What the registers hold."""
_LANES = 128
"""Columns that the warpgroup has at a time: one for each thread, of the rows of all probes."""
_MOST_ROWS, _MOST_TOGETHER = 32, 4
"""Numbers of a piece that a thread has at most, and columns: more of each hide the time that one takes."""
_BOX = 256
"""Columns of a copy at most."""
_MOST_STAGES = 32
"""As many barriers as there can be in an array."""
_MOST_THREAD_BLOCKS = 3
"""Of a multiprocessor: the others copy while one computes."""
_RESERVED = 3 * 1024
"""Shared memory of a thread block that does not hold pieces: barriers, sums of warps, what the driver takes."""
_TILING = plgpu.Tiling(((1, _LANES), (_LANES // 4,), (1,)))
_LAYOUT = plgpu.Layout.TILED(_TILING, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
_ROW, _COLUMN = _LAYOUT.reduce(1), _LAYOUT.reduce(0)
_LOWEST = float(jnp.finfo(jnp.float32).min)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shape:
    groups: int
    """Of heads."""
    probes: int
    voters: int
    """Of a group."""
    together: int
    """Columns of a piece that a thread has."""
    pieces: int
    """Of a row."""
    thread_blocks: int
    """Of a multiprocessor."""
    stages: int
    """Pieces that a thread block holds."""

    @property
    def copies(self) -> int:
        """How often each row is there: Mosaic lays out no array of a single row, so the only one is taken twice."""
        return 2 if self.probes == 1 else 1

    @property
    def rows(self) -> int:
        return self.probes * self.copies

    @property
    def columns(self) -> int:
        """Of a piece."""
        return self.together * _LANES

    @property
    def box(self) -> int:
        """Columns of a copy."""
        return min(self.columns, _BOX)

    @property
    def boxes(self) -> int:
        return self.columns // self.box


def reason_against(probes: int) -> str | None:
    """Why the kernel cannot take rows of so many probes, None if it can."""
    if probes > MOST_PROBES:
        return f"there are {probes} probes, more than {MOST_PROBES}"
    return None


def _cut(groups: int, probes: int, voters: int, num_blocks: int) -> _Shape:
    """As many thread blocks as have room for a voter's rows.

    Rows that never fit stay in L2 between the passes if few thread blocks read at a time.
    """
    together = max(1, min(_MOST_ROWS // probes, _MOST_TOGETHER))
    columns = together * _LANES
    pieces = -(-num_blocks // columns)

    def stages(thread_blocks):
        return min((SHARED_MEMORY // thread_blocks - _RESERVED) // (4 * max(probes, 2) * columns), _MOST_STAGES)

    thread_blocks = next((number for number in range(_MOST_THREAD_BLOCKS, 1, -1) if stages(number) >= pieces), 1)
    return _Shape(
        groups=groups,
        probes=probes,
        voters=voters,
        together=together,
        pieces=pieces,
        thread_blocks=thread_blocks,
        stages=stages(thread_blocks),
    )


def block_votes(
    best: jax.Array, local_lse: jax.Array, first: jax.Array, end: jax.Array, *, num_blocks: int, multiprocessors: int
) -> jax.Array:
    """Runs the kernel.

    Args:
        best: `[n G P V, B]` float32, B at least `num_blocks` and a multiple of 4: the logit of the best group of each
            block, rows by query block, group of heads, probe and voter; anything where a block may not be retrieved.
        local_lse: `[n, G, P, V]` float32, the log-sum-exp of what each probe reads anyhow.
        first, end: `[n]` int32: the blocks `first .. end - 1` may be retrieved, of `num_blocks`.

    Returns: `[n, G, V, num_blocks]` float32, the largest of `scores.shares_of_best` over the probes; 0 for blocks that
    may not be retrieved.
    """
    n, groups, probes, voters = local_lse.shape
    shape = _cut(groups, probes, voters, num_blocks)
    operands = {
        "best": best.reshape(n * groups, probes, voters, -1),
        "local_lse": jnp.repeat(local_lse.swapaxes(2, 3).reshape(-1, probes), shape.copies, axis=1),
        "first": first,
        "end": end,
    }
    scratch = {
        "pieces": plgpu.SMEM((shape.stages, shape.boxes, shape.rows, shape.box), jnp.float32),
        "full": plgpu.Barrier(num_arrivals=shape.boxes * shape.copies, num_barriers=shape.stages),
        "empty": plgpu.Barrier(num_barriers=shape.stages),
    }

    def body(operands, votes):
        pl.run_scoped(lambda scratch: _thread_block(shape, operands, votes, scratch), scratch, collective_axes="wg")

    votes = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((n * groups * voters, shape.pieces * shape.columns), jnp.float32),
        grid=(multiprocessors * shape.thread_blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
        kernel_name="block_votes",
        # Nothing is both read and written, so no barriers have to keep the two apart.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(operands)
    return votes.reshape(n, groups, voters, -1)[..., :num_blocks]


def _thread_block(shape, operands, votes, scratch):
    # No warpgroup gets registers of the other: several thread blocks share those of a multiprocessor.
    lax.cond(
        lax.axis_index("wg") == 0,
        lambda: _vote(shape, operands, votes, scratch),
        lambda: _copy(shape, operands, scratch),
    )


def _of_items(shape, operands, function):
    """Calls `function(item, first, end, pieces, done)` for each voter of a query block that this thread block takes.

    `pieces` are the first piece with blocks that may be retrieved and their number, `done` the copies before.
    """
    of_query_block = shape.groups * shape.voters

    def of_item(info, carry):
        (item,) = info.index
        query_block = lax.div(item, jnp.int32(of_query_block))
        first, end = operands["first"][query_block], operands["end"][query_block]
        start = lax.div(jnp.where(first < end, first, 0), jnp.int32(shape.columns))
        count = lax.div(jnp.where(first < end, end, 0) + shape.columns - 1, jnp.int32(shape.columns)) - start
        function(item, first, end, (start, count), carry)
        return carry + count * jnp.where(count > shape.stages, 2, 1)

    items = operands["first"].shape[0] * of_query_block
    return plgpu.nd_loop((items,), collective_axes="block", init_carry=jnp.int32(0))(of_item)


def _slot(shape, copy):
    return lax.rem(copy, jnp.int32(shape.stages))


def _copy(shape, operands, scratch):
    """The copying warpgroup: the pieces of a voter's rows, a second time where they do not all fit."""

    def await_free(copy):
        plgpu.barrier_wait(scratch["empty"].at[_slot(shape, copy)])

    def of_item(item, first, end, pieces, done):
        del first, end
        start, count = pieces
        group, voter = lax.div(item, jnp.int32(shape.voters)), lax.rem(item, jnp.int32(shape.voters))

        @pl.loop(0, count * jnp.where(count > shape.stages, 2, 1))
        def _piece(index):
            slot = _slot(shape, done + index)
            pl.when(done + index >= shape.stages)(lambda: await_free(done + index))
            column = (start + lax.rem(index, count)) * shape.columns
            for box, copy in itertools.product(range(shape.boxes), range(shape.copies)):
                plgpu.copy_gmem_to_smem(
                    operands["best"].at[group, :, voter, pl.ds(column + box * shape.box, shape.box)],
                    scratch["pieces"].at[slot, box, pl.ds(copy, shape.probes)],
                    scratch["full"].at[slot],
                )

    done = _of_items(shape, operands, of_item)
    # A barrier may not be given up before its last phase has been seen.
    pl.loop(jnp.maximum(done - shape.stages, 0), done)(await_free)


def _vote(shape, operands, votes, scratch):
    """The warpgroup that computes."""

    def filled(value, layout, *dimensions):
        return plgpu.layout_cast(jnp.full(dimensions, value, jnp.float32), layout)

    def by_row(values):
        return plgpu.layout_cast(lax.broadcast_in_dim(values, (shape.rows, _LANES), [0]), _LAYOUT)

    def load(slot, index):
        """Some columns of a piece: one of each thread, of the rows of all probes."""
        box, column = divmod(index * _LANES, shape.box)
        return plgpu.load(scratch["pieces"].at[slot, box, :, pl.ds(column, _LANES)], layout=_LAYOUT)

    def release(slot):
        # Orders the reads before the next copy into the stage.
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch["empty"].at[slot])

    def log_sum_exp(item, first, end, pieces, done):
        """Of what each probe reads anyhow and the blocks that may be retrieved: `[P]`."""
        start, count = pieces
        lanes = plgpu.broadcasted_iota(jnp.int32, (shape.rows, _LANES), 1, layout=_LAYOUT)

        def of_piece(index, so_far):
            top, total = so_far
            slot = _slot(shape, done + index)
            plgpu.barrier_wait(scratch["full"].at[slot])
            logits = []
            for i in range(shape.together):
                blocks = lanes + ((start + index) * shape.columns + i * _LANES)
                # Finite, so that nothing subtracts infinity from infinity.  It counts as 1 where a thread has had
                # nothing else, and as 0 beside what another has.
                logits.append(jnp.where((blocks >= first) & (blocks < end), load(slot, i), _LOWEST))
            pl.when(count > shape.stages)(lambda: release(slot))
            higher = functools.reduce(jnp.maximum, logits, top)
            return higher, total * jnp.exp(top - higher) + sum(jnp.exp(x - higher) for x in logits)

        lowest = filled(_LOWEST, _LAYOUT, shape.rows, _LANES)
        top, total = lax.fori_loop(0, count, of_piece, (lowest, filled(0.0, _LAYOUT, shape.rows, _LANES)))
        local = plgpu.load(operands["local_lse"].at[item], layout=_ROW, optimized=False)
        shift = jnp.maximum(jnp.max(top, axis=1), local)
        total = jnp.sum(total * jnp.exp(top - by_row(shift)), axis=1) + jnp.exp(local - shift)
        return shift + jnp.log(total)

    def store(item, column, values):
        votes.at[item, pl.ds(column, _LANES)][...] = values

    def store_votes(item, first, end, pieces, done):
        start, count = pieces
        lse = by_row(log_sum_exp(item, first, end, pieces, done))
        lanes = plgpu.broadcasted_iota(jnp.int32, (_LANES,), 0, layout=_COLUMN)
        again = count > shape.stages
        done = done + jnp.where(again, count, 0)

        @pl.loop(0, count)
        def _piece(index):
            slot = _slot(shape, done + index)
            pl.when(again)(lambda: plgpu.barrier_wait(scratch["full"].at[slot]))
            column = (start + index) * shape.columns
            found = []
            for i in range(shape.together):
                blocks = lanes + (column + i * _LANES)
                share = jnp.exp(jnp.max(load(slot, i) - lse, axis=0))
                found.append(jnp.where((blocks >= first) & (blocks < end), share, 0.0))
            release(slot)
            for i, share in enumerate(found):
                store(item, column + i * _LANES, share)

    def of_item(item, first, end, pieces, done):
        start, count = pieces

        def none(index):
            store(item, index * _LANES, filled(0.0, _COLUMN, _LANES))

        pl.loop(0, start * shape.together)(none)
        pl.when(count > 0)(lambda: store_votes(item, first, end, pieces, done))
        pl.loop((start + count) * shape.together, shape.pieces * shape.together)(none)

    _of_items(shape, operands, of_item)
