"""Peak rates of GPUs, and the shortest time that a piece of work can take."""

import dataclasses

from jaxinfer.bench.operation import Work


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peaks:
    """10^12 dense operations a second of 16- and 8-bit tensor cores, 10^12 bytes a second of memory, and the source."""

    tflops_16_bit: float
    tflops_8_bit: float
    terabytes: float
    source: str


_SHEET = "NVIDIA's data sheet of the SXM form, half of the figures with sparsity"
PEAKS = {
    "NVIDIA H100 80GB HBM3": Peaks(tflops_16_bit=989.5, tflops_8_bit=1979, terabytes=3.35, source=_SHEET),
    "NVIDIA H200": Peaks(tflops_16_bit=989.5, tflops_8_bit=1979, terabytes=4.8, source=_SHEET),
    "NVIDIA H20": Peaks(tflops_16_bit=148, tflops_8_bit=296, terabytes=4.0, source="NVIDIA's published figures"),
}
"""By the name that the driver gives the device."""


def floor_seconds(work: Work, peaks: Peaks) -> float:
    """The larger of arithmetic at the peak rate and bytes at the peak bandwidth."""
    arithmetic = (work.flops - work.flops_8_bit + work.more_flops) / peaks.tflops_16_bit
    arithmetic += work.flops_8_bit / peaks.tflops_8_bit
    return max(arithmetic, work.bytes / peaks.terabytes) / 1e12
