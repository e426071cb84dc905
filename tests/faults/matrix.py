"""A harness for stops: starts a command as people do, signals it at a known moment, and looks at what is left.

`stage.py` runs a script for it in which a moment (hashing, evaluating, sampling, saving) lasts long and leaves a mark.
"""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from commands import ACCELERATE, ROOT, TORCHRUN, environment
from ranks import free_port, wait_until
from runs import rows, same, training_config, weights

from gpt2_ddp.config.cli import dump

MARK = "GPT2_DDP_STOP_TEST"
LAUNCHERS = {
    "python": [sys.executable],
    "accelerate": ACCELERATE,
    "torchrun": [*TORCHRUN, "--nproc_per_node", "2", "--master_port", "PORT"],
    "processes": [sys.executable],
}
"""`processes` is `--launch.processes 2`, which only the small jobs have; torchrun and it have two ranks."""
STAGES = ("imports", "hashing", "training", "evaluation", "sampling", "saving")
BEFORE_TRAINING = STAGES[:2]
CHANGES = {
    "hashing": {"data.verify_hashes": "always"},
    "evaluation": {"eval.every": 3, "eval.tokens": 2000},
    "sampling": {"tracking.sample_every": 3},
    "saving": {"checkpoint.every": 3},
}
STEPS = 150


@dataclass(frozen=True)
class Cell:
    """One stop: who started the command, who is signalled by what and when, and how many workers the loader has.

    Args:
        target: launcher (the process that was started), rank (the last one), or group (every process, at once).
    """

    launcher: str
    target: str
    signal: str
    stage: str
    workers: int = 0

    def __str__(self) -> str:
        return "-".join(map(str, (self.launcher, self.target, self.signal, self.stage, self.workers)))


@dataclass
class Seen:
    """What a stop came to.

    Args:
        code: the started process's exit code.
        status: of the run folder; empty for none.
        seconds: until the status said so, and until no process was left.
        left: commands of processes that were there 30 s after the signal, and were killed.
    """

    code: int
    errors: str
    status: dict
    seconds: dict[str, float]
    left: list[str] = field(default_factory=list)
    folder_is_there: bool = False


def command(cell: Cell, folder: Path, corpus: Path, disturbed: bool) -> list[str]:
    """What a user types; `disturbed` makes the cell's stage last."""
    if cell.launcher == "processes":
        script = [str(ROOT / "scripts/train_regression.py"), "--launch.processes", "2", "--output_dir", str(folder)]
        script += ["--run_name", "run", "--train.device", "cpu", "--train.epochs", "40", "--tracking.log_every", "1"]
    else:
        values = {"train.steps": STEPS, "train.global_batch_tokens": 8 * 32, "data.workers": cell.workers}
        values |= {"eval.every": 10**6, "eval.tokens": 500, "checkpoint.every": 10**6}
        file = folder / f"{cell.stage}.yaml"
        file.write_text(dump(training_config(corpus, folder, values | CHANGES.get(cell.stage, {}))))
        script = [str(ROOT / "scripts/train_gpt2.py"), "--config", str(file)]
    if disturbed and cell.stage not in ("imports", "training"):
        script = [str(Path(__file__).with_name("stage.py")), cell.stage, str(folder / "mark"), *script]
    return [word.replace("PORT", str(free_port())) for word in LAUNCHERS[cell.launcher]] + script


