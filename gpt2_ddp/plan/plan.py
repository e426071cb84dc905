"""The plan of a training: its steps, memory, disk, time and price, and its user errors."""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from difflib import get_close_matches
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from accelerate import Accelerator

from gpt2_ddp.checkpoint.format import Checkpoint
from gpt2_ddp.checkpoint.store import should_save_async
from gpt2_ddp.config.cli import load
from gpt2_ddp.config.own_text import (
    CHOSEN,
    TYPICAL_MACHINE,
    TYPICAL_TEXT,
    Machine,
    choose,
    describe_shape,
)
from gpt2_ddp.config.plan import GPT2_IDS, PlanConfig
from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.config.training import ModelConfig, TrainingConfig
from gpt2_ddp.data.feed import split_batch
from gpt2_ddp.data.fetch import missing_data
from gpt2_ddp.data.tokenizer import load_tokenizer
from gpt2_ddp.distributed.environment import free_memory, spare_core, world_size
from gpt2_ddp.distributed.launch import pick_device, pick_precision
from gpt2_ddp.distributed.precision import settle_fast
from gpt2_ddp.errors import UserError, is_main_process
from gpt2_ddp.evaluation.forecast import from_record
from gpt2_ddp.evaluation.ladder import describe_interval, expectation_of, find_ladder
from gpt2_ddp.model.gpt import without_init
from gpt2_ddp.output import check_can_make
from gpt2_ddp.preparation.sources import scan
from gpt2_ddp.tasks.pretraining import Pretraining, make_pretraining
from gpt2_ddp.training.gpus import GPUS, peak_flops
from gpt2_ddp.training.memory import (
    Memory,
    Setting,
    choose_micro_batch,
    estimate,
    keeping_weights,
    largest_micro_batch,
    other_ways,
    setting_of,
)
from gpt2_ddp.training.save_interval import Interval, SaveCost, describe, settle_interval
from gpt2_ddp.training.start import OpenRun, open_run
from gpt2_ddp.training.throughput import device_name

# largest error of the memory estimate on CPUs: kernels differ, and freed memory fragments
CPU_MARGIN = 0.2
FIRST_STEP = 4e7  # bytes that the first step on a CPU loads: libraries and kernels
MFU = 0.4  # assumed model FLOP/s utilization, as a fraction of the GPUs' peak
# narrowest model that reached it (docs/benchmarks.md); narrower ones wait for memory and launches
MFU_WIDTH = 768
UNKNOWN_PEAK = 1e14  # assumed FLOP/s of a GPU that is not in the table
DISK = 5e8  # assumed bytes per second for copying, hashing and writing a checkpoint
COPY = (
    5e9  # of that, for the copy alone: what training waits for if it is written in the background
)
START = {"cuda": 180.0, "cpu": 60.0, "mps": 60.0}  # assumed seconds to the first step; GPUs compile


@dataclass
class Seen:
    """Results of a dry run.

    Attributes:
        mistakes: user errors, as the lines printed after `error:`.
        kind: class of the task; Pretraining after most user errors.
        task: with its data open; None for missing data, and after most user errors.
        model: the settled model section; None after most user errors.
        step: of the checkpoint to resume.
        completed: the configuration of a text of one's own, as the rule or the run completes it.
    """

    mistakes: list[str] = field(default_factory=list)
    kind: type[Pretraining] = Pretraining
    task: Pretraining | None = None
    model: ModelConfig | None = None
    step: int = 0
    completed: TrainingConfig | None = None


