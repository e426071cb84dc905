"""What to run first on a GPU, in the order of its worth (`make gpu`, docs/benchmarks.md). With
GPU_DEVICE=cpu, tiny.

A part is one or more commands with a time limit, and belongs to a tier. A part that passed on this
commit is not run again; the earlier call may have been on another machine, whose gpu.json was
brought to GPU_OUTPUT. The table at the end has all parts of all calls, and what their runs found.

    GPU_DEVICE=cpu GPU_OUTPUT=/tmp/gpu GPU_SECONDS=540 GPU_TIERS="smoke real" \\
        .venv/bin/pytest -m gpu tests/test_gpu.py
"""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import get_args

import pytest
import torch
from cifar import pictures, write_folders
from commands import ROOT, last_of_each
from runs import train_with_faults
from torch.profiler import ProfilerActivity, profile

from benchmarks.config import Benchmark, BenchmarkConfig
from benchmarks.harness import environment_info
from benchmarks.step import quiet_run, random_tokens, short_run
from gpt2_ddp.cluster import read_clock
from gpt2_ddp.config.cli import load
from gpt2_ddp.config.jobs import ClassifierConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.files import read_json
from gpt2_ddp.model import fp8
from gpt2_ddp.output import write_json
from gpt2_ddp.project import git_commit
from gpt2_ddp.records.rows import is_event
from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.training.loop import train_loop
from gpt2_ddp.training.task import Due

OUT = Path(os.environ.get("GPU_OUTPUT", ROOT / "runs/gpu")).absolute()
DEVICE = os.environ.get("GPU_DEVICE", "cuda")
CALL_SECONDS = float(os.environ.get("GPU_SECONDS", "300" if DEVICE == "cuda" else "inf"))
"""Seconds of this call. A part begins only if its limit is left, or as the first part, which gets
what there is."""
BEGUN, USUAL_LIMIT, GRACE = time.monotonic(), 120, 10
"""Start; seconds of a part where `LIMITS` has no others, twice as many on a CPU; seconds to end
after that."""
TINY = (
    " --model.n_layer 1 --model.n_head 2 --model.n_embd 32 --model.block_size 32"
    " --train.global_batch_tokens 256"
    " --optim.warmup_steps 2 --eval.tokens 512"
)
TINY_PRESET = (
    "train: {steps: 10}\nmodel: {n_layer: 1, n_head: 2, n_embd: 32}\noptim: {warmup_steps: 5}\n"
)

