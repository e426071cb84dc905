"""The tests that compare numbers, on kinds of processors that this machine can stand for.

    .venv/bin/python tests/kinds.py           # all of them
    .venv/bin/python tests/kinds.py --turn    # one: another each day

A kind limits the instructions of torch, oneDNN and MKL, and has its own number of threads and
Python's hash seed. Each run prints its nearest comparisons. The exit code is 1 if a kind has a
failed test, or one above margins.MOST.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from margins import MOST

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


def run(number, folder):
    """Runs the tests on a kind. Returns pytest's exit code and the margins."""
    instructions, onednn, mkl, threads = KINDS[number]
    kind = {"ATEN_CPU_CAPABILITY": instructions, "ONEDNN_MAX_CPU_ISA": onednn, "MKL_CBWR": mkl}
    kind |= {"TEST_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    kind |= {"PYTHONHASHSEED": str(number)}
    margins = folder / f"{number}.json"
    begun = time.monotonic()
    tests = "computes and not slow and not gpu"
    words = ["-m", "pytest", "-m", tests, "-n", str(min(4, os.cpu_count() or 1))]
    print(f"\nkind {number}:", *(f"{name}={value}" for name, value in kind.items()), flush=True)
    code = subprocess.run(
        [sys.executable, *words], env=os.environ | kind | {"MARGINS": str(margins)}
    ).returncode
    print(f"kind {number}: exit code {code} after {time.monotonic() - begun:.0f} s", flush=True)
    return code, json.loads(margins.read_text()) if margins.is_file() else {}


def main():
    """Runs the kinds, and prints how each ended."""
    here = ORDER.index(torch.backends.cpu.get_cpu_capability().lower())
    numbers = [number for number, kind in enumerate(KINDS) if ORDER.index(kind[0]) <= here]
    if "--turn" in sys.argv:
        numbers = [numbers[int(time.time()) // 86400 % len(numbers)]]
    with tempfile.TemporaryDirectory() as folder:
        found = {number: run(number, Path(folder)) for number in numbers}
    print()
    for number, (code, margins) in found.items():
        largest = max(margins.values(), default=0)
        print(f"kind {number}: exit code {code}, largest error / tolerance {largest:.4f}")
    failed = [code for code, _ in found.values() if code]
    near = [margin for _, margins in found.values() for margin in margins.values() if margin > MOST]
    return int(bool(failed or near))


if __name__ == "__main__":
    sys.exit(main())
