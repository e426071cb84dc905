"""Everything before the first step: processes, data, model and optimizer, and where the run goes on."""

import math
import os
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim import Optimizer

from gpt2_ddp.config.cli import dump, load
from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.loader import FIRST_DIGEST, Order, WindowDataset, count_windows, split_batch
from gpt2_ddp.data.prepare import default_output, prepare
from gpt2_ddp.data.shards import MANIFEST, Manifest, TokenStream, read_manifest, verify_shards
from gpt2_ddp.data.tokenizer import Tokenizer, load_tokenizer
from gpt2_ddp.errors import UserError
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.model.optim import build_optimizer
from gpt2_ddp.processes.launch import start_run
from gpt2_ddp.processes.ranks import check_ranks_agree, on_every_rank, on_main
from gpt2_ddp.run.checkpoint import CheckpointFolder, find_checkpoint, load_weights
from gpt2_ddp.run.folder import RunFolder, check_resumable, open_run
from gpt2_ddp.run.resume import Progress, find_progress, restore_optimizer, restore_weights
from gpt2_ddp.run.tracking import new_run_id

PREPARATION = timedelta(days=7)
"""How long the other ranks wait while data are prepared on first use."""


@dataclass
class TrainState:
    """What a run has done so far; a checkpoint's state.json begins with it.

    Args:
        step: optimizer steps taken.
        position: the next step's first position in the order of windows.
        order_digest: running SHA-256 over the windows of every step.
        tokens: targets trained on.
        skipped: steps whose gradient was not finite, so that they changed nothing.
        run_id: the tracker's id of this run.
    """

    step: int = 0
    position: int = 0
    order_digest: str = FIRST_DIGEST
    tokens: int = 0
    skipped: int = 0
    run_id: str = ""

    @classmethod
    def of(cls, saved: dict[str, Any]) -> "TrainState":
        """The state in a checkpoint's state.json, which holds more."""
        return cls(**{name: saved[name] for name in asdict(cls())})


@dataclass
class Training:
    """A run that is ready to step. `run` and `checkpoints` exist on the main process alone."""

    config: TrainingConfig
    accelerator: Accelerator
    run: RunFolder | None
    checkpoints: CheckpointFolder | None
    manifest: Manifest
    tokenizer: Tokenizer
    order: Order
    dataset: WindowDataset
    val_stream: TokenStream | None
    plain_model: GPT
    model: nn.Module
    plain_optimizer: Optimizer
    optimizer: AcceleratedOptimizer
    state: TrainState
    steps: int
    batch_size: int
    accumulation: int

    def save(self, val_loss: float | None) -> None:
        """Saves a checkpoint of the present step; on the main process, the others go on.

        Args:
            val_loss: of this very step, or None where it was not evaluated.
        """
        if self.checkpoints is None:
            return
        scaler = self.accelerator.scaler
        state = {
            **asdict(self.state),
            "val_loss": val_loss,
            "scaler": scaler.state_dict() if scaler else None,
            "tokenizer": self.manifest.tokenizer,
            "tokenizer_sha256": self.manifest.tokenizer_sha256,
            "vocab_size": self.manifest.vocab_size,
            "data_manifest": self.manifest.hash,
            "processes": self.accelerator.num_processes,
            "versions": {"torch": torch.__version__},
        }
        tokenizer_file = Path(self.config.data.path) / self.manifest.tokenizer  # checkpoints carry it, if it is a file
        extra = (tokenizer_file,) if tokenizer_file.is_file() else ()
        self.checkpoints.save(self.plain_model, self.plain_optimizer, state, dump(self.config), extra)


