"""Writing altered checkpoints, and the shardings to load them into."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.configs.model import ModelConfig
from jaxinfer.model.precision import Precision
from jaxinfer.model.transformer import parameter_specs
from jaxinfer.sharding.mesh import make, parse
from jaxinfer.sharding.rules import Rules

Tensors = dict[str, tuple[str, np.ndarray]]
"""Name -> (type as in a safetensors header, data)."""

_TYPES = {"F32": np.float32, "BF16": jnp.bfloat16, "F16": np.float16, "F8_E4M3": jnp.float8_e4m3fn, "I32": np.int32}


def specs_on(
    mesh: str, config: ModelConfig, dtype: Any = np.float32, shard_dense: bool = True, precision: str | None = None
) -> dict[str, Any]:
    """The parameters of `config` placed on a mesh such as "cp=8", in `dtype`, or in `precision` with the rest in it."""
    shape = parse(mesh)
    held = Precision(jnp.dtype(dtype))
    if precision is not None:
        held = Precision.named(precision, config, jnp.dtype(dtype))
    return parameter_specs(config, Rules(shape, shard_dense=shard_dense), make(shape), held)


def read_tensors(file: Path) -> Tensors:
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    found: Tensors = {}
    for name, entry in json.loads(raw[8:end]).items():
        if name != "__metadata__":
            begin, stop = (end + offset for offset in entry["data_offsets"])
            data = np.frombuffer(raw[begin:stop], _TYPES[entry["dtype"]]).reshape(entry["shape"])
            found[name] = (entry["dtype"], data)
    return found


def write_tensors(file: Path, tensors: Tensors) -> None:
    header, offset = {}, 0
    for name, (kind, data) in tensors.items():
        offsets = [offset, offset + data.nbytes]
        header[name] = {"dtype": kind, "shape": list(data.shape), "data_offsets": offsets}
        offset += data.nbytes
    text = json.dumps(header).encode()
    body = b"".join(np.ascontiguousarray(data).tobytes() for _, data in tensors.values())
    file.write_bytes(len(text).to_bytes(8, "little") + text + body)


def write_checkpoint(folder: Path, like: Path, tensors: Tensors, files: int = 1, **config: Any) -> Path:
    """A checkpoint with the configuration of `like` (changed by `config`) and these tensors, dealt to `files` files."""
    folder.mkdir()
    text = json.loads((like / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(text))
    if files == 1:
        write_tensors(folder / "model.safetensors", tensors)
        return folder
    weight_map = {}
    for part in range(files):
        name = f"model-{part + 1:05}-of-{files:05}.safetensors"
        # Round robin, so that most scales lie in another file than their weights.
        chosen = {key: tensors[key] for key in sorted(tensors)[part::files]}
        write_tensors(folder / name, chosen)
        weight_map |= dict.fromkeys(chosen, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def copy_checkpoint(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    return folder


def assert_trees_equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Bit for bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype, path
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=str(path))
