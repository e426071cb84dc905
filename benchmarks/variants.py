"""Variants of a training step, by name: `loss+gelu+x8` switches three of them on together.

    python -m benchmarks.variants loss+gelu scripts/train_gpt2.py --train.steps 60

runs a script with them switched on.
"""

import os
import runpy
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module

from gpt2_ddp.errors import UserError

PLAIN = "A"
"""The name of a step as it is."""
PATCHES: dict[str, Mapping[str, object]] = {
    "loss": {"gpt2_ddp.model.loss:FUSED_ON": ("cuda", "cpu")},
    "gelu": {"gpt2_ddp.model.architecture:SIGMOID_GELU_ON": ("cuda", "cpu")},
    "autotune": {"gpt2_ddp.model.compiled:AUTOTUNES_POINTWISE": True},
    "apart": {
        "gpt2_ddp.model.optim:TOGETHER_ON_GPUS": 2**22,
        "gpt2_ddp.model.optim:FOREACH_ON": (),
    },
    "documents": {"gpt2_ddp.model.gpt:BLOCK_MASKS_ON": ("cuda",)},
    "casts": {"gpt2_ddp.model.step_casts:CASTS_ONCE_ON": ("cuda", "cpu")},
    "prompt": {"gpt2_ddp.training.step_rows:LATE_ROWS_ON": ()},
    "fp8": {"gpt2_ddp.model.fp8:EMULATED_ON": ("cpu",)},
}
"""Attributes of modules, and the values that switch a variant on."""
SETTINGS: dict[str, Mapping[str, object]] = {
    "muon": {"optim.name": "muon"},
    "mask": {"model.document_mask": True},
    "rows": {"tracking.log_every": 1},
    "fp8": {"train.fp8_head": True},
}
"""Fields of the training's configuration that a variant sets. A name of both tables is a patch."""
SIZES = {"w64": ("windows", 64), "x8": ("parts", 8)}
"""Windows of a micro-batch, and micro-batches of a step."""
OTHERS = ("bare", "nanogpt")
"""Contenders of `benchmarks.step` in place of our trainer."""


def split_name(name: str) -> list[str]:
    """The variants that a name joins; none for `PLAIN`. Raises: UserError for an unknown one."""
    parts = [part for part in name.split("+") if part != PLAIN]
    known = [*PATCHES, *SETTINGS, *SIZES, *OTHERS]
    for part in parts:
        if part not in known:
            raise UserError(
                "variant", part, f"has no such name; choose from {', '.join([PLAIN, *known])}"
            )
    return parts


def baseline_of(name: str) -> str:
    """The same step without patches, of our trainer: `mask+documents+x8` is compared with
    `mask+x8`."""
    return (
        "+".join(part for part in split_name(name) if part not in PATCHES and part not in OTHERS)
        or PLAIN
    )


@contextmanager
def patched(name: str) -> Iterator[None]:
    """Sets the attributes of a variant. Raises: UserError for one that this code does not have."""
    with ExitStack() as restoring:
        for part in split_name(name):
            for where, value in PATCHES.get(part, {}).items():
                module = import_module(where.partition(":")[0])
                attribute = where.partition(":")[2]
                if not hasattr(module, attribute):
                    raise UserError("variant", part, f"this code has no {where}")
                restoring.callback(setattr, module, attribute, getattr(module, attribute))
                setattr(module, attribute, value)
        yield


def run_script(name: str, script: str, arguments: list[str]) -> None:
    """Runs a script of this folder with a variant switched on."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.getcwd())
    with patched(name):
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    run_script(sys.argv[1], sys.argv[2], sys.argv[3:])
