"""Models that come with the package, as Hugging Face folders.  `launch/bundled_model` is how they were made."""

from pathlib import Path

BUNDLED_NAMES = ("jaxinfer-12m",)


def bundled_folder(name: str) -> Path | None:
    """The folder of a bundled model; None if `name` is not one."""
    return Path(__file__).parent / name if name in BUNDLED_NAMES else None
