"""Times and errors of the kernels: `python -m jaxinfer.bench kernels [--ops gemm,mla_decode] [--out DIR]`.

Every operation runs through its public function with the tiles that users get, on random operands that are not left in
the L2: median of the time of its kernels (CUPTI; the host's clock where that is not to be had), relative error and bias
of a part of the result against float64, share of what arithmetic and memory of the device allow, the clock and power
meanwhile, and torch's kernel for the same work in the same process.

Writes `kernels.jsonl` (a record a case) and `kernels.md` to the folder `--out`.  What has a record there is not
measured again, so the same command goes on where a run was stopped; other versions of the kernels are measured anew.
Cases run in processes of their own: a fault of one is its own row.
"""

import dataclasses
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import jax
from absl import app, flags
from tqdm import tqdm

from jaxinfer.bench import workers
from jaxinfer.bench.clocks import Clocks
from jaxinfer.bench.measure import OPERATIONS
from jaxinfer.bench.operation import Case
from jaxinfer.bench.records import Records
from jaxinfer.bench.report import markdown
from jaxinfer.kernels.dispatch import Implementation

_ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The flags of the command, see `define_flags`."""

    ops: Sequence[str]
    shapes: Sequence[str]
    out: str
    peers: bool
    check: bool
    repeats: int
    implementation: Literal["auto"] | Implementation
    workers: int | None
    case_seconds: float


def define_flags() -> None:
    """Defines a flag for each field of `Options`."""
    shapes = ", ".join(f"{op.name}:{'x'.join(op.sizes)}" for op in OPERATIONS.values())
    flags.DEFINE_list("ops", list(OPERATIONS), f"what to measure, of: {', '.join(OPERATIONS)}")
    flags.DEFINE_list(
        "shapes",
        [],
        f"shapes in place of the default ones: {shapes}. Example: gemm:4096x7168x2048,mla_decode:128x16x8192",
    )
    flags.DEFINE_string("out", "bench", "folder for records and table; an earlier run in it is continued")
    flags.DEFINE_bool("peers", True, "also time torch's kernels, where there is a torch with CUDA")
    flags.DEFINE_bool("check", True, "compare with float64")
    flags.DEFINE_integer("repeats", 24, "runs that a median is of", lower_bound=1)
    flags.DEFINE_enum(
        "implementation",
        "auto",
        ["auto", "mosaic", "reference"],
        "auto is what users get: Mosaic on a Hopper GPU where it takes the operands. The reference runs on CPU, too",
    )
    flags.DEFINE_integer(
        "workers", None, "processes that compile at a time. Default: 6 with a GPU, 1 without", lower_bound=1
    )
    flags.DEFINE_float("case_seconds", 120, "a case that takes longer has failed", lower_bound=1)


def chosen_cases(ops: Sequence[str], shapes: Sequence[str]) -> list[Case]:
    """The cases of operations: the default ones, or those of the shapes `op:AxBxC`; raises ValueError for others."""
    unknown = [name for name in ops if name not in OPERATIONS]
    if unknown or not ops:
        raise ValueError(f"ops: expected some of {', '.join(OPERATIONS)}, got {', '.join(unknown) or 'none'}")
    if not shapes:
        return [case for name in ops for case in OPERATIONS[name].table()]
    found = []
    for text in shapes:
        name, _, sizes = text.partition(":")
        if name not in ops:
            raise ValueError(f"shapes: expected op:sizes with an op of --ops, {', '.join(ops)}; got {text!r}")
        parts = sizes.split("x")
        if not all(part.isdecimal() for part in parts):
            raise ValueError(f"shapes: expected {name}:{'x'.join(OPERATIONS[name].sizes)} in numbers, got {text!r}")
        found += OPERATIONS[name].cases(tuple(map(int, parts)))
    return found


def fingerprint() -> str:
    """Changes with every change of the kernels' code and tables."""
    found = hashlib.sha256()
    for path in sorted((_ROOT / "kernels").rglob("*")):
        if path.suffix in (".py", ".json"):
            found.update(path.read_bytes())
    return found.hexdigest()[:12]


def commit() -> str | None:
    """The commit of the source tree, `+` where it has been changed since; None outside a repository."""
    if shutil.which("git") is None or not (_ROOT.parent / ".git").exists():
        return None
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


