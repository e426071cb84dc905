"""Compares the recorded runs of `golden/` with those of another commit: losses, norms, digests and tensors are equal.

python tests/golden_same.py REVISION
"""

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.numpy import load_file

GOLDEN = Path(__file__).parent / "golden"
NUMBERS = ("step", "loss", "loss_mean", "lr", "grad_norm", "skipped", "order_digest", "tokens", "samples", "val_loss")


def numbers(run: Path) -> list[dict[str, object]]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{name: row[name] for name in NUMBERS if name in row} for row in rows]


def main(revision: str) -> None:
    archive = subprocess.check_output(["git", "archive", revision, "golden"], cwd=GOLDEN.parent)
    with TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        for run in ("gpt2_run", "regression_run"):
            old, new = Path(folder) / "golden" / run, GOLDEN / run
            assert numbers(old) == numbers(new), run
            names = sorted(file.relative_to(old) for file in old.rglob("*.safetensors"))
            assert names == sorted(file.relative_to(new) for file in new.rglob("*.safetensors"))
            for file in names:
                ours, theirs = load_file(new / file), load_file(old / file)
                assert ours.keys() == theirs.keys(), file
                assert all((ours[name].tobytes() == theirs[name].tobytes()) for name in ours), file
            print(f"{run}: {len(numbers(new))} rows and {len(names)} files of tensors are equal")


if __name__ == "__main__":
    main(sys.argv[1])