SHORT = {
    "flags": "--output_dir {out} --train.device {device} --optim.decay_steps 400",
    "small": "scripts/train_gpt2.py {flags}{tiny}",
    "ranks": (
        "-m torch.distributed.run --standalone --nproc_per_node {gpus} {small}"
        " --tracking.log_every 1"
    ),
    "sharded": "{ranks} --run_name sharded --launch.parallel fsdp --tracking.sample_every 20",
    "random": (
        "--data.path {out}/random --data.prepare null --tracking.log_every 5"
        " --train.mixed_precision bf16 --train.steps 40{large}"
    ),
    "124M": "scripts/train_gpt2.py {flags} --config configs/gpt2_124m.yaml {random}",
    "curve": "{small} --tracking.log_every 1 --train.steps 200",
    "step": "-m benchmarks step --steps 20 --precision bf16 --device {device} --output {out}/",
}
"""Parts of commands: the default training, and GPT-2 (124M) in bf16 with 64 windows of random
tokens a step."""
PARTS = {
    # does it work at all
    "fp32": ["{small} --run_name fp32 --train.mixed_precision no --train.steps 50"],
    "bf16": ["{small} --run_name bf16 --train.mixed_precision bf16 --train.steps 50"],
    "resume": [
        "{small} --run_name straight --train.deterministic --train.steps 40",
        "{small} --run_name resumed --train.deterministic --train.steps 20",
        "{small} --run_name resumed --train.deterministic --train.steps 40",
    ],
    "stop": [
        "{small} --run_name stopped --train.max_minutes 0.001 --train.steps 50",
        "{small} --run_name stopped --train.steps 50",
    ],
    "Inf": [
        "tests/test_gpu.py Inf {flags}{tiny} --run_name inf --train.mixed_precision {fp16}"
        " --train.steps 50",
    ],
    "verify": ["scripts/verify_run.py {out}/resumed"],
    "generate": ["scripts/generate.py {out}/resumed --max_new_tokens 20"],
    "evaluate": ["scripts/evaluate.py {out}/resumed --device {device}"],
    "torchrun": [
        "-m torch.distributed.run --standalone --nproc_per_node 1 {small} --run_name torchrun"
        " --train.steps 20",
    ],
    # one model, in parts on all GPUs
    "replicated": ["{ranks} --run_name replicated --train.steps 40"],
    "sharded": [
        "{sharded} --train.steps 20",
        "{sharded} --train.steps 40",
        "scripts/verify_run.py {out}/sharded",
    ],
    # the step
    "step": ["{step}step --repeats 2 --compile model --micro_batch 32{nanogpt}{short}"],
    "steps": ["{step}steps --repeats 2 --compile off blocks model --micro_batch 16 64"],
    "124M": ["{124M} --run_name 124M"],
    "fp8": ["{124M} --run_name fp8 --train.fp8_head"],
    "trace": ["tests/test_gpu.py trace {device} {out}{preset}"],
    # what the guarantees cost
    "guards off": ["{124M} --run_name unguarded --guard.sigmas null"],
    "saves in the background": [
        "{124M} --run_name background --checkpoint.every 10 --checkpoint.background yes",
    ],
    "saves standing": [
        "{124M} --run_name standing --checkpoint.every 10 --checkpoint.background no",
    ],
    "checkpoint": [
        "-m benchmarks checkpoint --repeats 3 --device {device} --output {out}/checkpoint{preset}",
    ],
    # sizes
    "350M": ["{step}350M --repeats 2 --preset configs/gpt2_350m.yaml --micro_batch 16 32"],
    "1558M": ["{step}1558M --repeats 2 --preset configs/gpt2_1558m.yaml --micro_batch 4 8"],
    "1558M recomputed": [
        "scripts/train_gpt2.py {flags} --config configs/gpt2_1558m.yaml {random}"
        " --run_name recomputed --train.activation_checkpointing --train.micro_batch_size 16",
    ],
    # real runs
    "200 in fp32": ["{curve} --run_name curve_fp32 --train.mixed_precision no --train.compile off"],
    "200 in bf16": [
        "{curve} --run_name curve_bf16 --train.mixed_precision bf16 --train.compile {compile}",
    ],
    "a run": [
        "scripts/train_gpt2.py --output_dir {out} --run_name whole"
        " --train.device {device}{tiny}{steps}",
    ],
    # small jobs
    "ResNet": [
        "scripts/train_classifier.py --config configs/jobs/cifar100_resnet18.yaml"
        " --output_dir {out} --data.name cifar10 --data.path {out}/images --train.epochs 2"
        " --train.device {device} --tracking.log_every 1 --run_name resnet{sync}"
        " --train.mixed_precision {fp16}",
    ],
}
"""Name -> what Python runs, one after the other. All but the last may be a training that stops,
with exit code 75."""
LIMITS = {
    "steps": 420,
    **dict.fromkeys(("350M", "1558M", "1558M recomputed", "a run"), 300),
    "checkpoint": 180,
}
"""Seconds of the parts that may take longer than others."""
FIRSTS = {
    "fp32": "smoke",
    "step": "speed",
    "guards off": "saves",
    "350M": "sizes",
    "200 in fp32": "real",
}
"""The first part of each tier; the parts after it are of the same one."""
TIERS = os.environ.get("GPU_TIERS", " ".join(FIRSTS.values())).split()
"""Tiers of this call."""
GPU_ONLY = ("steps", "fp8", "350M", "1558M", "1558M recomputed")
RATES = {
    "the head in fp8": ("124M", "fp8"),
    "guards off": ("124M", "unguarded"),
    "saves while training stands still": ("background", "standing"),
}
"""What the second run does otherwise -> two runs whose tokens/s are compared."""


@pytest.fixture(scope="session")
def call(pytestconfig):
    """Seconds of the parts that this call has run; what they need is in OUT, and the table follows
    the tests."""
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.exit("no CUDA device here; `make gpu DEVICE=cpu` tries the commands, tiny", 2)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "tiny.yaml").write_text(TINY_PRESET)
    random_tokens(OUT / "random", "gpt2", 10_000_000)
    for split in ("train", "test"):
        write_folders(OUT / "images" / split, *pictures(600, 10))
    pytestconfig.pluginmanager.register(Summary())
    return {}


class Summary:
    """The table at the end of the call, which gpu.json has as well."""

    def pytest_terminal_summary(self, terminalreporter):
        file = OUT / "gpu.json"
        known = read_json(file)
        found = {"device": DEVICE, **environment_info(), **known, "findings": [*findings()]}
        file.write_text(json.dumps(found, indent=1) + "\n")
        terminalreporter.section(f"{DEVICE}, all calls: {OUT}/gpu.json")
        for name, result in found["parts"].items():
            terminalreporter.write_line(
                f"{name:24} {result['seconds']:7.1f} s  {result['failure'] or 'ok'}"
            )
        for line in found["findings"]:
            terminalreporter.write_line(line)


