"""GPT-2 pretraining on HuggingFace Accelerate; docs/python.md shows what can be imported from here.

Importing the package imports nothing heavy: a name is looked up in its module when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpt2_ddp.api import evaluate, export_hf, generate, load_config, load_model, prepare, read_metrics, train
    from gpt2_ddp.config.training import TrainingConfig
    from gpt2_ddp.errors import UserError

_HOMES = {
    **dict.fromkeys(
        ("evaluate", "export_hf", "generate", "load_config", "load_model", "prepare", "read_metrics", "train"), "api"
    ),
    "TrainingConfig": "config.training",
    "UserError": "errors",
}
__all__ = [
    "TrainingConfig",
    "UserError",
    "evaluate",
    "export_hf",
    "generate",
    "load_config",
    "load_model",
    "prepare",
    "read_metrics",
    "train",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
