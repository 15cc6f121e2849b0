"""Long-context inference for MLA + MoE language models in JAX: `LLM`, `SamplingParams`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxinfer.engine.request import SamplingParams
    from jaxinfer.llm import LLM

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> object:
    """Imports the public names at first use: `import jaxinfer` alone must not load JAX."""
    if name == "LLM":
        from jaxinfer.llm import LLM

        return LLM
    if name == "SamplingParams":
        from jaxinfer.engine.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
