"""The model card of an export (README.md), which the Hub shows: what was trained on what, how well, how to use it."""

from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpt2_ddp.checkpoint.checkpoint import Checkpoint
from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.data.mixture import recorded
from gpt2_ddp.data.tokenizer import Tokenizer
from gpt2_ddp.errors import UserError
from gpt2_ddp.export.check import Findings
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.reports.picture import draw
from gpt2_ddp.reports.report import choose_axis
from gpt2_ddp.reports.runs import read_runs

CURVE = "loss.png"
TRAINING = "training.yaml"
"""The configuration that the run was trained with."""
CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [gpt2]
---

# {name}

A GPT-2 of {parameters} parameters, pretrained with gpt2_ddp.

```python
from transformers import pipeline

generate = pipeline("text-generation", model=".")  # this folder, or its name on the Hub
print(generate("The", max_new_tokens=50)[0]["generated_text"])
```

| | |
|---|---|
{table}
{curve}
{notes}

## What was checked

transformers {transformers} loaded this folder and agreed with the trained model in {findings}. Each file of the
checkpoint had the SHA-256 that it was saved with.

The configuration is `{training}`: `python scripts/train_gpt2.py --config {training}` trains the model again, from the
same data, and `python scripts/export_hf.py CHECKPOINT` makes such a folder.
"""


def write_card(
    checkpoint: Checkpoint, sha256: str, model: GPT, tokenizer: Tokenizer, findings: Findings, folder: Path
) -> None:
    """Writes README.md, and the run's curves beside it if its rows are there.

    Args:
        checkpoint: may be deleted by now.
        sha256: of its manifest.
    """
    rows = {**_model(model, tokenizer), **_data(checkpoint), **_training(checkpoint, sha256), **_scores(checkpoint)}
    has_curve = _draw(checkpoint, folder / CURVE)
    notes = [
        f"In training each document begins with end-of-text, id {tokenizer.eot}; the tokenizer does not add it. "
        "Written out in a text, `<|endoftext|>` is text like any other (`split_special_tokens`).",
    ]
    if getattr(model.config, "document_mask", False):
        notes.append(
            "It was trained with attention that does not cross documents. transformers' GPT-2 attends across them: "
            "give it one document at a time."
        )
    padding = model.wte.weight[model.vocab_size :]
    text = CARD.format(
        name=_cell(checkpoint.config["run_name"]),
        parameters=f"{sum(weight.numel() for weight in model.parameters()) - padding.numel():,}",
        table="\n".join(f"| {label} | {_cell(value)} |" for label, value in rows.items() if value is not None),
        curve=f"\n![Loss, learning rate, gradient norm and throughput]({CURVE})\n" if has_curve else "",
        notes="\n\n".join(notes),
        transformers=version("transformers"),
        findings=findings,
        training=TRAINING,
    )
    (folder / "README.md").write_text(text, encoding="utf-8", errors="replace")


def _model(model: GPT, tokenizer: Tokenizer) -> dict[str, Any]:
    config = model.config
    biases = "" if config.bias else "; trained without biases, which are zeros here"
    return {
        "model": f"{config.n_layer} layers, {config.n_head} heads, width {config.n_embd}{biases}",
        "context": f"{config.block_size:,} tokens",
        "tokenizer": f"{tokenizer.name}, {tokenizer.vocab_size:,} ids, SHA-256 `{tokenizer.sha256}`",
    }


def _data(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the data are; more, where a folder is still there and still the same."""
    mixture, data = recorded(checkpoint.state), checkpoint.config["data"]
    assert mixture is not None, "every checkpoint has it"
    paths = [data["path"]] if isinstance(data["path"], str) else data["path"]
    weights = data.get("weights") or [None] * len(paths)
    said = {}
    for path, digest, weight in zip(paths, mixture.manifests, weights, strict=False):
        which = f" {path}" if len(paths) > 1 else ""
        share = f", weight {weight:g}" if weight is not None else ""
        text = path
        with suppress(UserError):
            manifest = read_manifest(Path(path))
            if manifest.hash == digest:
                train, val = manifest.tokens("train"), manifest.tokens("val")
                text = f"{manifest.source}: {train:,} tokens to train on, {val:,} to validate"
        said |= {f"data{which}": f"{text}{share}", f"hash of the data{which}": f"`{digest}`"}
    return said


def _training(checkpoint: Checkpoint, sha256: str) -> dict[str, Any]:
    state = checkpoint.state
    epoch = state.get("epoch_size")
    passes = f", {state['position'] / epoch:.3g} epochs" if epoch else ""
    return {
        "trained on": f"{state['tokens']:,} tokens in {state['step']:,} steps{passes}",
        "order digest": f"`{state['order_digest']}`",
        "checkpoint": f"{checkpoint.path.name}, SHA-256 of its manifest `{sha256}`",
        "run": state.get("run_id"),
        "seed": checkpoint.config.get("seed"),
        "processes": state.get("processes"),
        "device": state.get("device"),
        "versions": ", ".join(f"{name} {version}" for name, version in (state.get("versions") or {}).items()) or None,
    }


def _scores(checkpoint: Checkpoint) -> dict[str, Any]:
    scores = checkpoint.state.get("metrics") or {"val_loss": checkpoint.state.get("val_loss")}
    names = {"val_loss": "validation loss", "train_loss": "training loss", "val_bits_per_byte": "bits per byte"}
    found = {label: f"{scores[key]:.4f}" for key, label in names.items() if scores.get(key) is not None}
    return found | ({"validation tokens": f"{scores['val_tokens']:,}"} if scores.get("val_tokens") else {})


def _draw(checkpoint: Checkpoint, file: Path) -> bool:
    """Draws the run that the checkpoint stands in, if it does."""
    try:
        runs = read_runs([checkpoint.path.parent.parent])
    except UserError:
        return False
    file.write_bytes(draw(runs, choose_axis(runs, "auto")).png())
    return True


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")
