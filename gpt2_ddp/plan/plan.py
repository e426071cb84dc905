"""A training as a plan: what it does, what it takes, what it costs, and what would be refused."""

import json
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from math import ceil
from typing import Any

import psutil
import torch

from gpt2_ddp.checkpoint.checkpointer import should_save_async
from gpt2_ddp.config.cli import load
from gpt2_ddp.config.plan import PlanConfig
from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.feed import divisors, split_batch
from gpt2_ddp.data.tokenizer import load_tokenizer
from gpt2_ddp.distributed.environment import is_main_process, spare_core, world_size
from gpt2_ddp.distributed.launch import pick_precision
from gpt2_ddp.errors import UserError
from gpt2_ddp.model.compiled import what_pays
from gpt2_ddp.model.gpt import GPT, without_init
from gpt2_ddp.model.memory import Memory, estimate, pick_micro_batch, setting_of, state_numbers
from gpt2_ddp.plan.cost import Count, Disk, Rate, assumed_rate, count, disk, divides, seconds
from gpt2_ddp.plan.machine import Machine, find_machine
from gpt2_ddp.plan.measure import Measured, base_memory, measure
from gpt2_ddp.plan.refusals import Seen, preflight

GPT2_VOCABULARY = 50_257
"""Of data that are not there to ask, and whose recipe does not say."""


@dataclass(frozen=True)
class Plan:
    """All that is printed; the fields are those of the JSON.

    Args:
        tokens, epochs: of the whole run; None where they depend on data that are not there.
        fits: whether `memory` suffices. largest_micro_batch: the one that still fits, of a rank's share; 0 for none.
        splits: of each process count that divides the global batch, micro-batch and accumulation.
        data_bytes: of the shards; None where they are not prepared.
        seconds, price: of what is left to do; None where no rate is known.
        refused: what train_gpt2.py would answer, in its own words.
    """

    run_name: str
    machine: Machine
    parameters: int
    vocab_size: int
    vocab_size_is_known: bool
    flops_per_token: int
    flops: float | None
    step: int
    steps: int | None
    tokens: int | None
    epochs: float | None
    epoch_tokens: int | None
    global_batch_windows: int
    micro_batch: int
    accumulation: int
    splits: dict[int, tuple[int, int]]
    precision: str
    memory: Memory
    measured_memory: float | None
    fits: bool
    largest_micro_batch: int
    disk: Disk
    data_bytes: int | None
    count: Count | None
    rate: Rate | None
    seconds: dict[str, float] | None
    device_hours: float | None
    price: float | None
    refused: list[str]

    @property
    def suffices(self) -> bool:
        """Whether memory and disk do, for what is left to do."""
        return (self.count is not None and not self.count.steps) or (
            self.fits and self.disk.checkpoints <= self.disk.free
        )


def show_plan(config: PlanConfig) -> int:
    """The command. Raises: UserError, after the plan is printed, with what training would refuse."""
    loaded = time.time() - psutil.Process().create_time()
    plan = make_plan(config, loaded)
    if is_main_process():
        print(json.dumps(asdict(plan), indent=1) if config.json else "\n".join(format_plan(plan)), flush=True)
    if plan.refused:
        raise UserError.join(plan.refused)
    return 0 if plan.suffices else 1


