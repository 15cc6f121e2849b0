"""Bytes of shared memory as the operand of a product that is turned round: read transposed, and widened to float16.

Below Pallas, in Mosaic's terms: what each thread of a warpgroup holds.  `ldmatrix` transposes pairs of bytes, and what
a thread then has of two keys and two columns is what it holds of two rows of the operand, in an order of rows that
suits.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

COLUMNS = 128
"""Columns of bytes that lie side by side in shared memory."""
_ROWS = 64
_WGMMA = plgpu.Layout.WGMMA
_HALVES = (
    plgpu.TilingTransform((8, COLUMNS // 2)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(COLUMNS),  # pyright: ignore[reportAbstractUsage]
)
_BYTES = (
    plgpu.TilingTransform((8, COLUMNS)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(COLUMNS),  # pyright: ignore[reportAbstractUsage]
)


def strided(numbers, first, step, layout):
    """Every `step`-th of the numbers from the first on, in a layout of rows or columns of `WGMMA`."""
    by_row = layout == _WGMMA.reduce(1)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct((_ROWS,), jnp.float32, layout=layout),
    )
    def read(_, numbers, first):
        f32 = ir.F32Type.get()
        lane, warp = _lane_and_warp()
        if by_row:
            own = arith.addi(arith.muli(warp, _i32(16)), arith.shrui(lane, _i32(2)))
            places = [0, 8]
        else:
            own = arith.muli(arith.andi(lane, _i32(3)), _i32(2))
            places = [8 * block + place for block in range(_ROWS // 8) for place in range(2)]
        start = arith.addi(arith.muli(own, _i32(step)), first.registers[()])
        base = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(numbers), [start], f32)
        # Loads that stay where they are: moved forward they would take the registers of all groups.
        found = [
            llvm.inline_asm(f32, [base], f"ld.shared.f32 $0, [$1+{4 * place * step}];", "=f,r", has_side_effects=True)
            for place in places
        ]
        size, axis = (1, 1) if by_row else (2, 0)
        held = [_vector(*found[at : at + size]) for at in range(0, len(found), size)]
        return _array(mgpu.WGMMA_LAYOUT.reduce((axis,)), (_ROWS,), held)

    return read(numbers, first)  # pyright: ignore[reportCallIssue]


def ordered(array):
    """The array with its columns in the order in which `rows` has them."""
    columns = array.reshape(*array.shape[:-1], -1, 8, 2)
    return columns.swapaxes(-1, -2).reshape(array.shape)


def rows(block, half):
    """A half of the columns of a tile `[keys, 128]` of bytes as columns, in float16 `[keys, 64]`.

    Of each 16 columns those at even places come first, then the others: a thread has four bytes side by side, which
    are two columns each of two fragments.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(_BYTES),),
        return_type=plgpu.ShapeDtypeStruct((_ROWS, _ROWS), jnp.float16, layout=_WGMMA),
    )
    def read(_, block):
        memory = ir.MemRefType(block.type)
        eight_rows, _, row, _ = memory.get_strides_and_offset()[0]
        lane, warp = _lane_and_warp()
        # Matrices of 8 rows and 16 bytes: rows r, r + 8, then the next 16 bytes.
        key, second = arith.andi(lane, _i32(7)), arith.andi(arith.shrui(lane, _i32(3)), _i32(1))
        place = arith.muli(arith.addi(arith.muli(warp, _i32(2)), second), _i32(eight_rows))
        place = arith.addi(place, arith.muli(key, _i32(row)))
        registers = []
        for start in range(0, 4, 2):
            # Pieces of 16 bytes are swizzled.
            piece = arith.xori(arith.addi(arith.shrui(lane, _i32(4)), _i32(4 * half + start)), key)
            offset = arith.addi(place, arith.muli(piece, _i32(16)))
            words = _load_matrices(block, offset, "")
            for at in range(0, 4, 2):
                upper, lower = (_widened(words[at + index], memory.element_type) for index in range(2))
                registers += [upper[0], lower[0], upper[1], lower[1]]
        return _array(mgpu.WGMMA_LAYOUT, (_ROWS, _ROWS), _pairs(registers))

    return read(block)  # pyright: ignore[reportCallIssue]


def load(block, half):
    """Columns of a tile `[keys, 128]` of bytes as rows, in float16 `[64, keys]`.

    Warp w of the four has the 16 columns from `32 w + 16 half` on: rows `16 w + r` and `16 w + 8 + r` are columns 2r
    and 2r + 1 of those.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(_BYTES),),
        return_type=plgpu.ShapeDtypeStruct((_ROWS, _ROWS), jnp.float16, layout=plgpu.Layout.WGMMA),
    )
    def read(_, block):
        memory = ir.MemRefType(block.type)
        rows, _, row, _ = memory.get_strides_and_offset()[0]
        lane, warp = _lane_and_warp()
        key, keys = arith.andi(lane, _i32(7)), arith.shrui(lane, _i32(3))
        # Pieces of 16 bytes are swizzled.
        piece = arith.xori(arith.addi(arith.muli(warp, _i32(2)), _i32(half)), key)
        offset = arith.addi(arith.muli(keys, _i32(rows)), arith.muli(key, _i32(row)))
        offset = arith.addi(offset, arith.muli(piece, _i32(16)))
        registers = []
        for start in range(0, _ROWS // 8, 4):
            # A word is columns 2r and 2r + 1 of a key, then those of the next key.
            for word in _load_matrices(block, arith.addi(offset, _i32(start * rows)), ".trans"):
                registers += _widened(word, memory.element_type)
        return _array(mgpu.WGMMA_LAYOUT, (_ROWS, _ROWS), _pairs(registers))

    return read(block)  # pyright: ignore[reportCallIssue]


def _load_matrices(block, offset, turned):
    """Four matrices of 8 rows of 16 bytes each, at this thread's row; four words."""
    i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
    words = llvm.inline_asm(
        ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>"),
        [mgpu.utils.getelementptr(mgpu.utils.memref_ptr(block), [offset], i8)],
        f"ldmatrix.sync.aligned.m8n8.x4{turned}.shared.b16 {{$0, $1, $2, $3}}, [$4];",
        "=r,=r,=r,=r,r",
        has_side_effects=True,
    )
    return [llvm.extractvalue(i32, words, [index]) for index in range(4)]


