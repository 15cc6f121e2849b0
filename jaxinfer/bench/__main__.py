"""`python -m jaxinfer.bench COMMAND ...`; without a command, the list of commands."""

import importlib
import sys

from absl import app, flags

from jaxinfer.flags import parse_flags

COMMANDS = {"kernels": "times and errors of the kernels on this device"}


def main() -> None:
    """Runs the command that the first argument names."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in COMMANDS:
        module = importlib.import_module(f"jaxinfer.bench.{command}")
        module.define_flags()
        flags.adopt_module_key_flags(module)
        sys.modules["__main__"].__doc__ = module.__doc__  # what --help shows
        app.run(module.main, argv=[f"{sys.argv[0]} {command}", *sys.argv[2:]], flags_parser=parse_flags)
    commands = "\n".join(f"  {name}: {what}" for name, what in COMMANDS.items())
    wanted = command in ("--help", "-h", "help") and len(sys.argv) > 1
    print(f"usage: python -m jaxinfer.bench COMMAND ...; COMMAND --help says more\n{commands}")
    if not wanted and len(sys.argv) > 1:
        print(f"expected a command of {', '.join(COMMANDS)}, got {command!r}")
    sys.exit(0 if wanted else 1)


if __name__ == "__main__":
    main()
