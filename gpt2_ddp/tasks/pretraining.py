"""Pretraining a GPT on token shards: what this task has of its own (see `run.task.Task`)."""

import math
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt2_ddp.config.cli import complete, load
from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.config.training import ModelConfig, TrainingConfig
from gpt2_ddp.data.feed import Feed, MicroBatch, interleaved
from gpt2_ddp.data.hashes import verify_shards
from gpt2_ddp.data.prepare import default_output, prepare
from gpt2_ddp.data.shards import MANIFEST, Manifest, TokenStream, read_manifest
from gpt2_ddp.data.tokenizer import Tokenizer, check_tokenizer, load_tokenizer
from gpt2_ddp.data.windows import Windows, split_batch
from gpt2_ddp.errors import UserError
from gpt2_ddp.model.evaluate import evaluate
from gpt2_ddp.model.generate import sample_text
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.model.optim import build_optimizer, lr_at
from gpt2_ddp.processes.ranks import PREPARATION, check_ranks_agree, on_every_rank, on_main
from gpt2_ddp.processes.watch import FIRST_TIME, Watch
from gpt2_ddp.run.checkpoint import MODEL, Checkpoint, find_checkpoint
from gpt2_ddp.run.snapshot import fit_weights
from gpt2_ddp.run.task import Due, Poll, Scores


