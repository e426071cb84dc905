"""The Python interface: the scripts as functions. User errors raise `UserError`. docs/python.md has
examples."""

import os
import pickle
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from gpt2_ddp.config.cli import resolve
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.config.tools import (
    EvaluateConfig,
    GenerateConfig,
    PrepareConfig,
    VerifyConfig,
    WhereConfig,
)
from gpt2_ddp.config.training import TrainingConfig, training_default
from gpt2_ddp.data.manifest import Manifest
from gpt2_ddp.distributed.environment import world_size
from gpt2_ddp.distributed.signals import Stopped
from gpt2_ddp.distributed.spawn import start_processes
from gpt2_ddp.errors import UserError
from gpt2_ddp.reports.runs import read_runs

if TYPE_CHECKING:  # what follows is slow to import
    from gpt2_ddp.data.tokenizer import Tokenizer
    from gpt2_ddp.evaluation.evaluate import Evaluation
    from gpt2_ddp.model.gpt import GPT
    from gpt2_ddp.reports.explain import Explanation
    from gpt2_ddp.reports.where import Answer, WindowText
    from gpt2_ddp.training.loop import Result
    from gpt2_ddp.training.task import MakeTask

OnRow = Callable[[dict[str, Any]], object]
Place = str | os.PathLike[str]
_trained: list[str] = []
"""The runs that this process has trained."""


def load_config(*files: str, **changes: object) -> TrainingConfig:
    """The configuration of a training, as train_gpt2.py would have it: defaults < files, left to
    right < changes.

    Args:
        files: YAML files, those of `configs/` from any folder. None: the file that suits the data.
        changes: `run_name="a", train={"steps": 100}` or, by dotted names, `**{"train.steps": 100}`.
    """
    return resolve(TrainingConfig, files, changes, training_default)


def prepare(
    source: Place | Sequence[Place] = "stdlib", output: Place | None = None, **settings: object
) -> Manifest:
    """Creates a folder of token shards, as prepare_data.py does, or keeps a prepared one. Returns
    its manifest: `.tokens("train")`, `.vocab_size`, ... `settings` are other flags of
    prepare_data.py, such as `tokenizer="gpt2"`.
    """
    from gpt2_ddp.preparation.prepare import prepare  # noqa: PLC0415  tiktoken

    sources = [source] if isinstance(source, str | os.PathLike) else source
    settings["source"] = tuple(os.fspath(source) for source in sources)
    settings["output"] = None if output is None else os.fspath(output)
    return prepare(PrepareConfig.model_validate(settings))


def train(
    config: RunConfig,
    task: "MakeTask | None" = None,
    processes: int | None = None,
    on_row: OnRow | None = None,
) -> "Result":
    """Trains until the last step, from the run folder's newest checkpoint, as train_gpt2.py does.
    Returns:
        `outcome` (completed, stopped or diverged), `step`, `metrics` (val_loss, ...), `seconds`,
        `run` (the folder) and `checkpoint` (the newest). `best` is the one with the lowest val_loss
        if it is older, else None.

    After Ctrl-C or a notebook's stop button, in the main thread, the run saves a checkpoint; its
    outcome is `stopped`. Another Ctrl-C, a second or more later, raises KeyboardInterrupt at once.

    Args:
        task: class of the training, whose source the run records; None: the one that `config.task`
            names, or that the run recorded, or else `Pretraining`.
        on_row: called in the main process with each row of metrics.jsonl, once written; an
            exception ends the run.
        processes: None: train in this process, which may be a launcher's rank. A number: start so
            many new processes on this machine, one per GPU if there are GPUs; a script then needs
            `if __name__ == "__main__":`.

    Raises:
        ChildProcessError: one of `processes` crashed; its traceback is on stderr.
        KeyboardInterrupt: Ctrl-C before the first step, when there is nothing to save.
    """
    if processes is None:
        return _train(config, task, on_row)
    if processes < 1:
        hint = "should be at least 1, or None to train in this process"
        raise UserError("processes", processes, hint)
    for name, value in {"config": config, "task": task, "on_row": on_row}.items():
        _check_importable(name, value)
    try:
        return start_processes(_train, processes, config, task, on_row)
    except Stopped as stopped:
        raise KeyboardInterrupt(str(stopped)) from stopped
    except SystemExit as end:
        message = "a process of the training crashed; its traceback is on stderr"
        raise ChildProcessError(message) from end


