"""The optimizer and its parameter groups."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from gpt2_ddp.config.training import OptimConfig
from gpt2_ddp.distributed.launch import multiplies_bf16
from gpt2_ddp.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)
Role = Literal["matrix", "embedding", "head", "vector", "other"]
"""matrix: a hidden layer's, or a stack of them [..., A, B]: Muon's. embedding: a table that no
matrix product reads.
head: the matrix that makes the outputs. vector: without weight decay."""
KERNELS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def roles(model: nn.Module) -> dict[Tensor, Role]:
    """The role of each parameter, in the order of `named_parameters`.

    A model's optional method `parameter_roles` returns roles by parameter. The others follow from
    modules and shapes. The head is transformers' `get_output_embeddings`, or else the last
    `nn.Linear`. An `nn.Embedding` that shares its weight with the head is the head.
    """
    parameter_roles = getattr(model, "parameter_roles", None)
    given: dict[Tensor, Role] = parameter_roles() if parameter_roles else {}
    assert {*given.values()} <= {*get_args(Role)}, given.values()
    inferred: dict[Tensor, Role] = {
        parameter: "vector" if parameter.dim() < 2 or name.endswith("bias") else "matrix"
        for name, parameter in model.named_parameters()
    }
    output_embeddings = getattr(model, "get_output_embeddings", None)
    head = output_embeddings() if output_embeddings else None
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            inferred[module.weight] = "embedding"
        elif isinstance(module, KERNELS):
            inferred[module.weight] = "other"
        elif isinstance(module, nn.Linear) and not output_embeddings:
            head = module
    if head is not None and "head" not in given.values():
        inferred[head.weight] = "head"
    return inferred | given


MOMENTUM = 0.95
"""Decay rate of Muon's momentum."""
EPSILON = 1e-8
"""AdamW's epsilon."""
NOBODY = (
    "the model trains no parameter of the role {}; {}, or name some in the model's parameter_roles"
)


def build_optimizer(model: nn.Module, config: OptimConfig, bf16: bool = False) -> Optimizer:
    """The optimizer over the plain model. `bf16`: Muon sends its updates in bf16, and computes them
    in bf16 on devices with instructions for it. Raises: UserError for a setting of a group that no
    parameter is in."""
    entry = OPTIMIZERS[config.name]
    optimizer = entry.build(model, config)
    sent = torch.bfloat16 if bf16 else torch.float32
    dtype = sent if multiplies_bf16(next(model.parameters()).device) else torch.float32
    for group in optimizer.param_groups:
        group |= {"sent_dtype": sent, "dtype": dtype, STATE: entry.state[group["name"]]}
    return optimizer


def adamw(model: nn.Module, config: OptimConfig) -> Optimizer:
    """PyTorch's fused AdamW."""
    return without_dynamo(AdamW)(
        decay_groups(model, config), config.lr, config.betas, EPSILON, fused=True
    )


def muon(model: nn.Module, config: OptimConfig) -> Optimizer:
    """Muon for the matrices, at `relative_lr` times the learning rate, and AdamW for the others."""
    matrices = muon_matrices(model)
    group = {
        "name": "muon",
        "params": matrices,
        "relative_lr": config.muon_lr / config.lr,
        "weight_decay": config.weight_decay,
        "momentum": MOMENTUM,
    }
    groups = [*decay_groups(model, config, excluded={*matrices}), group]
    return MuonAdamW(groups, config.lr, config.betas, EPSILON, fused=True)


STATE = "state_names"
"""Key of a parameter group: names of the tensors that the optimizer keeps for each parameter. A
tuple, which `torch.load` reads from a saved optimizer without trust."""
OF_ADAM = ("step", "exp_avg", "exp_avg_sq")
"""Names of the state of Adam and AdamW."""
OF_MOMENTUM = ("momentum_buffer",)
"""Names of the state of Muon, and of SGD with momentum."""
ADAMW_STATE: dict[str, Sequence[str]] = dict.fromkeys(("decayed", "vector", "embedding"), OF_ADAM)
"""State of AdamW in the groups of `decay_groups`."""