def preflight(config: TrainingConfig, processes: int, speed: float | None = None) -> Seen:
    """Does the work of a training up to its first step (`training.loop.train`, `run.build`), with
    the same user errors. `processes` are the planned training's; this one is alone, or has as
    many. `speed`: of training, in FLOP/s, of other machines than this one."""
    seen = Seen()
    launch = config.launch
    # for this process alone
    config = config.model_copy(update={"launch": launch.model_copy(update={"replicas": 1})})

    def make_task(
        config: TrainingConfig, accelerator: Accelerator, saved: Checkpoint | None
    ) -> Pretraining:
        if config.launch.parallel == "fsdp":
            from gpt2_ddp.training.fsdp import count_shards  # noqa: PLC0415  FSDP: a second

            count_shards(processes, launch.replicas)
        if not config.own_text:
            split_batch(config.global_batch_windows, processes, 1)
        return make_pretraining(config, accelerator, saved)

    with redirect_stdout(sys.stderr):
        try:
            _check_folder(Path(config.output_dir, config.run_name))
            with open_run(config, make_task, lock=False) as run:
                assert isinstance(run.config, TrainingConfig)
                assert isinstance(run.task, Pretraining)
                seen.kind = type(run.task)
                seen.model = run.config.model
                seen.step = run.step
                recipe_file = missing_data(config)
                if recipe_file is None:
                    _open_data(run, seen, Machine(speed, processes) if speed else None)
                else:
                    recipe = load(PrepareConfig, ["--config", recipe_file])
                    if not recipe.source_name.startswith("hub:"):
                        scan(recipe)
        except UserError as error:
            seen.mistakes = error.mistakes
    return seen


def _check_folder(run_folder: Path) -> None:
    try:
        check_can_make(run_folder / "checkpoints")
    except OSError as error:
        hint = f"cannot be written ({error.strerror}); choose another output_dir"
        raise UserError("output_dir", run_folder, hint) from error


def _open_data(run: OpenRun, seen: Seen, machine: Machine | None) -> None:
    task = run.task
    assert isinstance(task, Pretraining)
    task.settle(machine)
    seen.completed = task.config
    seen.model = task.config.model
    task.open_data()
    seen.task = task
    if not run.is_complete:
        task.load_tasks()
        # without random weights, for which the meta device imports torch._dynamo and sympy
        with torch.device("meta"), without_init():
            task.build_model(needs_memory=False)
        task.check_hashes(record=False)


class Target(NamedTuple):
    """The hardware of a plan: this machine, or GPUs by name.

    Attributes:
        device: a GPU's exact name, or cpu or mps.
        kind: cuda, cpu or mps.
        processes: in all, one per device.
        memory: bytes of a process.
        peak: FLOP/s of a device; None if unknown.
        is_here: whether it is this machine.
    """

    device: str
    kind: str
    processes: int
    memory: float
    peak: float | None
    is_here: bool


def find_target(config: PlanConfig, started: int) -> Target:
    """The machine to plan for, where a launcher started `started` processes. Raises: UserError."""
    processes = config.gpus or started
    if config.gpu is None:
        device = pick_device(config.train.device, "train.")
        name = device_name(device)
        kind = device.type
        memory = free_memory() / processes  # the processes of a machine share it
        if kind == "cuda":
            memory = float(torch.cuda.get_device_properties(device).total_memory)
    else:
        kind = "cuda"
        names = matching_gpus(config.gpu)
        # variants with equal figures have equal plans
        is_clear = len({GPUS[name] for name in names}) == 1
        if not is_clear and not config.gpu_memory:
            raise UserError("gpu", config.gpu, _gpu_hint(config.gpu, names))
        name = names[0] if is_clear else config.gpu
        memory = GPUS[name].memory * 1e9 if is_clear else 0.0
    if config.gpu_memory:
        memory = config.gpu_memory * 1e9
    return Target(
        device=name,
        kind=kind,
        processes=processes,
        memory=memory,
        peak=peak_flops(name),
        is_here=config.gpu is None,
    )


def matching_gpus(text: str) -> list[str]:
    """The names of the table that a user may mean: an exact one, or else all that have each word of
    the text. Case, hyphens, NVIDIA and GeForce do not matter; nor do spaces in a whole name, like
    `rtx4090`."""
    words = _words(text)
    exact = [name for name in GPUS if f" {name}".lower().endswith(f" {text}".lower())]
    exact += [name for name in GPUS if "".join(_words(name)) == "".join(words)]
    near = [name for name in GPUS if words and {*words} <= {*_words(name)}]
    return [*dict.fromkeys(exact if len({*exact}) == 1 else near)]


