"""lm-eval on an exported model, by the command and the
description in docs/evaluation.md, against our own scoring."""

import heapq
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from close import assert_close
from commands import ROOT
from hellaswag import made_items, write
from ranks import run_ranks
from runs import complete, training_config

from gpt2_ddp.config.cli import load as load_config
from gpt2_ddp.config.tools import EvaluateConfig, ExportConfig
from gpt2_ddp.export.export import export_hf
from gpt2_ddp.files import read_json
from gpt2_ddp.preparation import tokenizer_check
from gpt2_ddp.tasks.checkpoints import evaluate_checkpoint

LM_EVAL = Path(sys.executable).with_name("lm_eval")


def local_tasks(folder, page):
    """The page's own task; HellaSwag as lm-eval describes it, but for the data."""
    import lm_eval

    folder.mkdir()
    described = [part.split("```")[0] for part in page.split("```yaml\n")[1:]]
    for name, text in zip(("items", "questions"), described, strict=True):
        text = text.replace(f"{name}.jsonl", str(folder / f"{name}.jsonl"))
        (folder / f"local_{name}.yaml").write_text(text)
    shots = (folder / "local_questions.yaml").read_text()
    (folder / "local_shots.yaml").write_text(shots.replace("questions\n", "questions_2shot\n", 1))
    (folder / "local_questions.yaml").write_text(shots.replace("num_fewshot: 2\n", ""))
    theirs = Path(lm_eval.__file__).parent / "tasks"
    shutil.copy(theirs / "hellaswag/utils.py", folder)
    lines = (theirs / "hellaswag/hellaswag.yaml").read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("dataset_", "task:", "training_"))]
    data = {"task": "local_hellaswag", "dataset_path": "json"}
    data |= {"dataset_kwargs": {"data_files": {"validation": str(folder / "hellaswag.jsonl")}}}
    (folder / "local_hellaswag.yaml").write_text(yaml.safe_dump(data) + "\n".join(kept) + "\n")

    swag = made_items(200)
    write(folder / "hellaswag.jsonl", swag)
    ends = ("", " ", "\n    ", " \t")  # what a context ends with
    choices = []
    for row in swag[:50]:
        context = row["ctx_a"] + ends[row["ind"] % 4] if row["ind"] % 9 else ""
        choices.append({"context": context, "choices": row["endings"], "label": row["label"]})
    write(folder / "items.jsonl", choices)
    write(folder / "questions.jsonl", questions([row["context"][:300] for row in choices[:40]]))


def questions(contexts):
    """Items with a target. A model of ten steps generates none: test_items.py has matches."""
    targets = [" ", "the", "e", "\n", "self.x"]
    return [
        {"context": context, "target": targets[n % len(targets)]}
        for n, context in enumerate(contexts)
    ]


CHOICES = ("hellaswag", "items")
TARGETS = ("questions", "questions_2shot")
NAMES = (*CHOICES, *TARGETS)


def lm_eval_of(exported, page, folder):
    """The results of the page's command for each of the local tasks; samples are in `folder`."""
    command = next(
        line
        for line in page.splitlines()
        if line.startswith("lm_eval ") and "--include_path" in line
    )
    words = command.replace("EXPORT", str(exported)).split()
    words = [
        ",".join(f"local_{name}" for name in NAMES) if word == "local_items" else word
        for word in words
    ]
    words += ["--output_path", "found", "--log_samples"]
    env = os.environ | {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    env |= {"CUDA_VISIBLE_DEVICES": "", "DISABLE_MULTIPROC": "1"}
    subprocess.run([LM_EVAL, *words[1:]], cwd=folder, env=env, check=True, timeout=570)
    (results,) = (folder / "found").rglob("results_*.json")
    return read_json(results)["results"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")
def test_lm_eval_says_the_same_of_the_export(corpus, tmp_path, monkeypatch):
    """A run's checkpoint, as `evaluate.py` scores it, and its export. Some of the items have
    contexts longer than the model's, or none."""
    page = (ROOT / "docs/evaluation.md").read_text()
    local_tasks(tmp_path / "local", page)
    changes = {"model.block_size": 128, "train.global_batch_tokens": 12 * 128, "optim.lr": 0.03}
    complete(training_config(corpus, tmp_path, changes))
    monkeypatch.setattr(tokenizer_check, "library_files", lambda: [Path(heapq.__file__)])
    export = load_config(
        ExportConfig, [str(tmp_path / "run"), "--output", str(tmp_path / "export")]
    )
    assert export_hf(export) == 0
    theirs = lm_eval_of(tmp_path / "export", page, tmp_path)
    tasks = tuple(
        str(tmp_path / f"local/{name.removesuffix('_2shot')}.jsonl") + ":2" * name.endswith("shot")
        for name in NAMES
    )
    settings = {
        "checkpoint": str(tmp_path / "run"),
        "output": str(tmp_path / "scores"),
        "device": "cpu",
    }
    run_ranks(evaluate_checkpoint, 1, EvaluateConfig.model_validate(settings | {"tasks": tasks}))
    for name in NAMES:
        (file,) = (tmp_path / "found").rglob(f"samples_local_{name}_????-??-*.jsonl")
        samples = sorted(
            map(json.loads, file.read_text().splitlines()), key=lambda row: row["doc_id"]
        )
        rows = map(json.loads, (tmp_path / f"scores/{name}.jsonl").read_text().splitlines())
        for row, sample in zip(rows, samples, strict=True):
            answers = [float(nats) for ((nats, _),) in sample["resps"]]
            assert_close(row["log_likelihoods"], answers, 1e-4)
            if name in TARGETS:
                assert row["greedy"] == sample["acc"]
                continue
            ours = np.array(row["log_likelihoods"])
            for metric, scores in (("acc", ours), ("acc_norm", ours / [*map(len, row["choices"])])):
                assert (scores.argmax() == row["label"]) == sample[metric]
        found = read_json(tmp_path / f"scores/{name}.json")
        said = theirs[f"local_{name}"]
        for metric in ("acc", "acc_norm" if name in CHOICES else "perplexity"):
            assert_close(found[metric], said[f"{metric},none"], 1e-4)
            if metric != "perplexity":  # lm-eval resamples for its error
                assert_close(found[f"{metric}_stderr"], said[f"{metric}_stderr,none"], 1e-9)
