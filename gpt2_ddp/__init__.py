"""GPT-2 pretraining on HuggingFace Accelerate; docs/python.md shows what can be imported from here.

Importing the package is fast: the first use of a name imports its module.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpt2_ddp.api import (
        evaluate,
        explain,
        generate,
        load_config,
        load_model,
        load_rows,
        prepare,
        score,
        step_texts,
        train,
        verify,
        where,
    )
    from gpt2_ddp.config.base import Section
    from gpt2_ddp.config.training import TrainingConfig
    from gpt2_ddp.errors import UserError
    from gpt2_ddp.tasks.pretraining import Pretraining

# GNU OpenMP, which runs torch's threads on Linux, reads this variable when torch is imported, so it
# is set here. Its threads wait for each other in a busy loop, by default of 300,000 rounds. On a
# busy machine such a loop takes the core that the other thread needs. docs/benchmarks.md has the
# speeds.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")

_MODULES = {
    "evaluate": "api",
    "explain": "api",
    "generate": "api",
    "load_config": "api",
    "load_model": "api",
    "load_rows": "api",
    "prepare": "api",
    "score": "api",
    "step_texts": "api",
    "train": "api",
    "verify": "api",
    "where": "api",
    "TrainingConfig": "config.training",
    "UserError": "errors",
    "Pretraining": "tasks.pretraining",
    "Section": "config.base",
}
__all__ = list(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from gpt2_ddp.project import VERSION  # noqa: PLC0415  subprocess, for 10 ms

        return VERSION
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
