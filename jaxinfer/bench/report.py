"""Records of kernels as a table."""

from collections.abc import Sequence
from typing import Any

from jaxinfer.bench.hardware import PEAKS, floor_seconds
from jaxinfer.bench.operation import Published, Work

_COLUMNS = (
    *("operation", "form", "shape", "µs", "largest kernel, µs", "TFLOP/s", "TB/s", "of the floor", "error"),
    *("signed error", "torch, TFLOP/s", "ratio", "published", "ratio", "MHz", "W"),
)


def markdown(
    records: Sequence[dict[str, Any]], published: Sequence[Published | None], of_kernel: Sequence[bool]
) -> str:
    """A table with one line for each record.

    Args:
        records: see `kernels`.
        published: the figure of another library for each, None where there is none.
        of_kernel: for each, whether peers are compared with the largest kernel, not with the whole operation.
    """
    rows = [_row(*each) for each in zip(records, published, of_kernel, strict=True)]
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = [f"`{r['case']}`: {r['failed']}" for r in records if "failed" in r]
    notes += [f"`{r['case']}`, torch: {r['peer']['failed']}" for r in records if "failed" in (r.get("peer") or {})]
    return "\n".join([table, *([""] if notes else []), *(f"- {note}" for note in notes)])


def largest_kernel(record: dict[str, Any]) -> float:
    """Seconds of the longest kernel; of the whole operation where kernels were not seen one by one."""
    return max((seconds for _, seconds in record["kernels"]), default=record["seconds"])


def share_of_floor(record: dict[str, Any]) -> float | None:
    """The shortest possible time over the measured one, None for a device without known peaks."""
    peaks = PEAKS.get(record["device"])
    if peaks is None:
        return None
    work = Work(**{name: record[name] for name in ("flops", "bytes", "flops_8_bit", "more_flops")})
    return floor_seconds(work, peaks) / record["seconds"]


def _row(record: dict[str, Any], published: Published | None, of_kernel: bool) -> tuple[str, ...]:
    head = record["op"], record["form"], "x".join(map(str, record["shape"]))
    if "failed" in record:
        return (*head, "failed", *([""] * (len(_COLUMNS) - len(head) - 1)))
    seconds, largest = record["seconds"], largest_kernel(record)
    compared = largest if of_kernel else seconds
    tflops, terabytes = record["flops"] / compared / 1e12, record["bytes"] / seconds / 1e12
    share = share_of_floor(record)
    return (
        *head,
        f"{seconds * 1e6:.1f}",
        f"{largest * 1e6:.1f}" if record["clock"] == "cupti" else "",
        f"{tflops:.0f}" if record["flops"] else "",
        f"{terabytes:.2f}",
        "" if share is None else f"{share:.0%}",
        _error(record, "error", ".1e"),
        _error(record, "signed_error", "+.0e"),
        *_beside(record, tflops, terabytes),
        *_against(published if record["device"] == "NVIDIA H200" else None, tflops, terabytes),
        *("" if record.get(name) is None else f"{record[name]:.0f}" for name in ("sm_mhz", "watts")),
    )


def _error(record: dict[str, Any], name: str, form: str) -> str:
    return format(record[name], form) if name in record else ""


def _beside(record: dict[str, Any], tflops: float, terabytes: float) -> tuple[str, str]:
    """torch's figure and the ratio to it, of memory where the operation has no arithmetic."""
    peer = record.get("peer") or {}
    if "seconds" not in peer:
        return "", ""
    if record["flops"]:
        torch = peer["flops"] / peer["seconds"] / 1e12
        return f"{torch:.0f} ({peer['name']})", f"{tflops / torch:.2f}"
    torch = record["bytes"] / peer["seconds"] / 1e12
    return f"{torch:.2f} TB/s ({peer['name']})", f"{terabytes / torch:.2f}"


def _against(published: Published | None, tflops: float, terabytes: float) -> tuple[str, str]:
    if published is None:
        return "", ""
    if published.tflops is not None:
        return f"{published.tflops:.0f} ({published.name})", f"{tflops / published.tflops:.2f}"
    assert published.terabytes is not None
    return f"{published.terabytes} TB/s ({published.name})", f"{terabytes / published.terabytes:.2f}"