def build(config: TrainingConfig) -> Training:
    """Brings all ranks to the same step of the same run.

    Raises:
        UserError: for whatever the user has to mend, on every rank alike, before any long work.
    """
    accelerator = start_run(config)
    batch_size, accumulation = split_batch(
        config.global_batch_windows, accelerator.num_processes, config.train.micro_batch_size
    )
    run = open_run(accelerator, config)
    checkpoints = CheckpointFolder(run.checkpoints, config.checkpoint.keep_last) if run else None
    on_every_rank(accelerator, lambda: _prepare_missing_data(accelerator, config), patience=PREPARATION)
    manifest, tokenizer, stream = on_every_rank(accelerator, lambda: _open_data(accelerator, config))
    check_ranks_agree(dump(config), "data.path", config.data.path, manifest.hash)
    order = Order(config.seed, count_windows(len(stream), config.model.block_size))
    steps = config.train.steps or 0
    if config.train.epochs is not None:
        steps = math.ceil(config.train.epochs * order.n_windows / config.global_batch_windows)

    progress, decay_steps = on_main(accelerator, lambda: _find_progress(_present(checkpoints), config, manifest, steps))
    config = config.model_copy(update={"optim": config.optim.model_copy(update={"decay_steps": decay_steps})})
    state = TrainState.of(progress.state) if progress else TrainState(run_id=on_main(accelerator, new_run_id))
    if run:
        run.write_config(config)
        run.cut_metrics(state.step if progress else -1)
    plain_model = _build_model(accelerator, config, manifest, progress)
    plain_optimizer = build_optimizer(plain_model, config.optim)
    model, optimizer = accelerator.prepare(
        torch.compile(plain_model) if config.train.compile else plain_model, plain_optimizer
    )
    if progress:
        restore_optimizer(accelerator, progress, plain_model, plain_optimizer)
    return Training(
        config=config,
        accelerator=accelerator,
        run=run,
        checkpoints=checkpoints,
        manifest=manifest,
        tokenizer=tokenizer,
        order=order,
        dataset=WindowDataset(stream, order, config.model.block_size),
        val_stream=TokenStream(Path(config.data.path), manifest, "val") if manifest.tokens("val") > 1 else None,
        plain_model=plain_model,
        model=model,
        plain_optimizer=plain_optimizer,
        optimizer=optimizer,
        state=state,
        steps=steps,
        batch_size=batch_size,
        accumulation=accumulation,
    )


def _build_model(
    accelerator: Accelerator, config: TrainingConfig, manifest: Manifest, progress: Progress | None
) -> GPT:
    """The plain model on this rank's device; on the main process with the weights of a checkpoint, if there is one."""
    torch.manual_seed(config.seed)
    model = GPT(config.model, manifest.vocab_size)
    model.activation_checkpointing = config.train.activation_checkpointing
    if progress:
        restore_weights(accelerator, progress, model)
    elif config.train.init_from:
        other = Path(config.train.init_from)
        on_main(accelerator, lambda: load_weights(find_checkpoint(other), model))
    return model.to(accelerator.device)


def _prepare_missing_data(accelerator: Accelerator, config: TrainingConfig) -> None:
    """Makes the shards where there are none yet: one process per node, and on a shared disk one of all."""
    folder = Path(config.data.path)
    if config.data.prepare and not (folder / MANIFEST).exists():
        recipe = load(PrepareConfig, ["--config", config.data.prepare])
        output = Path(recipe.output or default_output(recipe))
        if output.resolve() != folder.resolve():  # a mistyped path must not become another corpus
            cure = f"has no {MANIFEST}, and data.prepare ({config.data.prepare}) writes to {output}; prepare it first"
            raise UserError("data.path", folder, cure)
        if accelerator.is_local_main_process:
            prepare(recipe)


def _open_data(accelerator: Accelerator, config: TrainingConfig) -> tuple[Manifest, Tokenizer, TokenStream]:
    """Opens the data and checks every shard, each process of a node its share."""
    folder = Path(config.data.path)
    manifest = read_manifest(folder)
    if not manifest.tokens("train"):
        raise UserError("data.path", folder, "has no training split; prepare it with prepare_data.py")
    if config.data.verify_hashes:
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", str(accelerator.num_processes)))
        verify_shards(folder, manifest, accelerator.local_process_index, local_world)
    file = folder / manifest.tokenizer
    tokenizer = load_tokenizer(str(file) if file.is_file() else manifest.tokenizer)
    if tokenizer.sha256 != manifest.tokenizer_sha256:
        cure = "is not the tokenizer that the shards were made with; put that one back or prepare the data again"
        raise UserError("tokenizer", file, cure)
    stream = TokenStream(folder, manifest, "train")
    if count_windows(len(stream), config.model.block_size) == 0:
        cure = f"a window needs {config.model.block_size + 1} tokens, the training split has {len(stream)}"
        raise UserError("data.path", config.data.path, f"{cure}; use more text or a smaller model.block_size")
    return manifest, tokenizer, stream


def _find_progress(
    checkpoints: CheckpointFolder, config: TrainingConfig, manifest: Manifest, steps: int
) -> tuple[Progress | None, int]:
    """Where the run goes on, and the length of its schedule."""
    progress = find_progress(checkpoints)
    if progress is None:
        return None, config.optim.decay_steps or max(steps, config.optim.warmup_steps + 1)
    decay_steps = config.optim.decay_steps or progress.config["optim"]["decay_steps"]
    resumed = config.model_copy(update={"optim": config.optim.model_copy(update={"decay_steps": decay_steps})})
    check_resumable(progress.config, progress.state["data_manifest"], resumed, manifest.hash)
    return progress, decay_steps


def _present(checkpoints: CheckpointFolder | None) -> CheckpointFolder:
    assert checkpoints is not None, "only the main process comes here"
    return checkpoints