def limit_of(part, first):
    """Seconds for a part that begins now; 0 if too few are left of this call."""
    limit, left = (
        LIMITS.get(part, USUAL_LIMIT) * (2 if DEVICE == "cpu" else 1),
        CALL_SECONDS - GRACE,
    )
    left -= time.monotonic() - BEGUN
    return max(min(limit, left), 0) if first or limit <= left else 0


@pytest.mark.gpu
@pytest.mark.parametrize("part", PARTS)
def test_part(part, call):
    """A failure is recorded for the table as well."""
    if DEVICE == "cpu" and part in GPU_ONLY:
        pytest.skip("takes a GPU")
    if tier_of(part) not in TIERS:
        pytest.skip(f"is of the tier {tier_of(part)}")
    if has_passed(part):
        pytest.skip("has passed on this commit")
    limit, begun = limit_of(part, first=not call), time.monotonic()
    failure = run_part(part, limit) if limit else "no time was left; the same command begins it"
    if limit:
        call[part] = time.monotonic() - begun
    record(part, call.get(part, 0.0), failure)
    if failure:
        pytest.fail(failure, pytrace=False)


@pytest.mark.gpu
@pytest.mark.parametrize("soft_cap", [None, 15.0])
def test_the_head_in_fp8_is_as_emulated(monkeypatch, soft_cap):
    """The kernel's products against products of the same fp8 numbers in fp32: loss and gradients,
    with and without a compiler. Both round logits and the rows' gradient to bf16."""
    if DEVICE == "cpu":
        pytest.skip("takes a GPU")
    device = torch.device(DEVICE)
    if not torch.cuda.is_available() or fp8.missing_fp8(device):
        pytest.exit("no CUDA device with fp8 here", 2)
    generator = torch.Generator(device).manual_seed(0)
    make = partial(torch.randn, device=device, generator=generator)
    x = make(4 * fp8.CHUNK + 256, 768, dtype=torch.bfloat16).requires_grad_()
    weight = (0.05 * make(50304, 768)).requires_grad_()
    targets = torch.randint(50257, (len(x),), device=device, generator=generator)
    targets[:100] = -100
    found = {}
    for name in ("emulated", "kernel", "compiled"):
        monkeypatch.setattr(fp8, "EMULATED_ON", ("cuda",) if name == "emulated" else ())
        loss_of = fp8.fp8_loss
        if name == "compiled":
            loss_of = torch.compile(fp8.fp8_loss, dynamic=False, fullgraph=True)
        loss = loss_of(x, weight, targets, 50257, soft_cap)
        gradients = torch.autograd.grad(loss, (x, weight))
        found[name] = loss.detach(), *(gradient.float() for gradient in gradients)
    for name in ("kernel", "compiled"):
        apart = [
            ((own - right).norm() / right.norm()).item()
            for own, right in zip(found[name], found["emulated"], strict=True)
        ]
        print(f"fp8, {name}, soft cap {soft_cap}: loss, rows, weight apart {apart}")
        # a rounding of a logit to bf16 may differ, and then of its gradient to fp8
        assert apart[0] < 1e-4
        assert max(apart[1:]) < 0.02


def tier_of(part):
    """The tier of a part."""
    firsts = [name for name in [*PARTS][: [*PARTS].index(part) + 1] if name in FIRSTS]
    return FIRSTS[firsts[-1]]


def has_passed(part):
    """Whether gpu.json says that the part passed on this commit and this kind of device."""
    known = read_json(OUT / "gpu.json")["parts"].get(part) if (OUT / "gpu.json").exists() else None
    commit = git_commit() or "-dirty"
    alike = {"failure": "", "commit": commit, "device": DEVICE}
    return bool(known) and not commit.endswith("-dirty") and alike.items() <= known.items()


