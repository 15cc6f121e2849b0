"""Where the reference fixtures are: tiny checkpoints with the logits that transformers computes from them."""

from pathlib import Path

import pytest

FIXTURES = Path(__file__).parent / "fixtures"
# All fixtures, for those who have them: some are too large for the repository.
SHARED = Path(__file__).resolve().parents[2] / "shared" / "oracles"
ONLY_SHARED = ("deepseek_v3_mtp",)


def oracle(name: str) -> Path:
    """The folder of a fixture: `config.json`, `model.safetensors` (not in `deepseek_v3_long`), `reference.npz`.

    Skips the test if the fixture is one that stands beside the repository only, and is not there.
    """
    folder = (SHARED if name in ONLY_SHARED else FIXTURES) / name
    if name in ONLY_SHARED and not folder.is_dir():
        pytest.skip(f"the fixture {name} is not beside the repository")
    if not (folder / "config.json").is_file():
        have = sorted(path.parent.name for path in FIXTURES.glob("*/config.json"))
        raise ValueError(f"expected a fixture among {have}, got {name!r}")
    return folder


def oracle_long(parent: Path) -> Path:
    """Makes, in a temporary folder `parent`, the checkpoint of `deepseek_v3_long`: its configuration and reference
    with the weights of `deepseek_v3`.
    """
    folder = parent / "deepseek_v3_long"
    folder.mkdir()
    for name in ("config.json", "reference.npz"):
        (folder / name).symlink_to(oracle("deepseek_v3_long") / name)
    (folder / "model.safetensors").symlink_to(oracle("deepseek_v3") / "model.safetensors")
    return folder