def _widened(word, kind):
    """Four bytes as two words of two numbers in float16."""
    i32 = ir.IntegerType.get_signless(32)
    wide = llvm.inline_asm(ir.Type.parse("!llvm.struct<(i32, i32)>"), [word], _WIDEN[str(kind)], "=r,=r,r")
    return [llvm.extractvalue(i32, wide, [index]) for index in range(2)]


def _pairs(words):
    pair = ir.VectorType.get((2,), ir.F16Type.get())
    return [mgpu.utils.bitcast(word, pair) for word in words]


_WIDEN = {
    # The byte, its sign turned over, as the last eight bits of 1,024 and more.
    "i8": """{
        .reg .b32 t, c;
        mov.b32 c, 0x64806480;
        lop3.b32 t, $2, 0x00ff00ff, c, 0x6a;
        sub.rn.f16x2 $0, t, c;
        shr.u32 t, $2, 8;
        lop3.b32 t, t, 0x00ff00ff, c, 0x6a;
        sub.rn.f16x2 $1, t, c;
        }""",
    "f8E4M3FN": """{
        .reg .b32 t;
        .reg .b16 low, high;
        prmt.b32 t, $2, 0, 0x3120;
        mov.b32 {low, high}, t;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
    "f8E5M2": """{
        prmt.b32 $0, $2, 0, 0x2404;
        and.b32 $1, $2, 0xff00ff00;
        }""",
}
"""PTX that makes of four bytes the first and third, and the second and fourth, in float16."""


def store(target, half, array):
    """Stores the rows of `array [64, heads]`, in the order of `load`, as columns of `target [heads, 128]`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA), return_type=None)
    def write(_, target, array):
        f32 = ir.F32Type.get()
        (stride, _), _ = ir.MemRefType(target.type).get_strides_and_offset()
        lane, warp = _lane_and_warp()
        column = arith.addi(arith.muli(warp, _i32(32)), arith.muli(arith.shrui(lane, _i32(2)), _i32(2)))
        head = arith.muli(arith.andi(lane, _i32(3)), _i32(2 * stride))
        base = mgpu.utils.getelementptr(
            mgpu.utils.memref_ptr(target), [arith.addi(arith.addi(column, head), _i32(16 * half))], f32
        )
        registers = list(array.registers.flat)
        for index in range(array.shape[1] // 8):
            for which in range(2):
                value = _vector(*(llvm.extractelement(r, _i32(which)) for r in registers[2 * index : 2 * index + 2]))
                llvm.store(value, mgpu.utils.getelementptr(base, [(8 * index + which) * stride], f32), alignment=8)

    write(target, array)  # pyright: ignore[reportCallIssue]


def store_transposed(target, array):
    """Stores `array [64, heads]` of float16 as the rows of `target [heads, 64]`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(_HALVES), _WGMMA), return_type=None)
    def write(_, target, array):
        i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
        eight_rows, _, row, _ = ir.MemRefType(target.type).get_strides_and_offset()[0]
        lane, warp = _lane_and_warp()
        # Matrices of 8 heads and 8 keys: keys r, r + 8, then the next heads.
        head, second = arith.andi(lane, _i32(7)), arith.andi(arith.shrui(lane, _i32(3)), _i32(1))
        piece = arith.xori(arith.addi(arith.muli(warp, _i32(2)), second), head)
        offset = arith.addi(arith.muli(arith.shrui(lane, _i32(4)), _i32(eight_rows)), arith.muli(head, _i32(row)))
        offset = arith.addi(arith.muli(offset, _i32(2)), arith.muli(piece, _i32(16)))
        base = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(target), [offset], i8)
        words = [mgpu.utils.bitcast(register, i32) for register in array.registers.flat]
        for start in range(0, len(words), 4):
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [mgpu.utils.getelementptr(base, [start * eight_rows], i8), *words[start : start + 4]],
                "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1, $2, $3, $4};",
                "r,r,r,r,r",
                has_side_effects=True,
            )

    write(target, array)  # pyright: ignore[reportCallIssue]


def _i32(value):
    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, ir.IntegerAttr.get(i32, value))


def _lane_and_warp():
    thread = mgpu.utils.thread_idx()
    return arith.andi(thread, _i32(31)), arith.andi(arith.shrui(thread, _i32(5)), _i32(3))


def _vector(*values):
    vector = llvm.mlir_undef(ir.VectorType.get((len(values),), values[0].type))
    for index, value in enumerate(values):
        vector = llvm.insertelement(vector, value, _i32(index))
    return vector


def _array(layout, shape, registers):
    """An array of a layout from its registers, in order."""
    held = np.empty(layout.registers_shape(shape), object)
    held.flat[:] = registers
    return mgpu.FragmentedArray(_registers=held, _layout=layout, _is_signed=None)
