"""torch.compile: which part of a model to compile, and whether a compiler is available
(docs/benchmarks.md)."""

import os
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, cast

import torch
from accelerate import Accelerator
from torch import nn

from gpt2_ddp.errors import UserError

AUTOTUNES_POINTWISE = False
"""Whether inductor measures several shapes of blocks for each kernel that is no matrix product,
while it compiles."""

MOST_GRAPHS = 64
"""Most graphs of the code of a compiled block, and of the head: one for each of training,
evaluation and scores of tasks, and with different blocks these for each. More end the run."""
PAYS_ON_CPUS = 20.0
"""Minutes of a run on a CPU from which on `auto` compiles it. Compilation takes about a minute, and
a step is then 1.2 times as fast on most CPUs (docs/benchmarks.md)."""


class HasBlocks(Protocol):
    """A model that compiles its blocks in place, as `GPT` does."""

    def compile_blocks(self) -> None: ...


def check_compiler(scope: str, device: torch.device) -> None:
    """Raises: UserError if `train.compile` requires a compiler that is missing."""
    if scope in ("auto", "off"):
        return
    if missing := missing_compiler(device):
        raise UserError("train.compile", scope, f"needs {missing}; install it, or use auto or off")


def missing_compiler(device: torch.device) -> str | None:
    """What inductor lacks: a C++ compiler for CPUs; Triton or a C compiler for GPUs. None:
    nothing."""
    if device.type == "mps":
        return None  # Metal has its own compiler
    variable = "CXX"
    names = ("g++", "clang++")
    if device.type == "cuda":
        # Triton supports GPUs from Volta on
        if not find_spec("triton") or torch.cuda.get_device_capability(device) < (7, 0):
            return "Triton"
        variable = "CC"
        names = ("gcc", "clang")
    compilers = [os.environ[variable]] if variable in os.environ else names
    if not any(shutil.which(name) for name in compilers):
        return f"a compiler, which is {' or '.join(compilers)}"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return f"Python's headers (python{sys.version_info.major}.{sys.version_info.minor}-dev)"
    return None


def resolve_compile(
    before: str | None, model: nn.Module, accelerator: Accelerator, minutes: float = 0
) -> tuple[str, str | None]:
    """The value of `train.compile: auto` (off, blocks or model), and what inductor lacks if that
    turned it off.

    Args:
        before: the saved run's value on the same devices.
        minutes: for which a new run is to train; 0 if that is not known.
    """
    device = accelerator.device
    pays = device.type == "cuda" or (device.type == "cpu" and minutes >= PAYS_ON_CPUS)
    if before:
        scope = before
    elif not pays or not hasattr(model, "compile_blocks"):
        scope = "off"
    else:
        scope = "blocks" if accelerator.num_processes > 1 else "model"
    if scope == "off":
        return scope, None
    missing = missing_compiler(device)
    if not missing and device.type == "cpu":
        missing = failing_compiler()
    return ("off", missing) if missing else (scope, None)


def failing_compiler() -> str | None:
    """What keeps inductor from compiling a line for the CPU: nobody has chosen the compilers of a
    laptop for it. None: it works. Takes some seconds."""

    def line(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    try:
        torch.compile(line)(torch.ones(8))
    except Exception as error:  # whatever it is, the run works without
        return f"a compiler that works ({type(error).__name__})"
    return None


def compiled(model: nn.Module, scope: str) -> nn.Module:
    """The model, compiled with static shapes: as a whole (model), each block in place (blocks), or
    unchanged (off)."""
    if scope != "off":
        import torch._inductor.config as inductor  # noqa: PLC0415  heavy

        # that launcher keeps Python's lock while the GPU's queue is full, as in a collective that
        # hangs: all threads of the watchdog would stop
        inductor.use_static_cuda_launcher = False
        # a measurement may choose another order of sums in a resumed run
        inductor.max_autotune_pointwise = (
            AUTOTUNES_POINTWISE and not torch.are_deterministic_algorithms_enabled()
        )
    if scope == "blocks":
        # it would cut each block by DDP's buckets, as if it were the model
        torch._dynamo.config.optimize_ddp = False
        # the blocks share one code, and those of a model of one's own may need a graph each
        torch._dynamo.config.recompile_limit = MOST_GRAPHS
        # rather than run them without a compiler, with no word
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        cast("HasBlocks", model).compile_blocks()
    if scope == "model":
        return cast(nn.Module, torch.compile(model, dynamic=False))
    return model


def is_compiled(model: nn.Module) -> bool:
    """Whether the model or its blocks are compiled: each new shape would compile another graph."""
    return hasattr(model, "_orig_mod") or getattr(model, "compiles_blocks", False)
