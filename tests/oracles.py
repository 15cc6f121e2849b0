"""Where the reference fixtures are: tiny checkpoints with the logits that transformers computes from them."""

from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures"


def oracle(name: str) -> Path:
    """The folder of a fixture: `config.json`, `model.safetensors` (not in `deepseek_v3_long`), `reference.npz`."""
    folder = FIXTURES / name
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
