"""Experiments on DDP as a wrapper of the model: what goes past it, what it renames, and what it sees too late."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from gpt2_ddp.lab.experiment import experiment, gap, make_model, make_rows, mse, share


def train(model: DDP, called: nn.Module, accelerator: Accelerator, seed: int) -> float:
    """Ten steps in which `called` computes the loss; how far replicas are apart then."""
    inputs, targets = (share(rows, accelerator) for rows in make_rows(seed, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(10):
        optimizer.zero_grad()
        mse(called, inputs, targets).backward()
        optimizer.step()
    return gap(model)


@experiment(
    claim="DDP averages gradients only of what was called through it",
    wrong="loss = f(model.module(inputs))",
    right="loss = f(model(inputs)); model.module is for saving and evaluation",
    measured="largest difference of a weight between ranks after 10 steps: {module:.2f} by model.module, "
    "{model:g} by model",
    holds=lambda m: m.model == 0 and m.module > 0.01,
)
def called_module(accelerator: Accelerator, seed: int):
    past, through = DDP(make_model(seed)), DDP(make_model(seed))
    return {
        "module": train(past, past.module, accelerator, seed),
        "model": train(through, through, accelerator, seed),
    }


@experiment(
    claim="DDP broadcasts weights once, in its constructor; what rank 0 loads later stays rank 0's",
    wrong="model = DDP(model); if rank == 0: model.module.load_state_dict(saved)",
    right="load before wrapping (or on all ranks)",
    measured="largest difference of a weight between ranks after 10 steps: {after:.2f} loaded after wrapping, "
    "{before:g} before",
    holds=lambda m: m.before == 0 and m.after > 0.01,
)
def loaded_after_wrapping(accelerator: Accelerator, seed: int):
    saved = make_model(seed + 1).state_dict()
    found = {}
    for way in ("after", "before"):
        bare = make_model(seed)
        if way == "before" and accelerator.is_main_process:
            bare.load_state_dict(saved)
        model = DDP(bare)
        if way == "after" and accelerator.is_main_process:
            bare.load_state_dict(saved)
        found[way] = train(model, model, accelerator, seed)
    return found


@experiment(
    claim="DDP's state_dict has names that the model itself does not know",
    wrong="torch.save(model.state_dict(), path)",
    right="accelerator.unwrap_model(model).state_dict()",
    measured="loaded into the bare model: `{error}`; with strict=False {forced:.0f} of 4 tensors and no error; "
    "unwrapped {unwrapped:.0f}",
    holds=lambda m: m.error != "no error" and m.forced == 0 and m.unwrapped == 4,
)
def module_prefix(accelerator: Accelerator, seed: int):
    trained = DDP(make_model(seed))

    def load(state: dict[str, Tensor], strict: bool) -> int:
        bare = make_model(seed + 1)
        bare.load_state_dict(state, strict=strict)
        return sum(
            torch.equal(ours, theirs) for ours, theirs in zip(bare.parameters(), trained.parameters(), strict=True)
        )

    wrapped, found = trained.state_dict(), {"error": "no error"}
    try:
        load(wrapped, strict=True)
    except RuntimeError as error:
        found["error"] = " ".join(str(error).split())
    unwrapped = accelerator.unwrap_model(trained).state_dict()
    return {**found, "forced": load(wrapped, strict=False), "unwrapped": load(unwrapped, strict=False)}


class Checkpointed(nn.Module):
    """Computes its activations again in the backward pass instead of keeping them, and leaves out a head."""

    def __init__(self, seed: int, use_reentrant: bool):
        super().__init__()
        self.body, self.unused, self.use_reentrant = make_model(seed), nn.Linear(1, 1), use_reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = checkpoint(self.body, inputs.clone().requires_grad_(), use_reentrant=self.use_reentrant)
        assert isinstance(outputs, Tensor)
        return outputs


@experiment(
    claim="find_unused_parameters and reentrant activation checkpointing count the same parameter twice",
    wrong="DDP(model, find_unused_parameters=True), checkpoint(use_reentrant=True)",
    right="use_reentrant=False (or static_graph=True, where every step is alike)",
    measured="steps done of 5: {reentrant:.0f} (`{error}`), {plain:.0f} with use_reentrant=False, "
    "{static:.0f} with static_graph",
    holds=lambda m: m.reentrant == 0 and m.plain == 5 and m.static == 5,
)
def reentrant_checkpointing(accelerator: Accelerator, seed: int):
    inputs, targets = (share(rows, accelerator) for rows in make_rows(seed, 32))
    ways: dict[str, tuple[bool, dict[str, Any]]] = {
        "reentrant": (True, {"find_unused_parameters": True}),
        "plain": (False, {"find_unused_parameters": True}),
        "static": (True, {"static_graph": True}),
    }
    done, message = dict.fromkeys(ways, 0), "no error"
    for way, (use_reentrant, options) in ways.items():
        model = DDP(Checkpointed(seed, use_reentrant), **options)
        for _ in range(5):
            try:
                mse(model, inputs, targets).backward()
            except RuntimeError as error:
                message = str(error).partition(".")[0]
                break
            done[way] += 1
    return {**done, "error": message}
