"""Compare variants of a training step on one device: each in a process of its own, and only one
computes at a time.

    python -m benchmarks.ab A loss gelu loss+gelu+x8 --seconds 240

benchmarks/variants.py has the names.

A round gives each variant a turn, and A two: the distance of these two says what a difference is
worth. All processes compile at the same time. They then wait for their turns, and hold no memory
but that of weights and optimizer.
"""

import fcntl
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch.profiler import ProfilerActivity, profile

from benchmarks.card import CardLog, card_log
from benchmarks.config import BenchmarkConfig
from benchmarks.harness import WARM_UP, Contender, Enough, environment_info, spent
from benchmarks.step import bare, nanogpt, ours, random_tokens, short_run
from benchmarks.variants import (
    OTHERS,
    PATCHES,
    PLAIN,
    SETTINGS,
    SIZES,
    baseline_of,
    patched,
    split_name,
)
from gpt2_ddp.compare import peak_memory
from gpt2_ddp.config.base import Command
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.distributed.launch import pick_device
from gpt2_ddp.distributed.process import end_with_parent
from gpt2_ddp.errors import UserError
from gpt2_ddp.output import make_output_folder, markdown_table, write_json
from gpt2_ddp.script import run_command

COMPILES_BOTH = "force_non_lazy_backward_lowering"
"""Setting of torch that compiles the backward pass with the forward pass."""
READY_SHARE = 0.6
"""Share of the time until which variants may compile. Those that are not ready then are left
out."""
MOST_NICE = 10
TRACED_STEPS = 3
TRACE_SECONDS = 12
TRACE_ROWS = 60
TURN_SECONDS = 60
"""Longest wait for a turn or a trace."""
HEADER = [
    "variant",
    "tokens/s",
    "ms",
    "to A",
    "to its baseline",
    "counts",
    "peak MiB",
    "MHz",
    "W",
    "ready after s",
]


class ABConfig(Command):
    """python -m benchmarks.ab: variants of a step, in turns"""

    positional = "variants"

    variants: tuple[str, ...] = (PLAIN, "loss", "gelu", "loss+gelu")
    """names of benchmarks/variants.py, joined by +; A is the step as it is, and is always
    measured"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """device to measure; auto: cuda if available, else cpu"""
    seconds: float = Field(default=240, gt=0)
    """time of everything; rounds end before it is over"""
    rounds: int = Field(default=20, ge=1)
    """most rounds"""
    windows: int = Field(default=32, ge=1)
    """windows per micro-batch, where the name does not say it"""
    turn: int = Field(default=12, ge=1)
    """micro-batches of a turn"""
    trace: tuple[str, ...] = ()
    """variants whose kernels are listed after the rounds; best: the fastest one of A's sizes"""
    preset: str = "configs/gpt2_124m.yaml"
    """configuration to measure, on random tokens"""
    block_size: int | None = Field(default=None, ge=2)
    """tokens per window; null: the preset's on a GPU, 256 on a CPU"""
    precision: Literal["no", "bf16"] = "bf16"
    """no is fp32"""
    compile: Literal["off", "blocks", "model"] = "model"
    """train.compile; the baselines compile the whole model, or nothing for off"""
    nanogpt: str | None = None
    """folder of a nanoGPT checkout, for the variant nanogpt"""
    output: str = "runs/ab"
    """folder for ab.json, ab.md and the traces"""


class Worker(NamedTuple):
    """A variant's process."""

    process: BaseProcess
    connection: Connection
    tokens: int  # of a step
    steps: int  # of a turn


def compare_variants(config: ABConfig) -> dict[str, Any]:
    """The command: measures all variants, writes ab.json and ab.md after each round, and prints the
    table. Raises: UserError."""
    begun = time.monotonic()
    output = make_output_folder(config.output)
    names = list(dict.fromkeys([PLAIN, *config.variants]))
    with TemporaryDirectory(prefix="ab-") as name, card_log() as log:
        folder = Path(name)
        random_tokens(folder / "random")
        workers = start_workers(config, names, folder)
        found: dict[str, Any] = {
            **environment_info(),
            "settings": config.model_dump(mode="json"),
            "rounds": 0,
        }
        found["variants"] = {name: {"state": "compiles", "turns": []} for name in names}
        try:
            wait_until_ready(workers, found["variants"], begun, config.seconds)
            if PLAIN not in workers:
                raise UserError(
                    "variants", PLAIN, f"was not ready: {found['variants'][PLAIN]['state']}"
                )
            for left in rounds(config, begun):
                take_round(workers, found, log, left)
                write_results(found, output)
            trace_variants(config, workers, found, output)
        finally:
            end_workers(workers)
    print((output / "ab.md").read_text(), flush=True)
    return found


