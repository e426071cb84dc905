"""Memory estimate of one process, by part, in training and evaluation (derived in docs/plan.md). By
it, `train.micro_batch_size: auto` is a number, and a training that does not fit names one.

On CPUs the estimate was within 20 % of the measured peaks; docs/plan.md compares it with GPUs.
"""

# accelerate has no type stubs, and torch is typed in part
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import nn

from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.feed import split_batch
from gpt2_ddp.distributed.environment import free_memory, processes_here
from gpt2_ddp.distributed.ranks import control_group, gather
from gpt2_ddp.evaluation.evaluate import BATCH
from gpt2_ddp.model.architecture import ARCHITECTURES, gelu, mlp_width, plain_rms_norm
from gpt2_ddp.model.compiled import PAYS_ON_CPUS, resolve_compile
from gpt2_ddp.model.fp8 import CHUNK, COMPILED_CHUNK
from gpt2_ddp.model.gpt import GPT, LOSS_CHUNK
from gpt2_ddp.model.loss import FUSED_ON, IN_PARTS_ON, MOST_LOGITS, PART
from gpt2_ddp.model.optim import build_optimizer, state_names

ROOM = 0.9
"""Largest estimate of a micro-batch that is chosen, as a share of the memory."""
KEEP_ROOM = 0.75
"""Largest estimate of a sharded training that keeps gathered weights, as a share of the memory.
On several GPUs, these estimates have not been compared with a training."""
KEEPS_WEIGHTS_ON: tuple[str, ...] = ("cuda",)
"""Types of devices on which a sharded training may keep gathered weights. They save the gathering
in each backward pass, and in each micro-batch but the first."""
CPU_TOKENS = 16_384
"""Most tokens of a micro-batch that is chosen on a CPU, which larger ones do not make faster."""

# bytes of a CUDA context, cuBLAS's workspace and the allocator's slack; NCCL takes as much again
CUDA_BASE = 1.0e9


@dataclass(frozen=True)
class Setting:
    """Inputs of the estimate.

    Attributes:
        kind: cuda, cpu or mps.
        processes: in all.
        precision: no, bf16 or fp16.
        parameters: numbers in all parameters.
        block: numbers in a block's parameters.
        state: numbers in the optimizer state.
        vocab_size: rows of the head, padding included.
        base: bytes of a process with all libraries and no model; on a CPU beyond what it has.
        micro_batch: windows per forward pass in training.
        background: whether checkpoints are written from a copy in host memory.
        validates: whether there are evaluations.
        keeps_weights: with fsdp, whether gathered weights stay until a step's last backward pass.
    """

    config: TrainingConfig
    kind: str
    processes: int
    precision: str
    parameters: int
    block: int
    state: int
    vocab_size: int
    base: float
    micro_batch: int = 1
    background: bool = False
    validates: bool = True
    keeps_weights: bool = False

    @property
    def number_bytes(self) -> int:
        """Bytes of a number that matrix products read or write."""
        return 4 if self.precision == "no" else 2

    @property
    def average(self) -> int:
        """Numbers in the average of the weights (`optim.average`)."""
        return self.parameters if self.config.optim.average else 0

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint's tensors."""
        return 4 * (self.parameters + self.average + self.state)


def setting_of(
    config: TrainingConfig, model: GPT, kind: str, processes: int, precision: str
) -> Setting:
    """Setting of a training on GPUs that evaluates and saves in the foreground, for a micro-batch
    of 1. The model may be on the meta device."""
    names = state_names(build_optimizer(model, config.optim))
    state = sum(len(kept - {"step"}) * parameter.numel() for parameter, kept in names.items())
    contexts = 2 if processes > 1 else 1  # NCCL's is as large
    base = 0.0 if kind == "cpu" else CUDA_BASE * contexts
    return Setting(
        config=config,
        kind=kind,
        processes=processes,
        precision=precision,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        block=sum(parameter.numel() for parameter in model.h[0].parameters()),
        state=state,
        vocab_size=model.wte.weight.size(0),
        base=base,
    )


Parts = dict[str, float]
"""Bytes by part."""