def _words(name: str) -> list[str]:
    return [
        word for word in name.lower().replace("-", " ").split() if word not in ("nvidia", "geforce")
    ]


def _gpu_hint(text: str, names: Sequence[str]) -> str:
    """What to do about a GPU's name that stands for several GPUs (`names`), or for none."""
    if names:
        short_names = ", ".join(name.removeprefix("NVIDIA ") for name in names)
        return f"may be {short_names}; name one of them"
    numbers = {word for word in _words(text) if any(map(str.isdigit, word))}
    short_names = {" ".join(_words(name)): name.removeprefix("NVIDIA ") for name in GPUS}
    near = [words for words in short_names if numbers & {*words.split()}]
    near = near or get_close_matches(text.lower(), short_names)
    similar = f" (similar: {', '.join(short_names[words] for words in near)})" if near else ""
    flags = "--gpu_memory, in GB, and --tokens_per_second"
    return f"is no known name of nvidia-smi{similar}; for another GPU, set {flags}"


class Corpus(NamedTuple):
    """Figures that depend on the data.

    Attributes:
        vocab_size: ids of the tokenizer.
        windows: of an epoch; None for missing data.
        steps: of the whole run; None if they depend on missing data, or on the speed.
        scored: tokens of an evaluation; 0 without a validation split.
    """

    vocab_size: int
    windows: int | None
    steps: int | None
    scored: int


def describe_corpus(config: TrainingConfig, task: Pretraining | None) -> Corpus:
    """The corpus of a training. `task` has opened its data; None for missing data."""
    tokens = config.eval.tokens
    scored = config.auto_eval_tokens if tokens == "auto" else tokens
    if task is None:
        steps = None if config.train.epochs else config.train.steps
        return Corpus(
            vocab_size=assumed_vocabulary(config),
            windows=None,
            steps=steps,
            scored=scored or config.auto_eval_tokens,
        )
    validation = sum(len(stream) - 1 for _, stream in task.corpus.validation.values())
    return Corpus(
        vocab_size=task.manifest.vocab_size,
        windows=task.epoch_size,
        steps=task.total_steps(task.epoch_size),
        scored=min(scored or validation, validation),
    )


def assumed_vocabulary(config: TrainingConfig) -> int:
    """The number of ids that missing data will have: by their recipe, or else GPT-2's."""
    with suppress(UserError):  # it is among those of training
        if config.data.prepare:
            recipe = load(PrepareConfig, ["--config", config.data.prepare])
            if recipe.tokenizer == "bpe":
                return recipe.vocab_size or GPT2_IDS
            return load_tokenizer(recipe.tokenizer).vocab_size
    return GPT2_IDS


def free_disk(config: TrainingConfig) -> int:
    """Bytes free for a run's checkpoints, which take the place of those that it has."""
    output = Path(config.output_dir).absolute()
    disk = shutil.disk_usage(next(filter(Path.is_dir, (output, *output.parents))))
    old = Path(config.output_dir, config.run_name).glob("checkpoints/step-*/*")
    return disk.free + sum(file.stat().st_size for file in old)


