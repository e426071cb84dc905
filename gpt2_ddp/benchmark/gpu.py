"""What to run first on a GPU: commands in parts of less than ten minutes, in the order of their worth. A second call
goes on with those that have not ended well."""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from gpt2_ddp.benchmark.step import CHECKOUTS, GPT2_IDS, random_tokens
from gpt2_ddp.benchmark.table import OURS, Case, Table
from gpt2_ddp.checkpoint.run_files import is_event
from gpt2_ddp.compare.compare import find_machine
from gpt2_ddp.config.benchmark import BenchmarkConfig
from gpt2_ddp.files import write_atomically
from gpt2_ddp.project import PROJECT

USUAL, TO_END = 120, 10
"""Seconds that a part may take where `LIMITS` does not say, twice as many on a CPU; and to end once it was told so."""
TINY = (
    " --model.n_layer 1 --model.n_head 2 --model.n_embd 32 --model.block_size 32 --train.global_batch_tokens 256"
    " --optim.warmup_steps 2 --eval.tokens 512"
)
TINY_PRESET = "train: {steps: 10}\nmodel: {n_layer: 1, n_head: 2, n_embd: 32}\noptim: {warmup_steps: 5}\n"
RUN = "scripts/train_gpt2.py --output_dir {out} --train.device {device} --optim.decay_steps 400"
SMALL = f"{RUN}{{tiny}}"
"""The default training."""
LARGE = (
    f"{RUN} --config configs/gpt2_124m.yaml --data.path {{out}}/random --data.prepare null --tracking.log_every 5"
    " --train.mixed_precision bf16 --train.steps 40{large}"
)
"""GPT-2 (124M), bf16, 64 windows a step, random tokens."""
CURVE = f"{SMALL} --tracking.log_every 1 --train.steps 200"
STEP = "scripts/benchmark.py step --precision bf16 --device {device} --output {out}/"
JOB = "--output_dir {out} --data.name cifar10 --data.path {out}/images --train.epochs 2"
JOB += " --train.device {device} --tracking.log_every 1"
PARTS = {
    # does it work at all
    "fp32": f"{SMALL} --run_name fp32 --train.mixed_precision no --train.steps 50",
    "bf16": f"{SMALL} --run_name bf16 --train.mixed_precision bf16 --train.steps 50",
    "straight": f"{SMALL} --run_name straight --train.deterministic --train.steps 40",
    "first half": f"{SMALL} --run_name resumed --train.deterministic --train.steps 20",
    "second half": f"{SMALL} --run_name resumed --train.deterministic --train.steps 40",
    "a stop": f"{SMALL} --run_name stopped --train.max_minutes 0.001 --train.steps 50",
    "after the stop": f"{SMALL} --run_name stopped --train.steps 50",
    "planted Inf": f"-m gpt2_ddp.benchmark.planted {SMALL} --run_name planted --train.mixed_precision {{fp16}}"
    " --train.steps 50",
    "verify": "scripts/verify_run.py {out}/resumed",
    "generate": "scripts/generate.py {out}/resumed --max_new_tokens 20",
    "evaluate": "scripts/evaluate.py {out}/resumed --device {device}",
    "torchrun": f"-m torch.distributed.run --standalone --nproc_per_node 1 {SMALL} --run_name torchrun"
    " --train.steps 20",
    # the step
    "step": f"{STEP}step --repeats 3 --compile model --micro_batch 32{{checkouts}}{{short}}",
    "step of 64": f"{STEP}step_64 --repeats 3 --compile model --micro_batch 64",
    "step eager": f"{STEP}step_eager --repeats 3 --compile off --micro_batch 32{{checkouts}}",
    "ceiling": "scripts/benchmark.py ceiling --precision bf16 --device {device} --output {out}/ceiling{short}",
    "step in blocks": f"{STEP}step_blocks --repeats 3 --compile blocks --micro_batch 32",
    "step of 16": f"{STEP}step_16 --repeats 3 --compile model --micro_batch 16",
    "124M": f"{LARGE} --run_name 124M",
    "cuDNN": f"{LARGE} --run_name cuDNN",
    "flash": f"{LARGE} --run_name flash",
    "logits whole": f"{LARGE} --run_name whole_logits --train.loss_chunk null",
    # where the time goes
    "trace": f"{LARGE} --run_name trace --train.profile_steps 5",
    # what the guarantees cost
    "guards off": f"{LARGE} --run_name unguarded --guard.skip no --guard.norm_sigmas null --guard.loss_sigmas null",
    "replicas compared": f"{LARGE} --run_name replicas --guard.check_every 5",
    "saves behind": f"{LARGE} --run_name behind --checkpoint.every 10 --checkpoint.background yes",
    "saves standing": f"{LARGE} --run_name standing --checkpoint.every 10 --checkpoint.background no",
    "checkpoint": "scripts/benchmark.py checkpoint --repeats 3 --device {device} --output {out}/checkpoint{preset}",
    # sizes
    **{
        name: f"{STEP}{name} --repeats 2 --preset configs/gpt2_{name.lower()}.yaml --micro_batch {batches}"
        for name, batches in {"350M": "16 32", "774M": "8 16", "1558M": "4 8"}.items()
    },
    "1558M recomputed": f"{LARGE.replace('124m', '1558m')} --run_name recomputed --train.activation_checkpointing"
    " --train.micro_batch_size 16",
    # real runs
    "200 in fp32": f"{CURVE} --run_name curve_fp32 --train.mixed_precision no --train.compile off",
    "200 in bf16": f"{CURVE} --run_name curve_bf16 --train.mixed_precision bf16 --train.compile {{compile}}",
    "AdamW": f"{CURVE} --run_name curve_adamw --train.mixed_precision bf16 --train.compile {{compile}}"
    " --optim.name adamw --optim.lr 2e-3 --optim.muon_lr 0.01",  # the default training has Muon, at another rate
    "a run": "scripts/train_gpt2.py --output_dir {out} --run_name whole --train.device {device}{tiny}{steps}",
    # small jobs
    "LeNet": f"scripts/train_classifier.py --config configs/cifar100_lenet.yaml {JOB} --run_name lenet",
    "ResNet": f"scripts/train_classifier.py --config configs/cifar100_resnet18.yaml {JOB} --run_name resnet{{sync}}"
    " --train.mixed_precision {fp16}",
    "compare": "scripts/compare_parallel.py --jobs regression classifier --seconds 2 --repeats 2 --busy_ok"
    " --device {device} --output {out}/compare",
}
"""Name -> what Python runs; tiny on a CPU, where it shows that the commands are right."""
GOES_ON = {"second half": "first half", "after the stop": "a stop"}
"""Part -> the one whose run it goes on with, once that has ended well. All others begin their runs anew."""
ENVIRONMENT = {
    "cuDNN": {"TORCH_CUDNN_SDPA_PREFERRED": "1"},
    "flash": {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"},
}
"""How PyTorch is told which attention comes first."""
LIMITS = {
    **dict.fromkeys(("step", "step of 64", "step eager", "step in blocks", "step of 16"), 420),
    **dict.fromkeys(("350M", "774M", "1558M", "1558M recomputed", "a run", "compare"), 300),
    "ceiling": 180,
    "checkpoint": 180,
}
"""Seconds of the parts that may take longer than others, or no call that is given few would have time for them."""
CODES = {"a stop": 75}
"""With which a part ends well."""
OUT_OF_TIME = (124, 137, -9)
"""With which `timeout` ends, the last two where a part had to be killed."""
GPU_ALONE = ("step of 64", "step eager", "step in blocks", "step of 16")
GPU_ALONE += ("350M", "774M", "1558M", "1558M recomputed", "compare")
RATES = {
    "attention by flash": ("cuDNN", "flash"),
    "logits whole": ("124M", "whole_logits"),
    "guards off": ("124M", "unguarded"),
    "no comparison of replicas": ("replicas", "124M"),
    "saves while training stands still": ("behind", "standing"),
}
"""What the second run is -> names of the runs whose tokens/s are compared; the first one is ours."""


def measure(config: BenchmarkConfig) -> Table:
    """Runs each part that has not ended well before, its log in `config.output`: those that were never begun first,
    then those whose log is oldest. A failure ends its part alone, and what its run left is removed before it is tried
    again: `straight` would not be straight. A part whose limit exceeds what is left of `config.within` waits for
    another call; but the first one of a call is begun with what there is, or one whose limit exceeds all of
    `config.within` would wait forever."""
    begun, device, out = time.monotonic(), find_machine(config.device).device, Path(config.output)
    small, words = device == "cpu", _words(config, device)
    (out / "tiny.yaml").write_text(TINY_PRESET)
    random_tokens(out / "random", GPT2_IDS, 10_000_000)
    _pictures(out / "images")
    names = [name for name in PARTS if not (small and name in GPU_ALONE)]
    cases, notes, waiting = {}, [], []
    ran = False
    for name in sorted(names, key=lambda name: _written_at(_log(out, name))):
        done, log, before = _done(out, name), _log(out, name), GOES_ON.get(name)
        limit = LIMITS.get(name, USUAL) * (2 if small else 1)
        left = config.within - TO_END - (time.monotonic() - begun) if config.within else math.inf
        if done.exists():
            seconds, unit = float(done.read_text()), "s"
        elif (limit > left and (ran or left < 1)) or (before and not _done(out, before).exists()):
            waiting.append(name)
            continue
        else:
            print(f"{name} ...", file=sys.stderr, flush=True)
            ran, given = True, min(limit, left)
            part = PARTS[name].format(**words)
            if not before and "--run_name" in part:
                shutil.rmtree(out / part.partition("--run_name ")[2].split()[0], ignore_errors=True)
            code, seconds = _run(part, ENVIRONMENT.get(name, {}), given, log)
            if code == CODES.get(name, 0):
                unit = "s"
                write_atomically(done, f"{seconds:.1f}")
            else:
                late = code in OUT_OF_TIME
                unit = "s, out of time" if late else "s, FAILED"
                last = next(filter(None, reversed(log.read_text(errors="replace").splitlines())), "-")
                of = f" after the {given:.0f} of {limit} s that --within left" if late and given < limit else ""
                notes.append(f"{name}: ended with {code}{of}: {last[:200]} ({log})")
        cases[name] = Case(name, unit, {device: [seconds]}, False)
    if waiting:
        why = "no time was left for these, or for what they go on with; the same command again goes on"
        notes.append(f"{why}: {', '.join(waiting)}")
    told = [cases[name] for name in names if name in cases]
    return Table("gpu", [*told, *_rates(out)], config.model_dump(mode="json"), [*notes, *_findings(out)])


def _written_at(log: Path) -> float:
    return log.stat().st_mtime if log.exists() else 0


def _log(out: Path, name: str) -> Path:
    return out / f"{name.replace(' ', '_')}.log"


def _done(out: Path, name: str) -> Path:
    return _log(out, name).with_suffix(".done")


def _run(part: str, environment: dict[str, str], limit: float, log: Path) -> tuple[int, float]:
    """The exit code of a part, with which all that it has started is ended, and how many seconds it took."""
    words = [str(PROJECT / word) if word.startswith("scripts/") else word for word in part.split()]
    begun, command = time.monotonic(), ["timeout", "-k", str(TO_END), str(limit), sys.executable, *words]
    with log.open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | environment)
    return done.returncode, time.monotonic() - begun


