"""export_hf.py: a checkpoint as a folder that transformers and lm-eval read, and a file for
llama.cpp.

Its model card (README.md), which the Hub shows, has the model, its scores and its use.
"""

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpt2_ddp.checkpoint.format import CONFIG, Checkpoint
from gpt2_ddp.checkpoint.verify import find_checkpoint
from gpt2_ddp.config.tools import ExportConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.export.check import ExportMismatch, check_export
from gpt2_ddp.export.formats import write_gguf, write_model, write_tokenizer
from gpt2_ddp.export.transformers_layout import LAYOUTS, LLAMA_CPP
from gpt2_ddp.files import writing
from gpt2_ddp.output import locked_output, publish
from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.tasks.trained_model import load_model, own_task, read_settings, still_there

GGUF = "model.gguf"


def export_hf(config: ExportConfig) -> int:
    """The command: exports and prints the comparisons; returns the exit code. Raises: UserError, if
    possible before the weights are read."""
    for name in ("transformers", "gguf") if config.gguf else ("transformers",):
        if importlib.util.find_spec(name) is None:
            hint = f"is not installed, but the export needs it; run `pip install {name}`"
            raise UserError("package", name, hint)
    checkpoint = find_checkpoint(Path(config.checkpoint), kind="gpt2")
    name = f"{read_settings(checkpoint).run_name}-step-{checkpoint.step:08d}"
    output = Path(config.output or f"exports/{name}")
    try:
        findings = export(checkpoint, output, config.gguf, config.trust_run_code)
    except ExportMismatch as rejected:
        print(f"rejected: {rejected}", file=sys.stderr)
        return 1
    print(f"{output}: {checkpoint.path} in transformers' format; equal: {findings}")
    if config.gguf:
        print(f"{output / GGUF}: the same for llama.cpp")
    return 0


def export(
    checkpoint: Checkpoint, output: Path, gguf: bool = False, trust_code: bool = False
) -> str:
    """Creates the folder `output` from a GPT's checkpoint, once transformers gives the same
    results; returns what is equal.

    Args:
        gguf: adds a file for llama.cpp.
        trust_code: as for `load_model`.

    Raises: UserError for another architecture, an `output` in use, a deleted checkpoint, or a
        failed write. ExportMismatch for other results.
    """
    settings = read_settings(checkpoint)
    task = own_task(checkpoint, trust_code)
    convert = getattr(task, "to_transformers", None)
    if task and not convert and type(task).make_model is not Pretraining.make_model:
        method = "a method to_transformers(model), which returns a GPT with its logits"
        raise UserError("task", settings.task, f"makes a model of its own; write {method}")
    architecture = settings.model.architecture
    exportable = LLAMA_CPP if gguf else LAYOUTS
    if architecture not in exportable:
        hint = f"only {', '.join(exportable)} can be exported in this format"
        raise UserError("model.architecture", architecture, hint)
    with atomic_directory(output) as folder:
        with still_there(checkpoint):
            trained, tokenizer = load_model(checkpoint, trust_code)
            model = convert(trained) if convert else trained
            shutil.copyfile(checkpoint.path / CONFIG, folder / "training.yaml")
            tokenizer_file = checkpoint.path / checkpoint.state.record["tokenizer"]
            definition = tokenizer_file.read_bytes() if tokenizer_file.is_file() else None
        write_tokenizer(tokenizer, definition, model.config.block_size, folder)
        write_model(model, tokenizer, folder)
        findings = check_export(folder, model, tokenizer, trained)
        if gguf:
            write_gguf(model, tokenizer, folder / GGUF)
        feed = checkpoint.state.feed
        scores = checkpoint.state.progress.scores
        rows = [f"| {name} | {score:,} |" for name, score in scores.items() if score is not None]
        template = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
        card = template.format(
            name=settings.run_name,
            their_class=LAYOUTS[architecture].class_name,
            config=model.config,
            tokenizer=tokenizer,
            tokens=feed.consumed * settings.model.block_size,
            checkpoint=checkpoint,
            rows="\n".join(rows),
            findings=findings,
        )
        (folder / "README.md").write_text(card, encoding="utf-8", errors="replace")
    return findings


@contextmanager
def atomic_directory(output: Path) -> Iterator[Path]:
    """Yields a hidden folder to fill. At the end it becomes `output`; after an exception it is
    removed. Raises: UserError if `output` is not an empty folder, another process writes it, or
    writing fails."""
    with locked_output(output) as aside:
        is_empty = os.path.isdir(output) and not os.path.islink(output) and not os.listdir(output)
        if os.path.lexists(output) and not is_empty:
            hint = "exists, and nothing is overwritten; remove it or name another folder"
            raise UserError("output", output, hint)
        with writing(output):
            yield aside
        publish(aside, output)
