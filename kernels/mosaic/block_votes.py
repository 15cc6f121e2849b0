"""Between the levels of retrieval on Hopper: from the best product of each block, by row, to how the blocks stand.

A vote is the largest share that a block has of a voter's softmax for any of its probes.  Persistent thread blocks, as
many of a multiprocessor as have room, take one query block and group of heads after another, voter by voter: one
warpgroup copies pieces of the rows of all probes of a voter, the other passes over them twice, for the log-sum-exp and
for the votes, which it adds up in shared memory.  Where the pieces of a voter fit there too they stay from the first
pass to the second; else they are copied twice.  Only pieces with blocks that may be retrieved are read.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxinfer.kernels.mosaic.block_scores import SUMS
from jaxinfer.kernels.selection.scores import ALIKE, bonus
from jaxinfer.kernels.tiles import SHARED_MEMORY

MOST_PROBES = 32
"""What the registers hold."""
_THREADS = 128
_PAIRED_PROBES = 8
"""Rows up to which a thread has two neighbouring columns, that is, a word of what is copied."""
_MOST_ROWS, _MOST_TOGETHER = 32, 4
"""Numbers of a piece that a thread has at most, and sets of columns: more of each hide the time that one takes."""
_BOX = 256
"""Columns of a copy at most."""
_MOST_STAGES = 32
"""As many barriers as there can be in an array."""
_MOST_THREAD_BLOCKS = 3
"""Of a multiprocessor: the others copy while one computes."""
_RESERVED = 3 * 1024
"""Shared memory of a thread block without pieces and sums: barriers, sums of warps, what the driver takes."""
_LOWEST = float(jnp.finfo(jnp.float32).min)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shape:
    groups: int
    """Of heads."""
    probes: int
    voters: int
    """Of a group."""
    together: int
    """Sets of columns of a piece."""
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
    def vector(self) -> int:
        """Neighbouring columns of a thread."""
        return _vector(self.probes)

    @property
    def lanes(self) -> int:
        """Columns that the warpgroup has at a time, of the rows of all probes: a set."""
        return self.vector * _THREADS

    @property
    def columns(self) -> int:
        """Of a piece."""
        return self.together * self.lanes

    @property
    def layout(self):
        """Of a set."""
        tiling = plgpu.Tiling(((1, self.lanes), (self.lanes // 4,), (self.vector,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)

    @property
    def box(self) -> int:
        """Columns of a copy."""
        return min(self.columns, _BOX)

    @property
    def boxes(self) -> int:
        return self.columns // self.box


def reason_against(probes: int, num_blocks: int) -> str | None:
    """Why the kernel cannot take rows of so many probes and blocks, None if it can."""
    if probes > MOST_PROBES:
        return f"there are {probes} probes, more than {MOST_PROBES}"
    if _cut(1, probes, 1, num_blocks).stages < 2:
        return f"{num_blocks} blocks are more than shared memory can count votes of"
    return None


def _vector(probes):
    return 2 if probes <= _PAIRED_PROBES else 1


def _cut(groups: int, probes: int, voters: int, num_blocks: int) -> _Shape:
    """As many thread blocks as have room for a voter's rows.

    Rows that never fit stay in L2 between the passes if few thread blocks read at a time.
    """
    vector = _vector(probes)
    together = max(1, min(_MOST_ROWS // (probes * vector), _MOST_TOGETHER))
    columns = together * vector * _THREADS
    pieces = -(-num_blocks // columns)

    def stages(thread_blocks):
        room = SHARED_MEMORY // thread_blocks - _RESERVED - 4 * pieces * columns
        return min(room // (SUMS.dtype.itemsize * max(probes, 2) * columns), _MOST_STAGES)

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
    best: jax.Array,
    q_scale: jax.Array,
    local_lse: jax.Array,
    first: jax.Array,
    end: jax.Array,
    *,
    num_blocks: int,
    scale: float,
    group: int,
    multiprocessors: int,
) -> jax.Array:
    """Runs the kernel.

    Args:
        best: `[n G P V, B]` float16, B at least `num_blocks` and a multiple of 8: `best` times `scale q_scale`, plus
            `ln(group)`, is the logit of the best group of each block, rows by query block, group of heads, probe and
            voter; anything where a block may not be retrieved.
        q_scale: `[n, G, P, V]` float32, positive.
        local_lse: `[n, G, P, V]` float32, the log-sum-exp of what each probe reads anyhow.
        first, end: `[n]` int32: the blocks `first .. end - 1` may be retrieved, of `num_blocks`.
        scale: positive.
        group: tokens of a group.

    Returns: `[n, G, num_blocks]` float32: `scores.standing` of the votes, which are the largest of
    `scores.shares_of_best` over the probes; 0 for blocks that may not be retrieved.
    """
    n, groups, probes, voters = local_lse.shape
    shape = _cut(groups, probes, voters, num_blocks)

    def by_voter(array):
        return jnp.repeat(array.swapaxes(2, 3).reshape(-1, probes), shape.copies, axis=1)

    operands = {
        "best": best.reshape(n * groups, probes, voters, -1),
        "factors": by_voter(q_scale * scale),
        # Less what every logit has.
        "local_lse": by_voter(local_lse - math.log(group)),
        "first": first,
        "end": end,
    }
    scratch = {
        "pieces": plgpu.SMEM((shape.stages, shape.boxes, shape.rows, shape.box), SUMS),
        "sums": plgpu.SMEM((shape.pieces * shape.columns,), jnp.float32),
        "full": plgpu.Barrier(num_arrivals=shape.boxes * shape.copies, num_barriers=shape.stages),
        "empty": plgpu.Barrier(num_barriers=shape.stages),
    }

    def body(operands, stands):
        pl.run_scoped(lambda scratch: _thread_block(shape, operands, stands, scratch), scratch, collective_axes="wg")

    stands = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((n * groups, shape.pieces * shape.columns), jnp.float32),
        grid=(multiprocessors * shape.thread_blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
        kernel_name="block_votes",
        # Nothing is both read and written, so no barriers have to keep the two apart.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(operands)
    return stands.reshape(n, groups, -1)[..., :num_blocks]


def _thread_block(shape, operands, stands, scratch):
    # No warpgroup gets registers of the other: several thread blocks share those of a multiprocessor.
    lax.cond(
        lax.axis_index("wg") == 0,
        lambda: _vote(shape, operands, stands, scratch),
        lambda: _copy(shape, operands, scratch),
    )


def _of_items(shape, operands, function):
    """Calls `function(item, first, end, pieces, done)` for each query block and group that this thread block takes.

    `pieces` are the first piece with blocks that may be retrieved and their number, `done` the copies before.
    """

    def of_item(info, carry):
        (item,) = info.index
        query_block = lax.div(item, jnp.int32(shape.groups))
        first, end = operands["first"][query_block], operands["end"][query_block]
        start = lax.div(jnp.where(first < end, first, 0), jnp.int32(shape.columns))
        count = lax.div(jnp.where(first < end, end, 0) + shape.columns - 1, jnp.int32(shape.columns)) - start
        function(item, first, end, (start, count), carry)
        return carry + shape.voters * _copies(shape, count)

    items = operands["first"].shape[0] * shape.groups
    return plgpu.nd_loop((items,), collective_axes="block", init_carry=jnp.int32(0))(of_item)


def _copies(shape, pieces):
    """How many copies bring the pieces of a voter: a second time where they do not all fit."""
    return pieces * jnp.where(pieces > shape.stages, 2, 1)


def _slot(shape, copy):
    return lax.rem(copy, jnp.int32(shape.stages))


def _copy(shape, operands, scratch):
    """The copying warpgroup: the pieces of each voter's rows."""

    def await_free(copy):
        plgpu.barrier_wait(scratch["empty"].at[_slot(shape, copy)])

    def of_item(item, first, end, pieces, done):
        del first, end
        start, count = pieces

        def of_voter(voter, done):
            def of_piece(index, done):
                slot = _slot(shape, done)
                pl.when(done >= shape.stages)(lambda: await_free(done))
                column = (start + lax.rem(index, count)) * shape.columns
                for box, copy in itertools.product(range(shape.boxes), range(shape.copies)):
                    plgpu.copy_gmem_to_smem(
                        operands["best"].at[item, :, voter, pl.ds(column + box * shape.box, shape.box)],
                        scratch["pieces"].at[slot, box, pl.ds(copy, shape.probes)],
                        scratch["full"].at[slot],
                    )
                return done + 1

            return lax.fori_loop(0, _copies(shape, count), of_piece, done)

        lax.fori_loop(0, shape.voters, of_voter, done)

    done = _of_items(shape, operands, of_item)
    # A barrier may not be given up before its last phase has been seen.
    pl.loop(jnp.maximum(done - shape.stages, 0), done)(await_free)


