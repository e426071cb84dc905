"""What is done with a checkpoint once it is there: evaluate.py scores it, generate.py writes with it."""

import io
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import add
from pathlib import Path

from accelerate import Accelerator

from gpt2_ddp.checkpoint.checkpoint import CONFIG, Checkpoint, find_checkpoint
from gpt2_ddp.config.jobs import JobConfig
from gpt2_ddp.config.kinds import read_config
from gpt2_ddp.config.tools import EvaluateConfig, GenerateConfig, check_writable
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.manifest import Manifest, read_manifest
from gpt2_ddp.data.mixture import source_weights
from gpt2_ddp.data.shards import TokenStream
from gpt2_ddp.data.tokenizer import Tokenizer, check_tokenizer
from gpt2_ddp.distributed.launch import build_accelerator, pick_device
from gpt2_ddp.distributed.ranks import check_ranks_agree, on_every_rank, on_main
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import read_small, writing
from gpt2_ddp.model.evaluate import EvalSet, Evaluation, evaluate, mixed
from gpt2_ddp.model.generate import Sampling, generate
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.output import text_table
from gpt2_ddp.scoring.items import ItemSet
from gpt2_ddp.scoring.result import METRICS, Result, judge, save
from gpt2_ddp.scoring.score import answer
from gpt2_ddp.scoring.sources import load_sets
from gpt2_ddp.tasks.confusion import confusion, format_confusion, with_predictions
from gpt2_ddp.tasks.confusion import save as save_classes
from gpt2_ddp.tasks.jobs import make_job
from gpt2_ddp.tasks.samples import score_each
from gpt2_ddp.tasks.supervised import means
from gpt2_ddp.tasks.trained_model import find_gpt, load_model, load_weights
from gpt2_ddp.training.progress import Best

LONGEST = 2**28
"""Bytes of a file of prompts."""


class TextStream:
    """Text of tokens that come one by one. Incomplete characters wait for their remaining tokens.

    Args:
        write: called with each piece of text; joined, the pieces are the text of all tokens.
    """

    def __init__(self, tokenizer: Tokenizer, write: Callable[[str], object]):
        self._tokenizer, self._write = tokenizer, write
        self._waiting: list[int] = []

    def add(self, token: int) -> None:
        """Writes the text since the last piece, unless it ends in U+FFFD, an incomplete character."""
        self._waiting.append(token)
        if not self._tokenizer.decode(self._waiting).endswith("\N{REPLACEMENT CHARACTER}"):
            self.end()

    def end(self) -> None:
        """Writes the waiting tokens."""
        self._write(self._tokenizer.decode(self._waiting))
        self._waiting = []


def evaluate_checkpoint(config: EvaluateConfig) -> int:
    """evaluate.py: prints the scores of a checkpoint, whatever it is a training of; returns the exit code.

    Raises:
        UserError: on every rank, for whatever the user has to mend.
    """
    accelerator = build_accelerator(config.device, config.mixed_precision)
    checkpoint = on_every_rank(accelerator, lambda: find_checkpoint(Path(config.checkpoint)))
    check_ranks_agree({"checkpoint": str(checkpoint.path)})
    accelerator.print(note_best(config.checkpoint, checkpoint), end="", file=sys.stderr)
    score = _score_small_job if checkpoint.kind != "gpt2" else _score_tasks if config.tasks else _score_gpt
    accelerator.print(f"{checkpoint.path}: {score(accelerator, config, checkpoint)}")
    accelerator.end_training()
    return 0


def note_best(named: str, checkpoint: Checkpoint) -> str:
    """A line, where a run is named and its newest checkpoint is not the one with the lowest val_loss."""
    best = Best(*(checkpoint.state.get("best_evaluation") or ()))
    place = checkpoint.path.with_name(f"step-{best.step:08d}")
    if os.path.realpath(named) == os.path.realpath(checkpoint.path) or place == checkpoint.path or not place.is_dir():
        return ""
    return (
        f"note: this is {checkpoint.path}, the newest; the run's lowest val_loss, {best.val_loss:.4f}, is {place}'s\n"
    )


def open_splits(
    folders: Sequence[str], split: str, tokenizer: Tokenizer
) -> tuple[list[Manifest], dict[int, TokenStream]]:
    """The manifests of folders, and the tokens of a split, by the number of each folder that has it, for a model that
    knows texts by `tokenizer`.

    Raises:
        UserError: one is of another tokenizer, or none has such a split.
    """
    manifests = [read_manifest(Path(folder)) for folder in folders]
    for folder, manifest in zip(folders, manifests, strict=True):
        if manifest.tokenizer_sha256 != tokenizer.sha256:
            names = f"({manifest.tokenizer}) than the checkpoint's ({tokenizer.name})"
            hint = f"its tokens are of another tokenizer {names}; prepare the text with the checkpoint's tokenizer"
            raise UserError("data", folder, hint)
        check_tokenizer(tokenizer, manifest, Path(folder))
    there = [number for number, manifest in enumerate(manifests) if manifest.tokens(split) > 1]
    if not there:
        known = ", ".join(sorted({split for manifest in manifests for split in manifest.splits}))
        raise UserError("split", split, f"is not in {' '.join(folders)}; it has {known}")
    return manifests, {number: TokenStream(Path(folders[number]), manifests[number], split) for number in there}


