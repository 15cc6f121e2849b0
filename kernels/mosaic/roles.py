"""What the warpgroups of a thread block do: the last one copies, those before it compute."""

from collections.abc import Callable

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax


def copy_beside(
    compute: Callable[[jax.Array], None], copy: Callable[[], None], *, warpgroups: int, registers: tuple[int, int]
) -> None:
    """Runs `compute(warpgroup)` in the first `warpgroups` warpgroups and `copy()` in the one after them.

    `registers` are those of a thread of the first, which get more than their share, and of the last.
    """
    warpgroup = lax.axis_index("wg")

    def copying():
        plgpu.set_max_registers(registers[1], action="decrease")
        copy()

    def computing():
        plgpu.set_max_registers(registers[0], action="increase")
        compute(warpgroup)

    # Two branches of one: the assembler keeps to the limits only where no path leads from one role into the other.
    lax.cond(warpgroup == warpgroups, copying, computing)