def moments_of(setting: Setting) -> dict[str, Parts]:
    """What is alive at the peak of a training step and of an evaluation. While a checkpoint is
    saved, less is."""
    config = setting.config
    window = config.model.block_size
    weights = 4.0 * setting.parameters
    state = 4.0 * setting.state
    is_sharded = config.launch.parallel == "fsdp"
    shards = setting.processes // config.launch.replicas if is_sharded else 1
    lasting = {"weights": weights / shards, "optimizer state": state / shards}
    if setting.average:
        lasting["average of weights"] = 4.0 * setting.average / shards
    if setting.background and setting.kind == "cpu":
        lasting["checkpoint's copy"] = setting.checkpoint_bytes / shards
    gradients = {"gradients": weights}
    # with DDP, gradients are views of its buckets, which stay; otherwise they are None between the
    # steps
    between = gradients if setting.processes > 1 and not is_sharded else {}
    layers = config.model.n_layer
    # which autocast copies
    matrices = layers * setting.block + setting.vocab_size * config.model.n_embd
    read = {"weights in half": 2.0 * matrices} if setting.precision != "no" else {}
    if is_sharded:
        root = setting.parameters - layers * setting.block
        at_once = 2 if setting.kind == "cuda" else 1
        if setting.keeps_weights:
            at_once = layers
        read = {"gathered weights": float(setting.number_bytes * (root + at_once * setting.block))}
        accumulates = config.global_batch_windows > setting.processes * setting.micro_batch
        if not accumulates:  # a block's, and the others', before their sum
            gradients = {"gradients": weights / shards + 4 * (root + setting.block)}
    tokens = setting.micro_batch * window
    saved = _saved(setting, tokens) + _temporary(setting, tokens)
    training = lasting | gradients | read
    training |= {"activations": saved, "logits": _logits(setting, tokens, trains=True)}
    scored = BATCH * window if setting.validates else 0
    evaluation = lasting | between | read
    evaluation |= {"activations": _temporary(setting, scored), "logits": _logits(setting, scored)}
    return {"training": training, "evaluation": evaluation}


def _saved(setting: Setting, tokens: int) -> float:
    """Bytes that autograd saves for the blocks."""
    model = setting.config.model
    kind = ARCHITECTURES[model.architecture]
    half = setting.number_bytes
    layers = model.n_layer
    width = tokens * model.n_embd
    keys = width * model.key_heads // model.n_head
    # the residual stream, as in fp32: an H100 reserves 1 % more than this says for GPT-2 (124M) in
    # bf16
    stream = (2 * layers + 3) * 4 * width
    block = 3 * width * half  # outputs of both norms and of attention
    block += (width + 2 * keys) * half  # queries, keys, values
    # before and after the activation
    block += (4 if kind.gated else 2) * tokens * mlp_width(model) * half
    if kind.rotary:  # rotated queries and keys
        block += (width + keys) * half
    # CPUs have no fused kernel of RMSNorm, and its output before the weights is a tensor of its own
    is_unfused = setting.kind == "cpu" and kind.norm not in (None, plain_rms_norm)
    if is_unfused:
        block += 2 * 4 * width
    if kind.query_norm or kind.rotated_norm:
        if is_unfused:
            block += 4 * (width + keys)
        if kind.rotated_norm or half == 2:  # otherwise its input is a part of the above
            block += 4 * (width + keys)
    if model.dropout:
        block += 2 * width  # a byte for each number
    # a block's input is kept, and one block at a time is whole
    if setting.config.train.activation_checkpointing:
        return stream - layers * 4 * width + block
    return stream + layers * block


def _temporary(setting: Setting, tokens: int) -> float:
    """Bytes of a block, in evaluation or the backward pass: the activation's input and output or
    their gradients."""
    model = setting.config.model
    # gelu's backward pass is one kernel
    numbers = 3 if ARCHITECTURES[model.architecture].activation is gelu else 5
    return numbers * tokens * mlp_width(model) * setting.number_bytes


def _logits(setting: Setting, tokens: int, trains: bool = False) -> float:
    """fp32: logits and log-softmax; in the backward pass the gradients of both and log-softmax, and
    tanh of capped logits. In half precision: logits in half and in fp32, and log-softmax. Compiled
    for a GPU: logits, in whose place their gradients come; in one pass, beside them. In parts on a
    CPU: a part in both precisions, and the gradients of the head and of its input. In fp8: a chunk
    of logits and of their gradients, and the head's."""
    model = setting.config.model
    train = setting.config.train
    is_compiled = setting.kind == "cuda" and train.compile != "off"
    if trains and train.fp8_head:
        # bf16 logits and their gradients in fp8, in rows and in columns; without a compiler also
        # five fp32 tensors; the head in fp8, in both ways, and its gradient
        chunk = min(tokens, COMPILED_CHUNK if is_compiled else CHUNK)
        each = 4.0 if is_compiled else 24.0
        return each * chunk * setting.vocab_size + 6.0 * setting.vocab_size * model.n_embd
    is_many = tokens * setting.vocab_size > MOST_LOGITS
    is_eager = setting.kind in IN_PARTS_ON and train.compile in ("off", "auto")
    if trains and setting.precision == "bf16" and is_eager and is_many:
        return 10.0 * PART + 4.0 * setting.vocab_size * model.n_embd + 2.0 * tokens * model.n_embd
    if is_compiled:
        is_one_pass = trains and setting.kind in FUSED_ON and setting.precision == "bf16"
        return float(setting.number_bytes * tokens * setting.vocab_size * (1 + is_one_pass))
    chunk = min(tokens, LOSS_CHUNK) if setting.kind == "cuda" else tokens
    if not trains:
        return chunk * setting.vocab_size * (8.0 if setting.precision == "no" else 10.0)
    is_capped = ARCHITECTURES[model.architecture].soft_cap is not None
    return 4.0 * chunk * setting.vocab_size * (4 if is_capped else 3)