def _settings(config: EvaluateConfig, checkpoint: Checkpoint) -> tuple[TrainingConfig, Sequence[str]]:
    """Of a GPT's checkpoint, and the folders of data that are to be scored: others, or its own."""
    settings = read_config(checkpoint.kind, checkpoint.config, checkpoint.path / CONFIG)
    assert isinstance(settings, TrainingConfig), "a GPT's"
    return settings, [config.data] if config.data else settings.data.paths


def _score_gpt(accelerator: Accelerator, config: EvaluateConfig, checkpoint: Checkpoint) -> str:
    settings, folders = _settings(config, checkpoint)

    def load():
        model, tokenizer = load_model(checkpoint)
        manifests, streams = open_splits(folders, config.split, tokenizer)
        weights = source_weights(settings, manifests, config.split) if len(folders) > 1 else {0: 1.0}
        return model, tokenizer, streams, weights

    model, tokenizer, streams, weights = on_every_rank(accelerator, load)
    size, lengths = model.config.block_size, tokenizer.token_bytes()
    prepared = accelerator.prepare_model(model, evaluation_mode=True)
    found = {
        number: evaluate(accelerator, prepared, EvalSet(stream, size, config.tokens, lengths), config.batch_size)
        for number, stream in streams.items()
    }
    whole = mixed([(weights[number], one) for number, one in found.items()]) if weights else None
    parts = [
        f"{settings.data.names[number]}: {_told(config, one)}" for number, one in found.items() if len(folders) > 1
    ]
    return "\n  ".join([*([_told(config, whole)] if whole else []), *parts])


def _told(config: EvaluateConfig, result: Evaluation) -> str:
    return (
        f"{config.split} loss {result.loss:.6f}, perplexity {result.perplexity:.4f}, "
        f"{result.bits_per_byte:.6f} bits per byte over {result.tokens:,} tokens ({round(result.bytes):,} bytes)"
    )


def _score_tasks(accelerator: Accelerator, config: EvaluateConfig, checkpoint: Checkpoint) -> str:
    """The scores of `config.tasks` in a table; items and scores are saved as soon as a task is done."""
    model, tokenizer = on_every_rank(accelerator, lambda: load_model(checkpoint))
    size, path = model.config.block_size, checkpoint.path
    folder = Path(config.output or _evaluations(checkpoint))

    def load() -> list[ItemSet]:
        folders = _settings(config, checkpoint)[1]
        split = lambda: next(iter(open_splits(folders, config.split, tokenizer)[1].values()))  # noqa: E731
        sets = load_sets(config.tasks, config.task_items, tokenizer, size, split)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        check_writable(str(folder / f"{sets[0].name}.json"))
        return sets

    prepared = accelerator.prepare_model(model, evaluation_mode=True)
    results: dict[str, tuple[ItemSet, Result]] = {}
    for items in on_main(accelerator, load):
        if items.cut:
            note = f"{items.cut:,} of {len(items.requests):,} texts are longer than the model's {size} tokens"
            accelerator.print(f"note: {items.name}: {note}, and lose their beginning", file=sys.stderr)
        result = judge(items, answer(accelerator, prepared, items.requests, config.batch_size))
        facts = {"checkpoint": str(path), "step": checkpoint.state["step"], "precision": accelerator.mixed_precision}
        on_main(accelerator, partial(save, folder, items, result, facts))
        results[items.name] = items, result
    return f"items and scores are in {folder}\n{task_table(results)}"


def task_table(results: Mapping[str, tuple[ItemSet, Result]]) -> str:
    """A line for each task: its items, metrics ± standard errors, and the accuracy of guessing."""
    lines: list[tuple[str, ...]] = [("task", "items", *METRICS, "chance")]
    for name, (items, result) in results.items():
        shown = (
            "{0.value:.4f} ± {0.error:.4f}".format(result.metrics[m]) if m in result.metrics else "-" for m in METRICS
        )
        lines.append((name, f"{len(items.items):,}", *shown, "-" if items.chance is None else f"{items.chance:.4f}"))
    return text_table(lines)


def _evaluations(checkpoint: Checkpoint) -> Path:
    """The folder for what is found out about a checkpoint."""
    path = checkpoint.path
    run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    return run / "evaluations" / path.name


