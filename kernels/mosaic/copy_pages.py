"""Pages of a cache one after the other, for Hopper through Pallas Mosaic GPU.

Persistent thread blocks of one warpgroup that lets the copy engine do all: piece after piece of the pages into shared
memory and from there to their place, several at a time.  XLA's gather, which reads and writes an element for each
thread, takes two to three times as long.
"""

import dataclasses
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxinfer.kernels.tiles import SHARED_MEMORY, device

_BOX = 256
"""Numbers of a copy along each dimension at most."""
_PIECE_BYTES = 40 * 1024
_STAGES = 6
_THREAD_BLOCKS = 8
"""Of a multiprocessor, of pieces so small that it is their number that takes time."""
_ALIGNMENT = 128
"""Bytes of a place in shared memory."""
_RESERVED = 2 * 1024
_LEAST_BYTES = 1024
"""Of a page: of smaller ones a multiprocessor would have to copy hundreds, one after another."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shape:
    parts: int
    """Pieces of a page."""
    rows: int
    columns: int
    thread_blocks: int
    stages: int


def _cut(array) -> _Shape | str:
    """How a page is copied, or why it cannot be."""
    size, itemsize = math.prod(array.shape[2:]), array.dtype.itemsize
    if size * itemsize < _LEAST_BYTES:
        return f"pages have {size * itemsize} bytes, fewer than {_LEAST_BYTES}"
    columns = math.gcd(size, _BOX)
    rows = size // columns
    most = min(_BOX, _PIECE_BYTES // (columns * itemsize))
    parts = next(n for n in range(1, rows + 1) if rows % n == 0 and rows // n <= most)
    piece = rows // parts * columns * itemsize
    if piece % _ALIGNMENT:
        return f"pages of {size * itemsize} bytes do not fall into pieces of multiples of {_ALIGNMENT}"
    thread_blocks = max(1, min(_THREAD_BLOCKS, _PIECE_BYTES // piece))
    stages = min(_STAGES, (SHARED_MEMORY // thread_blocks - _RESERVED) // piece)
    return _Shape(parts=parts, rows=rows // parts, columns=columns, thread_blocks=thread_blocks, stages=stages)


def reason_against(array: jax.Array | jax.ShapeDtypeStruct, pages: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why the kernel cannot take pages of this array, None if it can."""
    if 0 in array.shape or 0 in pages.shape:
        return "there are no pages"
    cut = _cut(array)
    return cut if isinstance(cut, str) else None


def copy_pages(array, layer, pages, count, *, multiprocessors: int | None = None):
    """See `jaxinfer.kernels.pages`."""
    shape = _cut(array)
    assert isinstance(shape, _Shape)
    places = (layer * array.shape[1] + pages.reshape(-1)).astype(jnp.int32)
    blocks = (multiprocessors or device().multiprocessors) * shape.thread_blocks
    scratch = {
        "pieces": plgpu.SMEM((shape.stages, shape.rows, shape.columns), array.dtype),
        "full": plgpu.Barrier(num_barriers=shape.stages),
    }

    def body(array, places, count, out):
        pl.run_scoped(lambda scratch: _copy(shape, blocks, array, places, count[0], out, scratch), scratch)

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((places.size * shape.parts, shape.rows, shape.columns), array.dtype),
        grid=(blocks,),
        grid_names=("block",),
        kernel_name="copy_pages",
    )(array.reshape(-1, shape.rows, shape.columns), places, jnp.minimum(count, places.size)[None])
    return out.reshape(*pages.shape, *array.shape[2:])


def _copy(shape, blocks, array, places, count, out, scratch):
    """What a thread block copies: every so-manieth piece, those to come on their way in while one is on its way out."""
    first = lax.axis_index("block")
    pieces = jnp.maximum(count * shape.parts - first + blocks - 1, 0)
    pieces = lax.div(pieces, jnp.int32(blocks))

    def start(number):
        slot = lax.rem(number, jnp.int32(shape.stages))
        piece = first + number * blocks
        place = places[lax.div(piece, jnp.int32(shape.parts))] * shape.parts + lax.rem(piece, jnp.int32(shape.parts))
        plgpu.copy_gmem_to_smem(array.at[place], scratch["pieces"].at[slot], scratch["full"].at[slot])

    ahead = shape.stages - 1
    pl.loop(0, jnp.minimum(pieces, ahead))(start)

    @pl.loop(0, pieces)
    def _piece(number):
        slot = lax.rem(number, jnp.int32(shape.stages))
        plgpu.barrier_wait(scratch["full"].at[slot])
        plgpu.copy_smem_to_gmem(scratch["pieces"].at[slot], out.at[first + number * blocks])
        # All but this one have been read: the place of the one before is free.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        pl.when(number + ahead < pieces)(lambda: start(number + ahead))

    plgpu.wait_smem_to_gmem(0)
