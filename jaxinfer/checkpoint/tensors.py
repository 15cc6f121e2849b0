"""Tensors of a folder of safetensors files, read where they lie.

The safetensors library gives no float8 and no bfloat16 numpy arrays; its format is a length, a JSON header and the
bytes (https://huggingface.co/docs/safetensors), so that a map of the file serves.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxinfer.checkpoint.errors import CheckpointError

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
"""Types of weights and scales that can be read; a header may name others for tensors that are not wanted."""

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies: `size` bytes from `offset` of `file`; `dtype` as the header names it."""

    name: str
    file: Path
    offset: int
    size: int
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> np.ndarray:
        """The tensor, copied into memory."""
        flat = np.fromfile(self.file, DTYPES[self.dtype], math.prod(self.shape), offset=self.offset)
        return flat.reshape(self.shape)

    def map(self) -> np.ndarray:
        """The tensor as a read-only map of the file, of which only what is touched is read."""
        data = np.memmap(self.file, np.uint8, mode="r", offset=self.offset, shape=(self.size,))
        return data.view(np.ndarray).view(DTYPES[self.dtype]).reshape(self.shape)


def files_of(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder: `model.safetensors`, or those of its index.

    Raises FileNotFoundError if there is neither, CheckpointError if files of the index are not there.
    """
    index = folder / _INDEX
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if not index.is_file():
        raise FileNotFoundError(f"expected {_SINGLE} or {_INDEX} in {folder}, found neither")
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"expected a JSON object with weight_map in {index}: {error!r}") from error
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise CheckpointError.of_faults(str(folder), {f"of {len(names)} files of {_INDEX} missing": absent})
    return [folder / name for name in names]


def read_headers(files: list[Path]) -> dict[str, Tensor]:
    """All tensors of `files` by name, without their data.

    Raises CheckpointError for a file that is cut short or no safetensors file, and for a tensor that is there twice.
    """
    tensors: dict[str, Tensor] = {}
    for file in files:
        for tensor in _read_header(file):
            if tensor.name in tensors:
                first = tensors[tensor.name].file.name
                raise CheckpointError(f"expected one tensor {tensor.name}, got it in {first} and in {file.name}")
            tensors[tensor.name] = tensor
    return tensors


def _read_header(file: Path) -> list[Tensor]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(f"expected a safetensors file, but {file} ends inside its header ({size} bytes)")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise CheckpointError(f"expected a safetensors file, but the header of {file} is no JSON") from error
    found = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        if 8 + length + end > size:
            raise CheckpointError(
                f"expected at least {8 + length + end} bytes in {file} (to the end of {name}), found {size}: "
                "the file is cut short"
            )
        shape = tuple(entry["shape"])
        dtype = DTYPES.get(entry["dtype"])
        if dtype is not None and dtype.itemsize * math.prod(shape) != end - begin:
            raise CheckpointError(f"expected {dtype.itemsize * math.prod(shape)} bytes for {name}, got {end - begin}")
        found.append(Tensor(name, file, 8 + length + begin, end - begin, shape, entry["dtype"]))
    return found
