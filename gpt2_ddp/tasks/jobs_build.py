"""Everything before the first step of a supervised job: processes, data, model and optimizer, where the run goes on."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from gpt2_ddp.config.cli import dump
from gpt2_ddp.config.jobs import JobConfig, JobOptimConfig
from gpt2_ddp.data.loader import FIRST_DIGEST, Order
from gpt2_ddp.errors import UserError
from gpt2_ddp.processes.ddp import share_buffers
from gpt2_ddp.processes.launch import start_run
from gpt2_ddp.processes.ranks import check_ranks_agree, on_main
from gpt2_ddp.run.checkpoint import CheckpointFolder
from gpt2_ddp.run.folder import RunFolder, differences, open_run
from gpt2_ddp.run.resume import Progress, find_progress, restore_optimizer, restore_weights
from gpt2_ddp.run.tracking import new_run_id
from gpt2_ddp.tasks.samples import Plan, Samples, score_samples


@dataclass(frozen=True)
class Job:
    """What one supervised job has of its own.

    Args:
        model: plain, fp32, on the CPU; inputs -> outputs.
        train: samples to train on.
        test: samples to score.
        losses: (outputs fp32, targets) -> fp32 [batch], each sample's loss.
        scores: (outputs, targets) -> further scores of each sample, [batch] by name.
        transform: (inputs as stored, training) -> what the model takes; on the device, a batch at a time.
    """

    model: nn.Module
    train: Samples
    test: Samples
    losses: Callable[[Tensor, Tensor], Tensor]
    scores: Callable[[Tensor, Tensor], dict[str, Tensor]] = lambda outputs, targets: {}
    transform: Callable[[Tensor, bool], Tensor] = lambda inputs, training: inputs


@dataclass
class FitState:
    """What a run has done so far; a checkpoint's state.json begins with it.

    Args:
        step: optimizer steps taken.
        samples: samples trained on.
        order_digest: running SHA-256 over the samples of every step.
        epoch_loss: sum of the losses of the present epoch's samples so far.
        skipped: steps whose gradient was not finite, so that they changed nothing.
        run_id: the tracker's id of this run.
    """

    step: int = 0
    samples: int = 0
    order_digest: str = FIRST_DIGEST
    epoch_loss: float = 0.0
    skipped: int = 0
    run_id: str = ""

    @classmethod
    def of(cls, saved: dict[str, Any]) -> "FitState":
        """The state in a checkpoint's state.json, which holds more."""
        return cls(**{name: saved[name] for name in asdict(cls())})


@dataclass
class Fitting:
    """A job that is ready to step. `run` and `checkpoints` exist on the main process alone."""

    config: JobConfig
    accelerator: Accelerator
    job: Job
    data_hash: str
    run: RunFolder | None
    checkpoints: CheckpointFolder | None
    plan: Plan
    lr: float
    model: nn.Module
    plain_optimizer: Optimizer
    optimizer: AcceleratedOptimizer
    state: FitState
    metrics: dict[str, float]

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.config.train.epochs * self.plan.steps_per_epoch

    def evaluate(self) -> dict[str, float | int]:
        """The test samples' scores, `val_` before their names, with the main process's BatchNorm statistics."""
        share_buffers(self.accelerator, self.job.model)
        job, model = self.job, self.accelerator.unwrap_model(self.model)

        def score(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
            outputs = model(job.transform(inputs, False)).float()
            return {"loss": job.losses(outputs, targets), **job.scores(outputs, targets)}

        found = score_samples(self.accelerator, model, job.test, score, self.config.eval.batch_size)
        return {f"val_{name}": value for name, value in found.items()} | {"val_samples": len(job.test.targets)}

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
            "metrics": self.metrics,
            "scaler": scaler.state_dict() if scaler else None,
            "global_batch_size": self.plan.global_batch_size,
            "lr": self.lr,
            "data_hash": self.data_hash,
            "processes": self.accelerator.num_processes,
            "versions": {"torch": torch.__version__},
        }
        self.checkpoints.save(self.job.model, self.plain_optimizer, state, dump(self.config))