def _check_importable(name: str, value: object) -> None:
    """Raises: UserError if a new process cannot import what `value` refers to."""
    try:
        is_sent = b"__main__" not in pickle.dumps(value) or hasattr(
            sys.modules["__main__"], "__file__"
        )
    except (pickle.PicklingError, AttributeError, TypeError):
        is_sent = False
    if not is_sent:
        hint = "define it in a .py file, outside functions, and import it from there"
        message = f"other processes cannot import it; {hint}"
        raise UserError(name, getattr(value, "__name__", value), message)


def _train(config: RunConfig, task: "MakeTask | None", on_row: OnRow | None) -> "Result":
    from accelerate import state  # noqa: PLC0415  torch

    from gpt2_ddp.tasks.pretraining import Pretraining, make_pretraining  # noqa: PLC0415  torch
    from gpt2_ddp.training.loop import train  # noqa: PLC0415  torch

    if state.PartialState._shared_state:  # Accelerate has no public way to see or reset it
        user = "by another training or your own Accelerator"
        hint = f"{user}, and a process has one Accelerate state; use processes=1"
        raise UserError("train", "Accelerate is in use in this process", hint)
    if world_size() > 1 and _trained:
        hint = "their process group has ended; start the launcher once per training"
        raise UserError("train", "the ranks have trained already", hint)
    _trained.append(config.run_name)
    make_task = task or make_pretraining
    if isinstance(task, type) and task is not Pretraining and issubclass(task, Pretraining):
        from gpt2_ddp.tasks.user_task import make  # noqa: PLC0415  torch

        make_task = partial(make, Pretraining, given=task)
    try:
        return train(config, make_task, on_row)
    finally:  # for the next training, which may want another device or precision
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def load_model(
    checkpoint: Place,
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    trust_run_code: bool = False,
) -> "tuple[GPT, Tokenizer]":
    """A trained GPT (fp32, in evaluation mode) and its tokenizer. `model(ids)` returns logits [B,
    T, V] for ids int64 [B, T] and a vocabulary of V tokens. `encode(text)` returns ids [n],
    `decode(ids)` the text; `eot` is end-of-text.

    Args:
        checkpoint: a run folder, for its newest intact one; or one in it,
            RUN/checkpoints/step-XXXXXXXX.
        trust_run_code: execute the class that the run recorded, even if it was never given on this
            machine.
    """
    from gpt2_ddp.checkpoint.verify import find_checkpoint  # noqa: PLC0415  torch
    from gpt2_ddp.distributed.launch import pick_device  # noqa: PLC0415  torch
    from gpt2_ddp.tasks.trained_model import load_model  # noqa: PLC0415  torch

    target = pick_device(device)
    model, tokenizer = load_model(find_checkpoint(Path(checkpoint), kind="gpt2"), trust_run_code)
    return model.to(target), tokenizer


def generate(  # noqa: PLR0913
    model: "GPT",
    tokenizer: "Tokenizer",
    prompts: str | Sequence[str] = "",
    max_new_tokens: int = 256,
    temperature: float = 0.8,
    top_k: int | None = 50,
    top_p: float = 1.0,
    seed: int = 0,
) -> list[str]:
    """Each prompt with its continuation as one text, as generate.py writes it with the same seed.

    Args:
        prompts: texts to continue, one or several; empty: the start of a document.
        max_new_tokens: most tokens to add to each prompt; the end-of-text token ends a text
            earlier.
        temperature: divisor of the logits; 0: always the likeliest token.
        top_k, top_p: sample among the k likeliest tokens, and among the likeliest whose
            probabilities add up to top_p.
        seed: with a prompt's index, determines its sample.
    """
    from gpt2_ddp.model.generate import Sampling, sample_texts  # noqa: PLC0415  torch

    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed)
    GenerateConfig(**sampling._asdict())  # checks them
    texts = [prompts] if isinstance(prompts, str) else prompts
    return sample_texts(model, tokenizer, texts, sampling)


def evaluate(  # noqa: PLR0913
    model: "GPT",
    tokenizer: "Tokenizer",
    data: Place,
    split: str = "val",
    tokens: int | None = None,
    batch_size: int = 16,
    stride: int | None = None,
) -> "Evaluation":
    """Scores a model on a split of prepared data, in this process alone: each token except the
    first, once. Returns `loss` (nats per token), `perplexity`, `bits_per_byte`, and the `tokens`
    and `bytes` that were scored. The model is in evaluation mode from then on.

    Args:
        data: the folder of token shards.
        tokens: number of tokens to score, evenly spread; None: all.
        batch_size: windows per forward pass.
        stride: tokens between the beginnings of two windows; only the last `stride` tokens of each
            are scored, after the context before them. None: windows side by side.
    """
    from gpt2_ddp.evaluation.evaluate import EvalSet, check_stride, evaluate  # noqa: PLC0415  torch
    from gpt2_ddp.tasks.checkpoints import open_splits  # noqa: PLC0415  torch

    EvaluateConfig(tokens=tokens, batch_size=batch_size, split=split, stride=stride)  # checks them
    size = model.config.block_size
    check_stride(stride, size)
    stream = open_splits([os.fspath(data)], split, tokenizer)[1][0]
    scored = EvalSet(stream, size, tokens, tokenizer.token_bytes(), stride)
    # all fields of an Accelerator that `evaluate` reads: Accelerate's own state stays unused
    alone: Any = SimpleNamespace(device=model.wte.weight.device, num_processes=1, process_index=0)
    return evaluate(alone, model.eval(), scored, batch_size)


