"""The tests that compare numbers, on kinds of processors that this machine can stand for.

    .venv/bin/python tests/kinds.py           # all of them
    .venv/bin/python tests/kinds.py --turn    # one: another each day

A kind limits the instructions of torch, oneDNN and MKL, and has its own number of threads and Python's hash seed. The
table has the error of the nearest tests, divided by their tolerances. The exit code is 1 if a kind has a failed test,
or one above close.MOST.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from close import MOST

KINDS = [  # torch, oneDNN, MKL, threads
    ("default", "SSE41", "COMPATIBLE", 1),
    ("default", "AVX512_CORE_BF16", "AUTO", 4),
    ("avx2", "AVX2", "AVX2", 1),
    ("avx2", "AVX", "SSE4_2", 2),
    ("avx2", "AVX512_CORE", "AVX512", 4),
    ("avx512", "AVX512_CORE", "AVX512", 1),
    ("avx512", "SSE41", "AVX2", 2),
    ("avx512", "AVX512_CORE_AMX", "AUTO", 4),
]
ORDER = ("default", "avx2", "avx512")
"""torch's sets of instructions. A process with one that the processor lacks would crash."""


def run(number: int, folder: Path) -> tuple[int, dict[str, float]]:
    """Runs the tests on a kind. Returns pytest's exit code and the margins."""
    instructions, onednn, mkl, threads = KINDS[number]
    kind = {"ATEN_CPU_CAPABILITY": instructions, "ONEDNN_MAX_CPU_ISA": onednn, "MKL_CBWR": mkl}
    kind |= {"TEST_THREADS": str(threads), "OMP_NUM_THREADS": str(threads), "PYTHONHASHSEED": str(number)}
    margins, begun = folder / f"{number}.json", time.monotonic()
    words = ["-m", "pytest", "-m", "computes and not slow and not gpu", "-n", str(min(4, os.cpu_count() or 1))]
    print(f"\nkind {number}:", *(f"{name}={value}" for name, value in kind.items()), flush=True)
    code = subprocess.run([sys.executable, *words], env=os.environ | kind | {"MARGINS": str(margins)}).returncode
    print(f"kind {number}: exit code {code} after {time.monotonic() - begun:.0f} s", flush=True)
    return code, json.loads(margins.read_text()) if margins.is_file() else {}


def main() -> int:
    """Runs the kinds and prints the table."""
    here = ORDER.index(torch.backends.cpu.get_cpu_capability().lower())
    numbers = [number for number, kind in enumerate(KINDS) if ORDER.index(kind[0]) <= here]
    if "--turn" in sys.argv:
        numbers = [numbers[int(time.time()) // 86400 % len(numbers)]]
    with tempfile.TemporaryDirectory() as folder:
        found = {number: run(number, Path(folder)) for number in numbers}
    largest = {
        test: max(margins.get(test, 0) for _, margins in found.values()) for _, all in found.values() for test in all
    }
    print("\nerror / tolerance", *(f"kind {number}" for number in numbers), "test", sep=" | ")
    for test in sorted(largest, key=largest.get, reverse=True)[:10]:
        print(
            f"{largest[test]:17.4f}", *(f"{margins.get(test, 0):.4f}" for _, margins in found.values()), test, sep=" | "
        )
    print(f"{'exit code':17}", *(f"{code:6}" for code, _ in found.values()), sep=" | ")
    return int(any(code for code, _ in found.values()) or any(margin > MOST for margin in largest.values()))


if __name__ == "__main__":
    sys.exit(main())