def build_fitting(
    config: JobConfig, make_job: Callable[[JobConfig, Accelerator], Job], data_parallel: bool = False
) -> Fitting:
    """Brings all ranks to the same step of the same run.

    Args:
        make_job: reads the data and makes the model, on every rank alike; torch is seeded before.
        data_parallel: one process splits each batch among the machine's GPUs (nn.DataParallel), for comparison.

    Raises:
        UserError: for whatever the user has to mend, on every rank alike, before any long work.
    """
    accelerator = _start_processes(config, data_parallel)
    scale = accelerator.num_processes if config.scale_with_processes else 1
    batch_size, lr = config.train.global_batch_size * scale, config.optim.lr * scale
    if batch_size % accelerator.num_processes:
        cure = f"should be a multiple of the {accelerator.num_processes} processes that share it"
        raise UserError("train.global_batch_size", batch_size, cure)
    run = open_run(accelerator, config)
    checkpoints = CheckpointFolder(run.checkpoints, config.checkpoint.keep_last) if run else None
    torch.manual_seed(config.seed)
    job = make_job(config, accelerator)
    data_hash = job.train.sha256() + job.test.sha256()
    data = config.model_dump().get("data", {})
    check_ranks_agree(dump(config), "data", data.get("path") or data.get("name") or "generated", data_hash)
    progress = on_main(accelerator, lambda: _find_progress(_present(checkpoints), config, (batch_size, lr), data_hash))
    state = FitState.of(progress.state) if progress else FitState(run_id=on_main(accelerator, new_run_id))
    if run:
        run.write_config(config)
        run.cut_metrics(state.step if progress else -1)
    if progress:
        restore_weights(accelerator, progress, job.model)
    plain_model = job.model.to(accelerator.device)
    plain_optimizer = build_job_optimizer(plain_model, config.optim, lr)
    model, optimizer = accelerator.prepare(
        nn.DataParallel(plain_model) if data_parallel else plain_model, plain_optimizer
    )
    if progress:
        restore_optimizer(accelerator, progress, plain_model, plain_optimizer)
    order = Order(config.seed, len(job.train.targets))
    return Fitting(
        config=config,
        accelerator=accelerator,
        job=job,
        data_hash=data_hash,
        run=run,
        checkpoints=checkpoints,
        plan=Plan(order, batch_size, accelerator.num_processes, config.train.micro_batch_size),
        lr=lr,
        model=model,
        plain_optimizer=plain_optimizer,
        optimizer=optimizer,
        state=state,
        metrics=progress.state["metrics"] if progress else {},
    )


def build_job_optimizer(model: nn.Module, config: JobOptimConfig, lr: float) -> Optimizer:
    """The fused optimizer over all parameters of the plain model."""
    parameters = list(model.parameters())
    if config.name == "sgd":
        optimizer = SGD(parameters, lr, config.momentum, weight_decay=config.weight_decay, fused=True)
        if config.momentum:  # there from the start: a first step that is skipped would leave it uninitialised
            for parameter in parameters:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return optimizer
    kind = Adam if config.name == "adam" else AdamW
    return kind(parameters, lr, weight_decay=config.weight_decay, fused=True)


def _start_processes(config: JobConfig, data_parallel: bool) -> Accelerator:
    accelerator = start_run(config, config.launch.backend)
    if config.launch.threads:
        torch.set_num_threads(config.launch.threads)
    if data_parallel and accelerator.num_processes > 1:
        raise UserError("processes", accelerator.num_processes, "DataParallel has one process; start only one")
    if config.launch.processes not in (None, accelerator.num_processes):
        cure = f"the launcher started {accelerator.num_processes}; leave one of the two away"
        raise UserError("launch.processes", config.launch.processes, cure)
    return accelerator


def _find_progress(
    checkpoints: CheckpointFolder, config: JobConfig, scaled: tuple[int, float], data_hash: str
) -> Progress | None:
    """Where the run goes on.

    Raises:
        UserError: naming every field that has to be the run's own, and is not. Epochs, micro-batch, processes,
            evaluation, logging and checkpoint settings may change.
    """
    progress = find_progress(checkpoints)
    if progress is None:
        return None
    saved = progress.state
    now = config.model_dump(mode="json")
    fixed = [(section, name) for section in ("data", "model", "optim") for name in now.get(section, {})]
    fixed = [("seed",), *[path for path in fixed if path != ("data", "path")], ("train", "global_batch_size")]
    mistakes = differences(progress.config, now, fixed)
    if not mistakes and (saved["global_batch_size"], saved["lr"]) != scaled:
        cure = f"the run's batch of {saved['global_batch_size']} would become {scaled[0]}; start as many processes"
        mistakes += UserError("scale_with_processes", config.scale_with_processes, f"{cure} as before").mistakes
    if not mistakes and saved["data_hash"] != data_hash:
        cure = "are not the data that the run was started with; give those back, or choose another run_name"
        mistakes += UserError("data", now.get("data", {}).get("path"), cure).mistakes
    if mistakes:
        raise UserError.join(mistakes)
    return progress


def _present(checkpoints: CheckpointFolder | None) -> CheckpointFolder:
    assert checkpoints is not None, "only the main process comes here"
    return checkpoints
