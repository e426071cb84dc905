"""Memory estimate of one process, by part, in training, evaluation and saving (derived in docs/plan.md); and
`train.micro_batch_size: auto` (docs/benchmarks.md): by a GPU's memory, with a trial, or by a CPU's caches.

On CPUs the estimate was within 20 % of the measured peaks; on GPUs it was compared with none.
"""

import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.feed import split_batch
from gpt2_ddp.model.architecture import ARCHITECTURES, SHORT, Architecture, gelu, mlp_width, plain_rms_norm
from gpt2_ddp.model.gpt import GPT, resolve_loss_chunk, without_init
from gpt2_ddp.model.optim import STATE_NUMBERS, build_optimizer, reads_found_inf

HEAP = 2**25  # smallest freed block, in bytes, that glibc returns to the system at once; it keeps smaller ones
ROOM = 0.9  # largest estimate for a micro-batch, as a fraction of a GPU's memory
CPU_TOKENS = 512  # largest micro-batch on a CPU
CUDA_BASE = 1.0e9  # bytes of a CUDA context, cuBLAS's workspace and the allocator's slack; NCCL takes as much again


@dataclass(frozen=True)
class Setting:
    """Inputs of the estimate."""

    config: TrainingConfig
    kind: str  # cuda, cpu or mps
    processes: int
    precision: str  # no, bf16 or fp16
    parameters: int  # numbers in all
    matrices: int  # numbers that autocast copies
    state: int  # numbers in the optimizer state
    vocab_size: int  # rows of the head, padding included
    micro_batch: int  # windows per forward pass in training
    base: float  # bytes of a process with all libraries and no model
    background: bool = False  # checkpoints are written from a copy in host memory
    validates: bool = True  # there are evaluations
    layer_tensors: int = 12  # parameter tensors of a block
    table_state: int = 2  # numbers in the optimizer state for each number of embedding and head
    copies: bool = False  # each step copies weights and optimizer state before it (`GuardedOptimizer`)
    block: int = 0  # numbers in a block's parameters

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.config.model.architecture]

    @property
    def number_bytes(self) -> int:
        """Bytes of a number that matrix products read or write."""
        return 4 if self.precision == "no" else 2

    @property
    def is_sharded(self) -> bool:
        return self.config.parallel == "fsdp"

    @property
    def shards(self) -> int:
        """Parts of the weights, gradients and optimizer state; a process has one of each."""
        return max(self.processes // self.config.launch.replicas, 1) if self.is_sharded else 1

    @property
    def accumulation(self) -> int:
        """Micro-batches of a process per step."""
        return -(-self.config.global_batch_windows // (self.processes * self.micro_batch))

    @property
    def root(self) -> int:
        """Numbers in the parameters outside the blocks."""
        return self.parameters - self.config.model.n_layer * self.block

    @property
    def sent(self) -> float:
        """Bytes that a process sends per step for weights and gradients, with AdamW. Ring algorithms."""
        launch, part = self.config.launch, lambda members: (members - 1) / members
        if not self.is_sharded:
            return 8 * part(self.processes) * self.parameters
        gathered = self.number_bytes * (self.parameters + launch.reshard * (self.parameters - self.root))
        sums = self.accumulation if launch.reduce == "each" else 1
        reduced = part(self.shards) + 2 * part(launch.replicas) / self.shards
        return self.accumulation * part(self.shards) * gathered + 4 * sums * reduced * self.parameters


def setting_of(
    config: TrainingConfig, model: GPT, kind: str, processes: int, precision: str, micro_batch: int = 1
) -> Setting:
    """Setting of a training on GPUs that evaluates and saves in the foreground. The model may be on the meta device."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    matrices = model.num_parameters() - sum(p.numel() for p in model.parameters() if p.dim() == 1)
    optimizer = build_optimizer(model, config.optim)
    each = {p: group.get(STATE_NUMBERS, 2) for group in optimizer.param_groups for p in group["params"]}
    state = sum(number * parameter.numel() for parameter, number in each.items())
    ids, base = model.wte.weight.size(0), CUDA_BASE * (1 + (processes > 1))
    own = {"table_state": each[model.wte.weight], "copies": not reads_found_inf(optimizer)}
    own["layer_tensors"] = len([*model.h[0].parameters()])
    own["block"] = sum(parameter.numel() for parameter in model.h[0].parameters())
    return Setting(config, kind, processes, precision, parameters, matrices, state, ids, micro_batch, base, **own)


def pick_micro_batch(
    sizes: Iterable[int], kind: str, block_size: int, peak: Callable[[int], float], room: float
) -> int:
    """Estimate for `train.micro_batch_size: auto`: the first of `sizes`, the largest first, that is expected to fit.
    `peak` returns the bytes of a process for a micro-batch; `room` is the device's."""
    fits = (lambda size: peak(size) <= ROOM * room) if kind == "cuda" else lambda size: size * block_size <= CPU_TOKENS
    return next(filter(fits, sizes), 1)


@dataclass(frozen=True)
class Block:
    """`count` tensors of a `part`, of `bytes` each. `stays`: they outlive the moment."""

    part: str
    count: float
    bytes: float
    stays: bool = False

    @property
    def total(self) -> float:
        return self.count * self.bytes


Moment = list[Block]


def moments_of(setting: Setting) -> dict[str, Moment]:
    """Tensors that are alive at the peak of a training step, of an evaluation, and while a checkpoint is saved."""
    config, evaluated = setting.config, setting.config.eval.batch_size * setting.validates
    n, n_eval = (windows * config.model.block_size for windows in (setting.micro_batch, evaluated))
    embedding, tensors = 4 * setting.vocab_size * config.model.n_embd, setting.layer_tensors * config.model.n_layer
    tables = 1 if setting.architecture.tied else 2

    def kept(
        part: str, copies: float, stays: bool = False, of_others: float | None = None, shards: int = setting.shards
    ) -> Moment:
        """Copies of the process's parameters in fp32: embedding and head, which are the largest, and the others."""
        of_others = copies if of_others is None else of_others
        largest = Block(part, copies * tables, embedding / shards, stays)
        return [largest, Block(part, of_others * tensors, others / tensors / shards, stays)]

    others = 4 * setting.parameters - tables * embedding
    tables_have = setting.table_state
    others_have = (4 * setting.state - tables_have * tables * embedding) / others  # Muon has one for matrices
    lasting = [*kept("weights", 1, True), *kept("optimizer state", tables_have, True, others_have)]
    copy = kept("checkpoint's copy", 1 + tables_have, setting.background, 1 + others_have, shards=1)
    copy = copy if setting.kind == "cpu" else []
    if setting.background:
        lasting += copy
    # alone or sharded, gradients are None between the steps; otherwise they are views of DDP's buckets, which stay
    stay = setting.processes > 1 and not setting.is_sharded
    gradients = kept("gradients", 1, stays=stay)
    between = gradients if stay else []
    saving = [*lasting, *between]
    copies = [Block("weights in half", 1, 2 * setting.matrices)] if setting.precision != "no" else []
    if setting.is_sharded:
        at_once = (2 if setting.kind == "cuda" else 1) if config.launch.reshard else config.model.n_layer
        copies = [Block("gathered weights", 1, setting.number_bytes * (setting.root + at_once * setting.block))]
        whole = setting.accumulation > 1 and config.launch.reduce == "last"
        saving += [Block("gathered weights", 1, embedding), *([] if setting.background else copy)]
        group = Block("gradients", 1, 4 * (setting.root + setting.block))  # of a block and the rest, before their sum
        gradients = kept("gradients", 1, shards=1) if whole else [*gradients, group]
    saved = [*_activations(setting, n), *_one_block(setting, n, trains=True)]
    training = [*lasting, *gradients, *copies, *saved, *_logits(setting, n, trains=True)]
    evaluation = [*lasting, *between, *copies, *_one_block(setting, n_eval), *_logits(setting, n_eval)]
    moments_at = {"training": training, "evaluation": evaluation, "saving": saving}
    if setting.copies:
        before = kept("copies before the step", 1 + tables_have, of_others=1 + others_have)
        moments_at["the optimizer's step"] = [*lasting, *gradients, *before]
    return moments_at


def _activations(setting: Setting, n: int) -> Moment:
    """Tensors that autograd saves for n tokens."""
    config, kind, half = setting.config.model, setting.architecture, setting.number_bytes
    width, recomputed = n * config.n_embd, setting.config.train.activation_checkpointing
    keys, wide, plain = width * config.key_heads / config.n_head, n * mlp_width(config), _plain_attention(setting)
    layers = 1 if recomputed else config.n_layer  # recomputed: a block's input is kept, one block at a time is whole
    # CPUs have no fused kernel of RMSNorm, and its output before the weights is a tensor of its own
    unfused = setting.kind == "cpu" and kind.norm not in (None, plain_rms_norm)
    saved = [  # counts and bytes: the residual stream; inputs of matrix products and of nonlinear functions
        ((1 if recomputed else 2) * config.n_layer + 3, 4 * width),
        (3 * layers, width * half),  # norms' outputs, attention's
        (layers, (width + 2 * keys) * (4 if plain else half)),  # queries, keys, values
        ((2 + 2 * kind.gated) * layers, wide * half),  # before and after the activation
        (2 * layers * unfused, 4 * width),
    ]
    short = setting.kind == "cpu" and half == 2 and config.block_size in SHORT and not (plain or config.document_mask)
    if kind.rotary and not plain and not short:  # rotated queries and keys
        saved.append((layers, (width + keys) * half))
    if kind.query_norm or kind.rotated_norm:  # its input, unless that is a part of queries and keys above
        saved.append(((unfused + bool(kind.rotated_norm or plain or half == 2)) * layers, 4 * (width + keys)))
    if plain:  # softmax, noise and their product; noise behind both branches, too
        saved += [(3 * layers, _scores(setting, n)), (2 * layers, width * half)]
    elif short:
        saved.append((layers, _scores(setting, n) / 2))  # softmax in bf16
    elif config.dropout:
        saved.append((2 * layers, width))  # a byte for each number
    return [Block("activations", *one) for one in saved]


def _one_block(setting: Setting, n: int, trains: bool = False) -> Moment:
    """Temporary tensors of a block, in evaluation or the backward pass: the activation's input and output or their
    gradients, and gradients of attention scores."""
    numbers, count = n * mlp_width(setting.config.model), 3 if setting.architecture.activation is gelu else 5
    wide = Block("activations", count, numbers * setting.number_bytes)  # gelu's backward pass is one kernel
    return [wide, Block("activations", 4, _scores(setting, n))] if trains and _plain_attention(setting) else [wide]


def _plain_attention(setting: Setting) -> bool:
    """Whether attention keeps T² scores per head: on CPUs flash attention has no dropout."""
    return setting.kind == "cpu" and setting.config.model.dropout > 0


def _scores(setting: Setting, n: int) -> float:
    return 4.0 * n * setting.config.model.block_size * setting.config.model.n_head


def _logits(setting: Setting, n: int, trains: bool = False) -> Moment:
    """fp32: logits and log-softmax; in the backward pass the gradients of both and log-softmax, and tanh of capped
    logits. In half precision: logits in half and in fp32, and log-softmax."""
    chunk, head = min(n, resolve_loss_chunk(setting.config.train.loss_chunk, setting.kind) or n), []
    if trains and chunk < n:  # the loss computes the head's gradient
        head = [Block("logits", 1, 4 * setting.vocab_size * setting.config.model.n_embd)]
    numbers = chunk * setting.vocab_size
    if trains:
        return [Block("logits", 3 + (setting.architecture.soft_cap is not None), 4 * numbers), *head]
    half = [Block("logits", 1, 2 * numbers)] if setting.precision != "no" else []
    return [*half, Block("logits", 2, 4 * numbers)]


@dataclass(frozen=True)
class Memory:
    """Bytes of one process."""

    peak: float  # largest of `peaks`
    moment: str  # of the largest
    peaks: dict[str, float]  # by moment
    parts: dict[str, float]  # by part at the largest, which they sum up to
    host: float  # host memory of a GPU's process for a checkpoint: a copy of it (sharded: on rank 0), or of a tensor


def estimate(setting: Setting) -> Memory:
    """Memory of one process, at each moment and by part."""
    at = moments_of(setting)
    small = HEAP if setting.kind == "cpu" and platform.libc_ver()[0] == "glibc" else 0
    heap = {name: sum(one.total for one in of if not one.stays and one.bytes < small) for name, of in at.items()}
    highest = max(heap.values())
    peaks = {name: setting.base + sum(one.total for one in of) - heap[name] + highest for name, of in at.items()}
    moment = max(peaks, key=peaks.__getitem__)
    parts = {"program": setting.base}
    for block in at[moment]:
        parts[block.part] = parts.get(block.part, 0.0) + block.total
    if highest > heap[moment]:
        parts["freed, and kept by the allocator"] = highest - heap[moment]
    embedding = setting.vocab_size * setting.config.model.n_embd
    copied = setting.parameters + setting.state if setting.background or setting.is_sharded else embedding
    return Memory(peaks[moment], moment, peaks, parts, 0.0 if setting.kind == "cpu" else 4.0 * copied)


def micro_batches(windows: int, processes: int) -> Iterator[int]:
    """Sizes to try, the largest first: `split_batch` below each limit in turn. Where W divides G, the divisors."""
    size = windows
    while size:
        yield (size := split_batch(windows, processes, size))
        size -= 1


def estimated_micro_batch(config: TrainingConfig, vocab_size: int, accelerator: Accelerator) -> int:
    """Windows per forward pass by the memory estimate, equal on all ranks. Collective."""
    device, processes = accelerator.device, accelerator.num_processes
    with torch.device("meta"), without_init():
        model = GPT(config.model, vocab_size)

    def peak(size: int) -> float:
        return estimate(setting_of(config, model, device.type, processes, accelerator.mixed_precision, size)).peak

    room = float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else 0.0
    sizes = micro_batches(config.global_batch_windows, processes)
    return min(gather_object([pick_micro_batch(sizes, device.type, config.model.block_size, peak, room)]))


def tried_micro_batch(model: GPT, accelerator: Accelerator, windows: int, size: int) -> int:
    """The largest micro-batch up to `size` whose forward and backward pass fits on every device, with the optimizer
    state; 1 if none fits. Collective. `windows`: of a step."""
    model.to(accelerator.device)
    sizes = (number for number in micro_batches(windows, accelerator.num_processes) if 1 < number <= size)
    return next((one for one in sizes if all(gather_object([_fits(model, accelerator, one)]))), 1)


def _fits(model: GPT, accelerator: Accelerator, size: int) -> bool:
    tokens = torch.zeros(size, model.config.block_size, dtype=torch.int64, device=accelerator.device)
    kept, fits = list[torch.Tensor](), True
    try:
        kept += [torch.empty_like(parameter) for parameter in model.parameters() for _ in range(2)]  # optimizer state
        with accelerator.autocast():
            kept.append(model(tokens, tokens, reduction="sum"))
        kept[-1].backward()
    except torch.OutOfMemoryError:
        fits = False
    kept.clear()  # with the loss its graph; NCCL cannot allocate what stays in PyTorch's cache
    model.zero_grad(set_to_none=True)
    if accelerator.device.type == "cuda":
        torch.cuda.empty_cache()
    return fits
