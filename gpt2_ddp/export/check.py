"""Checks that transformers, loading an exported folder, gives the same results as the checkpoint's
own model."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gpt2_ddp.data.tokenizer import Tokenizer
from gpt2_ddp.export.transformers_layout import to_transformers
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.preparation.tokenizer_check import difference, sample_text

MODULES = 50  # of Python, about a million characters to compare token ids on
WINDOWS = 2
"""Windows of the model's whole context, to compare logits on."""
TOLERANCE = 1e-4
RELATIVE = 1e-5
"""Largest difference of logits by rounding in fp32, absolute or relative to the largest logit."""


class ExportMismatch(Exception):
    """An export that differs from the checkpoint. The message names the difference."""


@torch.inference_mode()
def check_export(folder: Path, model: GPT, tokenizer: Tokenizer, own: nn.Module) -> str:
    """Loads the folder with transformers, without a network, and compares it with what it was made
    from: a model in fp32, on the CPU, in evaluation mode. `own`: the model that `model` was made
    of, whose logits count. Returns what is equal, in words. Raises: ExportMismatch at the first
    difference."""
    theirs, their_tokenizer = _load(folder)
    tensors = _compare_weights(theirs, model)
    text, ids = _compare_tokens(their_tokenizer, tokenizer)
    windows = np.resize(ids, (WINDOWS, model.config.block_size)).astype(np.int64)
    # each holds one document, as transformers attends across documents
    windows[:, 0] = tokenizer.eot
    inputs = torch.from_numpy(windows)
    logits = own(inputs)
    difference = (logits - theirs(inputs).logits).abs().max().item()  # NaN where one is
    if not difference <= (bound := max(TOLERANCE, RELATIVE * logits.abs().max().item())):
        raise ExportMismatch(f"logits differ by {difference:.2e}, more than rounding ({bound:.2e})")
    same_ids = f"all {len(ids):,} token ids of {len(text):,} characters"
    return f"{tensors} tensors bit for bit, logits to {difference:.1e}, and {same_ids}"


def _load(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, local_files_only=True
        )
        theirs, info = loaded
        their_tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # any exception for an unreadable folder
        raise ExportMismatch(
            f"transformers cannot load it: {type(error).__name__}: {error}"
        ) from error
    finally:
        if shows_bars:
            logging.enable_progress_bar()
    if found := {what: sorted(map(str, keys)) for what, keys in info.items() if keys}:
        raise ExportMismatch(f"transformers finds {found}")
    return theirs.eval(), their_tokenizer


def _compare_weights(theirs: Any, model: GPT) -> int:
    loaded = theirs.state_dict()
    wanted = to_transformers(model.state_dict(), model)
    for name, weight in wanted.items():
        if not torch.equal(loaded[name].view(torch.int32), weight.view(torch.int32)):
            raise ExportMismatch(
                f"{name} differs from the checkpoint's after loading with transformers"
            )
    return len(wanted)


def _compare_tokens(theirs: Any, tokenizer: Tokenizer) -> tuple[str, np.ndarray]:
    """The text, and its ids by both."""
    text = sample_text(MODULES)
    if differing := difference(
        tokenizer, lambda text: theirs(text, verbose=False)["input_ids"], theirs.decode, text
    ):
        raise ExportMismatch(differing)
    return text, tokenizer.encode(text)