def start_workers(config: ABConfig, names: list[str], folder: Path) -> dict[str, Worker]:
    """A process for each variant. Raises: UserError for an unknown variant."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes inherit both
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(4, os.cpu_count() or 1)))
    context = multiprocessing.get_context("spawn")
    workers = {}
    trainings = {name: training_of(config, name, folder) for name in names}
    for place, (name, training) in enumerate(trainings.items()):
        here, there = context.Pipe()
        process = context.Process(
            target=work, args=(there, config, name, training, str(folder / "card"), place)
        )
        process.start()
        there.close()
        tokens = training.train.global_batch_tokens
        micro = int(training.train.micro_batch_size) * training.model.block_size
        turn = config.turn * config.windows * training.model.block_size
        workers[name] = Worker(process, here, tokens, max(1, round(turn / max(tokens, micro))))
    return workers


def training_of(config: ABConfig, name: str, folder: Path) -> TrainingConfig:
    """The training of a variant. Raises: UserError."""
    sizes = {"windows": config.windows, "parts": 1}
    changes: dict[str, Any] = {
        "train.patience_seconds": 3600,
        "output_dir": str(folder / "runs" / name),
    }
    for part in split_name(name):
        sizes |= dict([SIZES[part]]) if part in SIZES else {}
        changes |= SETTINGS.get(part, {})
    settings = BenchmarkConfig(
        device=config.device, preset=config.preset, block_size=config.block_size
    )
    make = partial(short_run, settings, folder, sizes["windows"], config.precision, config.compile)
    plain = make(changes)
    return make(
        changes | {"train.global_batch_tokens": sizes["parts"] * plain.train.global_batch_tokens}
    )


def work(
    connection: Connection,
    config: ABConfig,
    name: str,
    training: TrainingConfig,
    card: str,
    place: int,
) -> None:
    """A variant's process: takes steps whenever it is told to. `place`: in the list of variants;
    the first ones are compiled first, where cores are few."""
    end_with_parent(signal.SIGKILL)
    os.nice(min(place, MOST_NICE))
    # else all variants would save a checkpoint at the same time, before their first step
    TrainingConfig.rollbacks = 0
    device = pick_device(config.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # as `step` does
    try:
        with open(card, "w") as lock, patched(name):
            take_card(lock.fileno(), device, training.train.compile != "off")
            steps = turns(connection, device, lock.fileno())
            contender(config, name, training, device)(partial(next, steps))
    except UserError as error:
        connection.send({"failed": str(error)})
    except Enough:
        return


def contender(
    config: ABConfig, name: str, training: TrainingConfig, device: torch.device
) -> Contender:
    """Who takes the steps: our whole training loop, or a baseline of `step`."""
    other = [part for part in split_name(name) if part in OTHERS]
    if not other:
        return partial(ours, config=training)
    if other == ["bare"]:
        return partial(bare, config=training, device=device)
    if config.nanogpt is None:
        raise UserError("nanogpt", None, "the variant nanogpt needs the folder of a checkout")
    return partial(nanogpt, config=training, device=device, checkout=config.nanogpt)


def take_card(lock: int, device: torch.device, is_compiled: bool) -> None:
    """Makes this process the only one that computes. A compiled step first compiles, beside others:
    its memory, and the choice of kernels, which are timed, are needed after that. A process that
    ends frees the card."""
    if not is_compiled:
        if device.type == "cuda":
            fcntl.flock(lock, fcntl.LOCK_EX)
        return
    import torch._functorch.config as functorch
    from torch._dynamo.callback import callback_handler

    # else the first backward pass compiles, while the other processes wait for the card
    if hasattr(functorch, COMPILES_BOTH):
        setattr(functorch, COMPILES_BOTH, True)

    def compiled(*_: object) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        fcntl.flock(lock, fcntl.LOCK_EX)
        callback_handler.end_callbacks.remove(compiled)

    callback_handler.end_callbacks.append(compiled)


def turns(connection: Connection, device: torch.device, lock: int) -> Iterator[None]:
    """Called after each step. After `WARM_UP` steps, waits for orders: so many steps, traced or
    timed."""
    for _ in range(WARM_UP):
        yield
    rest(device)
    fcntl.flock(lock, fcntl.LOCK_UN)
    connection.send({"ready": time.monotonic()})  # of all processes of this machine
    while order := connection.recv():
        steps, is_traced = order
        yield  # takes its memory again
        take = traced_turn if is_traced else timed_turn
        yield from take(connection, device, steps)
        rest(device)
    raise Enough


def rest(device: torch.device) -> None:
    """Waits for the device, and gives back the memory that no tensor holds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def timed_turn(connection: Connection, device: torch.device, steps: int) -> Iterator[None]:
    """Sends milliseconds per step, by the GPU's clock, and the most memory so far."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(steps):
            yield
        last.record()
        last.synchronize()
        ms = first.elapsed_time(last) / steps
    else:
        begun = spent(device)
        for _ in range(steps):
            yield
        ms = 1000 * (spent(device) - begun) / steps
    connection.send({"ms": ms, "mib": peak_memory(device) / 2**20})


def traced_turn(connection: Connection, device: torch.device, steps: int) -> Iterator[None]:
    """Sends name, milliseconds per step and calls per step of each kernel; on a CPU, of each
    operation."""
    on_gpu = device.type == "cuda"
    with profile(
        activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    ) as profiler:
        for _ in range(steps):
            yield
        rest(device)
    time_of = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    rows = [
        (one.key, getattr(one, time_of) / 1000 / steps, one.count / steps)
        for one in profiler.key_averages()
    ]
    connection.send({"kernels": sorted(rows, key=lambda row: -row[1])})


def wait_until_ready(
    workers: dict[str, Worker], found: dict[str, Any], begun: float, seconds: float
) -> None:
    """Waits for all processes, until `READY_SHARE` of the time is over; ends those that are not
    ready."""
    end = begun + READY_SHARE * seconds
    for name in [*workers]:
        if answer := ask(workers, name, None, end - time.monotonic(), found):
            found[name] |= {"state": "ready", "ready_seconds": answer["ready"] - begun}
        print(
            f"{time.monotonic() - begun:6.1f} s  {name}: {found[name]['state']}",
            file=sys.stderr,
            flush=True,
        )


def ask(
    workers: dict[str, Worker], name: str, order: object, timeout: float, found: dict[str, Any]
) -> dict[str, Any]:
    """The answer of a process to an order, if there is one; empty, and the process is gone, if it
    failed or is late."""
    worker = workers[name]
    try:
        if order:
            worker.connection.send(order)
        answer = worker.connection.recv() if worker.connection.poll(max(timeout, 0.1)) else {}
        if answer and "failed" not in answer:
            return answer
        found[name]["state"] = answer.get("failed", f"no answer after {timeout:.0f} s")
    except (EOFError, ConnectionError):
        worker.process.join(10)
        found[name]["state"] = f"failed with exit code {worker.process.exitcode}, see its traceback"
    end_workers({name: workers.pop(name)})
    return {}


def rounds(config: ABConfig, begun: float) -> Iterator[float]:
    """Seconds left, for each round that fits into the time beside the traces."""
    end = begun + config.seconds - TRACE_SECONDS * len(config.trace)
    longest = 0.0
    for _ in range(config.rounds):
        start = time.monotonic()
        if longest and start + 1.1 * longest > end:
            return
        yield max(end - start, TURN_SECONDS)
        longest = max(longest, time.monotonic() - start)


def take_round(
    workers: dict[str, Worker], found: dict[str, Any], log: CardLog, left: float
) -> None:
    """A turn of each variant, in an order that moves on from round to round; A comes first and in
    the middle."""
    number = found["rounds"]
    others = [name for name in workers if name != PLAIN]
    others = others[number % len(others) :] + others[: number % len(others)] if others else []
    middle = len(others) // 2
    for name in [PLAIN, *others[:middle], PLAIN, *others[middle:]]:
        if worker := workers.get(name):
            begin = time.monotonic()
            answer = ask(
                workers, name, (worker.steps, False), min(left, TURN_SECONDS), found["variants"]
            )
            if answer:
                turn = {"round": number, **answer, "rate": 1000 * worker.tokens / answer["ms"]}
                found["variants"][name]["turns"].append(turn | log.between(begin, time.monotonic()))
    found["rounds"] = number + 1


def write_results(found: dict[str, Any], output: Path) -> None:
    """Writes ab.json, and the table in ab.md."""
    write_json(output / "ab.json", found)
    spreads = own_spread(found)
    lines = [markdown_table(HEADER, [*table_rows(found)]), ""]
    lines += [
        f"A against itself: {median(spreads):.2%} apart on the median, {max(spreads):.2%} at most"
    ] * bool(spreads)
    lines += [
        f"{name}: {one['state']}" for name, one in found["variants"].items() if not one["turns"]
    ]
    (output / "ab.md").write_text("\n".join(lines) + "\n")


def own_spread(found: dict[str, Any]) -> list[float]:
    """How far A's two turns of each round are apart."""
    pairs = [rates_by_round(found, PLAIN).get(number, []) for number in range(found["rounds"])]
    return [abs(pair[1] / pair[0] - 1) for pair in pairs if len(pair) == 2]


