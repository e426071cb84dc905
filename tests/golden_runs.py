"""Golden runs: tiny runs of every training job, and what the first trainers made of them.

`golden/runs.json` holds the metrics and the final weights that two separate training loops, one for GPT and one for the
small jobs, once came to; whatever trains now has to come to the same. Everything a case depends on is spelled out here
or committed in `golden/`: no case may change, or what was recorded is worth nothing.
"""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from runs import rows
from safetensors.torch import load_file

from gpt2_ddp.config.cli import read_yaml
from gpt2_ddp.config.jobs import ClassifierConfig, RegressionConfig, TransformerConfig
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.state import State

GOLDEN = Path(__file__).parent / "golden"
CORPUS = GOLDEN / "corpus"
TIMINGS = ("tokens_per_second", "samples_per_second", "mfu", "data_share", "memory")
STATE = ("step", "position", "samples", "order_digest", "tokens", "skipped", "epoch_loss", "val_loss")
CIFAR = (37, 13)
"""Training and test images of the cases with images: `write_cifar(folder, *CIFAR)`."""


class Case(NamedTuple):
    """A run on each of several numbers of processes.

    Args:
        kind: gpt2, or a small job of KINDS.
        worlds: numbers of processes.
        changes: dotted names in its configuration that differ from the kind's.
        exact: sums are scaled by powers of two alone, so that any order of scaling and summing a rank's own losses
            gives the same bits.
        slow: those of the worlds that only `make test-slow` runs, as others are much like them or quicker.
    """

    kind: str
    worlds: tuple[int, ...]
    changes: dict[str, Any]
    exact: bool
    slow: tuple[int, ...] = ()


KINDS: dict[str, tuple[type[RunConfig], dict[str, Any]]] = {
    "gpt2": (TrainingConfig, {
        "model.n_layer": 1, "model.n_head": 2, "model.n_embd": 16, "optim.lr": 3e-3, "optim.min_lr": 3e-4,
        "optim.warmup_steps": 3, "train.steps": 10, "eval.every": 5, "eval.tokens": 500, "checkpoint.every": 5}),
    "regression": (RegressionConfig, {
        "data.points": 101, "data.test_points": 31, "optim.momentum": 0.9, "train.global_batch_size": 12}),
    "mlp": (ClassifierConfig, {
        "data.points": 101, "data.test_points": 31, "model.hidden": (30, 20), "optim.name": "adam",
        "train.global_batch_size": 24, "train.micro_batch_size": 4, "train.mixed_precision": "bf16"}),
    "lenet": (ClassifierConfig, {
        "data.name": "cifar100", "data.augment": True, "model.name": "lenet", "optim.name": "adam", "optim.lr": 1e-3,
        "train.global_batch_size": 12, "train.micro_batch_size": 4}),
    # a small rate: its rounding errors grow with it
    "resnet18": (ClassifierConfig, {
        "data.name": "cifar100", "model.name": "resnet18", "optim.lr": 3e-4, "train.global_batch_size": 12,
        "train.micro_batch_size": 4, "checkpoint.save_every": 2}),
    "transformer": (TransformerConfig, {"data.sequences": 19, "model.dropout": 0.1, "train.global_batch_size": 6}),
}  # fmt: skip
ALL = {"seed": 1337, "train.mixed_precision": "no", "train.device": "cpu", "tracking.log_every": 1}
JOB = {"train.epochs": 2, "eval.batch_size": 8}
"""What all cases, and what those of small jobs have in common."""


def _gpt2(block_size: int, windows: int, micro_batch_size: int, **others: Any) -> dict[str, Any]:
    return {
        "model.block_size": block_size,
        "train.global_batch_tokens": windows * block_size,
        "train.micro_batch_size": micro_batch_size,
        **{name.replace("__", "."): value for name, value in others.items()},
    }