def _words(config: BenchmarkConfig, device: str) -> dict[str, str]:
    """What stands in the parts' braces."""
    small = device == "cpu"
    out = config.output
    checkouts = [f" --{field} {folder}" for field in CHECKOUTS if (folder := getattr(config, field))]
    return {
        "device": device,
        "out": str(out),
        "fp16": "no" if small else "fp16",
        "compile": "off" if small else "model",
        "sync": "" if small else " --model.sync_batchnorm",  # PyTorch has none on CPUs
        "preset": f" --preset {out}/tiny.yaml" * small,
        "checkouts": "".join(checkouts),
        "tiny": TINY * small,
        "large": TINY if small else " --train.global_batch_tokens 65536 --eval.tokens 16384 --optim.warmup_steps 20",
        "steps": " --train.steps 20" * small,
        "short": f" --block_size 32 --micro_batch 1 --repeats 1 --seconds 0.01 --compile off --preset {out}/tiny.yaml"
        * small,
    }


def _rows(run: Path) -> list[dict[str, Any]]:
    """The rows of steps of a run that is there."""
    file = run / "metrics.jsonl"
    rows = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return [row for row in rows if not is_event(row)]


def _rates(out: Path) -> Iterator[Case]:
    """What of two runs, one after the other, is compared; their first rows, in which graphs are compiled, aside."""
    for what, names in RATES.items():
        first, second = ([row["tokens_per_second"] for row in _rows(out / name) if "loss" in row][2:] for name in names)
        if first and second:
            yield Case(what, "tokens/s", {OURS: [median(first)], what: [median(second)]})