def rates_by_round(found: dict[str, Any], name: str) -> dict[int, list[float]]:
    """Tokens per second of a variant's turns."""
    rates: dict[int, list[float]] = {}
    for turn in found["variants"].get(name, {"turns": []})["turns"]:
        rates.setdefault(turn["round"], []).append(turn["rate"])
    return rates


def ratios(found: dict[str, Any], name: str, baseline: str) -> list[float]:
    """The variant's speed over the baseline's of the same round."""
    ours = rates_by_round(found, name)
    theirs = rates_by_round(found, baseline)
    return [
        rates[-1] * len(theirs[number]) / sum(theirs[number])
        for number, rates in ours.items()
        if number in theirs
    ]


def table_rows(found: dict[str, Any]) -> Iterator[list[str]]:
    """Rows of the table below `HEADER`. A difference counts if it is twice as large as A's largest
    from itself."""
    limit = 2 * max(own_spread(found), default=0.0)
    for name, one in found["variants"].items():
        if not one["turns"]:
            continue
        middle = {
            key: median(turn[key] for turn in one["turns"] if key in turn)
            for key in ("rate", "ms", "mib")
        }
        card = {
            key: [turn[key] for turn in one["turns"] if key in turn] for key in ("mhz", "watts")
        }
        clock, power = (f"{median(values):.0f}" if values else "" for values in card.values())
        to_a = ratios(found, name, PLAIN)
        own = ratios(found, name, baseline_of(name))
        spread = (
            f"{median(to_a):.4f} ({min(to_a):.4f}–{max(to_a):.4f})"
            if to_a and name != PLAIN
            else ""
        )
        to_own = f"{median(own):.4f}" if own and name != baseline_of(name) else ""
        counts = "yes" if to_own and abs(median(own) - 1) > limit else ""
        figures = [
            f"{middle['rate']:,.0f}",
            f"{middle['ms']:.2f}",
            spread,
            to_own,
            counts,
            f"{middle['mib']:,.0f}",
        ]
        yield [name, *figures, clock, power, f"{one['ready_seconds']:.0f}"]