def disturb(cell: Cell, folder: Path, corpus: Path) -> Seen:
    """Starts the cell's command in `folder`, stops it, and waits until nothing of it is left."""
    mark, log = uuid.uuid4().hex, folder / "stderr"
    with log.open("w") as errors:
        words, env = command(cell, folder, corpus, disturbed=True), environment(OMP_NUM_THREADS="1", **{MARK: mark})
        pipes = {"stdout": subprocess.DEVNULL, "stderr": errors}
        process = subprocess.Popen(words, env=env, cwd=ROOT, start_new_session=True, **pipes)
    try:
        _await_stage(cell, folder, process, mark)
        number = signal.Signals[f"SIG{cell.signal}"]
        targets = {
            "launcher": lambda: [process.pid],
            "rank": lambda: [_ranks(mark)[-1].pid],
            "group": lambda: [found.pid for found in _family(mark)],
        }[cell.target]()
        begun = time.monotonic()
        for pid in targets:
            with suppress(ProcessLookupError):  # the parent forwards the signal, and a rank may end before its turn
                os.kill(pid, number)
        seconds = {}
        while (family := _family(mark)) and time.monotonic() < begun + 30:
            if "stopped" not in seconds and _status(folder).get("state") == "stopped":
                seconds["stopped"] = time.monotonic() - begun
            process.poll()
            time.sleep(0.05)
        seconds["gone"] = time.monotonic() - begun
        left = [" ".join(found.cmdline()) for found in family]
    finally:
        for found in _family(mark):
            found.kill()
        code = process.wait()
    return Seen(code, log.read_text(), _status(folder), seconds, left, (folder / "run").exists())


def finish(cell: Cell, folder: Path, corpus: Path) -> Path:
    """Gives the cell's command again, undisturbed, until it is complete; returns the run's folder."""
    words, env = command(cell, folder, corpus, disturbed=False), environment(OMP_NUM_THREADS="1")
    done = subprocess.run(words, env=env, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert _status(folder)["state"] == "completed"
    return folder / "run"


def equal(one: Path, other: Path) -> bool:
    """Whether two runs are the same, bit for bit, in what they trained on and in what came of it."""
    return _numbers(one) == _numbers(other) and same(weights(one), weights(other))


def _numbers(run: Path) -> list[tuple]:
    kept = ("step", "loss", "grad_norm", "order_digest", "train_loss")
    found = {row["step"]: tuple(row.get(name) for name in kept) for row in rows(run)}
    return [found[step] for step in sorted(found) if found[step][1] is not None]


def _await_stage(cell: Cell, folder: Path, process: subprocess.Popen, mark: str) -> None:
    def step() -> int:
        metrics = folder / "run/metrics.jsonl"
        found = rows(metrics.parent) if metrics.exists() and metrics.read_text().endswith("\n") else []
        return found[-1]["step"] if found else -1

    stage_mark = folder / "mark"
    if cell.stage == "imports":
        wait_until(
            lambda: len(_ranks(mark)) == (2 if cell.launcher in ("torchrun", "processes") else 1), process=process
        )
        wait_until(lambda: any("libtorch" in line.path for line in _ranks(mark)[-1].memory_maps()), process=process)
        return
    if cell.stage != "hashing":
        wait_until(lambda: step() >= (3 if cell.stage in ("training", "sampling", "saving") else 2), process=process)
        stage_mark.unlink(missing_ok=True)
    if cell.stage != "training":
        wait_until(stage_mark.exists, process=process)
        time.sleep(0.2)


def _family(mark: str) -> list[psutil.Process]:
    """Every process, dead ones apart, that was started by the command with this mark, the oldest first."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process.create_time(), process.pid, process))
        except psutil.Error:
            continue
    return [process for *_, process in sorted(found, key=lambda item: item[:2])]


def _ranks(mark: str) -> list[psutil.Process]:
    """The processes that train, in the order of their ranks: not the launcher, nor the loader's workers."""
    found = []
    for process in _family(mark):
        try:
            words, rank = process.cmdline(), process.environ().get("RANK")
        except psutil.Error:
            continue
        launches = {"accelerate", "torchrun"} & {Path(word).name for word in words}
        is_script = any("scripts/train_" in word for word in words) and not launches
        if is_script or (rank and any("multiprocessing.spawn" in word for word in words)):
            found.append((rank, process))
    connected = [(int(rank), process) for rank, process in found if rank] or [(0, process) for _, process in found]
    ranks = dict(reversed(connected))  # a loader's workers are younger than their rank
    return [ranks[rank] for rank in sorted(ranks)]


def _status(folder: Path) -> dict:
    file = folder / "run/status.json"
    return json.loads(file.read_text()) if file.exists() else {}
