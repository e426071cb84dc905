"""Evaluation of a checkpoint: its scores, and the predictions of a small job."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import Accelerator
from torch import Tensor, nn

from gpt2_ddp.checkpoint.format import CONFIG, Checkpoint
from gpt2_ddp.checkpoint.verify import find_checkpoint
from gpt2_ddp.config.jobs import ClassifierConfig, JobConfig
from gpt2_ddp.config.saved import read_config
from gpt2_ddp.config.tools import EvaluateConfig
from gpt2_ddp.data.manifest import Manifest, read_manifest, tokenizer_note
from gpt2_ddp.data.mixture import source_weights
from gpt2_ddp.data.shards import TokenStream
from gpt2_ddp.data.tokenizer import Tokenizer
from gpt2_ddp.distributed.launch import build_accelerator
from gpt2_ddp.distributed.ranks import check_ranks_agree, on_every_rank, on_main
from gpt2_ddp.errors import UserError, print_line, truncate
from gpt2_ddp.evaluation.evaluate import EvalSet, Evaluation, check_stride, evaluate, mixed
from gpt2_ddp.evaluation.items import METRICS, Answers, ItemSet, answer, judge, load_sets
from gpt2_ddp.files import refuse_links, write_atomically
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.output import make_output_folder, text_table, write_json
from gpt2_ddp.records.rows import finite
from gpt2_ddp.tasks.images import unlabelled
from gpt2_ddp.tasks.jobs import image_model, make_job, normalise
from gpt2_ddp.tasks.supervised import means, score_each
from gpt2_ddp.tasks.trained_model import load_model, load_weights, read_settings

LONGEST_NAME = 4096  # characters of a file's, as systems allow them
NO_IMAGES = "is for runs of classifiers of images; name such a run, or remove it"


def evaluate_checkpoint(config: EvaluateConfig) -> int:
    """evaluate.py: prints the scores of a checkpoint; returns the exit code. Raises: UserError on
    every rank."""
    accelerator = build_accelerator(config.device, config.mixed_precision)
    checkpoint = on_every_rank(lambda: find_checkpoint(Path(config.checkpoint)))
    check_ranks_agree({"checkpoint": str(checkpoint.path)})
    score = _score_tasks if config.tasks else _score_gpt
    if checkpoint.kind != "gpt2":
        score = _classify if config.images else _score_small_job
        if config.output:
            on_main(partial(make_output_folder, config.output))
    elif config.images:
        raise UserError("images", " ".join(config.images), NO_IMAGES)
    elif config.stride and config.tasks:
        hint = "is for the loss of a split; remove it, or tasks"
        raise UserError("stride", config.stride, hint)
    elif config.output and not config.tasks:
        raise UserError(
            "output", config.output, "is for tasks only; add some, like --tasks hellaswag"
        )
    accelerator.print(f"{checkpoint.path}: {score(accelerator, config, checkpoint)}")
    accelerator.end_training()
    return 0


def open_splits(
    folders: Sequence[str], split: str, tokenizer: Tokenizer
) -> tuple[list[Manifest], dict[int, TokenStream]]:
    """Manifests of folders, and the tokens of a split by the number of each folder that has it.
    Raises: UserError if a folder is of another tokenizer than `tokenizer`, or none has such a
    split."""
    manifests = [read_manifest(Path(folder), "data") for folder in folders]
    for folder, manifest in zip(folders, manifests, strict=True):
        if manifest.tokenizer_sha256 != tokenizer.sha256:
            names = f"({manifest.tokenizer}) than the checkpoint's ({tokenizer.name})"
            advice = "prepare the text with the checkpoint's tokenizer"
            raise UserError("data", folder, f"has tokens of another tokenizer {names}; {advice}")
    streams = {
        number: TokenStream(Path(folder), manifest, split)
        for number, (folder, manifest) in enumerate(zip(folders, manifests, strict=True))
        if manifest.tokens(split) > 1
    }
    if not streams:
        splits = ", ".join(sorted({name for manifest in manifests for name in manifest.splits}))
        raise UserError("split", split, f"is not in {' '.join(folders)}; it has {splits}")
    return manifests, streams


class _Loaded(NamedTuple):
    """A GPT, and the data that it is scored on."""

    model: GPT
    tokenizer: Tokenizer
    streams: dict[int, TokenStream]  # of the split, by the number of the folder
    weights: Mapping[int, float]  # of the folders, in the run; empty for other folders
    note: str


def _score_gpt(accelerator: Accelerator, config: EvaluateConfig, checkpoint: Checkpoint) -> str:
    """The loss of a GPT's checkpoint over a split of `data`, or of the run's own folders. With
    several, that of each, and of all by the run's weights, if there are as many as the run's."""
    settings = read_settings(checkpoint)
    check_stride(config.stride, settings.model.block_size)
    folders_of_run = settings.data.paths
    data = settings.data.model_copy(update={"path": config.data or settings.data.path})
    settings = settings.model_copy(update={"data": data})
    folders = data.paths
    has_weights = 1 < len(folders_of_run) == len(folders)

    def load() -> _Loaded:
        model, tokenizer = load_model(checkpoint, config.trust_run_code)
        manifests, streams = open_splits(folders, config.split, tokenizer)
        weights = source_weights(settings, manifests, config.split) if has_weights else {}
        note = ""
        if config.split == "val":
            note = tokenizer_note(dict(zip(folders, manifests, strict=True)))
        return _Loaded(model, tokenizer, streams, weights, note)

    loaded = on_every_rank(load)
    if loaded.note:
        print_line(f"note: {loaded.note}")
    size = settings.model.block_size
    lengths = loaded.tokenizer.token_bytes()
    prepared = accelerator.prepare_model(loaded.model, evaluation_mode=True)
    evaluations: dict[int, Evaluation] = {}
    for number, stream in loaded.streams.items():
        windows = EvalSet(stream, size, config.tokens, lengths, config.stride)
        evaluations[number] = evaluate(accelerator, prepared, windows, config.batch_size)

    def as_text(result: Evaluation) -> str:
        loss = f"{config.split} loss {result.loss:.6f}"
        bits = f"{result.bits_per_byte:.6f} bits per byte"
        scored = f"{result.tokens:,} tokens ({round(result.bytes):,} bytes)"
        stride = f", stride {config.stride}" if config.stride else ""
        return f"{loss}, perplexity {result.perplexity:.4f}, {bits} over {scored}{stride}"

    if len(folders) == 1:
        return as_text(evaluations[0])
    lines = [
        f"{settings.data.names[number]}: {as_text(result)}"
        for number, result in evaluations.items()
    ]
    if loaded.weights:
        weighted = [(loaded.weights[number], result) for number, result in evaluations.items()]
        lines.insert(0, as_text(mixed(weighted)))
    return "\n  ".join(lines)


def _score_tasks(accelerator: Accelerator, config: EvaluateConfig, checkpoint: Checkpoint) -> str:
    """The scores of `config.tasks` as a table. Saves items and scores after each task; another
    number of items has another file."""
    model, tokenizer = on_every_rank(lambda: load_model(checkpoint, config.trust_run_code))
    size = read_settings(checkpoint).model.block_size
    folder = Path(config.output or _evaluations(checkpoint))

    def load() -> list[ItemSet]:
        sets = load_sets("tasks", config.tasks, config.task_items, tokenizer, size)
        make_output_folder(folder)
        return sets

    prepared = accelerator.prepare_model(model, evaluation_mode=True)
    results: list[tuple[ItemSet, Mapping[str, float]]] = []
    for items in on_main(load):
        answers = answer(accelerator, prepared, items.requests, config.batch_size)
        metrics = with_errors(judge(items, answers), answers, len(items.items))
        facts = {"checkpoint": str(checkpoint.path), "step": checkpoint.step}
        facts |= {"precision": accelerator.mixed_precision, "task_items": config.task_items}
        name = f"{items.name}-{config.task_items}" if config.task_items else items.name
        on_main(partial(write_scores, folder / name, items, answers, metrics | facts))
        results.append((items, metrics))
    return f"items and scores are in {folder}\n{task_table(results)}"


def with_errors(metrics: Mapping[str, float], answers: Answers, count: int) -> dict[str, float]:
    """The metrics and the standard error of each, as `acc_stderr`: that of a fraction of so many
    items; of a perplexity, that of the mean log-likelihood times the perplexity."""
    found = {**metrics}
    for name, value in metrics.items():
        if count == 1:
            error = math.nan
        elif name == "perplexity":
            error = value * float(answers.nats.std(ddof=1)) / math.sqrt(count)
        else:
            error = math.sqrt(value * (1 - value) / (count - 1))
        found[f"{name}_stderr"] = error
    return found


def task_table(results: Iterable[tuple[ItemSet, Mapping[str, float]]]) -> str:
    """A line for each task: its items, metrics ± standard errors, and the accuracy of guessing.
    Metrics that no task has are left out."""
    results = [*results]
    names = [name for name in METRICS if any(name in metrics for _, metrics in results)]
    lines: list[tuple[str, ...]] = [("task", "items", *names, "chance")]
    for items, metrics in results:
        shown = (
            f"{metrics[name]:.4f} ± {metrics[f'{name}_stderr']:.4f}" if name in metrics else "–"
            for name in names
        )
        chance = "–" if items.chance is None else f"{items.chance:.4f}"
        lines.append((items.name, f"{len(items.items):,}", *shown, chance))
    return text_table(lines)


def _evaluations(checkpoint: Checkpoint) -> Path:
    """The folder for evaluations of a checkpoint. Raises: UserError if it is a link."""
    path = checkpoint.path
    run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    folder = run / "evaluations" / path.name
    refuse_links(folder.parent, folder)
    return folder


def _job_settings(config: EvaluateConfig, checkpoint: Checkpoint) -> JobConfig:
    """The configuration of a small job's run; `data` may name another folder of images. Raises:
    UserError for flags of GPT-2 runs."""
    data = checkpoint.config.get("data", {})
    folder = " ".join(config.data)
    refused = {
        "tokens": config.tokens,
        "stride": config.stride,
        "tasks": ", ".join(config.tasks),
        "split": "" if config.split == "val" else config.split,
        "data": "" if data.get("path") else folder,
    }
    for field, value in refused.items():
        if value:
            scored = f"this {checkpoint.kind} run is scored on all of its test samples"
            raise UserError(field, value, f"is for GPT-2 runs; {scored}: remove it")
    saved = checkpoint.config
    if folder:
        saved = {**saved, "data": {**data, "path": folder}}
    settings = read_config(checkpoint.kind, saved, checkpoint.path / CONFIG)
    assert isinstance(settings, JobConfig), "the other kinds"
    return settings


def _score_small_job(
    accelerator: Accelerator, config: EvaluateConfig, checkpoint: Checkpoint
) -> str:
    """The scores of a small job on its test samples. Saves predictions."""
    job = make_job(_job_settings(config, checkpoint), accelerator, checkpoint.state.record)
    hashed = checkpoint.state.record["data_hash"]  # of training and test samples
    if not config.data and not hashed.endswith(job.test.sha256()):
        own = checkpoint.config.get("data", {})
        hint = "has other test samples than the run was started with; restore them"
        raise UserError("data", own.get("path") or own.get("name") or "generated", hint)
    on_every_rank(partial(load_weights, checkpoint, job.model))
    prepared = accelerator.prepare_model(job.model.eval(), evaluation_mode=True)

    def score(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        outputs, scores = job.score(model, inputs, targets)
        predicted = predictions(outputs)
        return {**scores, "target": targets, **predicted} if predicted else scores

    names, values = score_each(accelerator, prepared, job.test, score, config.batch_size)
    plain = names.index("target") if "target" in names else len(names)
    scores = means(names[:plain], values[:, :plain])
    count = scores.pop("val_samples")
    line = (
        ", ".join(f"{name[4:]} {value:.6f}" for name, value in scores.items())
        + f" over {count:,} test samples"
    )
    # without `output`, only the run's own samples are saved
    if names[plain:] and (config.output or not config.data):
        folder = Path(config.output or _evaluations(checkpoint))
        lines = format_predictions(
            names[plain:], values[:, plain:], job.test.names, job.facts.get("classes")
        )
        on_main(partial(write_predictions, folder, lines))
        line += f"; predictions are in {folder}"
    return line


def _classify(accelerator: Accelerator, config: EvaluateConfig, checkpoint: Checkpoint) -> str:
    """A line with the likeliest class of each of `images`. Saves predictions if `output` names a
    folder."""
    settings = _job_settings(config, checkpoint)
    record = checkpoint.state.record
    if not isinstance(settings, ClassifierConfig) or not settings.data.images:
        raise UserError("images", " ".join(config.images), NO_IMAGES)
    model = image_model(settings, record)
    on_every_rank(partial(load_weights, checkpoint, model))
    images = on_every_rank(partial(unlabelled, config.images, settings.data, record["image_shape"]))

    def score(model: nn.Module, images: Tensor, _: Tensor) -> dict[str, Tensor]:
        return predictions(model(normalise(images)).float())

    prepared = accelerator.prepare_model(model.eval(), evaluation_mode=True)
    found = score_each(accelerator, prepared, images, score, config.batch_size)
    lines = [*format_predictions(*found, images.names, record["classes"])]
    if config.output:
        on_main(partial(write_predictions, Path(config.output), lines))
    shown = (
        f"{truncate(line['file'], LONGEST_NAME)}: {line['class']} {line['probability']:.2%}"
        for line in lines
    )
    return "\n".join([f"{len(lines):,} images", *shown])


def predictions(outputs: Tensor) -> dict[str, Tensor]:
    """Predictions of each sample, [b] by name: the number of [b]; of logits [b, K] the likeliest
    class, and its probability; none of sequences."""
    if outputs.dim() > 2:
        return {}
    if outputs.dim() == 1:
        return {"prediction": outputs}
    shares, classes = outputs.softmax(1).max(1)
    return {"class": classes, "probability": shares}


def format_predictions(
    names: Sequence[str], values: Tensor, files: Sequence[str], classes: Sequence[str] | None
) -> Iterator[dict[str, Any]]:
    """A line of predictions.jsonl for each sample. `values`: fp64 [N, .], a column for each name of
    `predictions`, and `target` if it is known. `files`: the names of images. `classes`: their
    names; None: their numbers."""
    numbers = ("target", "class") if "class" in names else ()  # columns with the number of a class

    def printed(name: str, value: float) -> str | float:
        return value if name not in numbers else classes[int(value)] if classes else str(int(value))

    for item, row in enumerate(values.tolist()):
        line = {"file": files[item]} if files else {"sample": item}
        yield line | {name: printed(name, value) for name, value in zip(names, row, strict=True)}


def write_predictions(folder: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Writes predictions.jsonl. Raises: UserError if that fails."""
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    write_atomically(make_output_folder(folder) / "predictions.jsonl", text)


def write_scores(place: Path, items: ItemSet, answers: Answers, facts: Mapping[str, Any]) -> None:
    """Writes `PLACE.jsonl`, the items and their log-likelihoods, with targets whether the model
    would generate them, then `PLACE.json`, each by a rename. `facts`: the metrics, the scored
    checkpoint and settings."""
    rows = [
        item.model_dump()
        | {"log_likelihoods": [value if math.isfinite(value) else None for value in nats.tolist()]}
        for item, nats in zip(items.items, items.split(answers.nats), strict=True)
    ]
    if items.has_targets:
        for row, greedy in zip(rows, answers.greedy.tolist(), strict=True):
            row["greedy"] = greedy
    scores = {
        "task": items.name,
        "items": len(items.items),
        "items_sha256": items.sha256,
        "chance": items.chance,
    }
    if items.shots:
        scores["shots"] = items.shots
    write_atomically(Path(f"{place}.jsonl"), "".join(f"{json.dumps(row)}\n" for row in rows))
    write_json(Path(f"{place}.json"), scores | finite({**facts}))
