"""Loads a Hugging Face folder tensor by tensor straight into device shards.

Everything that can be wrong with a checkpoint is found from the headers of its files, before any weight is read.  Then
each tensor is read once, in the order of the files; each device gets the part that it holds and writes it into its
shard, dequantising and casting there.  What has to be quantised passes through the first device of its shards first.
Host memory holds a few tensors at a time.
"""

import logging
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tqdm import tqdm

from jaxinfer.checkpoint.errors import CheckpointError
from jaxinfer.checkpoint.mapping import Source, TreePath, shapes_of, sources
from jaxinfer.checkpoint.quantize import fits
from jaxinfer.checkpoint.tensors import Tensor, files_of, read_headers
from jaxinfer.checkpoint.tree import flatten, unflatten
from jaxinfer.configs.model import ModelConfig
from jaxinfer.kernels.quantize import BLOCK, Scheme, quantize_weight
from jaxinfer.kernels.quantized import Quantized

log = logging.getLogger(__name__)

_SCALE = "_scale_inv"
_QUANTIZED = "F8_E4M3"
_PLAIN = ("F32", "F16", "BF16")
_SCALES = ("F32", "BF16", "F8_E8M0")

_IN_FLIGHT_BYTES = 256 << 20
"""How much may be on its way to the devices before reading goes on."""


def load(folder: Path, config: ModelConfig, specs: dict[str, Any], progress: bool = True) -> dict[str, Any]:
    """The weights of a Hugging Face folder as the parameter tree that `specs` describes.

    `specs` is a nested dict of `jax.ShapeDtypeStruct` with `sharding`, or `Quantized` ones; the result is the same with
    `jax.Array`s. FP8 weights (e4m3, with `weight_scale_inv` for each block of `config.weight_block_size`) are taken
    with their scales, bit for bit, where the spec is quantised in such blocks; else they are multiplied by their scales
    in float32, and cast to the type of the spec or quantised to it.  `progress` shows a bar in bytes on stderr.

    Raises CheckpointError naming all tensors that are missing, unexpected, of the wrong shape or type, and scales
    without weights or weights without scales; ValueError if `specs` are not those of `config`.
    """
    wanted = sources(config)
    flat_specs = flatten(specs)
    _check_specs(wanted, flat_specs)
    tensors = read_headers(files_of(folder))
    _check_tensors(folder, config, wanted, tensors)

    uses: dict[str, list[tuple[TreePath, Source]]] = {}
    for path, made_of in wanted.items():
        for source in made_of:
            uses.setdefault(source.name, []).append((path, source))
    parameters = {
        path: _QuantizedParameter(spec) if isinstance(spec, Quantized) else _Parameter(spec)
        for path, spec in flat_specs.items()
    }
    order = sorted(uses, key=lambda name: (tensors[name].file, tensors[name].offset))
    total = sum(tensors[name].size for name in order)
    in_flight = 0
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"loading {folder.name}", disable=not progress) as bar:
        for name in order:
            tensor = tensors[name]
            scale = tensors[name + _SCALE].read().astype(np.float32) if name + _SCALE in tensors else None
            data = tensor.map()
            for path, source in uses[name]:
                parameters[path].write(source, data, scale, config.weight_block_size)
            in_flight += tensor.size
            if in_flight >= _IN_FLIGHT_BYTES:
                for parameter in parameters.values():
                    parameter.wait()
                in_flight = 0
            bar.update(tensor.size)
    return unflatten({path: parameter.finish() for path, parameter in parameters.items()})