class OptimizerEntry(NamedTuple):
    """An optimizer of OPTIMIZERS.

    Attributes:
        build: makes the optimizer of a plain model. Each of its parameter groups has a `name`.
        state: names of the tensors that it keeps for a parameter, by the name of the group. They
            have the parameter's shape and are fp32; `step` is a scalar.
    """

    build: Callable[[nn.Module, OptimConfig], Optimizer]
    state: Mapping[str, Sequence[str]]


OPTIMIZERS = {
    "adamw": OptimizerEntry(adamw, ADAMW_STATE),
    "muon": OptimizerEntry(muon, ADAMW_STATE | {"muon": OF_MOMENTUM}),
}
"""The optimizers by `optim.name`."""


def state_names(optimizer: Optimizer) -> dict[Tensor, Set[str]]:
    """Names of the state of each parameter. Parameters of groups that do not declare it are left
    out: a class of somebody's own may keep any."""
    names: dict[Tensor, Set[str]] = {}
    for group in optimizer.param_groups:
        if STATE in group:
            names |= dict.fromkeys(group["params"], frozenset(group[STATE]))
    return names


def decay_groups(
    model: nn.Module, config: OptimConfig, excluded: Set[Tensor] = frozenset()
) -> list[dict[str, Any]]:
    """Groups of the trained parameters that are not `excluded`. Matrices and embeddings decay;
    biases and LayerNorms do not. `embedding_lr` has a group of its own."""
    trained = {p: role for p, role in roles(model).items() if p.requires_grad and p not in excluded}
    tables = [p for p, role in trained.items() if role == "embedding" and config.embedding_lr]
    vectors = [p for p, role in trained.items() if role == "vector"]
    decays = {"weight_decay": config.weight_decay}
    groups = [
        {
            "name": "decayed",
            "params": [p for p in trained if p not in {*tables, *vectors}],
            **decays,
        },
        {"name": "vector", "params": vectors, "weight_decay": 0.0, "relative_weight_decay": 0.0},
    ]
    if config.embedding_lr:
        if not tables:
            hint = NOBODY.format("embedding", "set it to null")
            raise UserError("optim.embedding_lr", config.embedding_lr, hint)
        relative = config.embedding_lr / config.lr
        groups.append({"name": "embedding", "params": tables, **decays, "relative_lr": relative})
    return groups


def without_dynamo(kind: type[AnyOptimizer]) -> type[AnyOptimizer]:
    """The optimizer class without torch's wrappers, which import Dynamo at the first call: 1.1 s of
    CPU time."""
    names = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    bare = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    bare["step"] = torch.no_grad()(inspect.unwrap(kind.step))
    return cast(type[AnyOptimizer], type(kind.__name__, (kind,), bare))


def muon_matrices(model: nn.Module) -> list[Tensor]:
    """Parameters of Muon's group. The largest come first, which balances the ranks. Raises:
    UserError for none."""
    matrices = [p for p, role in roles(model).items() if role == "matrix" and p.requires_grad]
    if not matrices:
        raise UserError("optim.name", "muon", NOBODY.format("matrix", "use adamw"))
    return sorted(matrices, key=Tensor.numel, reverse=True)


STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Newton-Schulz iteration by Jordan: singular values end between about 0.7 and 1.2."""
TOGETHER = 2**22
TOGETHER_ON_GPUS = 2**26
"""Most elements of matrices that are orthogonalized together; the same on GPUs, which only many
matrices fill. With `FOREACH_ON`, a step of 124M is 2.7 % faster on an H200 (docs/benchmarks.md)."""
FOREACH_ON: tuple[str, ...] = ("cuda",)
"""Types of devices on which operations are few and large: of whole batches or of all matrices."""


def orthogonal_updates(
    parameters: Sequence[Any],
    direction: Callable[[int], Tensor],
    dtype: torch.dtype,
    sent_dtype: torch.dtype,
) -> Iterator[Tensor]:
    """The orthogonalized `direction` of each parameter; of a sharded one, this rank's rows. Each
    rank computes some and sends them. So ranks share the work, and stay replicas although
    processors round differently. Computes in `dtype`, sends `sent_dtype`. All are sent at once:
    whoever takes one waits for that one alone. Collective."""
    mesh = parameters[0].device_mesh["shards"] if hasattr(parameters[0], "device_mesh") else None
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if mesh:
        rank = mesh.get_local_rank()
        world = mesh.size()
        direction = gathered(parameters, direction, dtype, mesh).__getitem__
    computed: dict[int, Tensor] = {}
    for batch in batches(parameters, range(rank, len(parameters), world), dtype):
        # a cast copy is half of the bytes
        matrices = torch.stack([direction(n).to(dtype) for n in batch])
        computed |= zip(batch, orthogonal(matrices, dtype).to(sent_dtype).contiguous(), strict=True)
    sent: list[Sent] = []
    for n, parameter in enumerate(parameters):
        update = computed.get(n)
        if mesh:
            sent.append(divided(update, parameter, sent_dtype, mesh, n % world))
            continue
        if update is None:
            update = torch.empty(parameter.shape, dtype=sent_dtype, device=parameter.device)
        work = dist.broadcast(update, n % world, async_op=True) if world > 1 else None
        sent.append(Sent(update, work))
    return (arrived(update) for update in sent)


class Sent(NamedTuple):
    """A tensor that is under way.

    Attributes:
        work: None for one that is here.
        rows: how many belong to it; those after them are padding. None: all.
    """

    tensor: Tensor
    work: dist.Work | None
    rows: int | None = None


def arrived(sent: Sent) -> Tensor:
    """The tensor, once it is here. A GPU waits, and not the host."""
    if sent.work:
        sent.work.wait()
    return sent.tensor[: sent.rows]


def part_rows(parameter: Tensor, mesh: "DeviceMesh") -> int:
    """Rows of each part of a sharded parameter, of which the last parts have fewer or none."""
    return -(-len(parameter) // mesh.size())


def padded(part: Tensor, rows: int) -> Tensor:
    """The part of a tensor with so many rows: collectives send equal parts."""
    if len(part) == rows:
        return part.contiguous()
    whole = part.new_zeros(rows, *part.shape[1:])
    whole[: len(part)] = part
    return whole


def divided(
    update: Tensor | None,
    parameter: Tensor,
    dtype: torch.dtype,
    mesh: "DeviceMesh",
    source: int,
) -> Sent:
    """This rank's rows of the update of the rank `source`, which alone has it. Collective."""
    rows = part_rows(parameter, mesh)
    shape = (rows, *parameter.shape[1:])
    parts = None
    if update is not None:
        parts = [padded(part, rows) for part in update.split(rows)]
        parts += [update.new_zeros(shape)] * (mesh.size() - len(parts))
    received = torch.empty(shape, dtype=dtype, device=parameter.device)
    group = mesh.get_group()
    work = dist.scatter(received, parts, group=group, group_src=source, async_op=True)
    return Sent(received, work, len(local(parameter)))


def gathered(
    parameters: Sequence[Tensor],
    direction: Callable[[int], Tensor],
    dtype: torch.dtype,
    mesh: "DeviceMesh",
) -> dict[int, Tensor]:
    """The whole directions that this rank orthogonalizes, of which each rank sends its rows. No
    rank receives another's. Collective."""
    group = mesh.get_group()
    pending: list[tuple[dist.Work | None, Tensor]] = []  # what is sent stays alive until it is
    received: dict[int, list[Tensor]] = {}
    for n, parameter in enumerate(parameters):
        part = padded(direction(n).to(dtype), part_rows(parameter, mesh))
        owner = n % mesh.size()
        parts = None
        if owner == mesh.get_local_rank():
            parts = received[n] = [torch.empty_like(part) for _ in range(mesh.size())]
        work = dist.gather(part, parts, group=group, group_dst=owner, async_op=True)
        pending.append((work, part))
    for work, _ in pending:
        if work:
            work.wait()
    return {n: torch.cat(parts)[: len(parameters[n])] for n, parts in received.items()}


class MuonAdamW(without_dynamo(AdamW)):
    """Muon for parameter groups with a `momentum`, fused AdamW for the others. Both read
    `found_inf` on the device."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Takes a step. `closure` is ignored."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if "momentum" not in group]
        super().step()
        self.param_groups = groups
        for group in groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if "momentum" in group and parameters:
                for p in parameters:
                    if not self.state[p]:
                        self.state[p] = {"momentum_buffer": torch.zeros_like(p)}
                bad = getattr(self, "found_inf", torch.zeros((), device=parameters[0].device))
                muon_step(
                    group,
                    parameters,
                    bad,
                    [local(self.state[p]["momentum_buffer"]) for p in parameters],
                )


def local(tensor: Tensor) -> Tensor:
    """The part that this rank holds of a sharded tensor; others as they are."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local else tensor


