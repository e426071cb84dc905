"""The plan of a training: its steps, memory, disk, time and price, and its user errors."""

import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from gpt2_ddp.checkpoint.run_files import METRICS, read_lines
from gpt2_ddp.checkpoint.store import should_save_async
from gpt2_ddp.config.cli import load
from gpt2_ddp.config.hints import differences
from gpt2_ddp.config.plan import GPT2_IDS, PlanConfig
from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.feed import divisors, padding_rows, split_batch
from gpt2_ddp.data.tokenizer import load_tokenizer
from gpt2_ddp.distributed.environment import free_memory, is_main_process, spare_core, world_size
from gpt2_ddp.distributed.launch import pick_device
from gpt2_ddp.errors import UserError
from gpt2_ddp.model.compiled import what_pays
from gpt2_ddp.model.gpt import GPT, without_init
from gpt2_ddp.model.memory import Memory, Setting, estimate, micro_batches, pick_micro_batch, setting_of
from gpt2_ddp.plan.preflight import Seen, base_memory, preflight
from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.training.meters import device_name
from gpt2_ddp.training.peaks import GPUS, peak_flops
from gpt2_ddp.training.precision import settle_precision

CPU_MARGIN = 0.2  # largest error of the memory estimate on CPUs: kernels differ, and freed memory fragments
DISK = 5e8  # assumed bytes per second for copying, hashing and writing a checkpoint
START = 60.0  # seconds assumed from the command to the first step
SETS_SPEED = "model", "optim.name", "train.mixed_precision", "train.compile", "train.global_batch_tokens"
SETS_SPEED += "train.micro_batch_size", "train.loss_chunk", "train.activation_checkpointing"


@dataclass(frozen=True)
class Target:
    """The hardware of a plan: this machine, or GPUs by name."""

    device: str  # a GPU's exact name, or cpu or mps
    kind: str  # cuda, cpu or mps
    processes: int  # in all, one per device
    nodes: int  # machines, which have equally many processes
    memory: float  # bytes of a process
    peak: float | None  # FLOP/s of a device; None if unknown
    is_here: bool


