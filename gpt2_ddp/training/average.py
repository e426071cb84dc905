"""The average of a run's weights over its steps (`optim.average`).

The model's parameters stay the trained weights: gradients and the optimizer know no other. The
average is a second tensor for each. Evaluations and samples exchange the two; a checkpoint has the
average as its model, and the trained weights beside the optimizer state.
"""

# torch is typed in part
# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gpt2_ddp.checkpoint.format import TRAINED


def rate_at(step: int, fraction: float) -> float:
    """How far the average moves toward the weights after a step, of 0 to 1; the first step is 1.

    The rate is min(1, c / t) at step t, with c = 1 / `fraction` - 1. So the weights of step s count
    in proportion to s^(c - 1), a power-law average (Karras et al., 2024, "Analyzing and Improving
    the Training Dynamics of Diffusion Models"). Their mean age is `fraction` of the steps so far.
    It needs no length of the run, and a resume needs the step alone.
    """
    return min(1.0, (1 / fraction - 1) / step)


class WeightAverage:
    """The average of a plain model's parameters; there is none at a fraction of 0.

    Args:
        fraction: `optim.average`.
        local: the part of a tensor that this rank has; it averages no other.

    Attributes:
        values: the average by names of parameters, like them; empty if there is none.
    """

    def __init__(self, model: nn.Module, fraction: float, local: Callable[[Tensor], Tensor]):
        self.fraction = fraction
        self._local = local
        self._parameters = dict(model.named_parameters()) if fraction else {}
        self.values = {
            name: parameter.detach().clone() for name, parameter in self._parameters.items()
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Moves the average toward the weights after this step; does not wait for the device."""
        if self.values:
            averages, weights = self._local_parts()
            rate = rate_at(step, self.fraction)
            # torch's stub of this function lacks a number as weight
            torch._foreach_lerp_(averages, weights, rate)  # pyright: ignore

    @torch.no_grad()
    def restart(self) -> None:
        """Makes the average equal to the weights."""
        for average, weight in zip(*self._local_parts(), strict=True):
            average.copy_(weight)

    @contextmanager
    def in_use(self) -> Generator[None]:
        """Context in which the model has the average as its parameters."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchanges average and weights. Compiled models, DDP and fsdp hold the tensors, so the
        values move."""
        for average, weight in zip(*self._local_parts(), strict=True):
            before = weight.clone()
            weight.copy_(average)
            average.copy_(before)

    def _local_parts(self) -> tuple[list[Tensor], list[Tensor]]:
        """This rank's part of each average and of its weights. fsdp may replace the storage of
        parts, so nothing holds them."""
        weights = [self._local(parameter) for parameter in self._parameters.values()]
        return [*map(self._local, self.values.values())], weights

    def model_state(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's `state_dict` for a checkpoint: the average, and the buffers as they are."""
        if not self.values:
            return model.state_dict()
        # by identity: two names may share a parameter
        average_of: dict[Tensor, Tensor] = {
            parameter: self.values[name] for name, parameter in self._parameters.items()
        }
        tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
        return {name: average_of.get(tensor, tensor).detach() for name, tensor in tensors.items()}

    def trained_weights(self) -> dict[str, Tensor]:
        """The weights for a checkpoint, where `model_state` is the average."""
        return {
            f"{TRAINED}.{name}": parameter.detach() for name, parameter in self._parameters.items()
        }
