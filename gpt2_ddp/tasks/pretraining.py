"""Pretraining a GPT on token shards: what this task has of its own (see `training.task.Task`)."""

import math
import os
import sys
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt2_ddp.checkpoint.checkpoint import MODEL, Checkpoint, find_checkpoint, fit_weights, still_there
from gpt2_ddp.checkpoint.metrics import Sample
from gpt2_ddp.config.base import complete
from gpt2_ddp.config.training import ModelConfig, TrainingConfig
from gpt2_ddp.data.feed import Feed, MicroBatch, interleaved, split_batch
from gpt2_ddp.data.mixture import MixedWindows, check_goes_on, identity, order_of, phases_of
from gpt2_ddp.data.shards import verify_shards
from gpt2_ddp.data.tokenizer import Tokenizer, load_tokenizer
from gpt2_ddp.distributed.ranks import PREPARATION, check_ranks_agree, on_every_rank, on_main
from gpt2_ddp.distributed.watchdog import FIRST_TIMEOUT, Watchdog
from gpt2_ddp.errors import UserError
from gpt2_ddp.model.chunked_loss import resolve_chunk
from gpt2_ddp.model.compiled import is_compiled
from gpt2_ddp.model.evaluate import evaluate, mixed
from gpt2_ddp.model.gpt import GPT, without_init
from gpt2_ddp.model.optim import build_optimizer, lr_at, schedule_note
from gpt2_ddp.tasks.corpus import open_corpus, prepare_missing_data
from gpt2_ddp.training.progress import Scores
from gpt2_ddp.training.task import Due, Poll
from gpt2_ddp.training.throughput import device_name

if TYPE_CHECKING:
    from gpt2_ddp.scoring.items import ItemSet


