"""The optimizer and its parameter groups."""

import inspect
from collections.abc import Callable, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from gpt2_ddp.config.training import OptimConfig
from gpt2_ddp.distributed.launch import multiplies_bf16
from gpt2_ddp.errors import UserError
from gpt2_ddp.model.roles import roles

MOMENTUM = 0.95
"""Decay rate of Muon's momentum."""
EPSILON = 1e-8
"""AdamW's epsilon."""
NOBODY = "the model trains no parameter of the role {}; {}, or name some in the model's parameter_roles"


def build_optimizer(model: nn.Module, config: OptimConfig, bf16: bool = False) -> Optimizer:
    """The optimizer over the plain model. `bf16`: Muon sends its updates in bf16, and computes them in bf16 on devices
    with instructions for it. Raises: UserError for a setting of a group that no parameter is in."""
    optimizer = OPTIMIZERS[config.name](model, config)
    sent = torch.bfloat16 if bf16 else torch.float32
    dtype = sent if multiplies_bf16(next(model.parameters()).device) else torch.float32
    for group in optimizer.param_groups:
        group |= {"sent_dtype": sent, "dtype": dtype}
    return optimizer


def adamw(model: nn.Module, config: OptimConfig) -> Optimizer:
    """PyTorch's fused AdamW."""
    return without_dynamo(AdamW)(decay_groups(model, config), config.lr, config.betas, EPSILON, fused=True)


def muon(model: nn.Module, config: OptimConfig) -> Optimizer:
    """Muon for the matrices, at `relative_lr` times the learning rate, and AdamW for the others."""
    from gpt2_ddp.model.muon import MuonAdamW

    matrices = {"params": muon_matrices(model), "weight_decay": config.weight_decay, "momentum": MOMENTUM}
    matrices |= {"name": "muon", "relative_lr": config.muon_lr / config.lr}
    groups = [*decay_groups(model, config, {*matrices["params"]}), matrices]
    return MuonAdamW(groups, config.lr, config.betas, EPSILON, fused=True)


OPTIMIZERS: dict[str, Callable[[nn.Module, OptimConfig], Optimizer]] = {"adamw": adamw, "muon": muon}
"""The function that builds each optimizer, by `optim.name`."""


def decay_groups(model: nn.Module, config: OptimConfig, own: Set[nn.Parameter] = frozenset()) -> list[dict[str, Any]]:
    """Groups of the trained parameters that are not in `own`. Matrices and embeddings decay; biases and LayerNorms do
    not. `embedding_lr` has a group of its own."""
    trained = {p: role for p, role in roles(model).items() if p.requires_grad and p not in own}
    tables = [p for p, role in trained.items() if role == "embedding" and config.embedding_lr]
    vectors = [p for p, role in trained.items() if role == "vector"]
    decays = {"weight_decay": config.weight_decay}
    groups = [
        {"name": "decayed", "params": [p for p in trained if p not in {*tables, *vectors}], **decays},
        {"name": "vector", "params": vectors, "weight_decay": 0.0, "relative_weight_decay": 0.0},
    ]
    if config.embedding_lr:
        if not tables:
            raise UserError("optim.embedding_lr", config.embedding_lr, NOBODY.format("embedding", "set it to null"))
        relative = config.embedding_lr / config.lr
        groups.append({"name": "embedding", "params": tables, **decays, "relative_lr": relative})
    return groups


def without_dynamo(kind: Any) -> Any:
    """The optimizer class without torch's wrappers, which import Dynamo at the first call: 1.1 s of CPU time."""
    names = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    bare = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    return type(kind.__name__, (kind,), {**bare, "step": torch.no_grad()(inspect.unwrap(kind.step))})


def muon_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Parameters of Muon's group. The largest come first, which balances the ranks. Raises: UserError for none."""
    matrices = [p for p, role in roles(model).items() if role == "matrix" and p.requires_grad]
    if not matrices:
        raise UserError("optim.name", "muon", NOBODY.format("matrix", "use adamw"))
    return sorted(matrices, key=Tensor.numel, reverse=True)
