"""Long-context inference for MLA + MoE language models in JAX: `LLM`, `SamplingParams`."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxinfer.engine.request import SamplingParams
    from jaxinfer.llm import LLM

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> object:
    """Imports the public names at first use: `import jaxinfer`, and any part without JAX, must not load JAX."""
    homes = {"LLM": "jaxinfer.llm", "SamplingParams": "jaxinfer.engine.request"}
    if name not in homes:
        raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
    return getattr(import_module(homes[name]), name)
