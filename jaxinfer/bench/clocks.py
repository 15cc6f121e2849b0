"""The clock and the power of the GPU while something runs, as nvidia-smi reads them."""

import os
import shutil
import statistics
import subprocess
import threading
import time
from types import TracebackType

_MILLISECONDS = 50


class Clocks:
    """Reads until it is left; without nvidia-smi there are no readings."""

    def __init__(self):
        self._readings: list[tuple[float, float, float]] = []
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> "Clocks":
        if shutil.which("nvidia-smi") is not None:
            gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
            query = ["--query-gpu=clocks.sm,power.draw.instant", "--format=csv,noheader,nounits"]
            self._process = subprocess.Popen(
                ["nvidia-smi", "-i", gpu, *query, f"--loop-ms={_MILLISECONDS}"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
            self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            with self._process:
                self._process.kill()
                self._reader.join()

    def between(self, began: float, ended: float) -> dict[str, float | None]:
        """Median MHz of the multiprocessors and watts between two values of `time.time()`; None without a reading."""
        found = [reading[1:] for reading in self._readings if began <= reading[0] <= ended]
        mhz, watts = map(statistics.median, zip(*found, strict=True)) if found else (None, None)
        return {"sm_mhz": mhz, "watts": watts}

    def _read(self, process: subprocess.Popen) -> None:
        for line in process.stdout or ():
            try:
                mhz, watts = map(float, line.split(","))
            except ValueError:  # a figure that this GPU does not have
                continue
            self._readings.append((time.time(), mhz, watts))