def _findings(out: Path) -> Iterator[str]:
    """A sentence for each question to which the runs that are there have an answer."""
    weights = [out / run / "checkpoints/step-00000040/model.safetensors" for run in ("straight", "resumed")]
    if all(file.exists() for file in weights):
        same = weights[0].read_bytes() == weights[1].read_bytes()
        losses = [
            {row["step"]: row["loss"] for row in _rows(out / run) if "loss" in row} for run in ("straight", "resumed")
        ]
        same = same and all(losses[1][step] == loss for step, loss in losses[0].items())
        word = "bitwise like" if same else "OTHERWISE than"
        yield f"a resumed run ends {word} one that was not stopped, losses and weights"
    if planted := _rows(out / "planted"):
        yield f"an Inf was planted: {planted[-1]['skipped']} steps skipped, loss {planted[-1].get('loss')} at the end"
    full, fast = (
        {row["step"]: row["loss"] for row in _rows(out / f"curve_{kind}") if "loss" in row} for kind in ("fp32", "bf16")
    )
    if apart := [abs(fast[step] / loss - 1) for step, loss in full.items() if step in fast]:
        most, mean = max(apart), np.mean(apart)
        yield f"first {len(apart)} steps, bf16 against fp32: loss {most:.2%} apart at most, {mean:.2%} on average"
    ends = {name: rows[-1].get("val_loss") for name in ("curve_bf16", "curve_adamw") if (rows := _rows(out / name))}
    if len(ends) == 2:
        yield f"validation loss after 200 steps: Muon {ends['curve_bf16']:.3f}, AdamW {ends['curve_adamw']:.3f}"
    for name in ("lenet", "resnet"):
        if rows := [row for row in _rows(out / name) if "samples_per_second" in row]:
            yield f"{name}: {median(row['samples_per_second'] for row in rows):,.0f} images/s"
    yield from _costs(out / "trace/trace.json")


