"""Which implementation of an operation runs, decided from shapes and types when a function is traced."""

import functools
import logging
from typing import Literal

import jax

Implementation = Literal["mosaic", "reference"]


def choose(op: str, implementation: Implementation | None, reason_against: str | None) -> Implementation:
    """The implementation that is asked for, else Mosaic where nothing speaks against it, else the reference.

    Args:
        op: the operation, for the log.
        implementation: what the caller asks for; None leaves the choice.
        reason_against: why Mosaic cannot take these shapes and types, None if it can.

    Raises: ValueError if Mosaic is asked for and cannot take them.
    """
    if implementation == "mosaic":
        if reason_against is not None:
            raise ValueError(f"expected operands that the Mosaic {op} takes: {reason_against}")
        _log(op, "mosaic", "asked for")
        return "mosaic"
    if implementation == "reference":
        _log(op, "reference", "asked for")
        return "reference"
    reason = _no_hopper() or reason_against
    if reason is None:
        _log(op, "mosaic", "the backend is a Hopper GPU")
        return "mosaic"
    _log(op, "reference", reason)
    return "reference"


def _no_hopper() -> str | None:
    if jax.default_backend() != "gpu":
        return f"the backend is {jax.default_backend()}, not a GPU"
    capability = jax.devices()[0].compute_capability
    return None if capability == "9.0" else f"expected compute capability 9.0, the GPU has {capability}"


@functools.cache
def _log(op: str, choice: str, reason: str) -> None:
    """Logs every choice once: the cache remembers those that were."""
    logging.getLogger(__name__).info("%s: %s (%s)", op, choice, reason)
