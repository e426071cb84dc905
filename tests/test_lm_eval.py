"""lm-eval on an exported model, by the command and the description in docs/evaluation.md, against our own scoring."""

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
import torch
import yaml
from hellaswag import SENTENCES, made_items, write
from ranks import run_ranks
from runs import train, training_config
from safetensors.torch import save_file

from gpt2_ddp.config.cli import load as load_config
from gpt2_ddp.config.tools import EvaluateConfig, ExportConfig
from gpt2_ddp.config.training import ModelConfig
from gpt2_ddp.data.tokenizer import load_tokenizer
from gpt2_ddp.export import check
from gpt2_ddp.export.export import export_hf
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.model.transformers_layout import to_transformers, transformers_config
from gpt2_ddp.scoring import Answers, ItemSet, answer, judge, load_sets
from gpt2_ddp.tasks.checkpoints import evaluate_checkpoint

SHAPE = ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=128)
LM_EVAL = Path(sys.executable).with_name("lm_eval")


def model(vocab_size: int) -> GPT:
    """Its choices differ more than those of a fresh model do."""
    torch.manual_seed(0)
    made = GPT(SHAPE, vocab_size)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(2)
    return made.eval()


def export(folder: Path, corpus: Path) -> Path:
    """The model and the corpus's tokenizer, as transformers reads them."""
    tokenizer, end = load_tokenizer(str(corpus)), "<|endoftext|>"
    folder.mkdir()
    shutil.copy(corpus / "tokenizer.json", folder)
    weights = to_transformers(model(tokenizer.vocab_size).state_dict(), SHAPE, tokenizer.vocab_size)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = transformers_config(SHAPE, tokenizer.vocab_size, tokenizer.eot)
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "split_special_tokens": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def local_tasks(folder: Path, page: str) -> None:
    """The page's own task; one with no delimiter; HellaSwag and LAMBADA as lm-eval describes them, but for the data."""
    import lm_eval

    folder.mkdir()
    described = page.split("```yaml\n")[1].split("```")[0]
    (folder / "local_items.yaml").write_text(described.replace("items.jsonl", str(folder / "items.jsonl")))
    bare = described.replace("items.jsonl", str(folder / "bare.jsonl")).replace("local_items", "local_bare")
    (folder / "local_bare.yaml").write_text(bare.replace('target_delimiter: " "', 'target_delimiter: ""'))
    theirs = Path(lm_eval.__file__).parent / "tasks"
    shutil.copy(theirs / "hellaswag/utils.py", folder)
    for name, split in (("hellaswag", "validation"), ("lambada", "test")):
        file = theirs / ("hellaswag/hellaswag.yaml" if name == "hellaswag" else "lambada/lambada_openai.yaml")
        theirs_alone = ("dataset_", "task:", "training_")
        kept = [line for line in file.read_text().splitlines() if not line.startswith(theirs_alone)]
        data = {"task": f"local_{name}", "dataset_path": "json"}
        data |= {"dataset_kwargs": {"data_files": {split: str(folder / f"{name}.jsonl")}}}
        (folder / f"local_{name}.yaml").write_text(yaml.safe_dump(data) + "\n".join(kept) + "\n")

    swag = made_items(200)
    write(folder / "hellaswag.jsonl", swag)
    choices = [
        {"context": "" if row["ind"] % 9 == 0 else row["ctx_a"], "choices": row["endings"], "label": row["label"]}
        for row in swag[:50]
    ]
    write(folder / "items.jsonl", choices)
    ends = ("", " ", "\n    ", " \t")  # what a context ends with
    bare = [
        {**row, "context": f"{row['context']}{ends[number % 4] if row['context'] else ''}", "delimiter": ""}
        for number, row in enumerate(choices)
    ]
    write(folder / "bare.jsonl", bare)
    write(folder / "lambada.jsonl", [{"text": sentence} for sentence in SENTENCES[:: len(SENTENCES) // 60]])


def ours(corpus: Path, files: list[Path]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Our answers on this rank."""
    from gpt2_ddp.distributed.launch import build_accelerator

    accelerator, scorer = build_accelerator("cpu", "no"), model(load_tokenizer(str(corpus)).vocab_size)
    return [tuple(answer(accelerator, scorer, items.requests, 16)) for items in load(corpus, files)]


def load(corpus: Path, files: list[Path]) -> list[ItemSet]:
    tokenizer, names = load_tokenizer(str(corpus)), [str(file) for file in files]
    return load_sets(names, None, tokenizer, SHAPE.block_size, lambda: pytest.fail("not needed"))


NAMES = ("hellaswag", "items", "bare", "lambada")


def lm_eval_of(exported: Path, page: str, folder: Path) -> dict[str, dict[str, float]]:
    """The results of the page's command for each of the local tasks; samples are in `folder`."""
    command = next(line for line in page.splitlines() if line.startswith("lm_eval ") and "--include_path" in line)
    words = command.replace("EXPORT", str(exported)).split()
    words = [",".join(f"local_{name}" for name in NAMES) if word == "local_items" else word for word in words]
    words += ["--output_path", "found", "--log_samples"]
    env = os.environ | {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    env |= {"CUDA_VISIBLE_DEVICES": "", "DISABLE_MULTIPROC": "1"}
    subprocess.run([LM_EVAL, *words[1:]], cwd=folder, env=env, check=True, timeout=570)
    (results,) = (folder / "found").rglob("results_*.json")
    return json.loads(results.read_text())["results"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")
def test_lm_eval_says_the_same_of_an_exported_llama(corpus, tmp_path, monkeypatch):
    """A run's checkpoint, as `evaluate.py` scores it, and its export."""
    page = (Path(__file__).parent.parent / "docs/evaluation.md").read_text(encoding="utf-8")
    local_tasks(tmp_path / "local", page)
    changes = {"model": {"architecture": "llama", "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32}}
    changes["model"]["block_size"] = 128
    config = training_config(corpus, tmp_path, changes | {"train.global_batch_tokens": 12 * 128, "optim.lr": 0.03})
    run_ranks(train, 1, config)
    monkeypatch.setattr(check, "library_files", lambda: [Path(heapq.__file__)])
    assert export_hf(load_config(ExportConfig, [str(tmp_path / "run"), "--output", str(tmp_path / "export")])) == 0
    theirs = lm_eval_of(tmp_path / "export", page, tmp_path)
    tasks = tuple(str(tmp_path / f"local/{name}.jsonl") for name in NAMES)
    settings = {"checkpoint": str(tmp_path / "run"), "output": str(tmp_path / "scores"), "device": "cpu"}
    run_ranks(evaluate_checkpoint, 1, EvaluateConfig.model_validate(settings | {"tasks": tasks}))
    for name in NAMES:
        found = json.loads((tmp_path / f"scores/{name}.json").read_text())
        said = {key.removesuffix(",none"): value for key, value in theirs[f"local_{name}"].items()}
        shared = [metric for metric in ("acc", "acc_norm", "perplexity") if metric in found]
        assert shared
        assert {metric: found[metric] for metric in shared} == pytest.approx(
            {metric: said[metric] for metric in shared}, rel=1e-4
        )


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")
def test_lm_eval_says_the_same_of_the_export(corpus, tmp_path):
    """200 items of HellaSwag's schema and others; some have contexts longer than the model's, or none."""
    page = (Path(__file__).parent.parent / "docs/evaluation.md").read_text(encoding="utf-8")
    local_tasks(tmp_path / "local", page)
    files = [tmp_path / f"local/{name}.jsonl" for name in NAMES]
    theirs = lm_eval_of(export(tmp_path / "export", corpus), page, tmp_path)

    alone, *others = (run_ranks(ours, world, corpus, files) for world in (1, 2, 3))
    for ranks in others:
        for rank in ranks:
            for found, same in zip(rank, alone[0], strict=True):
                assert [part.tobytes() for part in found] == [part.tobytes() for part in same]
    for items, answers in zip(load(corpus, files), alone[0], strict=True):
        (samples,) = (tmp_path / "found").rglob(f"samples_local_{items.name}_*.jsonl")
        rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: row["doc_id"])
        found = [(float(nats), greedy == "True") for row in rows for ((nats, greedy),) in row["resps"]]
        assert len(rows) == len(items.items)
        assert answers[0] == pytest.approx([nats for nats, _ in found], rel=1e-4)
        assert answers[1].tolist() == [greedy for _, greedy in found]
        result, said = judge(items, Answers(*answers)), theirs[f"local_{items.name}"]
        for name, (value, error) in result.metrics.items():
            assert value == pytest.approx(said[f"{name},none"], rel=1e-4)
            if name != "perplexity":  # whose standard error lm-eval draws, and so few items leave it wide
                assert error == pytest.approx(said[f"{name}_stderr,none"], rel=1e-9)
        for row, sample in zip(result.rows, rows, strict=True):
            if "pick" in row:
                assert (row["pick"] == row["label"], row["pick_norm"] == row["label"]) == (
                    sample["acc"],
                    sample["acc_norm"],
                )
