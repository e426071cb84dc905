"""torch.compile: which part of a model to compile, and whether a compiler is available
(docs/benchmarks.md)."""

import os
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from gpt2_ddp.errors import UserError

AUTOTUNES_POINTWISE = False
"""Whether inductor measures several shapes of blocks for each kernel that is no matrix product, while it compiles."""


def check_compiler(how: str, device: torch.device) -> None:
    """Raises: UserError if `train.compile` requires a compiler that is missing."""
    if how not in ("auto", "off") and (missing := missing_compiler(device)):
        raise UserError("train.compile", how, f"needs {missing}; install it, or use auto or off")


def missing_compiler(device: torch.device) -> str | None:
    """What inductor lacks: a C++ compiler for CPUs; Triton or a C compiler for GPUs. None:
    nothing."""
    if device.type == "mps":
        return None  # Metal has its own compiler
    if device.type == "cuda" and (
        not find_spec("triton") or torch.cuda.get_device_capability(device) < (7, 0)
    ):
        return "Triton"
    variable, names = (
        ("CC", ("gcc", "clang")) if device.type == "cuda" else ("CXX", ("g++", "clang++"))
    )
    compilers = [os.environ[variable]] if variable in os.environ else names
    if not any(shutil.which(name) for name in compilers):
        return f"a compiler, which is {' or '.join(compilers)}"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return f"Python's headers (python{sys.version_info.major}.{sys.version_info.minor}-dev)"
    return None


def resolve_compile(
    before: str | None, model: nn.Module, accelerator: Accelerator
) -> tuple[str, str | None]:
    """The value of `train.compile: auto` (off, blocks or model), and what inductor lacks if that
    turned it off.
    `before`: the saved run's value on the same devices."""
    device = accelerator.device
    how = "blocks" if accelerator.num_processes > 1 else "model"
    if device.type != "cuda" or not hasattr(model, "compile_blocks"):
        how = "off"
    how = before or how
    missing = None if how == "off" else missing_compiler(device)
    return ("off", missing) if missing else (how, None)


def compiled(model: Any, how: str) -> nn.Module:
    """The model, compiled with static shapes: as a whole (model), each block in place (blocks), or
    unchanged (off)."""
    if how != "off":
        import torch._inductor.config as inductor

        # that launcher keeps Python's lock while the GPU's queue is full, as in a collective that
        # hangs: all threads
        # of the watchdog would stop
        inductor.use_static_cuda_launcher = False
        # a measurement may choose another order of sums in a resumed run
        inductor.max_autotune_pointwise = (
            AUTOTUNES_POINTWISE and not torch.are_deterministic_algorithms_enabled()
        )
    if how == "blocks":
        # it would cut each block by DDP's buckets, as if it were the model
        torch._dynamo.config.optimize_ddp = False
        model.compile_blocks()
    return torch.compile(model, dynamic=False) if how == "model" else model  # pyright: ignore


def is_compiled(model: nn.Module) -> bool:
    """Whether the model or its blocks are compiled: each new shape would compile another graph."""
    return hasattr(model, "_orig_mod") or getattr(model, "compiles_blocks", False)
