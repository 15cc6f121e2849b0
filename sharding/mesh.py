"""The device mesh: parse `--mesh cp=8`, start the platform with enough devices, build the mesh."""

import logging
import math
import os
from dataclasses import dataclass, fields

import jax
import numpy as np
from jax.sharding import Mesh

AXES = ("dp", "cp", "ep", "tp")
"""Mesh axes, from the outermost to the innermost: data, context, expert and tensor parallel."""

# XLA:CPU ends the process when ranks reach a collective more than 40 s apart, which virtual devices that share a few
# cores do with large chunks.
_CPU_COLLECTIVE_TIMEOUT = "--xla_cpu_collective_call_terminate_timeout_seconds=600"


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the mesh axes; an axis that is not named has size 1."""

    dp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def replicas(self) -> int:
        """Groups of devices that serve requests of their own: `dp * ep`."""
        return self.dp * self.ep

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1) or "cp=1"


def parse(text: str) -> MeshShape:
    """Reads `"cp=4,ep=2"`; the empty string is one device.

    Raises ValueError naming what was expected and what came: unknown or repeated axes, sizes that are no positive
    integers, and `pp`, which is not built.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        axis, equals, size = (piece.strip() for piece in part.partition("="))
        if axis == "pp":
            raise ValueError("pipeline parallelism (pp) is not built yet; the mesh axes are " + ", ".join(AXES))
        if not equals or axis not in {field.name for field in fields(MeshShape)}:
            raise ValueError(f"expected axis=size with an axis of {', '.join(AXES)}, got {part!r}")
        if axis in sizes:
            raise ValueError(f"mesh axis {axis!r} is given twice in {text!r}")
        if not size.isdecimal() or int(size) < 1:
            raise ValueError(f"expected a positive size for mesh axis {axis!r}, got {size!r}")
        sizes[axis] = int(size)
    return MeshShape(**sizes)


def start_platform(shape: MeshShape) -> None:
    """Readies JAX for a mesh before its backend starts: where there is no GPU, as many virtual CPU devices.

    Does nothing if the backend runs already; `make` then says whether its devices suffice.
    """
    # At INFO it reports every kind of device that is not there.
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)
    flags = os.environ.get("XLA_FLAGS", "")
    if "collective_call_terminate_timeout" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_CPU_COLLECTIVE_TIMEOUT}".strip()
    try:
        if jax.config.jax_num_cpu_devices < shape.num_devices:
            jax.config.update("jax_num_cpu_devices", shape.num_devices)
    except RuntimeError:  # the backend has started, and its number of devices never changes
        pass


def make(shape: MeshShape) -> Mesh:
    """The mesh over the first devices of the default backend, axes `AXES` in that order.

    Raises ValueError with the sizes that are possible if there are fewer devices than `shape` needs.
    """
    devices = jax.devices()
    if shape.num_devices > len(devices):
        kind = devices[0].device_kind
        advice = (
            "; the backend had already started: make the mesh before any other use of JAX, or set "
            f"jax_num_cpu_devices to {shape.num_devices} at the start"
            if devices[0].platform == "cpu"
            else ""
        )
        raise ValueError(
            f"mesh {shape} needs {shape.num_devices} devices, but there are {len(devices)} ({kind}): "
            f"the product of the axes can be 1 to {len(devices)}{advice}"
        )
    used = np.array(devices[: shape.num_devices]).reshape(tuple(shape.sizes.values()))
    return Mesh(used, AXES)
