"""Pretraining of a GPT on the shard folders of `data.path` (a `training.task.Task`)."""

from collections.abc import Sequence, Sized
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar, cast

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from gpt2_ddp.checkpoint.format import Checkpoint
from gpt2_ddp.config.base import Section, shown
from gpt2_ddp.config.own_settings import (
    OWN,
    as_recorded,
    changed,
    check_declared,
    recorded_settings,
    settle,
)
from gpt2_ddp.config.own_text import Machine
from gpt2_ddp.config.training import ModelConfig, OptimConfig, TrainingConfig
from gpt2_ddp.data.corpus import open_corpus
from gpt2_ddp.data.feed import Feed, GlobalBatch, MicroBatch, interleaved, split_batch
from gpt2_ddp.data.fetch import get_data
from gpt2_ddp.data.manifest import missing_folders, tokenizer_note
from gpt2_ddp.data.mixture import MixedOrder, check_resumed_data, phases_of, single_folder
from gpt2_ddp.data.order import Order, Permutation
from gpt2_ddp.data.shards import verify_shards
from gpt2_ddp.distributed.environment import free_memory, processes_here
from gpt2_ddp.distributed.ranks import (
    LONGEST,
    check_ranks_agree,
    on_every_rank,
    on_main,
)
from gpt2_ddp.distributed.watchdog import FIRST_TIMEOUT, Watchdog
from gpt2_ddp.errors import UserError, is_main_process, print_line
from gpt2_ddp.evaluation.evaluate import BATCH, IGNORED, EvalSet, Evaluation, evaluate, mixed
from gpt2_ddp.evaluation.items import ItemSet, answer, judge, load_sets, notes_on
from gpt2_ddp.model.compiled import is_compiled
from gpt2_ddp.model.generate import Sampling, sample_texts
from gpt2_ddp.model.gpt import GPT, count_parameters, without_init
from gpt2_ddp.model.optim import build_optimizer
from gpt2_ddp.records.metrics import Sample
from gpt2_ddp.state import CODE, GPTData, OwnCode, Scores, TaskState
from gpt2_ddp.tasks.user_task import Code, check_trust, find, make
from gpt2_ddp.training.branch import advise_branch
from gpt2_ddp.training.initial_weights import load_initial_weights
from gpt2_ddp.training.memory import (
    ROOM,
    Setting,
    choose_micro_batch,
    divisions,
    fits,
    least_memory,
    other_ways,
    run_setting,
    usable_memory,
)
from gpt2_ddp.training.optimizer import lr_at
from gpt2_ddp.training.own_text import settle_own_text
from gpt2_ddp.training.run_length import settle_minutes
from gpt2_ddp.training.task import Due, Loss, Poll, Task

TASK_ITEMS = 500
"""Most items of each task that an evaluation during training scores."""


SettingsT = TypeVar("SettingsT", bound=Section, covariant=True)


class HasSettings(Protocol[SettingsT]):
    """A task of a class with an inner class `Settings`."""

    @property
    def Settings(self) -> type[SettingsT]: ...


