"""Writes what `check_gemm` measured into `kernels/tiles.json`: `python -m tests.gpu.adopt_tiles FILE [--kind KIND]`.

Products that were measured before and not this time keep their tiles.
"""

import argparse
import json
from pathlib import Path

from jaxinfer.kernels import tiles
from jaxinfer.kernels.tiles import DEFAULT_DEVICE, Tiles

TABLE = Path(tiles.__file__).with_name("tiles.json")


def identity(entry: dict) -> tuple:
    """The product of an entry."""
    return tuple(entry[name] for name in ("dtype", "scheme", "groups", "m", "n", "k"))


def dumped(devices: dict[str, dict]) -> str:
    """The table, each product on a line of its own."""
    parts = []
    for kind, device in devices.items():
        figures = json.dumps({name: value for name, value in device.items() if name != "measured"})[1:-1]
        lines = ",\n".join(f"    {json.dumps(entry)}" for entry in device["measured"])
        measured = f"[\n{lines}\n  ]" if lines else "[]"
        parts.append(f'"{kind}": {{{figures},\n  "measured": {measured}}}')
    return "{" + ",\n".join(parts) + "}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="check_gemm.json")
    parser.add_argument("--kind", default=DEFAULT_DEVICE, help="the device kind that JAX reports")
    arguments = parser.parse_args()
    devices = json.loads(TABLE.read_text())
    found = {identity(entry): entry for entry in devices[arguments.kind]["measured"]}
    for entry in json.loads(arguments.file.read_text())["measured"]:
        # What is as it is without being said is left out.
        usual = {name: field.default for name, field in Tiles.__dataclass_fields__.items()}
        chosen = {name: value for name, value in entry["tiles"].items() if value != usual[name]}
        found[identity(entry)] = {**entry, "tiles": chosen}
    devices[arguments.kind]["measured"] = sorted(found.values(), key=lambda entry: str(identity(entry)))
    TABLE.write_text(dumped(devices))


if __name__ == "__main__":
    main()
