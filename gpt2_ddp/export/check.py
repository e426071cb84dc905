"""Checks that transformers, loading an exported folder, gives the same results as the checkpoint's
own model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn

from gpt2_ddp.data.tokenizer import Tokenizer
from gpt2_ddp.export.transformers_layout import to_transformers
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.preparation.tokenizer_check import difference, sample_text

MODULES = 50
"""Modules of Python, about a million characters to compare token ids on."""
WINDOWS = 2
"""Windows of the model's whole context, to compare logits on."""
TOLERANCE = 1e-4
RELATIVE = 1e-5
"""Largest difference of logits by rounding in fp32, absolute or relative to the largest logit."""


class ExportMismatch(Exception):
    """An export that differs from the checkpoint. The message names the difference."""


@torch.inference_mode()
def check_export(folder: Path, model: GPT, tokenizer: Tokenizer, trained: nn.Module) -> str:
    """Loads the folder with transformers, without a network, and compares it with what it was made
    from. Returns what is equal, in words. Raises: ExportMismatch at the first difference.

    Args:
        model: in fp32, on the CPU, in evaluation mode.
        trained: the model that `model` was made of, whose logits count; usually the same.
    """
    loaded = _load(folder)
    tensors = _compare_weights(loaded.model, model)
    text, ids = _compare_tokens(loaded.tokenizer, tokenizer)
    windows = np.resize(ids, (WINDOWS, model.config.block_size)).astype(np.int64)
    # each holds one document, as transformers attends across documents
    windows[:, 0] = tokenizer.eot
    inputs = torch.from_numpy(windows)
    logits = trained(inputs)
    error = (logits - loaded.model(inputs).logits).abs().max().item()  # NaN where a logit is
    bound = max(TOLERANCE, RELATIVE * logits.abs().max().item())
    if not error <= bound:
        raise ExportMismatch(f"logits differ by {error:.2e}, more than rounding ({bound:.2e})")
    same_ids = f"all {len(ids):,} token ids of {len(text):,} characters"
    return f"{tensors} tensors bit for bit, logits to {error:.1e}, and {same_ids}"


class TransformersTokenizer(Protocol):
    """What this module calls of transformers' tokenizers."""

    def __call__(self, text: str, *, verbose: bool) -> Mapping[str, Sequence[int]]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...


class Loaded(NamedTuple):
    """What transformers loads of an exported folder."""

    model: nn.Module
    tokenizer: TransformersTokenizer


def _load(folder: Path) -> Loaded:
    # optional
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, local_files_only=True
        )
        model, info = loaded
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # any exception for an unreadable folder
        reason = f"transformers cannot load it: {type(error).__name__}: {error}"
        raise ExportMismatch(reason) from error
    finally:
        if shows_bars:
            logging.enable_progress_bar()
    complaints = {kind: sorted(map(str, keys)) for kind, keys in info.items() if keys}
    if complaints:
        raise ExportMismatch(f"transformers finds {complaints}")
    return Loaded(model.eval(), tokenizer)


def _compare_weights(theirs: nn.Module, model: GPT) -> int:
    """The number of tensors, which are equal bit for bit. Raises: ExportMismatch."""
    loaded = theirs.state_dict()
    expected = to_transformers(model.state_dict(), model)
    for name, weight in expected.items():
        if not torch.equal(loaded[name].view(torch.int32), weight.view(torch.int32)):
            reason = f"{name} differs from the checkpoint's after loading with transformers"
            raise ExportMismatch(reason)
    return len(expected)


def _compare_tokens(theirs: TransformersTokenizer, tokenizer: Tokenizer) -> tuple[str, np.ndarray]:
    """The text, and its ids, which are equal in both. Raises: ExportMismatch."""

    def encode(text: str) -> Sequence[int]:
        return theirs(text, verbose=False)["input_ids"]

    text = sample_text(MODULES)
    if reason := difference(tokenizer, encode, theirs.decode, text):
        raise ExportMismatch(reason)
    return text, tokenizer.encode(text)