class _Parameter:
    """A parameter being filled: one buffer for each different shard, on the first device that holds it.

    Devices that hold the same shard get it from that one at the end, so that nothing travels from the host twice.
    """

    def __init__(self, spec: jax.ShapeDtypeStruct):
        self.spec = spec
        self.devices: dict[tuple[tuple[int, int], ...], list[Any]] = {}
        assert spec.sharding is not None  # checked in _check_specs
        for device, slices in spec.sharding.addressable_devices_indices_map(spec.shape).items():
            whole = slices or (slice(None),) * len(spec.shape)
            bounds = tuple(piece.indices(size)[:2] for piece, size in zip(whole, spec.shape, strict=True))
            self.devices.setdefault(bounds, []).append(device)
        self.buffers = {
            bounds: jnp.zeros([stop - start for start, stop in bounds], spec.dtype, device=devices[0])
            for bounds, devices in self.devices.items()
        }

    def write(self, source: Source, data: np.ndarray, scale: np.ndarray | None, block: tuple[int, int] | None):
        """Writes a tensor of the file (and its scales) where `source` says, on the devices that hold that place."""
        view = data.reshape(source.rows + source.columns)
        rows = np.arange(math.prod(source.rows)).reshape(source.rows)
        columns = np.arange(math.prod(source.columns)).reshape(source.columns)
        if source.part is not None:
            at = (slice(None),) * (len(source.rows) - 1) + (source.part,)
            view, rows = view[at], rows[at]
        lead = len(source.index)
        for bounds, devices in self.devices.items():
            start = [place - low for place, (low, _) in zip(source.index, bounds[:lead], strict=True)]
            if not all(0 <= s < high - low for s, (low, high) in zip(start, bounds[:lead], strict=True)):
                continue
            ranges = tuple(slice(low, high) for low, high in bounds[lead:])
            if view[ranges].size == 0:  # a shard of the zeros that fill a parameter up
                continue
            scaling = None
            if scale is not None and block is not None:
                # Which scale belongs to which row and column of this piece.
                row_scales = rows[ranges[: rows.ndim]].reshape(-1) // block[0]
                column_scales = columns[ranges[rows.ndim :]].reshape(-1) // block[1]
                scaling = (scale, row_scales.astype(np.int32), column_scales.astype(np.int32))
            start = np.array(start + [0] * (len(bounds) - lead), np.int32)
            piece = jax.device_put((start, view[ranges], scaling), devices[0])
            self.buffers[bounds] = _write(self.buffers[bounds], *piece)

    def wait(self):
        """Returns when the devices have taken everything written so far."""
        jax.block_until_ready(list(self.buffers.values()))

    def finish(self) -> jax.Array:
        """The array; this object is of no use afterwards."""
        shards = [
            buffer if device == devices[0] else jax.device_put(buffer, device)
            for devices, buffer in ((self.devices[bounds], buffer) for bounds, buffer in self.buffers.items())
            for device in devices
        ]
        self.buffers.clear()
        return jax.make_array_from_single_device_arrays(
            self.spec.shape, self.spec.sharding, shards, dtype=self.spec.dtype
        )


class _QuantizedParameter:
    """A quantised parameter being filled: its values, and its scales as a parameter of their own."""

    def __init__(self, spec: Quantized):
        self.spec = spec
        self.values, self.scale = _Parameter(spec.values), _Parameter(spec.scale)

    def write(self, source: Source, data: np.ndarray, scale: np.ndarray | None, block: tuple[int, int] | None):
        """Writes a tensor of the file where `source` says: in its own blocks where they are those of the parameter."""
        if scale is None or self.spec.scheme != "block" or block != (BLOCK, BLOCK):
            data, scale = self._quantized(data, scale, block)
        rows, columns = (source.rows, ()) if scale.ndim == 1 else (scale.shape[:1], scale.shape[1:])
        self.values.write(source, data, None, None)
        self.scale.write(Source(source.name, source.index, rows, columns), scale, None, None)

    def _quantized(self, data, scale, block) -> tuple[np.ndarray, np.ndarray]:
        scaling = None
        if scale is not None:
            rows, columns = (
                np.arange(size, dtype=np.int32) // per for size, per in zip(data.shape, block, strict=True)
            )
            scaling = (scale, rows, columns)
        data, scaling = jax.device_put((data, scaling), next(iter(self.values.devices.values()))[0])
        values, scale = _quantize(data, scaling, self.spec.scheme, self.spec.dtype)
        return np.asarray(values), np.asarray(scale)

    def wait(self):
        """Returns when the devices have taken everything written so far."""
        self.values.wait()
        self.scale.wait()

    def finish(self) -> Quantized:
        """The parameter; this object is of no use afterwards."""
        return replace(self.spec, values=self.values.finish(), scale=self.scale.finish())


@partial(jax.jit, static_argnums=(2, 3))
def _quantize(
    data: jax.Array, scaling: tuple[jax.Array, jax.Array, jax.Array] | None, scheme: Scheme, dtype: np.dtype
) -> tuple[jax.Array, jax.Array]:
    """A whole tensor quantised; `scaling` as in `_write`."""
    return quantize_weight(data if scaling is None else _dequantized(data, *scaling), scheme=scheme, dtype=dtype)