def _vote(shape, operands, stands, scratch):
    """The warpgroup that computes."""
    layout = shape.layout
    by_probe, by_column = layout.reduce(1), layout.reduce(0)

    def filled(value, layout, *dimensions):
        return plgpu.layout_cast(jnp.full(dimensions, value, jnp.float32), layout)

    def across(values):
        return plgpu.layout_cast(lax.broadcast_in_dim(values, (shape.rows, shape.lanes), [0]), layout)

    def load(slot, index):
        """A set of columns of a piece."""
        box, column = divmod(index * shape.lanes, shape.box)
        source = scratch["pieces"].at[slot, box, :, pl.ds(column, shape.lanes)]
        return plgpu.load(source, layout=layout).astype(jnp.float32)

    def release(slot):
        # Orders the reads before the next copy into the stage.
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch["empty"].at[slot])

    def of_row(name, row):
        return plgpu.load(operands[name].at[row], layout=by_probe, optimized=False)

    def softmax(factors, local, first, end, pieces, done):
        """Of what each probe reads anyhow and the blocks that may be retrieved: largest logit, log-sum-exp, `[P]`."""
        start, count = pieces
        lanes = plgpu.broadcasted_iota(jnp.int32, (shape.rows, shape.lanes), 1, layout=layout)

        def of_piece(index, so_far):
            top, total = so_far
            slot = _slot(shape, done + index)
            plgpu.barrier_wait(scratch["full"].at[slot])
            logits = []
            for i in range(shape.together):
                blocks = lanes + ((start + index) * shape.columns + i * shape.lanes)
                # Finite, so that nothing subtracts infinity from infinity.  It counts as 1 where a thread has had
                # nothing else, and as 0 beside what another has.
                logits.append(jnp.where((blocks >= first) & (blocks < end), load(slot, i) * factors, _LOWEST))
            pl.when(count > shape.stages)(lambda: release(slot))
            higher = functools.reduce(jnp.maximum, logits, top)
            return higher, total * jnp.exp(top - higher) + sum(jnp.exp(x - higher) for x in logits)

        lowest = filled(_LOWEST, layout, shape.rows, shape.lanes)
        top, total = lax.fori_loop(0, count, of_piece, (lowest, filled(0.0, layout, shape.rows, shape.lanes)))
        largest = jnp.max(top, axis=1)
        shift = jnp.maximum(largest, local)
        total = jnp.sum(total * jnp.exp(top - across(shift)), axis=1) + jnp.exp(local - shift)
        return largest, shift + jnp.log(total)

    def add_votes(item, voter, first, end, pieces, done):
        """Adds the votes of a voter to those before, and stores what the last one's make."""
        start, count = pieces
        row = item * shape.voters + voter
        factors = across(of_row("factors", row))
        largest, lse = softmax(factors, of_row("local_lse", row), first, end, pieces, done)
        # For every column the same, and so where the shares are.
        best = jnp.exp(jnp.max(across(largest - lse), axis=0))
        lse = across(lse)
        lanes = plgpu.broadcasted_iota(jnp.int32, (shape.lanes,), 0, layout=by_column)
        later = plgpu.layout_cast(jnp.full(shape.lanes, voter, jnp.int32), by_column) > 0
        again = count > shape.stages
        done = done + jnp.where(again, count, 0)

        @pl.loop(0, count)
        def _piece(index):
            slot = _slot(shape, done + index)
            pl.when(again)(lambda: plgpu.barrier_wait(scratch["full"].at[slot]))
            shares = [jnp.exp(jnp.max(load(slot, i) * factors - lse, axis=0)) for i in range(shape.together)]
            release(slot)
            for i, share in enumerate(shares):
                column = (start + index) * shape.columns + i * shape.lanes
                blocks, columns = lanes + column, pl.ds(column, shape.lanes)
                vote = share + jnp.where((share >= best * ALIKE) & (share > 0.0), float(bonus(shape.voters)), 0.0)
                vote = jnp.where((blocks >= first) & (blocks < end), vote, 0.0)
                # A thread reads what it wrote itself.
                sums = scratch["sums"].at[columns]
                vote += jnp.where(later, plgpu.load(sums, layout=by_column), 0.0)

                @pl.when(voter < shape.voters - 1)
                def _(sums=sums, vote=vote):
                    sums[...] = vote

                @pl.when(voter == shape.voters - 1)
                def _(columns=columns, vote=vote):
                    stands.at[item, columns][...] = vote

    def of_item(item, first, end, pieces, done):
        start, count = pieces

        def none(index):
            stands.at[item, pl.ds(index * shape.lanes, shape.lanes)][...] = filled(0.0, by_column, shape.lanes)

        def of_voter(voter):
            add_votes(item, voter, first, end, pieces, done + voter * _copies(shape, count))

        pl.loop(0, start * shape.together)(none)
        pl.when(count > 0)(lambda: pl.loop(0, shape.voters)(of_voter))
        pl.loop((start + count) * shape.together, shape.pieces * shape.together)(none)

    _of_items(shape, operands, of_item)