def run_part(part, limit):
    """Runs the commands; returns why the part failed, or nothing. Runs of an earlier call are
    removed."""
    commands, end = commands_of(part, DEVICE), time.monotonic() + limit
    for command in commands:
        if "--run_name" in command:
            shutil.rmtree(OUT / command[command.index("--run_name") + 1], ignore_errors=True)
    log = OUT / f"{part.replace(' ', '_')}.log"
    with log.open("w") as file:
        for number, command in enumerate(commands, 1):
            left = max(end - time.monotonic(), 1)
            timeout = ["timeout", "-k", str(GRACE), str(left), sys.executable]
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            done = subprocess.run(
                [*timeout, *command], cwd=ROOT, env=environment, stdout=file, stderr=file
            )
            if done.returncode not in ((0,) if number == len(commands) else (0, 75)):
                last = next(
                    filter(None, reversed(log.read_text(errors="replace").splitlines())), "-"
                )
                why = (
                    f"out of {limit:.0f} s"
                    if done.returncode in (124, 137, -9)
                    else f"exit code {done.returncode}"
                )
                return f"{why}: {last[:200]} ({log})"
    if part == "resume" and not is_bitwise():
        return "the resumed run ends otherwise than the one that was not stopped"
    if part == "sharded" and max(apart("replicated", "sharded"), default=1.0) > 0.02:
        return "the losses differ by 2% from those of replicas, or are missing"
    if part == "Inf" and not (
        rows_of("inf")[-1]["skipped"] >= 1 and math.isfinite(rows_of("inf")[-1]["loss"])
    ):
        return "the step with an Inf was not skipped"
    return ""


def commands_of(part, device):
    """The words of each command."""
    text = "\n".join(PARTS[part])
    while "{" in text:
        text = text.format(**SHORT, **words(device))
    return [last_of_each(line.split()) for line in text.splitlines()]


def words(device):
    """What stands in the braces of `PARTS` and `SHORT`."""
    small, nanogpt = device == "cpu", os.environ.get("NANOGPT")
    return {
        "device": device,
        "out": str(OUT),
        "fp16": "no" if small else "fp16",
        "gpus": str(2 if small else max(torch.cuda.device_count(), 1)),
        "compile": "off" if small else "model",
        "sync": "" if small else " --model.sync_batchnorm",  # PyTorch has none on CPUs
        "preset": f" --preset {OUT}/tiny.yaml" * small,
        "nanogpt": f" --nanogpt {nanogpt}" if nanogpt else "",
        "tiny": TINY * small,
        "large": TINY
        if small
        else " --train.global_batch_tokens 65536 --eval.tokens 16384 --optim.warmup_steps 20",
        "steps": " --train.steps 20" * small,
        "short": (
            " --block_size 32 --micro_batch 1 --repeats 1 --steps 1 --compile off"
            f" --preset {OUT}/tiny.yaml"
        )
        * small,
    }


def record(part, seconds, failure):
    """Writes the parts of all calls, in their order, to gpu.json."""
    file = OUT / "gpu.json"
    known = read_json(file)["parts"] if file.exists() else {}
    known[part] = {
        "seconds": seconds,
        "failure": failure,
        "commit": git_commit() or "",
        "device": DEVICE,
    }
    file.write_text(json.dumps({"parts": {name: known[name] for name in PARTS if name in known}}))


def findings():
    """A line for each question to which the runs in OUT have an answer."""
    if rows_of("straight") and rows_of("resumed"):
        yield f"resumed and straight runs are bitwise equal, losses and weights: {is_bitwise()}"
    if rows := rows_of("inf"):
        skipped, loss = rows[-1].get("skipped"), rows[-1].get("loss")
        yield f"with an Inf in a gradient: {skipped} steps skipped, loss {loss} at the end"
    for file in sorted(file for name in get_args(Benchmark) for file in OUT.glob(f"*/{name}.json")):
        for case in read_json(file)["cases"]:
            figures = ", ".join(f"{name} {median(of):,.4g}" for name, of in case["figures"].items())
            yield f"{file.parent.name}: {case['what']}, {case['unit']}: {figures}"
    for what, runs in RATES.items():  # without the first rows, which compile
        rates = [
            [row["tokens_per_second"] for row in rows_of(run) if "loss" in row][2:] for run in runs
        ]
        if all(rates):
            yield f"{what}: {median(rates[1]):,.0f} tokens/s, otherwise {median(rates[0]):,.0f}"
    runs = {
        "bf16 against fp32": ("curve_fp32", "curve_bf16"),
        "sharded against replicas": ("replicated", "sharded"),
        "the head in fp8 against bf16": ("124M", "fp8"),
    }
    for what, pair in runs.items():
        if found := apart(*pair):
            spread = f"{max(found):.2%} apart at most, {mean(found):.2%} on average"
            yield f"loss of the first {len(found)} steps, {what}: {spread}"
    if (OUT / "trace.json").exists():
        traced = read_json(OUT / "trace.json")
        yield "trace: a step takes {step_ms:.1f} ms, of which its kernels {busy_ms:.1f}".format(
            **traced
        )
        for name in sorted(traced["kernels"], key=traced["kernels"].get)[:-25:-1]:
            yield f"{traced['kernels'][name]:8.2f} ms  {name[:110]}"
    if rates := [
        row["samples_per_second"] for row in rows_of("resnet") if "samples_per_second" in row
    ]:
        yield f"resnet: {median(rates):,.0f} images/s"