@dataclass(frozen=True)
class Plan:
    """The figures of a training on a machine.

    Attributes:
        setting: inputs of the memory estimate.
        step: of the newest checkpoint.
        checkpoint: bytes of one.
        free: bytes of the disk.
        refused: user errors of train_gpt2.py.
        forecast: of a new run of the rule, as its start row would have it; else empty.
        advice: the best size by the ladder on its text; empty without one.
    """

    config: PlanConfig
    machine: Target
    setting: Setting
    flops_per_token: int
    corpus: Corpus
    step: int
    memory: Memory
    checkpoint: int
    free: int
    refused: list[str]
    forecast: Mapping[str, Any] = field(default_factory=dict[str, Any])
    advice: str = ""

    @property
    def accumulation(self) -> int:
        return ceil(
            self.config.global_batch_windows / (self.machine.processes * self.setting.micro_batch)
        )

    @property
    def fits(self) -> bool:
        fits_host = not self.machine.is_here or self.memory.host <= free_memory()
        return self.memory.peak <= self.machine.memory and fits_host

    @property
    def checkpoints(self) -> int:
        """Bytes of all checkpoints at a time: `keep_last` and the others."""
        return self.checkpoint * (self.config.checkpoint.keep_last + self.others)

    @property
    def largest(self) -> int:
        """The most windows of a micro-batch that fit a process's memory; 0: none fits."""
        return largest_micro_batch(self.setting, self.machine.memory)

    @property
    def keep_last(self) -> int:
        """The largest `checkpoint.keep_last` for which the disk suffices; below 1: none does."""
        return int(self.free // self.checkpoint) - self.others

    @property
    def others(self) -> int:
        """Checkpoints besides the newest ones at a time: the best, and the one that is being
        written."""
        return bool(self.corpus.scored) + 1

    @property
    def has_known_mfu(self) -> bool:
        """Whether the assumed MFU holds for a model of this width, and the table of peaks for this
        precision."""
        # the table has bf16's
        return self.config.model.n_embd >= MFU_WIDTH and self.setting.precision != "no"

    @property
    def speed(self) -> float | None:
        """Tokens per second over all processes, as given or by the MFU; None without a known peak
        or MFU."""
        peak = self.machine.peak if self.has_known_mfu else None
        by_mfu = peak and MFU * peak * self.machine.processes / self.flops_per_token
        return self.config.tokens_per_second or by_mfu

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time of the remaining work, by kind; empty if unknown. First and last step are
        evaluated. An evaluation has a third of a step's arithmetic per token."""
        config = self.config
        steps = self.steps
        done = self.step
        if not steps or not self.speed:
            return {}
        step, evaluation, checkpoint = self._durations(self.speed)

        def times(every: int) -> int:
            return steps // every - done // every + (steps % every > 0) if steps > done else 0

        return {
            "start": START[self.machine.kind],
            "steps": max(steps - done, 0) * step,
            "evaluations": (times(config.eval.every) + (done == 0)) * evaluation,
            "checkpoints": times(self.save_every) * checkpoint,
        }

    @property
    def interval(self) -> Interval | None:
        """The saves by `checkpoint.seconds`; None without it, or without a speed."""
        keep = self.config.checkpoint
        if keep.seconds is None or not self.speed:
            return None
        written = self.checkpoint / DISK
        waited = self.checkpoint / COPY if self.setting.background else written
        step, *_ = self._durations(self.speed)
        return settle_interval(keep, SaveCost(waited, written), step)

    @property
    def save_every(self) -> int:
        """Steps between checkpoints."""
        every = self.config.checkpoint.every
        return min(every, self.interval.every) if self.interval else every

    @property
    def lost_seconds(self) -> float:
        """Seconds of training that a kill costs at most, besides a step; with a speed."""
        assert self.speed, "nothing is known without it"
        step, evaluation, _ = self._durations(self.speed)
        every = self.config.checkpoint.every
        by_steps = every * step + every // self.config.eval.every * evaluation
        by_steps += 2 * self.checkpoint / DISK
        return min(self.interval.lost_seconds, by_steps) if self.interval else by_steps

    @property
    def steps(self) -> int | None:
        """Steps of the whole run: with `train.minutes`, as many as fit. None if unknown."""
        config = self.config
        if self.corpus.steps or not config.train.minutes or not self.speed:
            return self.corpus.steps
        step, evaluation, checkpoint = self._durations(self.speed)
        each = step + evaluation / config.eval.every + checkpoint / self.save_every
        left = 60 * config.train.minutes - START[self.machine.kind] - 2 * evaluation - checkpoint
        return max(int(left / each), 0)

    def _durations(self, speed: float) -> tuple[float, float, float]:
        """Seconds of a step, an evaluation and a checkpoint."""
        step = self.config.train.global_batch_tokens / speed
        checkpoint = self.checkpoint / DISK
        if self.setting.background and self.config.checkpoint.seconds is not None:
            checkpoint = self.checkpoint / COPY  # they are many
        return step, self.corpus.scored / (3 * speed), checkpoint

    @property
    def device_hours(self) -> float:
        return sum(self.seconds.values()) / 3600 * self.machine.processes


def show_plan(config: PlanConfig) -> int:
    """The command. Raises: UserError after it has printed the plan, with the user errors of the
    training."""
    plan = make_plan(config)
    if is_main_process():
        print(*format_plan(plan), sep="\n", flush=True)
    if plan.refused:
        raise UserError.join(plan.refused)
    return 0 if plan.fits and plan.checkpoints <= plan.free else 1


def make_plan(config: PlanConfig) -> Plan:
    """The plan. Raises: UserError for errors in the fields of plan.py; errors of the training are
    in the plan."""
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        from gpt2_ddp.training.fsdp import follow_accelerate  # noqa: PLC0415  FSDP: a second

        config = config.model_copy(update={"launch": follow_accelerate(config.training).launch})
    machine = find_target(config, world_size())
    training = config.training
    # user errors of the device are those of the GPUs, which have all precisions
    lacking = [] if machine.is_here else fp8_mistakes(config, machine.device)
    if not machine.is_here:
        on_cpu = {"device": "cpu", "mixed_precision": "no", "fp8_head": False}
        training = training.model_copy(update={"train": training.train.model_copy(update=on_cpu)})
    precision = config.train.mixed_precision
    with suppress(UserError):  # it is among those of training
        if precision == "fast":
            config = settle_fast(config, torch.device(machine.kind))
        precision = pick_precision(config.train.mixed_precision, torch.device(machine.kind))
    # before the meta device loads more than a training has
    base = psutil.Process().memory_info().rss + FIRST_STEP
    peak = None if machine.is_here else (machine.peak or UNKNOWN_PEAK) * MFU * machine.processes
    seen = preflight(training, machine.processes, peak)
    seen.mistakes = [*lacking, *seen.mistakes]
    advice = _advice(training, machine, seen) if config.own_text else ""
    if config.own_text:
        config = _completed(config, seen)
    if config.inherited and not seen.model:
        raise UserError.join(seen.mistakes)
    return replace(build_plan(config, machine, precision, seen, base), advice=advice)


def _advice(training: TrainingConfig, machine: Target, seen: Seen) -> str:
    """The size that the ladder on the text finds best for `train.minutes`; empty without both."""
    minutes = training.train.minutes
    ladder = find_ladder(training, seen.task.manifests) if seen.task else None
    if not minutes or not ladder:
        return ""
    peak = (machine.peak or UNKNOWN_PEAK) * MFU * machine.processes

    def tokens_for(parameters: float) -> float:
        if machine.is_here:
            return ladder.tokens_in(minutes, parameters)
        return 60 * minutes * peak / (6 * parameters)

    best = ladder.answer(tokens_for)
    if best is None:
        return "the ladder on this text is too small to say which size is best"
    size = f"{describe_shape(best.layers, best.width)}, {best.tokens / 1e6:,.1f}M tokens"
    larger = ", or larger: more than the ladder can say" if best.is_limited else ""
    return f"best size by the ladder: {size}: {describe_interval(best.interval)}{larger}"


def fp8_mistakes(config: PlanConfig, gpu: str) -> list[str]:
    """The user errors of `train.fp8_head` on a GPU of this name; none for an unknown one."""
    if not config.train.fp8_head:
        return []
    if gpu in GPUS and not GPUS[gpu].fp8:
        hint = f"needs a GPU with fp8, not {gpu}; remove it"
        return UserError("train.fp8_head", "true", hint).mistakes
    return []


def _completed(config: PlanConfig, seen: Seen) -> PlanConfig:
    """The configuration of a text of one's own, as the dry run completed it; for missing data, as
    it would be for a typical text."""
    completed = seen.completed
    if completed is None:
        completed = choose(config.training, TYPICAL_TEXT, TYPICAL_MACHINE).config
    chosen = {section: {} for section in ("model", "optim", "train", "eval", "checkpoint")}
    for name in CHOSEN:
        section, _, field = name.partition(".")
        if section in chosen:
            chosen[section][field] = getattr(getattr(completed, section), field)
    updated = {
        section: getattr(config, section).model_copy(update=fields)
        for section, fields in chosen.items()
    }
    return config.model_copy(update=updated | {"own_text": False})


def build_plan(
    config: PlanConfig, machine: Target, precision: str, seen: Seen, base: float = 0.0
) -> Plan:
    """The plan of a dry run. `base`: bytes of a CPU's process without its model."""
    config = config.model_copy(update={"model": seen.model or config.model})
    corpus = describe_corpus(config, seen.task)
    with torch.device("meta"), without_init():
        model = (seen.task or seen.kind(config)).make_model(corpus.vocab_size)
    setting = setting_of(config, model, machine.kind, machine.processes, precision)
    checkpoint = setting.checkpoint_bytes
    # elsewhere, machines with GPUs have cores and memory
    background = config.checkpoint.background is not False
    if machine.is_here:
        has_core = spare_core(machine.kind, torch.get_num_threads())
        background = should_save_async(config.checkpoint.background, checkpoint, has_core)
    setting = replace(setting, background=background, validates=corpus.scored > 0)
    if machine.kind == "cpu":
        setting = replace(setting, base=base)
    windows = config.global_batch_windows
    processes = min(machine.processes, windows)  # more are refused
    size = config.train.micro_batch_size
    if size == "auto":
        recorded = seen.task.recorded_micro_batch if seen.task else None
        size = choose_micro_batch(setting, machine.memory, recorded)
    setting = replace(setting, micro_batch=split_batch(windows, processes, size))
    setting = keeping_weights(setting, machine.memory)
    return Plan(
        config=config,
        machine=machine,
        setting=setting,
        flops_per_token=model.flops_per_token(),
        corpus=corpus,
        step=seen.step,
        memory=estimate(setting),
        checkpoint=checkpoint,
        free=free_disk(config),
        refused=seen.mistakes,
        forecast=seen.task.start_fields.get("forecast", {}) if seen.task else {},
    )


def format_plan(plan: Plan) -> Iterator[str]:
    """The plan as lines of text."""
    config = plan.config
    machine = plan.machine
    setting = plan.setting
    memory = plan.memory
    windows = config.global_batch_windows
    assumed = "" if plan.corpus.windows else " (assumed: the data do not exist yet)"
    step = f"{machine.processes} x {plan.accumulation} x {setting.micro_batch}"
    margin = f" (estimate, ±{CPU_MARGIN:.0%})" if machine.kind == "cpu" else ""
    hardware = f"{machine.processes} x {machine.device}"
    yield f"{config.run_name} on {hardware}, precision {setting.precision}"
    flags = [f"--{name}" for name in ("gpus", "gpu_memory") if getattr(config, name)]
    if flags and machine.is_here and machine.kind == "cpu":
        note = f"{' and '.join(flags)} without --gpu: this is a plan for this machine's CPU"
        yield f"  note         {note}"
    yield f"  parameters   {setting.parameters:,}, vocabulary {plan.corpus.vocab_size:,}{assumed}"
    yield f"  training     {_training(plan)}"
    yield from _expected(plan)
    yield f"  a step       {windows:,} windows: {step} (processes x accumulation x batch)"
    room = f"{machine.memory / 1e9:,.2f} GB per process"
    yield f"  memory       {memory.peak / 1e9:,.2f}{margin} of {room}, in {memory.moment}"
    for part, size in memory.parts.items():
        yield f"    {size / 1e9:8,.2f}   {part}"
    if memory.host:
        yield f"    {memory.host / 1e9:8,.2f}   on the host, for a checkpoint"
    yield f"    {'fits' if plan.fits else f'DOES NOT FIT: {_what_fits(plan)}'}"
    each = f"{plan.checkpoint / 1e9:,.2f} GB per checkpoint"
    kept = f"at most {plan.checkpoints / 1e9:,.2f} GB for all kept ones"
    yield f"  disk         {each}, {kept}; {plan.free / 1e9:,.2f} GB free: {_disk_fits(plan)}"
    if not plan.seconds:
        yield f"  time         unknown{_why_unknown(plan)}: set --tokens_per_second"
        return
    total = timedelta(seconds=round(sum(plan.seconds.values())))
    times = [f"{kind} {timedelta(seconds=round(time))}" for kind, time in plan.seconds.items()]
    yield f"  time         {total} at {plan.speed:,.0f} tokens/s"
    yield f"    {', '.join(times)}"
    lost = timedelta(seconds=ceil(plan.lost_seconds))
    yield f"  a kill       costs at most {lost}: a checkpoint every {plan.save_every:,} steps"
    if plan.interval and not plan.interval.is_kept:
        yield f"    {describe(config.checkpoint, plan.interval)}"
    price = ""
    if config.price is not None:
        price = f", {config.price * plan.device_hours:,.2f} in total"
    yield f"  device time  {plan.device_hours:,.2f} hours{price}"


def _expected(plan: Plan) -> Iterator[str]:
    """What a run of the rule will reach."""
    if not plan.forecast:
        return
    tokens = plan.forecast["trained_tokens"]
    if plan.steps:
        tokens = plan.steps * plan.config.train.global_batch_tokens
    expectation = expectation_of({"forecast": plan.forecast})
    interval = expectation.at_end(tokens) if expectation else None
    if interval:
        yield f"  expect       {describe_interval(interval)} bits per byte, by the ladder (90 %)"
    else:
        about = from_record(plan.forecast)._replace(tokens=tokens).bits_per_byte
        yield f"  expect       about {about:.1f} bits per byte"
    if plan.advice:
        yield f"    {plan.advice}"


def _what_fits(plan: Plan) -> str:
    """The largest micro-batch that fits a process's memory, or what else would."""
    if plan.memory.peak <= plan.machine.memory:
        return "the host has no memory for the copy; --checkpoint.background false fits"
    if plan.largest:
        return f"--train.micro_batch_size {plan.largest} fits"
    return other_ways(plan.setting)


def _disk_fits(plan: Plan) -> str:
    if plan.checkpoints <= plan.free:
        return "fits"
    if plan.keep_last > 0:
        return f"DOES NOT FIT: --checkpoint.keep_last {plan.keep_last} fits"
    return f"DOES NOT FIT: at least {plan.checkpoint * (1 + plan.others) / 1e9:,.2f} GB are needed"


def _why_unknown(plan: Plan) -> str:
    """Why there is a GPU's peak and no speed; empty for other reasons."""
    if plan.speed or not plan.machine.peak:
        return ""
    if plan.setting.precision == "no":
        return f" (an MFU of {MFU:.0%} is assumed in bf16 only)"
    width = f"model.n_embd {MFU_WIDTH}"
    return f" (an MFU of {MFU:.0%} is assumed from {width} on; narrower models reach less)"


def _training(plan: Plan) -> str:
    steps = plan.steps
    windows = plan.corpus.windows
    minutes = None if plan.corpus.steps else plan.config.train.minutes
    if minutes and not steps:
        return f"no step fits into {minutes:g} minutes, or the speed is unknown"
    if not steps:
        return "the number of steps depends on the data, which do not exist yet"
    tokens = steps * plan.config.train.global_batch_tokens
    flops = plan.flops_per_token * tokens
    epochs = f", {tokens / (windows * plan.config.model.block_size):.2f} epochs" if windows else ""
    done = f"; {plan.step:,} steps are done" if plan.step else ""
    margin = ""
    if minutes:
        error = "±10%" if plan.config.tokens_per_second else "±25%"
        margin = f" (in {minutes:g} minutes, {error})"
    return f"{steps:,} steps{margin}, {tokens:,} tokens, {flops:.3g} FLOP{epochs}{done}"