def _costs(trace: Path) -> Iterator[str]:
    """The three kernels that take most of a profiler's trace, and the time in which none runs."""
    if not trace.exists():
        return
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    work = [event for event in events if event.get("cat") in kinds] or [e for e in events if e.get("cat") == "cpu_op"]
    took: Counter[str] = Counter()
    busy, end = 0.0, -np.inf
    for event in sorted(work, key=lambda event: event["ts"]):
        until = event["ts"] + event["dur"]
        took[event["name"]] += event["dur"]
        busy += max(until - max(event["ts"], end), 0)
        end = max(end, until)
    whole = end - min(event["ts"] for event in work)
    for name, micros in took.most_common(3):
        yield f"trace: {micros / whole:.1%} in {name[:100]}"
    yield f"trace: nothing runs in {1 - busy / whole:.1%} of {whole / 1000:.1f} ms"


def _pictures(folder: Path) -> None:
    """Images of CIFAR's size, 10 classes, as class folders; none where Pillow is missing."""
    try:
        from PIL import Image
    except ImportError:
        return
    rng = np.random.default_rng(0)
    for split, label, number in product(("train", "test"), range(10), range(60)):
        file = folder / split / str(label) / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 25, (32, 32, 3)) + 20 * label
        Image.fromarray(pixels.astype(np.uint8)).save(file)
