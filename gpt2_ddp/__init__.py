"""GPT-2 pretraining on HuggingFace Accelerate; docs/python.md shows what can be imported from here.

Importing the package is fast: the first use of a name imports its module.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpt2_ddp.api import (
        evaluate,
        generate,
        load_config,
        load_model,
        load_rows,
        prepare,
        score,
        train,
        verify,
    )
    from gpt2_ddp.config.training import TrainingConfig
    from gpt2_ddp.errors import UserError
    from gpt2_ddp.tasks.pretraining import Pretraining

_API = (
    "evaluate",
    "generate",
    "load_config",
    "load_model",
    "load_rows",
    "prepare",
    "score",
    "train",
    "verify",
)
_MODULES = {**dict.fromkeys(_API, "api"), "TrainingConfig": "config.training", "UserError": "errors"}
_MODULES["Pretraining"] = "tasks.pretraining"
__all__ = list(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from gpt2_ddp.project import VERSION

        return VERSION
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
