"""Memory of one process, by part, at each of the moments that may be the one with the most.

Every line is an argument about which tensors are alive, spelled out in docs/plan.md. On CPUs it was held against the
measured peak; no GPU run has checked it.
"""

import platform
from collections.abc import Callable
from dataclasses import dataclass

from gpt2_ddp.config.training import ModelConfig, TrainingConfig
from gpt2_ddp.data.feed import divisors
from gpt2_ddp.model.gpt import GPT, resolve_loss_chunk
from gpt2_ddp.model.optim import state_numbers

HEAP = 2**25
"""Bytes from which on glibc gives a freed block back to the system at once; what is smaller it keeps for later."""

ROOM = 0.9
"""Of a GPU's memory, that the estimate for a micro-batch may take."""
CPU_TOKENS = 512
"""Of a micro-batch that is chosen for a CPU, at most."""

CUDA_BASE = 1.0e9
"""A CUDA context, cuBLAS's workspace and the allocator's slack; NCCL has as much again."""


@dataclass(frozen=True)
class Setting:
    """What memory depends on.

    Args:
        kind: cuda, cpu or mps.
        parameters: all of them. matrices: those that autocast copies. state: numbers that the optimizer keeps of them.
        vocab_size: rows of the head, padding included.
        micro_batch: windows of a training step's forward pass; eval_batch: of an evaluation's.
        precision: no, bf16 or fp16. checkpointing: of activations.
        processes: of the whole training.
        background: checkpoints are written behind the training, from a copy in the host's memory.
        base: bytes of a process that has all libraries loaded, and no model.
        loss_chunk: tokens whose logits are there at a time; None: all.
    """

    kind: str
    model: ModelConfig
    parameters: int
    matrices: int
    state: int
    vocab_size: int
    micro_batch: int
    eval_batch: int
    precision: str
    checkpointing: bool
    processes: int
    background: bool
    base: float
    loss_chunk: int | None = None


def setting_of(
    config: TrainingConfig,
    model: GPT,
    kind: str,
    processes: int,
    precision: str,
    micro_batch: int,
    base: float,
    validates: bool = True,
    background: bool = False,
) -> Setting:
    """That of a training, of a model that may be on the meta device.

    Args:
        validates: it is evaluated. background: as in `Setting`.
    """
    sizes = [(parameter.numel(), parameter.dim()) for parameter in model.parameters()]
    return Setting(
        kind,
        config.model,
        sum(size for size, _ in sizes),
        sum(size for size, dim in sizes if dim > 1),
        state_numbers(model, config.optim),
        model.wte.weight.size(0),
        micro_batch,
        config.eval.batch_size if validates else 0,
        precision,
        config.train.activation_checkpointing,
        processes,
        background,
        base,
        resolve_loss_chunk(config.train.loss_chunk, kind),
    )


def pick_micro_batch(share: int, kind: str, block_size: int, peak: Callable[[int], float], room: float) -> int:
    """What `train.micro_batch_size: auto` comes to, before it is tried out: a divisor of the rank's windows of a step.

    Args:
        peak: bytes of a process, by its micro-batch. room: bytes of its device.
    """
    fits = (lambda size: peak(size) <= ROOM * room) if kind == "cuda" else lambda size: size * block_size <= CPU_TOKENS
    return next(filter(fits, divisors(share)), 1)


@dataclass(frozen=True)
class Block:
    """Tensors of a `part`: `count` of them, of `bytes` each; they stay, or are gone when the moment is over."""

    part: str
    count: float
    bytes: float
    stays: bool = False

    @property
    def total(self) -> float:
        return self.count * self.bytes


Moment = list[Block]


def optimizer_state(setting: Setting) -> dict[str, Moment]:
    """What is alive when most is: in a step of training, in an evaluation, and while a checkpoint is saved."""
    n, n_eval = (batch * setting.model.block_size for batch in (setting.micro_batch, setting.eval_batch))
    embedding, tensors = 4 * setting.vocab_size * setting.model.n_embd, 12 * setting.model.n_layer

    def kept(part: str, copies: float, stays: bool = False, of_others: float | None = None) -> Moment:
        """So many copies of the parameters in fp32: the embedding, which is the largest, and the others."""
        others, times = (4 * setting.parameters - embedding) / tensors, copies if of_others is None else of_others
        return [Block(part, copies, embedding, stays), Block(part, times * tensors, others, stays)]

    moments = (4 * setting.state - 2 * embedding) / (4 * setting.parameters - embedding)  # Muon has one for matrices
    lasting = [*kept("weights", 1, True), *kept("moments", 2, True, moments)]
    if setting.background and setting.kind == "cpu":
        lasting += kept("checkpoint's copy", 3, True, of_others=1 + moments)
    # alone, gradients are None between the steps; otherwise they are views of DDP's buckets, which stay
    gradients = kept("gradients", 1, stays=setting.processes > 1)
    between = gradients if setting.processes > 1 else []
    copies = [Block("weights in half", 1, 2 * setting.matrices)] if setting.precision != "no" else []
    saved = [*_activations(setting, n), *_one_block(setting, n, trains=True)]
    training = [*lasting, *gradients, *copies, *saved, *_logits(setting, n, trains=True)]
    evaluation = [*lasting, *between, *copies, *_one_block(setting, n_eval), *_logits(setting, n_eval)]
    return {"training": training, "evaluation": evaluation, "saving": [*lasting, *between]}