class Pretraining(Task[TrainingConfig]):
    """Next-token training of a GPT; the loss is a mean over tokens.

    A feed item is a window of T = block_size tokens. A step has G windows and may straddle two
    epochs.

    A subclass may replace `make_order`, `make_model`, `build_optimizer`, `schedule` and `loss`. The
    first, second and fourth depend on `config` and their arguments alone: other commands call them
    on a task without an accelerator.

    A subclass may declare settings of its own by an inner class `Settings`, a `Section`.

    Attributes:
        Settings: the class of `settings`.
        settings: those of this run, with the defaults of what it was not given.
    """

    Settings: type[Section] = Section
    unit = "tokens"
    model: GPT  # a subclass's may be another module that is called like one
    code: Code | None = None
    """Where a subclass comes from; None in this package."""

    def __init__(
        self,
        config: TrainingConfig,
        accelerator: Accelerator | None = None,
        saved: Checkpoint | None = None,
    ):
        if config.train.minutes:
            config = settle_minutes(config, saved, self._has_own_schedule)
        self.config = config
        # commands that only make a model or an order have none
        self.accelerator = cast(Accelerator, accelerator)
        self._saved = saved
        self._needs_weights = bool(config.train.init_from) and not saved
        self._settle_settings()
        if not config.own_text:
            self._divide_step()
        if saved and not self._has_own_schedule:
            self._check_learning_rate(saved)

    @property
    def settings(self: HasSettings[SettingsT]) -> SettingsT:
        """The settings of the class, which flags `--own.NAME` give. Frozen."""
        return cast(SettingsT, cast(Pretraining, self)._settings)

    def _settle_settings(self) -> None:
        """Makes `settings`, and completes `config.own`. Raises: UserError for unknown names, wrong
        values, and for what a resume or a branch must not change."""
        own = self.config.own
        recorded = recorded_settings(self._saved.config) if self._saved else {}
        # without an accelerator, the configuration is a run's: the class may have changed since
        dropped = recorded if self.accelerator else own.given
        kind = type(self)
        self._settings = settle(own, kind.Settings, kind.__name__, dropped)
        self.config = self.config.model_copy(update={OWN: as_recorded(self._settings)})
        if self._saved:
            self._check_settings(self._saved, recorded)

    def _check_settings(self, saved: Checkpoint, recorded: dict[str, object]) -> None:
        """Raises: UserError for settings that differ from those of the run, or of a new branch's
        parent, unless the class allows it."""
        changes = changed(self._settings, recorded, saved.step)
        whose = "the run was started"
        advice = "choose another run_name"
        if self._is_new_branch(saved):
            changes = [change for change in changes if change[0] in recorded]
            whose = "the branch's parent was trained"
            advice = "start a new run"
        mistakes: list[str] = []
        for name, now, before in changes:
            restore = f"{whose} with {shown(before)}; restore it (--{OWN}.{name} {shown(before)})"
            allow = "allow the change by may_change in Settings (docs/extend.md)"
            hint = f"{restore}, {advice}, or {allow}"
            mistakes += UserError(f"{OWN}.{name}", shown(now), hint).mistakes
        if mistakes:
            raise UserError.join(mistakes)

    def _is_new_branch(self, saved: Checkpoint) -> bool:
        """Whether `saved` is the parent of a branch that begins now."""
        is_first = saved.step == saved.state.progress.first_step
        return bool(self.config.train.branch_from) and is_first

    def _divide_step(self) -> None:
        """Sets what follows from the context and the batch. Raises: UserError if a step cannot be
        divided among the ranks."""
        self.units_per_item = self.config.model.block_size
        if self.accelerator:
            split_batch(self.config.global_batch_windows, self.accelerator.num_processes, 1)

    @property
    def _has_own_schedule(self) -> bool:
        """Whether a subclass has replaced `schedule`."""
        return type(self).schedule is not Pretraining.schedule

    def _check_learning_rate(self, saved: Checkpoint) -> None:
        """Raises: UserError if all remaining steps would have the learning rate 0, in a branch or
        in a run that was made longer. (A run that began with as many steps goes on, with a
        note.)"""
        config = self.config
        epoch_size = saved.state.setup.epoch_size
        steps = self.total_steps(epoch_size)
        optim = self._resolved_optim(epoch_size)
        end = optim.decay_steps
        if not (steps and end and steps > max(end, saved.step) and optim.is_over(saved.step)):
            return
        is_branch = self._is_new_branch(saved)
        length = config.model_dump(mode="json")["train"]
        before = saved.config["train"]
        is_longer = any(length[name] != before.get(name) for name in ("steps", "epochs"))
        if not (is_branch or is_longer):
            return
        zero = f"the learning rate is 0 from step {end:,} on"
        if is_branch:
            advice = f"give it a decay of its own, such as --optim.decay_steps {steps}"
            hint = f"{zero}, where this branch begins; {advice}"
            raise UserError("optim.decay_steps", config.optim.decay_steps, hint)
        field = "steps" if config.train.epochs is None else "epochs"
        advice = advise_branch(Path(config.output_dir, config.run_name), optim)
        raise UserError(f"train.{field}", getattr(config.train, field), f"{zero}; {advice}")

    def _resolved_optim(self, epoch_size: int) -> OptimConfig:
        """The section optim with an end of the decay: for null the last step, or the first after a
        longer warm-up. A resumed run's schedule keeps its ends, unless no step so far depends on
        them."""
        optim = self.config.optim
        saved = self._saved
        steps = self.total_steps(epoch_size)
        if optim.decay_steps is not None or not steps:
            return optim
        end = max(steps, optim.warmup_steps + 1)
        recorded = saved.config["optim"] if saved else {}
        if saved and recorded["decay_steps"]:
            names = ("decay_steps", "earlier_ends")
            ends = {name: recorded[name] for name in names if name in recorded}
            before = OptimConfig.model_validate(optim.model_dump() | ends)
            if not before.may_end_at(end, saved.step):
                return before
        return optim.model_copy(update={"decay_steps": end})

    def total_steps(self, epoch_size: int | None) -> int | None:
        return self.config.total_steps(epoch_size)

    def set_steps(self, steps: int, step: int) -> None:
        """Replaces `train.minutes` by a number of steps, or this number by another one."""
        self.config = self.config.with_steps(steps, step)

    def resolve(self) -> None:
        """Replaces `eval.tokens: auto` and `optim.decay_steps: null` in the configuration, once the
        data are open. A resumed run keeps its tokens."""
        config = self.config
        recorded = self._saved.config if self._saved else config.model_dump()
        tokens = config.eval.tokens
        if tokens == "auto":
            tokens = recorded["eval"]["tokens"]
        if tokens == "auto":
            tokens = config.auto_eval_tokens
        optim = self._resolved_optim(self.epoch_size)
        end = optim.decay_steps
        before = recorded["optim"]["decay_steps"]
        if config.optim.decay_steps is None and end and before not in (None, end):
            change = f"optim.decay_steps changes from {before} to {end}"
            print_line(f"note: {change}; no step so far depends on it")
        evals = config.eval.model_copy(update={"tokens": tokens})
        self.config = config.model_copy(update={"eval": evals, "optim": optim})

    def load(self, watchdog: Watchdog, is_complete: bool = False) -> None:
        """Prepares missing shards (`data.prepare`), opens and hashes the data, makes the model; for
        a complete run, only opens the data. Raises: UserError."""
        long = LONGEST.total_seconds()
        watchdog.heartbeat("preparing data", timeout=long)
        on_every_rank(self._get_missing_data)
        self.settle()
        self.open_data()
        if is_complete:
            return
        watchdog.heartbeat("reading tasks", timeout=FIRST_TIMEOUT)
        self.load_tasks()
        watchdog.heartbeat("building", timeout=FIRST_TIMEOUT)
        self.build_model()
        self.build_feed()
        watchdog.heartbeat("hashing", timeout=long)
        self.check_hashes()

    def settle(self, machine: Machine | None = None) -> None:
        """Completes the configuration of a text of one's own, whose data are there, for this
        machine or another. Raises: UserError."""
        if self.config.own_text:
            completed = settle_own_text(self.config, self.accelerator, machine)
            self.config = completed.config
            if completed.forecast:
                record: dict[str, object] = {**completed.forecast.record()}
                if completed.expectation:
                    record["ladder"] = completed.expectation.record()
                self.start_fields = {"forecast": record}
            self._divide_step()

    def open_data(self) -> None:
        """Opens the data by their small files, and resolves the configuration. Raises:
        UserError."""
        config = self.config
        paths = config.data.paths
        # one process of each machine: 10,000 shards x 1,024 ranks would be 10 million headers
        check = self.accelerator.is_local_main_process
        self.corpus = corpus = on_every_rank(lambda: open_corpus(config, check))
        self.validates = bool(corpus.validation)
        self.manifests = corpus.manifests
        self.tokenizer = corpus.tokenizer
        self.manifest = corpus.manifests[0]
        hashes = [f"hash {manifest.hash}" for manifest in self.manifests]
        check_ranks_agree({f"folder {n} of data.path": text for n, text in enumerate(hashes, 1)})
        if not self.validates:
            self._refuse_evaluations()
        if self._saved:
            mixture = corpus.mixture or single_folder(self.manifest.hash)
            check_resumed_data(config, self._saved.state, mixture)
        self.order = self.make_order(corpus.sources)
        self.epoch_size = len(self.order)
        self.resolve()
        self._print_notes()
        file = Path(paths[0]) / self.manifest.tokenizer
        files: dict[str, bytes] = {}
        if file.is_file():
            files[file.name] = file.read_bytes()
        if self.code:
            files[CODE] = self.code.source
        self.files = files

    def _refuse_evaluations(self) -> None:
        """Raises: UserError for settings that need a validation split."""
        evals = self.config.eval
        hint = "has no validation split; remove this setting"
        paths = " ".join(self.config.data.paths)
        if evals.patience:
            raise UserError("eval.patience", evals.patience, f"{paths} {hint}")
        if evals.tasks:
            raise UserError("eval.tasks", " ".join(evals.tasks), f"{paths} {hint}")

    def _print_notes(self) -> None:
        """Prints what is unusual about the length, the schedule and the tokenizers of the run."""
        optim = self.config.optim
        steps = self.total_steps(self.epoch_size)
        if steps and steps <= optim.warmup_steps:
            warm_up = f"the end of optim.warmup_steps = {optim.warmup_steps:,}"
            print_line(f"note: the run ends at step {steps:,}, before {warm_up}")
        end = optim.decay_steps
        is_longer = steps is not None and end is not None and steps > end
        if end and is_longer and optim.is_over(end) and not self._has_own_schedule:
            zero = f"the learning rate is 0 from step {end:,} on"
            print_line(f"note: {zero}, the end of optim.decay_steps")
        if self.config.train.fp8_head and self.validates:
            print_line("note: train.fp8_head is for training; evaluations stay in bf16")
        if note := tokenizer_note(dict(zip(self.config.data.paths, self.manifests, strict=True))):
            print_line(f"note: {note}")

    def _get_missing_data(self) -> None:
        config = self.config
        if self.accelerator.is_local_main_process and (config.data.urls or missing_folders(config)):
            get_data(config)

    def load_tasks(self) -> None:
        """Reads the items of `eval.tasks` on the main process, and prints notes on them. Raises:
        UserError."""
        self.item_sets: list[ItemSet] = []
        evals = self.config.eval
        if not evals.tasks:
            return
        size = self.config.model.block_size
        load = partial(load_sets, "eval.tasks", evals.tasks, TASK_ITEMS, self.tokenizer, size)
        self.item_sets = on_main(load)
        data = self._saved.state.task if self._saved else None
        before = data.tasks if isinstance(data, GPTData) else {}
        for note in notes_on(self.item_sets, before):
            print_line(f"note: {note}")

    def make_order(self, sources: Sequence[Sized]) -> Order:
        """The order of the windows of all folders' training splits."""
        config = self.config
        if len(sources) == 1:
            return Permutation(config.seed, len(sources[0]), shifts=config.shifts)
        windows = [*map(len, sources)]
        phases = phases_of(config, windows)
        return MixedOrder(config.seed, windows, phases, config.data.names, config.shifts)

    def make_model(self, vocab_size: int, eot: int | None = None) -> GPT:
        """The plain model, which is called like a `GPT`. Arguments: as of `GPT`."""
        config = self.config
        train = config.train
        return GPT(config.model, vocab_size, eot, train.activation_checkpointing, train.fp8_head)

    def build_model(self, needs_memory: bool = True) -> None:
        """Makes the model with its initial weights. Raises: UserError if `train.init_from` does not
        fit, or, if the model `needs_memory`, if there is too little."""
        config = self.config
        is_sharded = config.launch.parallel == "fsdp"
        # others receive their weights, or load a checkpoint's
        draws_weights = is_main_process() and not (self._saved or self._needs_weights)
        is_whole = draws_weights or not is_sharded
        if needs_memory:
            on_every_rank(self._check_memory if is_whole else lambda: None)
        torch.manual_seed(config.seed)
        make = partial(self.make_model, self.manifest.vocab_size, self.manifest.eot)
        if is_sharded:
            from gpt2_ddp.training.fsdp import make_model  # noqa: PLC0415  FSDP: a second

            self.model, initial = on_every_rank(partial(make_model, make))
            self.initial = initial if draws_weights else iter(())
        else:
            with nullcontext() if draws_weights else without_init():
                self.model = on_every_rank(make)
        if isinstance(self.model, GPT):
            self.flops_per_unit = self.model.flops_per_token()
        if config.train.fp8_head and not getattr(self.model, "fp8_head", False):
            hint = f"make_model of {type(self).__name__} makes a model without it; remove it"
            raise UserError("train.fp8_head", "true", hint)
        if self._needs_weights:
            on_main(self._load_initial_weights)

    def _check_memory(self) -> None:
        is_cpu = self.accelerator.device.type == "cpu"
        trains_here = is_cpu and self.config.launch.parallel != "fsdp"
        processes = processes_here() if trains_here else 0
        average = self.config.optim.average
        check_memory(self.config.model, self.manifest.vocab_size, processes, average)

    def _load_initial_weights(self) -> None:
        self.initial = load_initial_weights(self.config, self.model, self.tokenizer)

    @property
    def recorded_micro_batch(self) -> int | None:
        """`train.micro_batch_size` of the run that is resumed, or of a branch's parent; None for a
        new run."""
        if not self._saved:
            return None
        recorded: int | str = self._saved.config["train"]["micro_batch_size"]
        if isinstance(recorded, int):
            return recorded
        data = self._saved.state.task  # an early release recorded `auto`
        return data.micro_batch if isinstance(data, GPTData) else None

    def _memory_setting(self) -> Setting | None:
        """Inputs of the memory estimate; None for a model of one's own."""
        return run_setting(self.config, self.model, self.accelerator, self.validates)

    def _settle_micro_batch(self) -> int:
        """The number of `train.micro_batch_size`, which replaces `auto` in the configuration.
        Collective. Raises: UserError for `auto` and a model of one's own."""
        config = self.config
        given = config.train.micro_batch_size
        if given != "auto":
            return given
        setting = self._memory_setting()
        if setting is None:
            raise UserError("train.micro_batch_size", "auto", "needs a GPT; set a number")
        memory = least_memory(self.accelerator.device)
        before = self.recorded_micro_batch
        size = choose_micro_batch(setting, memory, before)
        is_whole = size == next(divisions(setting))  # the line of the start says as much
        if size != before and (before or not is_whole):
            change = f"was {before}, which no longer fits; it is now" if before else "is"
            free = f"{memory / 1e9:,.1f} GB are free"
            print_line(f"note: train.micro_batch_size {change} {size}, by an estimate; {free}")
        train = config.train.model_copy(update={"micro_batch_size": size})
        self.config = config.model_copy(update={"train": train})
        return size

    def less_memory(self) -> str:
        setting = self._memory_setting()
        if setting is None:
            return super().less_memory()
        room = ROOM * usable_memory(self.accelerator.device)
        smaller = (size for size in divisions(setting) if size < self.micro_batch)
        fitting = next((size for size in smaller if fits(setting, size, room)), None)
        return f"use {fitting}" if fitting else other_ways(setting)

    def build_feed(self) -> None:
        """Chooses the micro-batch, and makes `feed`. Collective."""
        accelerator = self.accelerator
        size = self._settle_micro_batch()
        processes = accelerator.num_processes
        self.micro_batch = split_batch(self.config.global_batch_windows, processes, size)
        shares = partial(interleaved, processes, self.micro_batch)
        batch = GlobalBatch(self.config.global_batch_windows, shares, rows=self.micro_batch)
        self.feed = Feed(self.order, batch, self.corpus.source, accelerator)

    def check_hashes(self, record: bool = True) -> None:
        """Hashes the shards that have changed since they were last hashed (`verify_shards`).
        Raises: UserError."""
        data = self.config.data
        accelerator = self.accelerator
        share = accelerator.local_process_index, processes_here(), record
        for path, manifest in zip(data.paths, self.manifests, strict=True):
            on_every_rank(partial(verify_shards, Path(path), manifest, *share))

    def build_optimizer(self) -> Optimizer:
        return build_optimizer(
            self.model, self.config.optim, self.accelerator.mixed_precision != "no"
        )

    def schedule(self, step: int) -> dict[str, float]:
        return {"lr": lr_at(step, self.config.optim)}

    def loss(self, model: nn.Module, batch: MicroBatch) -> Loss:
        """Sum of the losses of the valid windows' tokens, in nats, fp32 scalar."""
        targets = tokens = batch.rows[0]  # [b, T + 1]
        if batch.n_valid < len(tokens):
            # all of it: a compiled model would compile anew for other strides
            targets = tokens.clone()
            targets[batch.n_valid :] = IGNORED
        return model(tokens[:, :-1], targets[:, 1:], reduction="sum")

    def due(self, step: int, last: bool) -> Due:
        config = self.config
        evaluate = self.validates and (last or step % config.eval.every == 0)
        sample = config.tracking.sample_every
        return Due(
            log=evaluate or last or self.feed.ended_epoch or step % config.tracking.log_every == 0,
            evaluate=evaluate,
            save=last or step % config.checkpoint.every == 0,
            sample=sample > 0 and (last or step % sample == 0),
        )

    def evaluate(self, model: nn.Module, poll: Poll) -> Scores:
        """Validation loss over `eval.tokens` tokens, in nats per token and in bits per byte, and
        the scores of `eval.tasks`. Several folders share the tokens equally; each one's loss is
        returned too, and `val_loss` is their weighted mean."""
        config = self.config
        validation = self.corpus.validation
        size = config.model.block_size
        tokens = config.eval.tokens
        assert tokens != "auto", "eval.tokens is resolved when the run starts"
        if not validation:
            return {}
        weighted = sum(weight > 0 for weight, _ in validation.values())
        if tokens:  # of each folder, rounded up
            tokens = -(-tokens // max(weighted, 1))
        lengths = self.tokenizer.token_bytes()
        losses: dict[str, tuple[float, Evaluation]] = {}
        for name, (weight, stream) in validation.items():
            windows = EvalSet(stream, size, tokens, lengths)
            losses[name] = weight, evaluate(self.accelerator, model, windows, BATCH, poll)
        total = mixed(losses.values())
        scores: Scores = {
            "val_loss": total.loss,
            "val_tokens": total.tokens,
            "val_bits_per_byte": total.bits_per_byte,
        }
        if len(self.manifests) > 1:
            for name, (_, evaluation) in losses.items():
                scores[f"val_loss/{name}"] = evaluation.loss
                scores[f"val_bits_per_byte/{name}"] = evaluation.bits_per_byte
        for items in self.item_sets:
            length = size if is_compiled(model) else None
            answers = answer(self.accelerator, model, items.requests, BATCH, length, poll)
            for metric, value in judge(items, answers).items():
                scores[f"{items.name}_{metric}"] = value
        return scores

    def sample(self, poll: Poll) -> list[Sample]:
        """Each prompt and its continuation by at most 200 tokens."""
        prompts = self.config.tracking.sample_prompt
        sampling = Sampling(200, seed=self.config.seed)
        texts = sample_texts(self.model, self.tokenizer, prompts, sampling, poll)
        return [*map(Sample, prompts, texts)]

    def state_dict(self) -> GPTData:
        """Identity of the data, and the micro-batch."""
        return GPTData(
            tokenizer=self.manifest.tokenizer,
            tokenizer_sha256=self.manifest.tokenizer_sha256,
            vocab_size=self.manifest.vocab_size,
            data_manifest=self.manifest.hash,
            micro_batch=self.micro_batch,
            tasks={items.name: items.sha256 for items in self.item_sets},
            mixture=self.corpus.mixture,
            code=OwnCode(name=self.code.name, sha256=self.code.sha256) if self.code else None,
        )

    def load_state_dict(self, state: TaskState) -> None:
        """Does nothing: `open_data` compared the data, and the feed has a state of its own."""


def make_pretraining(
    config: TrainingConfig, accelerator: Accelerator, saved: Checkpoint | None
) -> Pretraining:
    """The task of a GPT run: `Pretraining`, or the class that `task` names or the run recorded.
    Collective."""
    recorded = saved.state.task if saved else None
    if config.task or (isinstance(recorded, GPTData) and recorded.code):
        return make(Pretraining, config, accelerator, saved)
    return Pretraining(config, accelerator, saved)


def settings_of(name: str, is_flag: bool = True) -> type[Section]:
    """The settings of the class that `task` names. Executes its code, which a flag --task trusts.
    Raises: UserError, also for code that a file names and nobody has trusted yet."""
    code = find(name)
    if not is_flag:
        check_trust(code)
    kind = code.load(Pretraining)
    check_declared(kind.Settings, kind.__name__)
    return kind.Settings


def check_memory(
    model: ModelConfig, vocab_size: int, processes: int = 0, average: float = 0.0
) -> None:
    """Raises: UserError if this machine has less free memory than the weights take. With
    `processes` that train in it, each needs gradients and one value of the optimizer per parameter
    in addition, and the average (`optim.average`)."""
    count = count_parameters(model, vocab_size)
    free = free_memory()
    size = 4 * count
    what = "their weights take"
    if processes:
        size = 12 * count * processes
        what = "weights, gradients and optimizer take at least"
        if average:
            size += 4 * count * processes
            what = "weights, their average, gradients and optimizer take at least"
    if size > free:
        memory = f"{free / 1e9:,.1f} GB of this machine's memory are free"
        advice = "choose smaller values of the section model"
        hint = f"{what} {size / 1e9:,.1f} GB, and {memory}; {advice}"
        raise UserError("model", f"{count:,} parameters", hint)
