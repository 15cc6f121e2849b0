"""The state of a training run in one file, replaced as a whole."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def save(path: Path, state: Any, progress: dict[str, Any]):
    """Writes the arrays of a tree and what else is needed to continue (JSON values)."""
    leaves = {f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(jax.device_get(jax.tree.leaves(state)))}
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez(file, progress=np.array(json.dumps(progress)), **leaves)
    part.replace(path)


def restore[State](path: Path, like: State) -> tuple[State, dict[str, Any]] | None:
    """What `save` wrote, in the structure of `like`; None if there is no such file.

    Raises ValueError if the arrays are not of the shapes of `like`.
    """
    if not path.is_file():
        return None
    leaves, structure = jax.tree.flatten(like)
    with np.load(path) as file:
        found = [file[f"leaf{i}"] for i in range(len(file.files) - 1)]
        progress = json.loads(str(file["progress"]))
    shapes, came = [np.shape(leaf) for leaf in leaves], [array.shape for array in found]
    if shapes != came:
        raise ValueError(f"expected arrays of the shapes {shapes} in {path}, got {came}")
    arrays = [jnp.asarray(a, jnp.asarray(leaf).dtype) for a, leaf in zip(found, leaves, strict=True)]
    return jax.tree.unflatten(structure, arrays), progress
