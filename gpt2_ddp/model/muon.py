"""Muon (Jordan et al., 2024) for matrices and AdamW for everything else, as one optimizer."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

from gpt2_ddp.model.optim import without_dynamo

STEPS, COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)
"""Newton-Schulz iteration by Jordan: singular values end between about 0.7 and 1.2."""
TOGETHER, TOGETHER_ON_GPUS = 2**22, 2**22
"""Most elements of matrices that are orthogonalized together; the same on GPUs, which many matrices fill."""
FOREACH_ON: tuple[str, ...] = ()
"""Types of devices on which operations are few and large: of whole batches or of all matrices."""


def orthogonal_updates(
    parameters: Sequence[Any], direction: Callable[[int], Tensor], dtype: torch.dtype, sent_dtype: torch.dtype
) -> list[Tensor]:
    """The orthogonalized `direction` of each parameter; of a sharded one, this rank's rows. Each rank computes some and
    sends them. So ranks share the work, and stay replicas although processors round differently. Computes in `dtype`,
    sends `sent_dtype`."""
    mesh = parameters[0].device_mesh["shards"] if hasattr(parameters[0], "device_mesh") else None
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if mesh:
        rank, world = mesh.get_local_rank(), mesh.size()
        direction = gathered(parameters, direction, dtype, mesh).__getitem__
    found: dict[int, Tensor] = {}
    for batch in batches(parameters, range(rank, len(parameters), world), dtype):
        matrices = torch.stack([direction(n).to(dtype) for n in batch])  # a cast copy is half of the bytes
        found |= zip(batch, orthogonal(matrices, dtype).to(sent_dtype).contiguous(), strict=True)
    updates = []
    for n, one in enumerate(parameters):
        update = found[n] if n in found else torch.empty(one.shape, dtype=sent_dtype, device=one.device)
        if mesh:
            update = divided(update, mesh, n % world)
        elif world > 1:
            dist.broadcast(update, n % world)
        updates.append(update)
    return updates


def divided(tensor: Tensor, mesh: Any, source: int) -> Tensor:
    """This rank's rows of the tensor of the rank `source`."""
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=source).to_local()


def gathered(
    parameters: Sequence[Any], direction: Callable[[int], Tensor], dtype: torch.dtype, mesh: Any
) -> dict[int, Tensor]:
    """The whole directions that this rank orthogonalizes. All ranks gather one after the other."""
    from torch.distributed.tensor import DTensor, Shard

    whole = {}
    for n, one in enumerate(parameters):
        layout = {"shape": one.shape, "stride": one.stride()}
        full = DTensor.from_local(direction(n).to(dtype), mesh, [Shard(0)], **layout).full_tensor()
        if n % mesh.size() == mesh.get_local_rank():
            whole[n] = full
    return whole


class MuonAdamW(without_dynamo(AdamW)):
    """Muon for parameter groups with a `momentum`, fused AdamW for the others. Both read `found_inf` on the device."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
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
                muon_step(group, parameters, bad, [local(self.state[p]["momentum_buffer"]) for p in parameters])


def local(tensor: Any) -> Tensor:
    """The part that this rank holds of a sharded tensor; others as they are."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def muon_step(group: dict[str, Any], parameters: list[Any], bad: Tensor, buffers: list[Tensor]) -> None:
    """Step of `torch.optim.Muon`. The update of an [A, B] matrix is Nesterov's momentum, orthogonalized and scaled by
    √max(1, A/B) (the "original" adjustment): its spectral norm is about the learning rate at any width."""
    gradients, bad = [local(parameter.grad) for parameter in parameters], bad.bool()
    is_foreach = bad.device.type in FOREACH_ON
    if is_foreach:
        for gradient, buffer in zip(gradients, buffers, strict=True):
            torch.where(bad, buffer, gradient, out=gradient)
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])  # pyright: ignore
    else:
        for gradient, buffer in zip(gradients, buffers, strict=True):
            buffer.lerp_(torch.where(bad, buffer, gradient), 1 - group["momentum"])  # lerp to itself keeps it
    direction = lambda n: gradients[n].lerp(buffers[n], group["momentum"])  # noqa: E731
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


def batches(matrices: Sequence[Tensor], numbers: Sequence[int], dtype: torch.dtype) -> Iterator[list[int]]:
    """The numbers of matrices to orthogonalize together: of one shape and, in bf16, `TOGETHER` elements at most. Small
    products fill a processor better in a batch. In fp32 each matrix is alone: its bits are the same on any rank."""
    for shape in dict.fromkeys(matrices[number].shape for number in numbers):
        same = [number for number in numbers if matrices[number].shape == shape]
        together = TOGETHER_ON_GPUS if matrices[0].is_cuda else TOGETHER
        size = 1 if dtype == torch.float32 else max(1, together // shape.numel())
        yield from (same[first : first + size] for first in range(0, len(same), size))


def orthogonal(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """About U·Vᵀ of each matrix U·S·Vᵀ, by the Newton-Schulz iteration in this dtype: [..., A, B] -> [..., A, B].

    Each step multiplies X by a polynomial of X·Xᵀ. For an oblong X in fp32, the polynomials' product is computed first
    and multiplies X once: half of the arithmetic. bf16 is too coarse for that, as singular values are squared first.
    """
    a, b, c = COEFFICIENTS
    is_tall, stack = matrices.size(-2) > matrices.size(-1), matrices.flatten(0, -3)
    x = (stack.mT if is_tall else stack).to(dtype)
    norms = x.norm(dim=(1, 2)) if x.device.type in FOREACH_ON else torch.stack([one.norm() for one in x])
    x = x / norms[:, None, None].clamp(min=1e-7)
    if dtype == torch.float32 and x.size(2) > 1.5 * x.size(1):  # nearer to a square, it takes more arithmetic
        x = torch.stack([_product_of_polynomials(one @ one.T) @ one for one in x])
    else:
        for _ in range(STEPS):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).unflatten(0, matrices.shape[:-2])


def _product_of_polynomials(gram: Tensor) -> Tensor:
    """Product of the iteration's polynomials of G = X·Xᵀ. A step by P = a + b·G + c·G² turns G into P·G·P."""
    a, b, c = COEFFICIENTS
    polynomial = product = gram
    for step in range(STEPS):
        gram = polynomial @ gram @ polynomial if step else gram
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal().add_(a)
        product = polynomial @ product if step else polynomial
    return product
