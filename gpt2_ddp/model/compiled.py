"""torch.compile: what of a model is compiled, whether that pays, and whether it can be done here (docs/step.md)."""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils._triton import has_triton

from gpt2_ddp.errors import UserError
from gpt2_ddp.model.gpt import GPT

WORTH_IT = 1.2e13
"""Floating-point operations that a training in bf16 on CPUs has left, per process, from which on compiling pays."""


def check_compiler(how: str, device: torch.device) -> None:
    """Raises: UserError where a graph is asked for, and what compiles it is not there."""
    if how not in ("auto", "off") and (missing := missing_compiler(device)):
        raise UserError("train.compile", how, f"needs {missing}; install that, or use auto or off")


def missing_compiler(device: torch.device) -> str | None:
    """What inductor would need, and does not find: a C++ compiler for CPUs; Triton, and a C compiler, for GPUs."""
    if device.type == "mps":
        return None  # Metal compiles its own
    if device.type == "cuda" and not has_triton():
        return "Triton"
    kind, names = ("CC", ("gcc", "clang")) if device.type == "cuda" else ("CXX", ("g++", "clang++"))
    wanted = [os.environ[kind]] if kind in os.environ else names
    if not any(shutil.which(name) for name in wanted):
        return f"a compiler, which is {' or '.join(wanted)}"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return f"Python's headers (python{sys.version_info.major}.{sys.version_info.minor}-dev)"
    return None


def resolve_compile(
    how: str, before: str | None, model: nn.Module, accelerator: Accelerator, flops: float
) -> tuple[str, str | None]:
    """What `train.compile` comes to: off, blocks or model; and what keeps `auto` from it, where that is not there.

    Args:
        before: what auto came to when the run was last on such devices.
        model: plain.
        flops: that a process has still to do; 0 where nobody counts.
    """
    if how != "auto":
        return how, None
    place = accelerator.device.type, accelerator.num_processes, accelerator.mixed_precision
    how = before or what_pays(model, *place, flops)
    missing = None if how == "off" else missing_compiler(accelerator.device)
    return ("off", missing) if missing else (how, None)


def what_pays(model: nn.Module, kind: str, processes: int, precision: str, flops: float) -> str:
    """What auto comes to on devices of a kind, where what compiles is there: off, blocks or model."""
    if kind == "cpu" and precision == "bf16" and flops >= WORTH_IT:
        return "model"
    if kind != "cuda" or not isinstance(model, GPT):
        return "off"
    # flex_attention needs the documents' mask in its own graph
    return "blocks" if processes > 1 and not model.config.document_mask else "model"


def compiled(model: nn.Module, how: str) -> nn.Module:
    """The model, with static shapes: compiled as a whole, or each of its blocks in place; or as it is (off)."""
    if how == "blocks":
        assert isinstance(model, GPT)
        model.compile_blocks()
    return torch.compile(model, dynamic=False) if how == "model" else model  # pyright: ignore


def is_compiled(model: nn.Module) -> bool:
    """Whether some of it is, so that each new shape would make a graph of its own."""
    return hasattr(model, "_orig_mod") or (isinstance(model, GPT) and model.compiles_blocks)