def rows_of(run):
    """The rows of steps, if the run is there."""
    file = OUT / run / "metrics.jsonl"
    rows = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return [row for row in rows if not is_event(row)]


def apart(one, other):
    """How far the losses of two runs are apart, relative to the first one's, in the steps that both
    took."""
    ours, theirs = (
        {row["step"]: row["loss"] for row in rows_of(run) if "loss" in row} for run in (one, other)
    )
    return [abs(theirs[step] / loss - 1) for step, loss in ours.items() if step in theirs]


def is_bitwise():
    """Whether the resumed run has the losses and weights of the straight one."""
    runs = ("straight", "resumed")
    straight, resumed = (
        {row["step"]: row["loss"] for row in rows_of(run) if "loss" in row} for run in runs
    )
    weights = [OUT / run / "checkpoints/step-00000040/model.safetensors" for run in runs]
    if not all(file.exists() for file in weights):
        return False
    return resumed == straight and weights[0].read_bytes() == weights[1].read_bytes()


def train_with_inf(flags):
    """A training with an Inf in the gradient of its second step."""
    config = load(TrainingConfig, flags, "configs/gpt2_stdlib.yaml")
    train_with_faults(config, (1, 2 * config.global_batch_windows), math.inf)


def test_a_part_that_passed_on_this_commit_is_not_run_again(monkeypatch, tmp_path):
    monkeypatch.setattr(sys.modules[__name__], "OUT", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "git_commit", lambda: "one")
    record("fp32", 1.0, "")
    record("bf16", 1.0, "exit code 1")
    assert [has_passed(part) for part in ("fp32", "bf16", "resume")] == [True, False, False]
    monkeypatch.setattr(sys.modules[__name__], "git_commit", lambda: "two")
    assert not has_passed("fp32")
    assert [
        tier_of(part) for part in ("fp32", "sharded", "trace", "checkpoint", "1558M", "ResNet")
    ] == [*("smoke", "smoke", "speed", "saves", "sizes", "real")]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_commands_are_such_that_a_script_takes_them(device, monkeypatch, tmp_path):
    # a trial with DEVICE=cpu leaves other runs
    monkeypatch.setattr(sys.modules[__name__], "OUT", tmp_path)
    kinds = {
        "train_gpt2": TrainingConfig,
        "train_classifier": ClassifierConfig,
        "benchmarks": BenchmarkConfig,
    }
    kinds |= {"Inf": TrainingConfig}
    for part in PARTS:
        for command in commands_of(part, device):
            script = next(
                number
                for number, word in enumerate(command)
                if word.endswith((".py", "benchmarks"))
            )
            assert (ROOT / command[script]).exists(), part
            script += command[script] == "tests/test_gpu.py"
            if kind := kinds.get(Path(command[script]).stem):
                default = "configs/gpt2_stdlib.yaml" if kind is TrainingConfig else None
                config = load(kind, command[script + 1 :], default)
                assert part != "ResNet" or config.model.sync_batchnorm == (device == "cuda")
    assert {*LIMITS, *GPU_ONLY} <= {*PARTS}


class Enough(Exception):
    """All steps of the trace are taken."""


def trace(words):
    """Writes the milliseconds of a step of 64 windows, and those of its kernels in five further
    steps; on a CPU, of its operations."""
    device, out, *preset = words
    settings = BenchmarkConfig(
        device=device, **({"preset": preset[1], "block_size": 32} if preset else {})
    )
    batch, precision = (2, "no") if preset else (64, "bf16")
    config = short_run(settings, Path(out), batch, precision, "off" if preset else "model", {})
    random_tokens(Path(config.data.paths[0]))
    kind = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    profiler, begun = profile(activities=[kind]), []

    class Traced(Pretraining):
        def due(self, step, last):
            if step in (10, 30, 35):
                begun.append(read_clock(self.accelerator.device))
            if step == 30:
                profiler.start()
            if step == 35:
                profiler.stop()
                raise Enough
            return Due(False)

    with suppress(Enough), quiet_run(config, Traced) as run:
        train_loop(run)
    time_of = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    kernels = {event.key: getattr(event, time_of) / 5000 for event in profiler.key_averages()}
    found = {
        "step_ms": (begun[1] - begun[0]) * 50,
        "busy_ms": sum(kernels.values()),
        "kernels": kernels,
    }
    write_json(Path(out) / "trace.json", found)


if __name__ == "__main__":
    {"Inf": train_with_inf, "trace": trace}[sys.argv[1]](sys.argv[2:])
