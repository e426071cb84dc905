"""Clocks and power of the GPU during a measurement, as nvidia-smi reports them. Nothing is set."""

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import IO

FIELDS = ("clocks.sm", "power.draw", "temperature.gpu", "clocks_event_reasons.active")
QUERY = [
    "nvidia-smi",
    f"--query-gpu={','.join(FIELDS)}",
    "--format=csv,noheader,nounits",
    "-lms",
    "200",
]


class CardLog:
    """Lines of nvidia-smi with the time of their arrival, `time.monotonic()`."""

    def __init__(self) -> None:
        self.lines: list[tuple[float, str]] = []

    def read(self, stream: IO[str]) -> None:
        """Reads to the end of the stream."""
        for line in stream:
            self.lines.append((time.monotonic(), line.strip()))

    def between(self, begin: float, end: float) -> dict[str, object]:
        """Medians of clock (MHz), power (W) and temperature, and the reasons for slower clocks;
        empty without lines."""
        rows = [line.split(", ") for when, line in list(self.lines) if begin <= when <= end]
        rows = [
            row
            for row in rows
            if len(row) == len(FIELDS) and all(_is_number(cell) for cell in row[:3])
        ]
        if not rows:
            return {}
        clock, power, heat = (median(float(row[column]) for row in rows) for column in range(3))
        return {
            "mhz": clock,
            "watts": power,
            "celsius": heat,
            "reasons": sorted({row[3] for row in rows}),
        }


@contextmanager
def card_log() -> Iterator[CardLog]:
    """A log of this machine's GPU while the context lasts; it stays empty where nvidia-smi is
    missing."""
    log = CardLog()
    if not shutil.which(QUERY[0]):
        yield log
        return
    with subprocess.Popen(
        QUERY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout
        reader = threading.Thread(target=log.read, args=(process.stdout,), daemon=True)
        reader.start()
        try:
            yield log
        finally:
            process.terminate()
            reader.join(5)


def _is_number(cell: str) -> bool:
    return cell.replace(".", "", 1).isdigit()