def score(model: "GPT", tokenizer: "Tokenizer", text: str) -> "Evaluation":
    """Scores a text as a document, like `evaluate`. A text longer than the model's context is
    scored in windows, each without the text before it."""
    import torch  # noqa: PLC0415  torch

    from gpt2_ddp.evaluation.evaluate import Evaluation  # noqa: PLC0415  torch

    ids = torch.from_numpy(tokenizer.encode(text).astype("int64"))
    if not len(ids):
        raise UserError("text", "", "has no tokens to score")
    whole = torch.cat([torch.tensor([tokenizer.eot]), ids]).to(model.wte.weight.device)
    size = model.config.block_size
    windows = (whole[start : start + size + 1] for start in range(0, len(ids), size))
    with torch.no_grad():
        nll = sum(
            model(part[None, :-1], part[None, 1:], reduction="none").double().sum().item()
            for part in windows
        )
    return Evaluation(nll, len(ids), int(tokenizer.token_bytes()[ids].sum()))


def load_rows(run: Place) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl, one for each logged step, also while it still trains.

    Keys are those of the file: step, tokens, loss, lr, ...; val_loss only where there was an
    evaluation. Left out are events, steps that a rollback has undone, and unreadable lines.
    """
    record = read_runs([Path(run)])[0]
    for note in record.notes:
        print(f"note: {run}: {note}", file=sys.stderr)
    return record.rows


def verify(run: Place, **settings: object) -> bool:
    """Checks that all records of a run agree, and prints the lines of verify_run.py. Returns
    whether the run is intact. `settings` are other flags of verify_run.py, such as
    `replay="40:60"`.
    """
    from gpt2_ddp.reports.verify import verify_run  # noqa: PLC0415  torch

    config = VerifyConfig.model_validate({"run": os.fspath(run)} | settings)
    return verify_run(config) == 0


def explain(first: Place, second: Place) -> "Explanation":
    """Why two recorded runs differ, as explain.py prints it. Returns `verdict` (equal, explained,
    not explained, or changed after it was written), `first` (name of the first cause), `changes`,
    `causes`, `partings`, `text` for people, and `as_json()`. docs/explain.md has their fields.
    """
    from gpt2_ddp.reports.explain import explain  # noqa: PLC0415  torch

    return explain(Path(first), Path(second))


def where(run: Place, text: str, **settings: object) -> "Answer":
    """When a run has seen a text, as where.py prints it. Returns `text` (the answer in a line) and
    `as_json()`, whose keys docs/where.md explains. `steps`, `part_steps` (whose windows have only a
    part), `exposures`, `uses` (each window: step, epoch, rank, ...), `undone`, `places` in the data
    and `reached` are attributes, too. `settings` are other flags of where.py: `data`,
    `trust_run_code`.
    """
    from gpt2_ddp.reports.where import find, open_run  # noqa: PLC0415  torch

    asked = WhereConfig.model_validate({"run": os.fspath(run), "text": text} | settings)
    return find(open_run(Path(asked.run), asked.data, asked.trust_run_code), text)


def step_texts(
    run: Place, step: int, rank: int | None = None, **settings: object
) -> "list[WindowText]":
    """The windows that a step of a run trained on, as where.py prints them: of one rank, or of all.
    Each has `text`, `rank`, `micro_batch`, `row`, `folder`, `window` and `first`, the position of
    its first token. `settings`: as of `where`.
    """
    from gpt2_ddp.reports.where import PastStep, open_run, texts_of  # noqa: PLC0415  torch

    asked = WhereConfig.model_validate(
        {"run": os.fspath(run), "step": step, "rank": rank} | settings
    )
    opened = open_run(Path(asked.run), asked.data, asked.trust_run_code)
    return [*texts_of(opened, PastStep(step, opened.history), rank)]