def _score_small_job(accelerator: Accelerator, config: EvaluateConfig, checkpoint: Checkpoint) -> str:
    """A small job is scored on its own test samples; `data` may name another folder of images."""
    saved = dict(checkpoint.config)
    given = {"tokens": config.tokens, "split": config.split if config.split != "val" else None, "data": config.data}
    given["tasks"] = ", ".join(config.tasks) or None
    if saved.get("data", {}).get("path"):
        given.pop("data")
    for field, value in given.items():
        if value is not None:
            hint = f"is for others; this {checkpoint.kind} run is scored on all of its own test samples: leave it away"
            raise UserError(field, value, hint)
    if config.data:
        saved["data"] = {**saved.get("data", {}), "path": config.data}
    settings = read_config(checkpoint.kind, saved, checkpoint.path / CONFIG)
    assert isinstance(settings, JobConfig), "the other kinds"
    job = make_job(settings, accelerator, checkpoint.state)
    data, hashed = saved.get("data", {}), checkpoint.state.get("data_hash")  # of training and test samples
    if hashed and not config.data and not hashed.endswith(job.test.sha256()):
        hint = "has other test samples than those that the run was started with; give them back"
        raise UserError("data", data.get("path") or data.get("name") or "generated", hint)
    on_every_rank(accelerator, lambda: load_weights(checkpoint, job.model))
    prepared = accelerator.prepare_model(job.model, evaluation_mode=True)
    names = job.facts.get("classes")
    score = with_predictions(job).score if names else job.score
    kinds, values = score_each(accelerator, prepared, job.test, score, config.batch_size)
    scores = means(kinds[:-2], values[:, :-2]) if names else means(kinds, values)
    count = scores.pop("val_samples")
    line = ", ".join(f"{name[4:]} {value:.6f}" for name, value in scores.items()) + f" over {count:,} test samples"
    if not names:
        return line
    found = values[:, -2:].T.long().numpy()
    counts = confusion(found, len(names))
    if not config.data:  # or they would stand for those of the run
        step, folder = checkpoint.state["step"], _evaluations(checkpoint)
        try:
            on_main(accelerator, lambda: save_classes(folder, step, found, counts, names, job.test))
            line += f"; {folder} has the classes"
        except UserError as error:  # the run may be another's
            accelerator.print(f"note: {error}", file=sys.stderr)
    return "\n".join([line, *filter(None, [format_confusion(counts, names)])])


def generate_text(config: GenerateConfig) -> int:
    """generate.py: prints the samples that `config` asks for, and the speed on stderr; returns the exit code.

    Raises:
        UserError: for whatever the user has to mend, such as a checkpoint that is no GPT's.
    """
    typed = config.prompts_file == "-" and sys.stdin is not None and sys.stdin.isatty()
    prompts = () if typed else _read_prompts(config.prompts_file) if config.prompts_file else config.prompts
    device = pick_device(config.device)
    checkpoint = find_gpt(Path(config.checkpoint), "checkpoint")
    print(note_best(config.checkpoint, checkpoint), end="", file=sys.stderr)
    model, tokenizer = load_model(checkpoint)
    model.to(device)
    if typed:
        print("type what the model is to continue; Ctrl-D ends", file=sys.stderr)
        for line in iter(_typed_line, ""):
            _print_samples(config, model, tokenizer, [line.rstrip("\n")])
        print(file=sys.stderr)
    else:
        _print_samples(config, model, tokenizer, prompts)
    return 0


def _print_samples(config: GenerateConfig, model: GPT, tokenizer: Tokenizer, prompts: Sequence[str]) -> None:
    """Prints the samples, a single one while it is written; after a stop, of each what there is."""
    rows = [tokenizer.encode(prompt, "prompts").tolist() for prompt in prompts for _ in range(config.num_samples)]
    written: list[list[int]] = [[] for _ in rows]
    stream = TextStream(tokenizer, lambda text: print(text, end="", flush=True)) if len(rows) == 1 else None

    def heard(row: int, token: int) -> None:
        written[row].append(token)
        if stream:
            stream.add(token)

    sampling = Sampling(config.max_new_tokens, config.temperature, config.top_k, config.top_p, config.seed)
    begun = time.perf_counter()
    try:
        if stream:
            print(tokenizer.decode(rows[0]), end="", flush=True)
        generate(model, rows, tokenizer.eot, sampling, heard=heard)
    finally:
        seconds = time.perf_counter() - begun
        if stream:
            stream.end()
            print()
        else:
            print(f"\n{'-' * 80}\n".join(map(tokenizer.decode, map(add, rows, written))))
    count = sum(map(len, written))
    speed = f"{count} tokens in {seconds:.1f} s, {count / seconds:.0f} tokens/s on {model.wte.weight.device}"
    print(speed, file=sys.stderr)


def _typed_line() -> str:
    """A line from the terminal; nothing at the end."""
    print("> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline()


def _read_prompts(name: str) -> list[str]:
    """The lines of a file, or of standard input, that are not empty. Raises: UserError where there are none."""
    try:
        text = (sys.stdin or io.StringIO()).read() if name == "-" else read_small(Path(name), LONGEST).decode()
    except OSError as error:
        raise UserError("prompts_file", name, f"cannot be read ({error.strerror}); name a file of text") from error
    except UnicodeDecodeError as error:
        raise UserError("prompts_file", name, "is not UTF-8; save it as UTF-8") from error
    prompts = [line for line in text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n") if line]
    if not prompts:
        raise UserError("prompts_file", name, "is empty; write a prompt in each line")
    return prompts