def muon_step(
    group: dict[str, Any], parameters: list[Any], bad: Tensor, buffers: list[Tensor]
) -> None:
    """Step of `torch.optim.Muon`. The update of an [A, B] matrix is Nesterov's momentum,
    orthogonalized and scaled by √max(1, A/B) (the "original" adjustment): its spectral norm is
    about the learning rate at any width."""
    gradients = [local(parameter.grad) for parameter in parameters]
    bad = bad.bool()
    is_foreach = bad.device.type in FOREACH_ON
    if is_foreach:
        for gradient, buffer in zip(gradients, buffers, strict=True):
            torch.where(bad, buffer, gradient, out=gradient)
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])  # pyright: ignore
    else:
        for gradient, buffer in zip(gradients, buffers, strict=True):
            # lerp to itself keeps it
            buffer.lerp_(torch.where(bad, buffer, gradient), 1 - group["momentum"])

    def direction(n: int) -> Tensor:
        return gradients[n].lerp(buffers[n], group["momentum"])

    updates = orthogonal_updates(parameters, direction, group["dtype"], group["sent_dtype"])
    decay = group["lr"] * group["weight_decay"]
    if is_foreach:
        kept = torch.where(bad, 1.0, 1 - decay)
        torch._foreach_mul_([local(parameter) for parameter in parameters], kept)  # pyright: ignore
    for parameter, update in zip(parameters, updates, strict=True):
        held = local(parameter)
        rate = group["lr"] * math.sqrt(max(1, parameter.size(-2) / parameter.size(-1)))
        if is_foreach:
            held.add_(update.masked_fill_(bad, 0), alpha=-rate)
        else:
            stepped = held * (1 - decay)
            stepped.add_(update, alpha=-rate)
            held.copy_(torch.where(bad, held, stepped))


def batches(
    matrices: Sequence[Tensor], numbers: Sequence[int], dtype: torch.dtype
) -> Iterator[list[int]]:
    """The numbers of matrices to orthogonalize together: of one shape and, in bf16, `TOGETHER`
    elements at most. Small products fill a processor better in a batch. In fp32 each matrix is
    alone: its bits are the same on any rank."""
    for shape in dict.fromkeys(matrices[number].shape for number in numbers):
        same = [number for number in numbers if matrices[number].shape == shape]
        together = TOGETHER_ON_GPUS if matrices[0].is_cuda else TOGETHER
        size = 1 if dtype == torch.float32 else max(1, together // shape.numel())
        yield from (same[first : first + size] for first in range(0, len(same), size))


def orthogonal(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """About U·Vᵀ of each matrix U·S·Vᵀ, by the Newton-Schulz iteration in this dtype: [..., A, B]
    -> [..., A, B].

    Each step multiplies X by a polynomial of X·Xᵀ. For an oblong X in fp32, the polynomials'
    product is computed first and multiplies X once: half of the arithmetic. bf16 is too coarse for
    that, as singular values are squared first.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.size(-2) > matrices.size(-1)
    stack = matrices.flatten(0, -3)
    x = (stack.mT if is_tall else stack).to(dtype)
    norms = (
        x.norm(dim=(1, 2))
        if x.device.type in FOREACH_ON
        else torch.stack([one.norm() for one in x])
    )
    x = x / norms[:, None, None].clamp(min=1e-7)
    # nearer to a square, it takes more arithmetic
    if dtype == torch.float32 and x.size(2) > 1.5 * x.size(1):
        x = torch.stack([_product_of_polynomials(one @ one.T) @ one for one in x])
    else:
        for _ in range(STEPS):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).unflatten(0, matrices.shape[:-2])


def _product_of_polynomials(gram: Tensor) -> Tensor:
    """Product of the iteration's polynomials of G = X·Xᵀ. A step by P = a + b·G + c·G² turns G into
    P·G·P."""
    a, b, c = COEFFICIENTS
    polynomial = product = gram
    for step in range(STEPS):
        gram = polynomial @ gram @ polynomial if step else gram
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal().add_(a)
        product = polynomial @ product if step else polynomial
    return product