class Pretraining:
    """A GPT that learns to predict the next token; the loss is a mean over tokens.

    The feed's items are windows of block_size tokens. A step has G of them, and may straddle two epochs; rank r
    computes, in micro-batch m of b windows, those at (m·W + r)·b and the b - 1 after it.
    """

    unit = "tokens"

    def __init__(self, config: TrainingConfig, accelerator: Accelerator, saved: Checkpoint | None):
        self.config, self.accelerator, self._saved = config, accelerator, saved
        self.units_per_item = config.model.block_size
        split_batch(config.global_batch_windows, accelerator.num_processes, 1)  # or it cannot be shared out
        self._begin_with = None
        self._settle_evaluation(saved)
        if saved:
            self._settle_schedule(self._length_since(saved))
            self._check_goes_on(saved)
        elif config.train.init_from:
            from gpt2_ddp.tasks.initial_weights import find_initial_weights

            self._begin_with = on_main(accelerator, lambda: find_initial_weights(config))

    def total_steps(self, epoch_size: int | None) -> int | None:
        """`train.steps`, or those of `train.epochs`."""
        return self._steps(self.config.train.steps, self.config.train.epochs, epoch_size)

    def _steps(self, steps: int | None, epochs: float | None, epoch_size: int | None) -> int | None:
        if epochs is None or epoch_size is None:
            return None if epochs else steps
        return math.ceil(epochs * epoch_size / self.config.global_batch_windows)

    def load(self, watchdog: Watchdog) -> None:
        """Opens the shards, which are prepared first where there are none and `data.prepare` says how; checks them."""
        config, accelerator = self.config, self.accelerator
        watchdog.heartbeat("preparing data", timeout=PREPARATION.total_seconds())
        on_every_rank(accelerator, lambda: prepare_missing_data(accelerator, config), patience=PREPARATION)
        self.open_data()
        watchdog.heartbeat("reading tasks", timeout=FIRST_TIMEOUT)
        self.load_tasks()
        watchdog.heartbeat("building", timeout=PREPARATION.total_seconds() if self._begin_with else FIRST_TIMEOUT)
        self.build_model()
        self._try_micro_batch()
        watchdog.heartbeat("hashing", timeout=PREPARATION.total_seconds())
        self.check_hashes()

    def open_data(self) -> None:
        """Looks at the data by their small files; `feed`, steps and schedule are settled then. Raises: UserError."""
        config, accelerator, paths = self.config, self.accelerator, self.config.data.paths
        corpus = on_every_rank(accelerator, lambda: open_corpus(config))
        self.manifests, self.tokenizer, windows, self._validation = corpus
        self.manifest = self.manifests[0]
        places = [f" ({number})" * (len(paths) > 1) for number in range(len(paths))]
        both = list(zip(places, self.manifests, strict=True))
        check_ranks_agree({f"{part} of data.path{at}": what for at, one in both for part, what in one.parts.items()})
        if config.eval.patience and not self.validates:
            hint = f"{' '.join(paths)} has no validation split; set it to null"
            raise UserError("eval.patience", config.eval.patience, hint)
        sizes = [len(source) for source in windows]
        self._mixture, order = identity(self.manifests, phases_of(config, sizes)), order_of(config, sizes)
        if self._saved:
            check_goes_on(config, self._saved.state, self._mixture)
        source = windows[0] if len(windows) == 1 else MixedWindows(windows)
        step_size, workers = config.global_batch_windows, config.data.workers
        self.micro_batch, self._untried = self._settle_micro_batch()
        share = interleaved(accelerator.num_processes, self.micro_batch)
        self.feed = Feed(source, config.seed, step_size, share, accelerator, workers=workers, order=order)
        steps, step = self.total_steps(len(order)) or 0, self._saved.state["step"] if self._saved else 0
        self._settle_schedule(self._length(steps))
        if note := schedule_note(step, steps, self.config.optim):
            self._say(note)
        file = Path(paths[0]) / self.manifest.tokenizer
        self.files = (file,) if file.is_file() else ()

    def load_tasks(self) -> None:
        """Reads the items of `eval.tasks`, on the main process. Raises: UserError."""
        self.item_sets = on_main(self.accelerator, self._load_tasks)

    def build_model(self) -> None:
        """Makes the model, with the weights that it begins with. Raises: UserError where these do not fit it."""
        config, accelerator = self.config, self.accelerator
        torch.manual_seed(config.seed)
        is_given = bool(self._saved) or not accelerator.is_main_process  # by the checkpoint, or by the main process
        with without_init() if is_given else nullcontext():
            self.model = GPT(config.model, self.manifest.vocab_size, self.manifest.eot)
        self.model.activation_checkpointing = config.train.activation_checkpointing
        self.model.loss_chunk = resolve_chunk(config.train.loss_chunk, accelerator.device.type)
        self.flops_per_unit = self.model.flops_per_token()
        if start := self._begin_with:  # of the main process; DDP gives them to the others
            from gpt2_ddp.tasks.initial_weights import load_initial_weights

            begin = lambda: load_initial_weights(config, start, self.model, self.tokenizer)  # noqa: E731
            on_every_rank(accelerator, begin if accelerator.is_main_process else lambda: None, patience=PREPARATION)

    def check_hashes(self, record: bool = True) -> None:
        """Hashes the shards, as `data.verify_hashes` says. Raises: UserError. `record`: as in `verify_shards`."""
        data, accelerator = self.config.data, self.accelerator
        if data.verify_hashes == "never":
            return
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", str(accelerator.num_processes)))
        share = (accelerator.local_process_index, local_world, data.verify_hashes == "changed", record)
        for path, manifest in zip(data.paths, self.manifests, strict=True):
            on_every_rank(accelerator, partial(verify_shards, Path(path), manifest, *share))

    def build_optimizer(self) -> Optimizer:
        return build_optimizer(self.model, self.config.optim)

    def lr_at(self, step: int) -> float:
        return lr_at(step, self.config.optim)

    def loss(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        (tokens,) = batch.rows  # [b, T + 1]
        return model(tokens[:, :-1], tokens[:, 1:], reduction="sum")

    def due(self, step: int, last: bool) -> Due:
        return due(self.config, step, last, self.feed.ended_epoch, self.validates)

    @property
    def validates(self) -> bool:
        """Whether there is something to validate on."""
        return bool(self._validation)

    @property
    def validation_tokens(self) -> int:
        """Targets of all validation splits."""
        return sum(len(stream) - 1 for _, stream in self._validation.values())

    def evaluate(self, model: nn.Module, poll: Poll) -> Scores:
        """The loss of `eval.tokens` tokens of the validation text, per token and in bits per byte; of several sources,
        each one's and what they come to by their weights, in which those that count share the tokens equally. And
        `eval.tasks`."""
        config, lengths = self.config, self.tokenizer.token_bytes()
        size, batch_size, tokens = config.model.block_size, config.eval.batch_size, config.eval.tokens
        assert tokens != "auto", "it was settled when the run started"
        tokens = tokens and -(-tokens // max(sum(weight > 0 for weight, _ in self._validation.values()), 1))
        found = {
            name: (weight, evaluate(self.accelerator, model, stream, size, batch_size, tokens, lengths, poll))
            for name, (weight, stream) in self._validation.items()
        }
        if not found:
            return {}
        whole = mixed(found.values())
        scores = {"val_loss": whole.loss, "val_tokens": whole.tokens, "val_bits_per_byte": whole.bits_per_byte}
        for name, (_, own) in found.items() if len(config.data.paths) > 1 else ():
            scores |= {f"val_loss/{name}": own.loss, f"val_bits_per_byte/{name}": own.bits_per_byte}
        for items in self.item_sets:
            from gpt2_ddp.scoring.result import as_row
            from gpt2_ddp.scoring.score import answer

            length = size if is_compiled(model) else None
            scores |= as_row(items, answer(self.accelerator, model, items.requests, batch_size, length, poll))
        return scores

    def sample(self, poll: Poll) -> list[Sample]:
        """Each prompt with 200 tokens more, or up to where the text ends."""
        from gpt2_ddp.model.generate import sample_texts

        prompts = self.config.tracking.sample_prompt
        texts = sample_texts(self.model, self.tokenizer, prompts, 200, self.config.seed, poll)
        return [Sample(*pair) for pair in zip(prompts, texts, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """What the data are."""
        return {
            "tokenizer": self.manifest.tokenizer,
            "tokenizer_sha256": self.manifest.tokenizer_sha256,
            "vocab_size": self.manifest.vocab_size,
            "data_manifest": self.manifest.hash,
            "micro_batch": self.micro_batch,
            **({"tasks": {items.name: items.sha256 for items in self.item_sets}} if self.item_sets else {}),
            **({"mixture": asdict(self._mixture)} if len(self._mixture.manifests) > 1 else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: `load` has compared the data."""

    def _settle_evaluation(self, saved: Checkpoint | None) -> None:
        """Gives `eval.tokens: auto` its number: the run's own, or else the configuration's."""
        own = saved.config.get("eval", {}).get("tokens") if saved else self.config.auto_eval_tokens
        if self.config.eval.tokens == "auto":
            evaluation = self.config.eval.model_copy(update={"tokens": own})
            self.config = self.config.model_copy(update={"eval": evaluation})
        elif saved and self.config.eval.tokens != own:
            now, before = (tokens or "all" for tokens in (self.config.eval.tokens, own))
            note = f"evaluations score {now} tokens from here on, and {before} before (eval.tokens); the lowest "
            self._say(f"{note}val_loss is looked for anew, as the two do not compare")

    def _settle_micro_batch(self) -> tuple[int, bool]:
        """The micro-batch, in windows, and whether it has still to be tried out."""
        config, accelerator, state = self.config, self.accelerator, self._saved.state if self._saved else {}
        windows, processes, size = config.global_batch_windows, accelerator.num_processes, config.train.micro_batch_size
        here = processes, device_name(accelerator.device)
        before = state.get("micro_batch") if here == (state.get("processes"), state.get("device")) else None
        if size == "auto" and not before:
            from gpt2_ddp.tasks.micro_batch import estimated_micro_batch

            untried = accelerator.device.type == "cuda"
            return estimated_micro_batch(config, self.manifest.vocab_size, accelerator), untried
        return split_batch(windows, processes, before if size == "auto" else size), False  # pyright: ignore

    def _try_micro_batch(self) -> None:
        if self._untried:
            from gpt2_ddp.tasks.micro_batch import tried_micro_batch

            share = self.config.global_batch_windows // self.accelerator.num_processes
            self.micro_batch = tried_micro_batch(self.model, self.accelerator, share, self.micro_batch)
            self.feed.share = interleaved(self.accelerator.num_processes, self.micro_batch)

    def _load_tasks(self) -> "list[ItemSet]":
        config, streams = self.config, [stream for _, stream in self._validation.values()]
        if not config.eval.tasks:
            return []
        from gpt2_ddp.scoring.sources import load_sets

        if not streams:
            where = " ".join(config.data.paths)
            hint = f"are scored where the validation split is, and {where} has none; leave them away"
            raise UserError("eval.tasks", ", ".join(config.eval.tasks), hint)
        most, size = config.eval.task_items, config.model.block_size
        try:
            sets = load_sets(config.eval.tasks, most, self.tokenizer, size, lambda: streams[0])
        except UserError as error:
            raise UserError.join([f"eval.{mistake}" for mistake in error.mistakes]) from error
        before = self._saved.state.get("tasks", {}) if self._saved else {}
        for items in sets:
            chance = "" if items.chance is None else f", of which guessing gets {items.chance:.1%}"
            self._say(f"{items.name} is scored on {len(items.items):,} items{chance}")
            if before.get(items.name, items.sha256) != items.sha256:
                self._say(f"the items of {items.name} are others than before; scores do not compare with earlier rows'")
        return sets

    def _length(self, steps: int) -> int:
        """Of a schedule that is given none."""
        return max(steps, self.config.optim.warmup_steps + 1)

    def _length_since(self, saved: Checkpoint) -> int | None:
        """The length of the schedule of a run that goes on: its own, or that of its steps now, if it was that of its
        steps then and no step so far depends on it."""
        values, epoch_size = complete(TrainingConfig, saved.config)[0], saved.state.get("epoch_size")
        own: int | None = values["optim"]["decay_steps"]
        before = self._steps(values["train"]["steps"], values["train"]["epochs"], epoch_size)
        now = self.total_steps(epoch_size)
        if self.config.optim.decay_steps or not own or not before or not now or self._length(before) != own:
            return own
        length = self._length(now)
        optim = self.config.optim.model_copy(update={"decay_steps": own})
        if length == own or not optim.may_end_at(length, saved.state["step"]):
            return own
        self._say(f"optim.decay_steps, which no step depends on so far, was {own} and is {length} now")
        return length

    def _say(self, note: str) -> None:
        if self.accelerator.is_main_process:
            print(f"note: {note}", file=sys.stderr)

    def _check_goes_on(self, saved: Checkpoint) -> None:
        """Raises: UserError where a branch has no step of its own."""
        begins, steps = saved.state.get("branched_from"), self.total_steps(saved.state.get("epoch_size"))
        if begins and steps is not None and steps <= begins["step"]:
            field = "train.steps" if self.config.train.epochs is None else "train.epochs"
            hint = f"{begins['from']} is at step {begins['step']}, which counts; raise it to go on from there"
            raise UserError(field, getattr(self.config.train, field[6:]), hint)

    def _settle_schedule(self, decay_steps: int | None) -> None:
        """Gives a schedule without a length this one."""
        if self.config.optim.decay_steps is None and decay_steps is not None:
            optim = self.config.optim.model_copy(update={"decay_steps": decay_steps})
            self.config = self.config.model_copy(update={"optim": optim})


def due(config: TrainingConfig, step: int, last: bool, ended_epoch: bool, validates: bool) -> Due:
    """What follows a step of a run that `validates`, as there is a validation split."""
    evaluate = validates and (last or step % config.eval.every == 0)
    return Due(
        log=evaluate or last or ended_epoch or step % config.tracking.log_every == 0,
        evaluate=evaluate,
        save=last or step % config.checkpoint.every == 0,
        sample=config.tracking.sample_every > 0 and (last or step % config.tracking.sample_every == 0),
    )


def find_gpt(path: Path, field: str, weights: bool = True) -> Checkpoint:
    """The GPT's checkpoint that a user means (`find_checkpoint`).

    Raises:
        UserError: also when it is of another kind of run, which `field` has no use for.
    """
    return find_checkpoint(path, field, weights, kind="gpt2")


def load_model(checkpoint: Checkpoint) -> tuple[GPT, Tokenizer]:
    """The model (fp32, on the CPU, in evaluation mode) and the tokenizer of a GPT's checkpoint.

    Raises:
        UserError: when the tokenizer cannot be had, or the weights do not fit the configuration.
    """
    settings, _ = complete(TrainingConfig, checkpoint.config)
    name = checkpoint.state["tokenizer"]
    file = checkpoint.path / name
    tokenizer = load_tokenizer(str(file) if file.is_file() else name)
    with without_init():
        model = GPT(ModelConfig(**settings["model"]), checkpoint.state["vocab_size"], tokenizer.eot)
    load_weights(checkpoint, model)
    return model.eval(), tokenizer


def load_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Copies a checkpoint's weights into the plain module.

    Raises:
        UserError: when names or shapes differ, or it was removed since it was verified.
    """
    with still_there(checkpoint):
        weights = load_file(checkpoint.path / MODEL)
    fit_weights(weights, model, checkpoint.path)