def _dequantized(piece: jax.Array, scale: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    return piece.astype(jnp.float32) * scale[rows][:, columns].reshape(piece.shape)


@partial(jax.jit, donate_argnums=0)
def _write(
    buffer: jax.Array, start: jax.Array, piece: jax.Array, scaling: tuple[jax.Array, jax.Array, jax.Array] | None
) -> jax.Array:
    """`buffer` with `piece` at `start`; `scaling`: the table of scales and the place there of each row and column."""
    if scaling is not None:
        piece = _dequantized(piece, *scaling)
    piece = piece.astype(buffer.dtype)
    piece = piece.reshape((1,) * (buffer.ndim - piece.ndim) + piece.shape)
    return lax.dynamic_update_slice(buffer, piece, [start[dim] for dim in range(buffer.ndim)])


def _check_specs(wanted: dict[TreePath, list[Source]], specs: dict[TreePath, Any]):
    """Raises ValueError unless `specs` are exactly the parameters of the model, with shardings."""
    shapes = shapes_of(wanted)
    came = {path: tuple(spec.shape) for path, spec in specs.items()}
    differing = [
        f"{'.'.join(path)}: expected {shapes.get(path)}, got {came.get(path)}"
        for path in dict.fromkeys([*shapes, *came])
        if path not in shapes or path not in came or not fits(shapes[path], came[path])
    ]
    if differing:
        raise ValueError("the parameter specs are not those of the model: " + "; ".join(differing))
    unplaced = [".".join(path) for path, spec in specs.items() if spec.sharding is None]
    if unplaced:
        raise ValueError(f"expected a sharding in every parameter spec, found none in {', '.join(unplaced)}")


def _check_tensors(folder: Path, config: ModelConfig, wanted: dict[TreePath, list[Source]], tensors: dict[str, Tensor]):
    """Raises CheckpointError unless every tensor is used, and every use has its tensor in the right form."""
    faults: dict[str, list[str]] = {
        kind: []
        for kind in (
            "missing",
            "unexpected",
            "of the wrong shape",
            "of a type that cannot be read",
            "quantised without a scale",
            "scales without a quantised weight",
        )
    }
    expected = {source.name: source.tensor_shape for made_of in wanted.values() for source in made_of}
    for name, shape in expected.items():
        tensor, scale = tensors.get(name), tensors.get(name + _SCALE)
        if tensor is None:
            faults["missing"].append(name)
            continue
        if tensor.shape != shape:
            faults["of the wrong shape"].append(f"{name} (expected {list(shape)}, got {list(tensor.shape)})")
        if tensor.dtype == _QUANTIZED and len(shape) == 2:
            if scale is None:
                faults["quantised without a scale"].append(name)
            elif config.weight_block_size is None:
                faults["of a type that cannot be read"].append(
                    f"{name} ({tensor.dtype}, and config.json has no quantization_config)"
                )
            else:
                _check_scale(scale, shape, config.weight_block_size, faults)
        else:
            if tensor.dtype not in _PLAIN:
                faults["of a type that cannot be read"].append(f"{name} ({tensor.dtype})")
            if scale is not None:
                faults["scales without a quantised weight"].append(scale.name)
    mtp = [name for name in tensors if _is_mtp(name, config)]
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name in tensors:
        scaled = name.removesuffix(_SCALE)
        if name in expected or name in tied or name.endswith(".rotary_emb.inv_freq") or _is_mtp(name, config):
            continue
        if name.endswith(_SCALE) and scaled not in tensors:
            faults["scales without a quantised weight"].append(name)
        elif not (name.endswith(_SCALE) and scaled in expected):
            faults["unexpected"].append(name)
    if any(faults.values()):
        raise CheckpointError.of_faults(str(folder), faults)
    if mtp:
        layers = len({name.split(".")[2] for name in mtp})
        log.info(
            "skipping %d tensors of %d multi-token-prediction layer%s", len(mtp), layers, "s" if layers > 1 else ""
        )
    if tied & set(tensors):
        log.info("skipping lm_head.weight: the configuration ties the output to the embedding")


def _check_scale(scale: Tensor, shape: tuple[int, ...], block: tuple[int, int], faults: dict[str, list[str]]):
    blocks = tuple(-(-size // per) for size, per in zip(shape, block, strict=True))
    if scale.shape != blocks:
        faults["of the wrong shape"].append(f"{scale.name} (expected {list(blocks)}, got {list(scale.shape)})")
    if scale.dtype not in _SCALES:
        faults["of a type that cannot be read"].append(f"{scale.name} ({scale.dtype})")


def _is_mtp(name: str, config: ModelConfig) -> bool:
    """Whether a tensor belongs to a multi-token-prediction layer, stored as layers behind the model's last."""
    parts = name.split(".")
    if parts[:2] != ["model", "layers"] or len(parts) < 4 or not parts[2].isdecimal():
        return False
    return config.num_layers <= int(parts[2]) < config.num_layers + config.num_mtp_layers