def _activations(setting: Setting, n: int) -> Moment:
    """What autograd saves of n tokens."""
    config = setting.model
    recomputed = setting.checkpointing  # of each block its input is kept, and one block at a time is whole
    residual = Block("activations", (1 if recomputed else 2) * config.n_layer + 3, n * config.n_embd * 4)
    return [residual, *_of_block(setting, n, 1 if recomputed else config.n_layer)]


def _of_block(setting: Setting, n: int, layers: int) -> Moment:
    """Of so many blocks, without the residual stream: inputs of the four matrix products, and what is not linear."""
    config, half = setting.model, 4 if setting.precision == "no" else 2
    width = n * config.n_embd
    saved = [
        Block("activations", 3 * layers, width * half),  # LayerNorms' outputs, attention's
        Block("activations", layers, 3 * width * (4 if _plain_attention(setting) else half)),  # queries, keys, values
        Block("activations", 2 * layers, 4 * width * half),  # before and after GELU
    ]
    if _plain_attention(setting):  # softmax, noise and their product; noise behind both branches, too
        saved += [Block("activations", 3 * layers, _scores(setting, n)), Block("activations", 2 * layers, width * half)]
    elif config.dropout:
        saved += [Block("activations", 2 * layers, width)]  # a byte for each number
    return saved


def _one_block(setting: Setting, n: int, trains: bool = False) -> Moment:
    """What a block has for a moment, in an evaluation or in the backward pass: what goes into GELU and what comes out,
    or their gradients; and gradients of attention's scores."""
    wide = Block("activations", 3, 4 * n * setting.model.n_embd * (4 if setting.precision == "no" else 2))
    return [wide, Block("activations", 4, _scores(setting, n))] if trains and _plain_attention(setting) else [wide]


def _plain_attention(setting: Setting) -> bool:
    """Whether attention is by its formula, with T² numbers a head: flash attention has no dropout on CPUs."""
    return setting.kind == "cpu" and setting.model.dropout > 0


def _scores(setting: Setting, n: int) -> float:
    return 4.0 * n * setting.model.block_size * setting.model.n_head


def _logits(setting: Setting, n: int, trains: bool = False) -> Moment:
    """fp32: logits and log-softmax, and in the backward pass the gradients of both beside log-softmax. In half
    precision: logits in half and in fp32, and log-softmax."""
    chunk, head = min(n, setting.loss_chunk or n), []
    if trains and chunk < n:  # the head's gradient is there with the loss
        head = [Block("logits", 1, 4 * setting.vocab_size * setting.model.n_embd)]
    numbers = chunk * setting.vocab_size
    if trains:
        return [Block("logits", 3, 4 * numbers), *head]
    half = [Block("logits", 1, 2 * numbers)] if setting.precision != "no" else []
    return [*half, Block("logits", 2, 4 * numbers)]


@dataclass(frozen=True)
class Memory:
    """Bytes of one process.

    Args:
        peak: the most. moment: when that is.
        peaks: of each moment. parts: at that moment, by name; they add up to the peak.
        host: on the CPU's side of a GPU's process, for a checkpoint: a copy of it, or of its largest tensor.
    """

    peak: float
    moment: str
    peaks: dict[str, float]
    parts: dict[str, float]
    host: float


def estimate(setting: Setting) -> Memory:
    """The memory of one process, at each moment and by part."""
    at = optimizer_state(setting)
    keeps = setting.kind == "cpu" and platform.libc_ver()[0] == "glibc"
    heap = {
        name: sum(block.total for block in blocks if not block.stays and keeps and block.bytes < HEAP)
        for name, blocks in at.items()
    }
    peaks, highest = {}, max(heap.values())
    for name, blocks in at.items():
        own = sum(block.total for block in blocks)
        peaks[name] = setting.base + own - heap[name] + highest
    moment = max(peaks, key=peaks.__getitem__)
    parts = {"program": setting.base}
    for block in at[moment]:
        parts[block.part] = parts.get(block.part, 0.0) + block.total
    if highest > heap[moment]:
        parts["freed, and kept by the allocator"] = highest - heap[moment]
    copied = setting.parameters + setting.state if setting.background else setting.vocab_size * setting.model.n_embd
    return Memory(peaks[moment], moment, peaks, parts, 0.0 if setting.kind == "cpu" else 4.0 * copied)