class Memory(NamedTuple):
    """Bytes of one process.

    Attributes:
        moment: of the peak, a key of `moments_of`.
        parts: at the peak.
        host: host memory of GPUs' processes for a checkpoint in the background, on one machine at
            most.
    """

    moment: str
    parts: Parts
    host: float

    @property
    def peak(self) -> float:
        return sum(self.parts.values())


def estimate(setting: Setting) -> Memory:
    """Memory of one process at its peak."""
    moments = moments_of(setting)
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    host = 0.0
    if setting.background and setting.kind != "cpu":
        host = float(setting.checkpoint_bytes)
    return Memory(moment, parts={"program": setting.base} | moments[moment], host=host)


def usable_memory(device: torch.device) -> float:
    """Bytes of the device's memory that this process has or may still take. The processes of a
    machine share its memory, but for that of CUDA devices."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return float(free + torch.cuda.memory_reserved(device))
    return free_memory() / processes_here()


def least_memory(device: torch.device) -> float:
    """The least `usable_memory` of all ranks. Collective."""
    return min(gather(lambda: usable_memory(device), control_group()))


def divisions(setting: Setting) -> Iterator[int]:
    """The micro-batches into which a step may be divided, from the largest one down to 1."""
    windows = setting.config.global_batch_windows
    processes = min(setting.processes, windows)  # more are refused
    size = windows
    while size > 0:
        size = split_batch(windows, processes, size)
        yield size
        size -= 1


def run_setting(
    config: TrainingConfig, model: nn.Module, accelerator: Accelerator, validates: bool = True
) -> Setting | None:
    """Setting of a run on this machine, for a micro-batch of 1; None for a model of one's own."""
    if not isinstance(model, GPT):
        return None
    kind = accelerator.device.type
    if config.train.compile == "auto":
        # a CPU's compiler is tried later, which takes seconds
        scope = "model" if (config.train.minutes or 0) >= PAYS_ON_CPUS else "off"
        if kind != "cpu":
            scope, _ = resolve_compile(None, model, accelerator)
        train = config.train.model_copy(update={"compile": scope})
        config = config.model_copy(update={"train": train})
    setting = setting_of(
        config, model, kind, accelerator.num_processes, accelerator.mixed_precision
    )
    background = config.checkpoint.background is not False
    return replace(setting, background=background, validates=validates)


def keeping_weights(setting: Setting, memory: float) -> Setting:
    """The setting of a sharded training that keeps gathered weights, if that fits `KEEP_ROOM` of so
    many bytes; else the setting as it is."""
    if setting.config.launch.parallel != "fsdp" or setting.kind not in KEEPS_WEIGHTS_ON:
        return setting
    kept = replace(setting, keeps_weights=True)
    return kept if fits(kept, setting.micro_batch, KEEP_ROOM * memory) else setting


def largest_micro_batch(setting: Setting, memory: float) -> int:
    """Windows of `train.micro_batch_size: auto`: as many of a process's share of a step as fit
    `ROOM` of its memory; on a CPU at most `CPU_TOKENS`. 0: none fits."""
    most = CPU_TOKENS // setting.config.model.block_size if setting.kind == "cpu" else None
    for size in divisions(setting):
        is_allowed = most is None or size <= max(most, 1)
        if is_allowed and fits(setting, size, ROOM * memory):
            return size
    return 0


def choose_micro_batch(setting: Setting, memory: float, recorded: int | None = None) -> int:
    """The number of `train.micro_batch_size: auto`, for so many bytes. It is the `recorded` one of
    the run or its parent if that fits them, or else the largest that does; at least 1."""
    if recorded:
        processes = min(setting.processes, setting.config.global_batch_windows)
        size = split_batch(setting.config.global_batch_windows, processes, recorded)
        if fits(setting, size, memory):
            return recorded
    return largest_micro_batch(setting, memory) or 1


def fits(setting: Setting, micro_batch: int, memory: float) -> bool:
    """Whether a training with this micro-batch is expected to fit so many bytes."""
    return estimate(replace(setting, micro_batch=micro_batch)).peak <= memory


def other_ways(setting: Setting) -> str:
    """What a training takes that does not fit with any micro-batch, and flags that save memory."""
    config = setting.config
    least = estimate(replace(setting, micro_batch=1)).peak
    is_sharded = config.launch.parallel == "fsdp"
    flags: list[str] = []
    if not config.train.activation_checkpointing:
        flags.append("--train.activation_checkpointing true")
    if not is_sharded and setting.processes > 1:
        flags.append("--launch.parallel fsdp")
    hint = ""
    if flags:
        hint = f"; try {' and '.join(flags)}"
    elif is_sharded:
        hint = "; use more GPUs"
    return f"a micro-batch of 1 takes {least / 1e9:,.2f} GB{hint}"