CASES: dict[str, Case] = {
    "even": Case("gpt2", (1, 2), _gpt2(16, 16, 4), exact=True, slow=(2,)),
    "even-dropout": Case("gpt2", (1, 2), _gpt2(16, 16, 4, model__dropout=0.1), exact=True, slow=(1,)),
    "even-bf16": Case("gpt2", (1, 2), _gpt2(16, 16, 4, train__mixed_precision="bf16"), exact=True, slow=(1,)),
    # DDP divides by 3 where it reads a gradient from its bucket, and multiplies by 1 / 3 where it copies it there
    "even3-dropout": Case("gpt2", (3,), _gpt2(16, 24, 4, model__dropout=0.1), exact=False, slow=(3,)),
    "odd": Case("gpt2", (1, 2, 3), _gpt2(15, 18, 3), exact=False, slow=(1, 2, 3)),
    "odd-dropout": Case("gpt2", (1, 2, 3), _gpt2(15, 18, 3, model__dropout=0.1), exact=False, slow=(1, 2)),
    # 750 windows, so that steps 3, 6 and 9 lie in two epochs; and all of the validation split, its tail too
    "epochs": Case("gpt2", (1, 2), _gpt2(16, 256, 32, eval__tokens=None), exact=True, slow=(1,)),
    "regression-even": Case(
        "regression", (1, 2), {"data.points": 128, "data.test_points": 32, "train.global_batch_size": 16}, True, (1, 2)
    ),
    "regression": Case("regression", (1, 2), {}, exact=False, slow=(1, 2)),
    # last steps of one sample
    "regression-lone": Case("regression", (1, 2), {"data.points": 97}, exact=False, slow=(1,)),
    "mlp-bf16": Case("mlp", (1, 2), {}, exact=False, slow=(1,)),
    "lenet-augment": Case("lenet", (1, 2), {}, exact=False, slow=(2,)),
    "resnet18": Case("resnet18", (1, 2), {}, exact=False, slow=(1, 2)),
    "transformer-dropout": Case("transformer", (1, 2), {}, exact=False, slow=(1,)),
}

LONGER = CASES["even-dropout"].changes | {"optim.decay_steps": 20, "checkpoint.keep_last": 2}
RESUMED: dict[str, tuple[Case, dict[str, Any]]] = {
    "gpt2_run": (Case("gpt2", (1, 2), LONGER, exact=True, slow=(2,)), {"train.steps": 20}),
    "regression_run": (Case("regression", (1, 2), {}, exact=False, slow=(1,)), {"train.epochs": 4}),
}
"""Run folders in `golden/`, which one process left halfway: the case that made them, and what takes them to their end.
The case's worlds are those that go on with it."""


def make_config(case: Case, output_dir: Path | str, cifar: Path | str | None = None) -> RunConfig:
    """The configuration of a case. `cifar`: folder of the images, for the kinds that need them."""
    command, own = KINDS[case.kind]
    data = {"data.path": str(CORPUS)} if case.kind == "gpt2" else JOB
    if own.get("data.name") == "cifar100":
        assert cifar is not None, "this case needs images"
        data = data | {"data.path": str(cifar)}
    folder = {"output_dir": str(output_dir), "run_name": "run"}
    return command.model_validate(change(folder, ALL | data | own | case.changes))


def change(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Nested values with those of dotted names replaced."""
    values = {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}
    for name, value in changes.items():
        section, _, key = name.rpartition(".")
        (values.setdefault(section, {}) if section else values)[key] = value
    return values


def summary(run: Path) -> dict[str, Any]:
    """What a run came to: its metrics but for timings, and its newest checkpoint's state and weights."""
    checkpoint = max((run / "checkpoints").glob("step-*"))
    state, config = State.parse((checkpoint / "state.json").read_text()), read_yaml(str(run / "config.yaml"), "run")
    items = state.feed.consumed
    units = {"tokens": items * config["model"]["block_size"]} if state.kind == "gpt2" else {"samples": items}
    found = state.record | units | {"epoch_loss": state.losses.epoch[0]}
    return {
        "rows": [{name: value for name, value in row.items() if name not in TIMINGS} for row in rows(run)],
        "state": {name: found[name] for name in STATE if name in found},
        "weights": weights(load_file(checkpoint / "model.safetensors")),
    }


def weights(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Of a model's tensors, a SHA-256 over names and bytes, and of each its size, 2-norm and sum in fp64."""
    digest = hashlib.sha256()
    sizes = {}
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
        exact = tensor.double()
        sizes[name] = [tensor.numel(), exact.norm().item(), exact.sum().item()]
    return {"sha256": digest.hexdigest(), "tensors": sizes}


def draws() -> dict[str, str]:
    """SHA-256 of what torch's generator gives on this machine, whose kernels differ between processors.

    Where `masks` are others than the recorder's, dropout and crops are others, and so is all that follows. Where
    `normals` are, the points of a regression differ in their last bits, and a run may not go on with them.
    """
    generator_state = torch.get_rng_state()
    torch.manual_seed(0)
    masks = (F.dropout(torch.ones(3, 1001), 0.1) > 0, torch.randint(9, (2, 50)), torch.rand(50) < 0.5)
    normals = (torch.randn(2, 101), torch.randn(2, 31))
    torch.set_rng_state(generator_state)
    return {
        name: hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in drawn)).hexdigest()
        for name, drawn in (("masks", masks), ("normals", normals))
    }