def trace_variants(
    config: ABConfig, workers: dict[str, Worker], found: dict[str, Any], output: Path
) -> None:
    """Writes trace_NAME.txt of each variant to trace: its kernels, the longest first. Names on
    stderr those that cannot be traced."""
    for name in dict.fromkeys(best(found) if asked == "best" else asked for asked in config.trace):
        answer = {}
        if name in workers:
            answer = ask(workers, name, (TRACED_STEPS, True), TURN_SECONDS, found["variants"])
        if not answer:
            state = found["variants"].get(name, {"state": "is no variant"})["state"]
            print(f"no trace of {name}: {state}", file=sys.stderr, flush=True)
            continue
        total = sum(ms for _, ms, _ in answer["kernels"])
        lines = [f"{name}: {total:.2f} ms of kernels a step of {workers[name].tokens} tokens"]
        lines += [
            f"{ms:9.3f} ms {calls:7.1f} x  {kernel[:160]}"
            for kernel, ms, calls in answer["kernels"]
        ]
        file = output / f"trace_{name.replace('+', '_')}.txt"
        file.write_text("\n".join(lines[: TRACE_ROWS + 1]) + "\n")


def best(found: dict[str, Any]) -> str:
    """The fastest variant of A's sizes and settings."""
    alike = [
        name for name in found["variants"] if all(part in PATCHES for part in split_name(name))
    ]
    return max(alike, key=lambda name: median(ratios(found, name, PLAIN) or [0.0]))


def end_workers(workers: dict[str, Worker]) -> None:
    """Ends the processes."""
    for worker in workers.values():
        worker.process.kill()
        worker.connection.close()


if __name__ == "__main__":
    sys.argv[0] = "python -m benchmarks.ab"
    run_command(ABConfig, "benchmarks.ab:compare_variants")