class Measurement:
    """One run of the command."""

    def __init__(self, options: Options):
        """Raises ValueError for options that cannot be, or not on this machine."""
        self.options = options
        self.implementation = None if options.implementation == "auto" else options.implementation
        self.cases: list[Case] = []
        self.left_out: dict[str, list[Case]] = {}
        for case in chosen_cases(options.ops, options.shapes):
            reason = OPERATIONS[case.op].left_out(case, self.implementation)
            (self.cases if reason is None else self.left_out.setdefault(reason, [])).append(case)
        self.gpu = jax.default_backend() == "gpu"
        device = jax.devices()[0]
        hopper = self.gpu and device.compute_capability == "9.0"
        if not hopper and options.implementation != "reference":
            raise ValueError(
                "expected a Hopper GPU and JAX with CUDA (pip install 'jaxinfer[cuda13]'), found "
                f"{device.device_kind}; --implementation reference with small --shapes runs there"
            )
        self.settings = {"repeats": options.repeats, "check": options.check, "peers": options.peers and self.gpu}
        self.common = {
            "implementation": options.implementation,
            "device": device.device_kind,
            "jax": version("jax"),
            "sources": fingerprint(),
            "settings": self.settings,
        }
        self.out = Path(options.out)
        self.records = Records(self.out / "kernels.jsonl")
        self._commit = commit()

    def run(self) -> None:
        """Measures all cases that have no record yet, or one of a failure."""
        todo = [case for case in self.cases if "failed" in (self._record(case) or {"failed": ""})]
        environment = os.environ | {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            # Every kernel launched for itself, so that each is seen.
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer=",
        }
        with tempfile.NamedTemporaryFile() as lock, Clocks() as clocks:
            # Half of a case's time for itself: one that hangs does not make those fail that wait for the device.
            held = {"lock": lock.name, "held_seconds": self.options.case_seconds / 2}
            common = {**self.settings, "implementation": self.implementation, **held}
            requests = [{"op": case.op, "form": case.form, "shape": list(case.shape), **common} for case in todo]
            answers = workers.serve(
                "jaxinfer.bench.measure",
                requests,
                self.options.workers or (6 if self.gpu else 1),
                self.options.case_seconds,
                environment,
            )
            with closing(answers):
                for index, answer in tqdm(answers, total=len(todo), unit="case", disable=None):
                    if "failed" not in answer:
                        answer |= clocks.between(answer.pop("began"), answer.pop("ended"))
                    self._add(todo[index], answer)

    def report(self) -> str:
        """The table of what has been measured, which is also written to the folder."""
        found = [record for case in self.cases if (record := self._record(case)) is not None]
        operations = [OPERATIONS[record["op"]] for record in found]
        published = [
            operation.published(Case(record["op"], record["form"], tuple(record["shape"])))
            for operation, record in zip(operations, found, strict=True)
        ]
        clocks = sorted({record["clock"] for record in found if "clock" in record})
        text = (
            f"{self.common['device']}, JAX {self.common['jax']}, kernels {self.common['sources']}, "
            f"implementation {self.common['implementation']}; medians of {self.settings['repeats']} runs, "
            f"clock: {', '.join(clocks) or 'none'}\n\n"
            + markdown(found, published, [operation.of_kernel for operation in operations])
            + "".join(
                f"\n\nLeft out ({reason}): {', '.join(case.name for case in cases)}"
                for reason, cases in self.left_out.items()
            )
        )
        (self.out / "kernels.md").write_text(text + "\n")
        return text

    def failed(self) -> bool:
        return any("failed" in (self._record(case) or {"failed": ""}) for case in self.cases)

    def _record(self, case: Case) -> dict[str, Any] | None:
        return self.records.find({"case": case.name, **self.common})

    def _add(self, case: Case, answer: dict[str, Any]) -> None:
        names = {"case": case.name, "op": case.op, "form": case.form, "shape": list(case.shape)}
        self.records.add(names | self.common | {"commit": self._commit} | answer)
        said = answer.get("failed") or f"{answer['seconds'] * 1e6:.1f} µs"
        tqdm.write(f"{case.name}: {said}")


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code: 0 when every case was measured, 130 after an interrupt."""
    if len(arguments) > 1:
        raise app.UsageError(f"expected flags only, got {arguments[1:]}")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)  # else it says which backends there are not
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        values: dict[str, Any] = {field.name: flags.FLAGS[field.name].value for field in dataclasses.fields(Options)}
        measurement = Measurement(Options(**values))
    except (ValueError, OSError) as error:
        print(f"jaxinfer.bench: {error}")
        return 1
    try:
        measurement.run()
    except KeyboardInterrupt:
        print(measurement.report())
        print("jaxinfer.bench: interrupted; the same command goes on where this one stopped")
        return 130
    print(measurement.report())
    return 1 if measurement.failed() else 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