def find_target(config: PlanConfig, started: int) -> Target:
    """The machine to plan for, where a launcher started `started` processes. Raises: UserError."""
    per_node = config.gpus or max(started // config.nodes, 1)
    memory = config.gpu_memory * 1e9 if config.gpu_memory else None
    if config.gpu is None:
        device = pick_device(config.train.device, "train.")
        name, kind = device_name(device), device.type
        if kind == "cuda":
            memory = memory or float(torch.cuda.get_device_properties(device).total_memory)
        memory = memory or free_memory() / per_node  # the processes of a machine share it
    else:
        kind, name = "cuda", find_gpu(config.gpu) or config.gpu
        if memory is None and name not in GPUS:
            hint = "is no known name of nvidia-smi; set --gpu_memory, in GB, and --tracking.peak_flops, in FLOP/s"
            raise UserError("gpu", config.gpu, hint)
        memory = memory or GPUS[name].memory * 1e9
    peak = config.tracking.peak_flops or peak_flops(name)
    return Target(name, kind, per_node * config.nodes, config.nodes, memory, peak, config.gpu is None)


def find_gpu(text: str) -> str | None:
    """The name in the table that has all words of `text` at the start of its own, in any case; None if there is none.
    A name that ends with `text` comes first. Raises: UserError for several names."""
    words = re.findall(r"[^\W_]+", text.lower())
    found = [name for name in GPUS if words and all(re.search(rf"\b{word}", name.lower()) for word in words)]
    equal = [name for name in found if f" {name}".lower().endswith(f" {text}".lower())]
    if len(found) > 1 and not equal:
        several = ", ".join(f"{name} ({GPUS[name].memory} GB)" for name in found)
        raise UserError("gpu", text, f"is part of several names; name one of {several}")
    return next(iter([*equal, *found]), None)


class Corpus(NamedTuple):
    """Figures that depend on the data; None for missing data."""

    vocab_size: int
    is_known: bool  # the number of ids is not assumed
    windows: int | None  # of an epoch
    steps: int | None  # of the whole run
    validates: bool
    scored: int  # tokens of an evaluation
    bytes: int | None  # of the shards


def describe_corpus(config: TrainingConfig, task: Pretraining | None) -> Corpus:
    """The corpus of a training. `task` has opened its data; None for missing data."""
    tokens = task.config.eval.tokens if task else config.eval.tokens or "auto"
    scored = config.auto_eval_tokens if tokens == "auto" else tokens
    if task is None:
        steps = None if config.train.epochs else config.train.steps
        return Corpus(*_vocabulary(config), None, steps, True, scored or 0, None)
    windows, scored = task.epoch_size, min(scored or task.validation_tokens, task.validation_tokens)
    splits = [shards for manifest in task.manifests for shards in manifest.splits.values()]
    size = sum(shard.bytes for shards in splits for shard in shards)
    return Corpus(task.manifest.vocab_size, True, windows, task.total_steps(windows), task.validates, scored, size)


def _vocabulary(config: TrainingConfig) -> tuple[int, bool]:
    """The number of ids that missing data will have, and whether it is known."""
    if config.data.prepare:
        with suppress(UserError):
            recipe = load(PrepareConfig, ["--config", config.data.prepare])
            if recipe.tokenizer in ("bpe", "chars"):
                return recipe.vocab_size or GPT2_IDS, False
            return load_tokenizer(recipe.tokenizer).vocab_size, True
    return GPT2_IDS, False


def count(config: TrainingConfig, step: int, steps: int, validates: bool) -> dict[str, int]:
    """Numbers of steps, evaluations, saves and samples from `step` to `steps`. First and last step are evaluated."""

    def times(every: int) -> int:
        return steps // every - step // every + (steps % every > 0) if every and steps > step else 0

    return {
        "steps": steps - step,
        "evaluations": times(config.eval.every) + (step == 0) if validates else 0,
        "saves": times(config.checkpoint.every),
        "samples": times(config.tracking.sample_every),
    }


@dataclass(frozen=True)
class Rate:
    """Speed of a training, and seconds of its other work."""

    tokens_per_second: float  # of the steps, over all processes
    source: str  # given, recorded, or by the MFU
    evaluation: float
    save: float
    start: float = START


def recorded_speed(config: TrainingConfig, devices: dict[str, Any]) -> float | None:
    """Median of `tokens_per_second` in the rows of the run folder, from sessions on these devices with equal fields of
    SETS_SPEED; None without such rows."""
    found, counts = [], False
    for row in (line.row or {} for line in read_lines(Path(config.output_dir, config.run_name, METRICS))):
        if row.get("event") == "start":
            saved, counts = row.get("config"), devices.items() <= row.items()
            counts = counts and isinstance(saved, dict) and not differences(config, saved, SETS_SPEED)
        elif counts and isinstance(speed := row.get("tokens_per_second"), float) and speed > 0:
            found.append(speed)
    return median(found) if found else None


def seconds(count: dict[str, int], rate: Rate, step_tokens: int) -> dict[str, float]:
    """Wall time of the whole training, by kind of work."""
    return {
        "start": rate.start,
        "steps": count["steps"] * step_tokens / rate.tokens_per_second,
        "evaluations": count["evaluations"] * rate.evaluation,
        "checkpoints": count["saves"] * rate.save,
    }


def disk(config: TrainingConfig, size: int, validates: bool) -> dict[str, int]:
    """Bytes of a checkpoint, of all checkpoints at a time (`keep_last`, the best, and the one that is being written),
    and free on the disk."""
    place = Path(config.output_dir).absolute()
    while not place.is_dir():
        place = place.parent
    old = Path(config.output_dir, config.run_name).glob("checkpoints/step-*/*")  # new ones take their place
    free = shutil.disk_usage(place).free + sum(file.stat().st_size for file in old)
    return {"checkpoint": size, "checkpoints": size * (config.checkpoint.keep_last + validates + 1), "free": free}


class Plan:
    """A training on a machine. The public attributes are the figures of the JSON, in its order. Figures that depend on
    missing data are None."""

    def __init__(self, config: PlanConfig, machine: Target, precision: str, seen: Seen):
        corpus, windows = describe_corpus(config, seen.task), config.global_batch_windows
        tokens = corpus.steps * config.train.global_batch_tokens if corpus.steps else None
        with torch.device("meta"), without_init():
            model = GPT(config.model, corpus.vocab_size)
        self._config, self._corpus, self._model = config, corpus, model
        self._place = machine.kind, machine.processes, precision
        self._devices = {"processes": machine.processes, "device": machine.device}
        self._resolved = seen.record if self._devices.items() <= seen.record.items() else {}
        self.run_name, self.machine = config.run_name, machine
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.vocab_size, self.vocab_size_is_known = corpus.vocab_size, corpus.is_known
        self.flops_per_token = model.flops_per_token()
        self.flops = self.flops_per_token * tokens if tokens else None
        self.step, self.steps, self.tokens = seen.step, corpus.steps, tokens
        self.epochs = corpus.steps * windows / corpus.windows if corpus.steps and corpus.windows else None
        self.epoch_tokens = corpus.windows * config.model.block_size if corpus.windows else None
        self.global_batch_windows, self.block_size = windows, config.model.block_size
        self._setting = self._make_setting(seen.base)
        processes = min(machine.processes, windows)  # more are refused
        self.micro_batch, self.accumulation = self._split(processes)
        self.padding = padding_rows(windows, processes, self.micro_batch)  # of a step, over all processes
        self.nearest_batch = nearest_without_padding(windows, processes, self.micro_batch)  # in windows
        self.splits = {n: self._split(n) for n in divisors(windows)[::-1] if n <= 64}  # by number of processes
        self.precision = precision
        self.memory = self._memory_of(self.micro_batch)
        self.sent = replace(self._setting, micro_batch=self.micro_batch).sent  # bytes of a process per step
        fits_host = not machine.is_here or self.memory.host <= free_memory()
        self.fits = self.memory.peak <= machine.memory and fits_host
        fitting = (n for n in micro_batches(windows, processes) if self._memory_of(n).peak <= machine.memory)
        self.largest_micro_batch = next(fitting, 0)  # up to a rank's share; 0 for none
        self.fits_sharded = None if self.largest_micro_batch else self._find_sharded()
        self.disk = disk(config, 4 * (self._setting.parameters + self._setting.state), corpus.validates)
        self.data_bytes = corpus.bytes
        self._add_time()
        self.refused = seen.mistakes  # user errors of train_gpt2.py

    def _add_time(self) -> None:
        """Adds time and price of the remaining work; None if unknown."""
        config, steps = self._config, self.steps
        self.count = None
        if steps and steps >= self.step:
            self.count = count(config, self.step, steps, self._corpus.validates)
        self.rate = self._find_rate()
        tokens = config.train.global_batch_tokens
        self.seconds = seconds(self.count, self.rate, tokens) if self.count and self.rate else None
        self.device_hours = sum(self.seconds.values()) / 3600 * self.machine.processes if self.seconds else None
        self.price = None if config.price is None or self.device_hours is None else config.price * self.device_hours

    def _make_setting(self, base: float | None) -> Setting:
        """The setting of the memory estimate, for a micro-batch of 1."""
        config, (kind, processes, precision) = self._config, self._place
        setting = setting_of(config, self._model, kind, processes, precision)
        background = config.checkpoint.background is not False  # elsewhere, machines with GPUs have cores and memory
        if self.machine.is_here:
            has_core = spare_core(kind, torch.get_num_threads())
            size = 4 * (setting.parameters + setting.state)
            background = should_save_async(config.checkpoint.background, size, has_core)
        base = setting.base if base is None else base
        return replace(setting, background=background, base=base, validates=self._corpus.validates)

    def _memory_of(self, micro_batch: int, **changes: Any) -> Memory:
        return estimate(replace(self._setting, micro_batch=micro_batch, **changes))

    def _find_sharded(self) -> dict[str, Any] | None:
        """Fewest GPUs, a number in `splits`, whose memory suffices with fsdp, and `launch.reduce`; None for none."""
        (kind, _, precision), before = self._place, self._config.launch
        for reduce in ("last", "each"):
            launch = before.model_copy(update={"parallel": "fsdp", "replicas": 1, "reduce": reduce})
            config = self._config.model_copy(update={"launch": launch})
            for number, (batch, _) in self.splits.items() if kind == "cuda" else ():
                setting = setting_of(config, self._model, kind, number, precision, batch)
                if number > 1 and estimate(setting).peak <= self.machine.memory:
                    return {"gpus": number, "reduce": reduce}
        return None

    def _split(self, processes: int) -> tuple[int, int]:
        """Micro-batch and accumulation of each process."""
        size, machine, windows = self._config.train.micro_batch_size, self.machine, self.global_batch_windows
        if size == "auto" and processes == machine.processes:
            size = self._resolved.get("micro_batch") or size
        if size == "auto":
            peak, sizes = lambda n: self._memory_of(n, processes=processes).peak, micro_batches(windows, processes)
            batch = pick_micro_batch(sizes, machine.kind, self._config.model.block_size, peak, machine.memory)
        else:
            batch = split_batch(windows, processes, size)
        return batch, ceil(windows / (processes * batch))

    def _find_rate(self) -> Rate | None:
        """The given rate, the run's recorded one, or one by the MFU; None without a known peak in this precision. An
        evaluation has a third of a step's arithmetic per token."""
        config, machine, start = self._config, self.machine, START
        speed, source = config.tokens_per_second, "as given"
        if not speed and (speed := recorded_speed(config, self._devices)):
            source = f"as {Path(config.output_dir, config.run_name)} recorded"
        is_of_bf16 = self.precision == "no" and machine.kind == "cuda" and not config.tracking.peak_flops
        if not speed:
            if not machine.peak or is_of_bf16:
                return None
            speed = config.mfu * machine.peak * machine.processes / self.flops_per_token
            source = f"at {config.mfu:.0%} of {machine.peak / 1e12:,.1f} TFLOP/s"
        if not config.tokens_per_second and self._compiles():
            start *= 3
        return Rate(speed, source, self._corpus.scored / (3 * speed), self.disk["checkpoint"] / DISK, start)

    def _compiles(self) -> bool:
        how, steps = self._config.train.compile, self.count["steps"] if self.count else 0
        if how == "auto":
            flops = self.flops_per_token * self._config.train.global_batch_tokens * steps / self.machine.processes
            how = self._resolved.get("compile") or what_pays(self._model, *self._place, flops)
        return how != "off"

    @property
    def suffices(self) -> bool:
        """Whether memory and disk suffice for the remaining work."""
        done = self.count is not None and not self.count["steps"]
        return done or (self.fits and self.disk["checkpoints"] <= self.disk["free"])


def show_plan(config: PlanConfig) -> int:
    """The command. Raises: UserError after it has printed the plan, with the user errors of the training."""
    plan = make_plan(config)
    if is_main_process():
        figures = {name: value for name, value in vars(plan).items() if not name.startswith("_")}
        text = json.dumps(figures, indent=1, default=asdict) if config.json else "\n".join(format_plan(plan))
        print(text, flush=True)
    if plan.refused:
        raise UserError.join(plan.refused)
    return 0 if plan.suffices else 1


def make_plan(config: PlanConfig) -> Plan:
    """The plan. Raises: UserError for errors in the fields of plan.py; errors of the training are in the plan."""
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        from gpt2_ddp.training.sharded import follow_accelerate

        config = config.model_copy(update={"launch": follow_accelerate(config.training).launch})
    machine = find_target(config, world_size())
    training = config.training
    if not machine.is_here:  # user errors of the device are those of the GPUs, which have all precisions
        own = {"device": "cpu", "mixed_precision": "no"}
        training = training.model_copy(update={"train": training.train.model_copy(update=own)})
    precision = config.train.mixed_precision
    with suppress(UserError):  # it is among those of training
        config, precision, _ = settle_precision(config, torch.device(machine.kind))
    # before using the meta device, which loads more libraries than a training
    base = base_memory(training) if machine.kind == "cpu" else None
    seen = preflight(training, machine.processes)
    seen.base = base
    return Plan(config, machine, precision, seen)


def format_plan(plan: Plan) -> list[str]:
    """The plan as lines of text."""
    machine, memory, disk = plan.machine, plan.memory, plan.disk
    known = "" if plan.vocab_size_is_known else " (assumed: the data do not exist yet)"
    nodes = f", {machine.nodes} nodes" if machine.nodes > 1 else ""
    total = f", {plan.flops:.3g} FLOP in total" if plan.flops else ""
    lines = [
        f"{plan.run_name} on {machine.processes} x {machine.device}{nodes}, precision {plan.precision}",
        f"  parameters   {plan.parameters:,}, vocabulary {plan.vocab_size:,}{known}",
        f"  arithmetic   {plan.flops_per_token / 1e6:,.1f} MFLOP per token{total}",
        f"  training     {_training(plan)}",
    ]
    windows, step = plan.global_batch_windows, f"{machine.processes} x {plan.accumulation} x {plan.micro_batch}"
    lines.append(f"  a step       {windows:,} windows: {step} (processes x accumulation x batch)")
    if plan.padding:
        tokens = plan.nearest_batch * plan.block_size
        none = f"none with {plan.nearest_batch:,} windows (train.global_batch_tokens {tokens})"
        lines.append(f"    padding    {plan.padding} rows, {plan.padding / windows:.1%} of a step's time; {none}")
    splits = ", ".join(f"{n} x {times} x {batch}" for n, (batch, times) in list(plan.splits.items())[:16])
    lines.append(f"  divisible by {splits}")
    on_cpu = f" (estimate, ±{CPU_MARGIN:.0%})" if machine.kind == "cpu" else ""
    margin = " (estimate)" if "gathered weights" in memory.parts else on_cpu
    of = f"{_gb(machine.memory)} GB per process, in {memory.moment}"
    lines.append(f"  memory       {_gb(memory.peak)}{margin} of {of}")
    lines += [f"    {_gb(size):>8}   {part}" for part, size in memory.parts.items()]
    others = ", ".join(f"{name} {_gb(peak)}" for name, peak in memory.peaks.items() if name != memory.moment)
    host = f"; {memory.host / 1e9:.2f} on the host, for a checkpoint" if memory.host else ""
    lines.append(f"    elsewhere  {others}{host}")
    largest = "no micro-batch fits; try activation_checkpointing, or a smaller eval.batch_size"
    if plan.largest_micro_batch:
        largest = f"the largest micro-batch that fits is {plan.largest_micro_batch}"
    lines.append(f"    {'fits' if plan.fits else 'DOES NOT FIT'}; {largest}")
    if plan.fits_sharded:
        each = " --launch.reduce each" * (plan.fits_sharded["reduce"] == "each")
        lines.append(f"    --launch.parallel fsdp{each} fits on {plan.fits_sharded['gpus']} GPUs (estimate)")
    if plan.sent:
        lines.append(f"  network      each process sends {_gb(plan.sent)} GB per step (estimate)")
    kept = f"{_gb(disk['checkpoint'])} GB per checkpoint, at most {_gb(disk['checkpoints'])} GB for all kept ones"
    free = f"{'' if disk['checkpoints'] <= disk['free'] else 'DOES NOT FIT, '}{_gb(disk['free'])} GB free"
    data = f"data {_gb(plan.data_bytes)} GB" if plan.data_bytes else "the data do not exist yet"
    return [*lines, f"  disk         {kept} ({free}); {data}", *_time(plan)]


def _training(plan: Plan) -> str:
    if plan.steps is None:
        return "the number of steps depends on the data, which do not exist yet"
    epochs = f", {plan.epochs:.2f} epochs of {plan.epoch_tokens:,}" if plan.epochs else ""
    done = f"; {plan.step:,} steps are done" if plan.step else ""
    return f"{plan.steps:,} steps, {plan.tokens:,} tokens{epochs}{done}"


def _time(plan: Plan) -> list[str]:
    if plan.rate is None or plan.seconds is None:
        how = "train a few steps first" if plan.machine.is_here else "set --tracking.peak_flops"
        return [f"  time         unknown: {how}, or set --tokens_per_second"]
    total, price = sum(plan.seconds.values()), f", {plan.price:,.2f} in total" if plan.price is not None else ""
    return [
        f"  time         {_duration(total)} at {plan.rate.tokens_per_second:,.0f} tokens/s, {plan.rate.source}",
        "    " + ", ".join(f"{what} {_duration(time)}" for what, time in plan.seconds.items() if time >= 0.5),
        f"  device time  {plan.device_hours:,.2f} hours{price}",
    ]


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f}" if size >= 1e8 else f"{size / 1e9:.3f}"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def nearest_without_padding(windows: int, processes: int, batch: int) -> int:
    """The number of windows per step nearest to `windows` that splits evenly, into micro-batches of >= `batch` / 2."""
    shares = sorted(range(1, 2 * windows // processes + 2), key=lambda share: abs(share * processes - windows))
    sizes = (share * processes for share in shares)  # one micro-batch per process is among them
    return next(size for size in sizes if 2 * split_batch(size, processes, batch) >= batch)