class Pretraining:
    """A GPT that learns to predict the next token; the loss is a mean over tokens.

    The feed's items are windows of block_size tokens. A step has G of them, and may straddle two epochs; rank r
    computes, in micro-batch m of b windows, those at (m·W + r)·b and the b - 1 after it.
    """

    unit = "tokens"

    def __init__(self, config: TrainingConfig, accelerator: Accelerator, saved: Checkpoint | None):
        self.config, self.accelerator, self._saved = config, accelerator, saved
        self.units_per_item = config.model.block_size
        processes, windows = accelerator.num_processes, config.global_batch_windows
        self._share = interleaved(processes, split_batch(windows, processes, config.train.micro_batch_size))
        self._begin_with = None
        if saved:
            self._settle_schedule(saved.config.get("optim", {}).get("decay_steps"))
        elif config.train.init_from:
            start = Path(config.train.init_from)
            self._begin_with = on_main(accelerator, lambda: find_gpt(start, "train.init_from", weights=False)).path

    def total_steps(self, epoch_size: int | None) -> int | None:
        """`train.steps`, or those of `train.epochs`."""
        epochs = self.config.train.epochs
        if epochs is None or epoch_size is None:
            return None if epochs else self.config.train.steps
        return math.ceil(epochs * epoch_size / self.config.global_batch_windows)

    def load(self, watch: Watch) -> None:
        """Opens the shards, which are prepared first where there are none and `data.prepare` says how; checks them."""
        config, accelerator = self.config, self.accelerator
        folder, block_size = Path(config.data.path), config.model.block_size
        watch.at("preparing data", allowance=PREPARATION.total_seconds())
        on_every_rank(accelerator, lambda: _prepare_missing_data(accelerator, config), patience=PREPARATION)
        self.manifest, self.tokenizer, stream, self.val_stream = on_every_rank(accelerator, lambda: _open_data(config))
        check_ranks_agree("data.path", str(folder), self.manifest.hash)
        if self._saved and self._saved.state.get("data_manifest", self.manifest.hash) != self.manifest.hash:
            cure = "its tokens are not the ones that the run was started with"
            raise UserError("data.path", folder, f"{cure}; give those back, or choose another run_name")
        if config.data.verify_hashes != "never":
            watch.at("hashing", allowance=PREPARATION.total_seconds())
            local_world = int(os.environ.get("LOCAL_WORLD_SIZE", str(accelerator.num_processes)))
            part, remember = accelerator.local_process_index, config.data.verify_hashes == "changed"
            on_every_rank(accelerator, lambda: verify_shards(folder, self.manifest, part, local_world, remember))
        windows = Windows(stream, block_size)
        step_size, workers = config.global_batch_windows, config.data.workers
        self.feed = Feed(windows, config.seed, step_size, self._share, accelerator, workers=workers)
        self._settle_schedule(max(self.total_steps(len(windows)) or 0, config.optim.warmup_steps + 1))
        file = folder / self.manifest.tokenizer
        self.files = (file,) if file.is_file() else ()

        watch.at("building", allowance=FIRST_TIME)
        torch.manual_seed(config.seed)
        self.model = GPT(config.model, self.manifest.vocab_size)
        self.model.activation_checkpointing = config.train.activation_checkpointing
        self.flops_per_unit = self.model.flops_per_token()
        if start := self._begin_with:  # of the main process; DDP gives them to the others
            on_main(accelerator, lambda: load_weights(find_checkpoint(start, "train.init_from"), self.model))

    def build_optimizer(self) -> Optimizer:
        return build_optimizer(self.model, self.config.optim)

    def lr_at(self, step: int) -> float:
        return lr_at(step, self.config.optim)

    def loss(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        (tokens,) = batch.rows  # [b, T + 1]
        return model(tokens[:, :-1], tokens[:, 1:], reduction="sum")

    def due(self, step: int, last: bool) -> Due:
        config = self.config
        evaluate = self.val_stream is not None and (last or step % config.eval.every == 0)
        return Due(
            log=evaluate or last or self.feed.ended_epoch or step % config.tracking.log_every == 0,
            evaluate=evaluate,
            save=last or step % config.checkpoint.every == 0,
            sample=config.tracking.sample_every > 0 and (last or step % config.tracking.sample_every == 0),
        )

    def evaluate(self, model: nn.Module, poll: Poll) -> Scores:
        if self.val_stream is None:
            return {}
        config, lengths = self.config, self.tokenizer.token_bytes()
        size, batch_size, tokens = config.model.block_size, config.eval.batch_size, config.eval.tokens
        found = evaluate(self.accelerator, model, self.val_stream, size, batch_size, tokens, lengths, poll)
        return {"val_loss": found.loss, "val_tokens": found.tokens, "val_bits_per_byte": found.bits_per_byte}

    def sample(self, poll: Poll) -> str:
        return sample_text(self.model, self.tokenizer, self.config.tracking.sample_prompt, 200, self.config.seed, poll)

    def state(self) -> dict[str, Any]:
        """What the data are."""
        return {
            "tokenizer": self.manifest.tokenizer,
            "tokenizer_sha256": self.manifest.tokenizer_sha256,
            "vocab_size": self.manifest.vocab_size,
            "data_manifest": self.manifest.hash,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Nothing: `load` has compared the data."""

    def _settle_schedule(self, decay_steps: int | None) -> None:
        """Gives a schedule without a length this one: that of the first start."""
        if self.config.optim.decay_steps is None and decay_steps is not None:
            optim = self.config.optim.model_copy(update={"decay_steps": decay_steps})
            self.config = self.config.model_copy(update={"optim": optim})


def find_gpt(path: Path, field: str, weights: bool = True) -> Checkpoint:
    """The GPT's checkpoint that a user means (`find_checkpoint`).

    Raises:
        UserError: also when it is of another kind of run, which `field` has no use for.
    """
    found = find_checkpoint(path, field, weights)
    if found.kind != "gpt2":
        cure = f"is of a {found.kind} run, and a GPT is wanted; scripts/evaluate.py gives such a run's scores"
        raise UserError(field, path, cure)
    return found


def load_model(checkpoint: Checkpoint) -> tuple[GPT, Tokenizer]:
    """The model (fp32, on the CPU, in evaluation mode) and the tokenizer of a GPT's checkpoint.

    Raises:
        UserError: when the tokenizer cannot be had, or the weights do not fit the configuration.
    """
    settings, _ = complete(TrainingConfig, checkpoint.config)
    name = checkpoint.state["tokenizer"]
    file = checkpoint.path / name
    tokenizer = load_tokenizer(str(file) if file.is_file() else name)
    model = GPT(ModelConfig(**settings["model"]), checkpoint.state["vocab_size"])
    load_weights(checkpoint, model)
    return model.eval(), tokenizer


def load_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Copies a checkpoint's weights into the plain module. Raises: UserError when names or shapes differ."""
    fit_weights(load_file(checkpoint.path / MODEL), model, checkpoint.path)


def _prepare_missing_data(accelerator: Accelerator, config: TrainingConfig) -> None:
    """Makes the shards where there are none yet: one process per node, and on a shared disk one of all."""
    folder = Path(config.data.path)
    if config.data.prepare and not os.path.exists(folder / MANIFEST):
        recipe = load(PrepareConfig, ["--config", config.data.prepare])
        output = Path(recipe.output or default_output(recipe))
        if os.path.realpath(output) != os.path.realpath(folder):  # a mistyped path must not become another corpus
            cure = f"has no {MANIFEST}, and data.prepare ({config.data.prepare}) writes to {output}; prepare it first"
            raise UserError("data.path", folder, cure)
        if accelerator.is_local_main_process:
            prepare(recipe)


def _open_data(config: TrainingConfig) -> tuple[Manifest, Tokenizer, TokenStream, TokenStream | None]:
    """The tokenizer and both splits, by their small files: nothing is hashed but the tokenizer."""
    folder = Path(config.data.path)
    manifest = read_manifest(folder)
    if not manifest.tokens("train"):
        raise UserError("data.path", folder, "has no training split; prepare it with prepare_data.py")
    file = folder / manifest.tokenizer
    tokenizer = load_tokenizer(str(file) if os.path.exists(file) else manifest.tokenizer)
    if tokenizer.sha256 != manifest.tokenizer_sha256:
        cure = "is not the tokenizer that the shards were made with; put that one back or prepare the data again"
        raise UserError("tokenizer", file, cure)
    check_tokenizer(tokenizer, manifest, folder)
    stream = TokenStream(folder, manifest, "train")
    if not len(Windows(stream, config.model.block_size)):
        cure = f"a window needs {config.model.block_size + 1} tokens, the training split has {len(stream)}"
        raise UserError("data.path", config.data.path, f"{cure}; use more text or a smaller model.block_size")
    return manifest, tokenizer, stream, TokenStream(folder, manifest, "val") if manifest.tokens("val") > 1 else None