def make_plan(config: PlanConfig, loaded: float = 0.0) -> Plan:
    """The plan; `loaded`: seconds that this process took to load its libraries.

    Raises:
        UserError: for what is wrong with the question, rather than with the training.
    """
    machine = find_machine(config, world_size())
    training = config.training
    if not machine.is_here:  # what is refused of the device is that of the GPUs, and they have all precisions
        own = {"device": "cpu", "mixed_precision": "no"}
        training = training.model_copy(update={"train": training.train.model_copy(update=own)})
    precision = config.train.mixed_precision
    with suppress(UserError):  # it is among those of training
        precision = pick_precision(config.train.mixed_precision, torch.device(machine.kind), "train.")
    begun = time.perf_counter()  # before there is a meta device, which loads more than a training does
    base = {"base": base_memory(training)} if machine.kind == "cpu" else {}
    loaded += time.perf_counter() - begun  # a training's first step would load the same
    seen = preflight(training, machine.processes)
    training = seen.task.config if seen.task else training
    vocab_size, is_known = _vocabulary(config, seen)
    with torch.device("meta"), without_init():
        model = GPT(config.model, vocab_size)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    checkpoint = 4 * (parameters + state_numbers(model, config.optim))  # in fp32
    windows = len(seen.task.feed.order) if seen.task else None
    steps = seen.task.total_steps(windows) if seen.task else config.train.steps if not config.train.epochs else None
    tokens = steps * config.train.global_batch_tokens if steps else None
    validates = seen.task is None or seen.task.validates
    counted = count(training, seen.step, steps, validates) if steps and steps >= seen.step else None
    share = ceil(config.global_batch_windows / machine.processes)
    even = config.global_batch_windows % machine.processes == 0
    # elsewhere: machines with GPUs have cores and memory for it
    wish = config.checkpoint.background
    has_core = spare_core(machine.kind, torch.get_num_threads(), config.data.workers)
    background = should_save_async(wish, checkpoint, has_core) if machine.is_here else wish is not False

    setting = setting_of(config, model, machine.kind, machine.processes, precision)
    setting = replace(setting, background=background, eval_batch=setting.eval_batch * validates, **base)

    def memory_of(size: int) -> Memory:
        return estimate(replace(setting, micro_batch=size))

    def batch_of(share: int) -> int:
        size = config.train.micro_batch_size
        if size == "auto" and share * machine.processes == config.global_batch_windows:
            size = before.get("micro_batch") or size
        if size != "auto":
            return split_batch(share, 1, size)
        peak = lambda size: memory_of(size).peak  # noqa: E731
        return pick_micro_batch(share, machine.kind, config.model.block_size, peak, room)

    place = {"processes": machine.processes, "device": machine.device}
    before = seen.state if all(seen.state.get(name) == value for name, value in place.items()) else {}
    room = machine.memory
    batch = batch_of(share)
    memory = memory_of(batch)
    largest = next((size for size in divisors(share) if memory_of(size).peak <= room), 0)
    measured = None
    if config.measure and not seen.mistakes:
        if seen.task is None:
            raise UserError("measure", "true", "the data are not prepared yet; prepare them with prepare_data.py first")
        measured = measure(training, loaded)
    compiles = config.train.compile
    if compiles == "auto":
        flops = model.flops_per_token() * config.train.global_batch_tokens * (counted.steps if counted else 0)
        what = what_pays(model, machine.kind, machine.processes, precision, flops / machine.processes)
        compiles = before.get("compile") or what
    slow_start = compiles != "off"
    rate = _rate(config, machine, measured, model.flops_per_token(), checkpoint, training, seen, precision, slow_start)
    spent = seconds(counted, rate, config.train.global_batch_tokens) if rate and counted else None
    hours = sum(spent.values()) / 3600 * machine.processes if spent else None
    return Plan(
        run_name=config.run_name,
        machine=machine,
        parameters=parameters,
        vocab_size=vocab_size,
        vocab_size_is_known=is_known,
        flops_per_token=model.flops_per_token(),
        flops=model.flops_per_token() * tokens if tokens else None,
        step=seen.step,
        steps=steps,
        tokens=tokens,
        epochs=steps * config.global_batch_windows / windows if steps and windows else None,
        epoch_tokens=windows * config.model.block_size if windows else None,
        global_batch_windows=config.global_batch_windows,
        micro_batch=batch if even else 0,
        accumulation=share // batch if even else 0,
        splits={n: _split(config.global_batch_windows // n, batch_of) for n in divides(config)},
        precision=precision,
        memory=memory,
        measured_memory=measured.memory if measured else None,
        fits=memory.peak <= room and (not machine.is_here or memory.host <= psutil.virtual_memory().available),
        largest_micro_batch=largest,
        disk=disk(config, checkpoint, validates),
        data_bytes=_data_bytes(seen),
        count=counted,
        rate=rate,
        seconds=spent,
        device_hours=hours,
        price=config.price * hours if config.price is not None and hours is not None else None,
        refused=seen.mistakes,
    )


def _split(share: int, batch_of: Callable[[int], int]) -> tuple[int, int]:
    return batch_of(share), share // batch_of(share)


def _vocabulary(config: TrainingConfig, seen: Seen) -> tuple[int, bool]:
    """How many ids the data have, and whether that is known."""
    if seen.task:
        return seen.task.manifest.vocab_size, True
    with suppress(UserError):
        recipe = load(PrepareConfig, ["--config", config.data.prepare]) if config.data.prepare else None
        if recipe and recipe.tokenizer in ("bpe", "chars"):
            return recipe.vocab_size or GPT2_VOCABULARY, False
        if recipe:
            return load_tokenizer(recipe.tokenizer).vocab_size, True
    return GPT2_VOCABULARY, False


def _data_bytes(seen: Seen) -> int | None:
    if seen.task is None:
        return None
    return sum(shard.bytes for one in seen.task.manifests for shards in one.splits.values() for shard in shards)


def _rate(
    config: PlanConfig,
    machine: Machine,
    measured: Measured | None,
    flops_per_token: int,
    checkpoint: int,
    training: TrainingConfig,
    seen: Seen,
    precision: str,
    compiles: bool,
) -> Rate | None:
    tokens, task = training.eval.tokens, seen.task
    there = task.validation_tokens if task else math.inf  # without data, no evaluation is known to be cut short
    scored = config.auto_eval_tokens if tokens == "auto" or (tokens is None and not task) else tokens or there
    scored = int(min(scored, there))
    if config.tokens_per_second:
        return assumed_rate(config.tokens_per_second, "as given", scored, checkpoint)
    if measured:
        return measured.rate
    if machine.peak and (precision != "no" or machine.kind != "cuda" or config.tracking.peak_flops):
        rate = config.mfu * machine.peak * machine.processes / flops_per_token
        source = f"at {config.mfu:.0%} of {machine.peak / 1e12:,.1f} TFLOP/s"
        return assumed_rate(rate, source, scored, checkpoint, compiles)
    return None


def format_plan(plan: Plan) -> list[str]:
    """The plan as lines of text."""
    machine, memory, room = plan.machine, plan.memory, plan.machine.memory
    known = "" if plan.vocab_size_is_known else ", which is assumed, as the data are not there"
    nodes = f", {machine.nodes} nodes" if machine.nodes > 1 else ""
    lines = [
        f"{plan.run_name} on {machine.processes} x {machine.device}{nodes}, precision {plan.precision}",
        f"  parameters   {plan.parameters:,}, vocabulary {plan.vocab_size:,}{known}",
        f"  arithmetic   {plan.flops_per_token / 1e6:,.1f} MFLOP a token" + _of(plan.flops, ", {:.3g} FLOP in all"),
        f"  training     {_training(plan)}",
    ]
    if plan.micro_batch:
        step = f"{machine.processes} x {plan.accumulation} x {plan.micro_batch}"
        lines.append(f"  a step       {plan.global_batch_windows:,} windows: {step} (processes x accumulation x batch)")
    splits = ", ".join(f"{n} x {times} x {batch}" for n, (batch, times) in list(plan.splits.items())[:16])
    lines.append(f"  divisible by {splits}")
    lines.append(f"  memory       {_gb(memory.peak)} of {_gb(room)} GB a process, in {memory.moment}")
    lines += [f"    {_gb(size):>8}   {part}" for part, size in memory.parts.items()]
    others = ", ".join(f"{name} {_gb(peak)}" for name, peak in memory.peaks.items() if name != memory.moment)
    lines.append(f"    besides    {others}" + _of(memory.host / 1e9 or None, "; {:.2f} on the host, for a checkpoint"))
    if plan.measured_memory:
        lines.append(f"    measured   {_gb(plan.measured_memory)}")
    largest = f"the largest micro-batch that does is {plan.largest_micro_batch}" if plan.largest_micro_batch else ""
    fits = "fits" if plan.fits else "DOES NOT FIT"
    lines.append(
        f"    {fits}; {largest or 'no micro-batch does; try activation_checkpointing, a smaller eval.batch_size'}"
    )
    free = "" if plan.disk.checkpoints <= plan.disk.free else "DOES NOT FIT, "
    disks = (
        f"{_gb(plan.disk.checkpoint)} GB a checkpoint, {_gb(plan.disk.checkpoints)} GB for all that are kept at a time"
    )
    data = f"data {_gb(plan.data_bytes)} GB" if plan.data_bytes else "the data are not there yet"
    lines.append(f"  disk         {disks} ({free}{_gb(plan.disk.free)} are free); {data}")
    return lines + _time(plan)


def _training(plan: Plan) -> str:
    if plan.steps is None:
        return "steps depend on the data, which are not there"
    batch = f"{plan.steps:,} steps, {plan.tokens:,} tokens"
    epochs = f", {plan.epochs:.2f} epochs of {plan.epoch_tokens:,}" if plan.epochs else ""
    return batch + epochs + (f"; {plan.step:,} steps are done" if plan.step else "")


def _time(plan: Plan) -> list[str]:
    if plan.rate is None or plan.seconds is None:
        return ["  time         not known: --measure measures it here, --tokens_per_second gives it"]
    total = sum(plan.seconds.values())
    spent = ", ".join(f"{what} {_duration(time)}" for what, time in plan.seconds.items() if time >= 0.5)
    line = f"  time         {_duration(total)} at {plan.rate.tokens_per_second:,.0f} tokens/s, {plan.rate.source}"
    lines = [line, f"    {spent}"]
    if plan.device_hours is not None:
        price = f", {plan.price:,.2f} in all" if plan.price is not None else ""
        lines.append(f"  device time  {plan.device_hours:,.2f} hours{price}")
    return lines


def _of(value: Any, text: str) -> str:
    return text.format(value) if value is not None else ""


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f}" if size >= 1e8 else f"{size / 1e9:.3f}"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
