"""Golden runs: tiny runs of every training job, and what the first trainers made of them.

`golden/runs.json` holds the metrics and the final weights that two separate training loops, one for
GPT and one for the small jobs, once came to; whatever trains now has to come to the same.
Everything a case depends on is spelled out here or committed in `golden/`: no case may change, or
what was recorded is worth nothing.
"""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from runs import changed as change
from runs import rows
from safetensors.torch import load_file

from gpt2_ddp.checkpoint.verify import parse_state
from gpt2_ddp.config.base import flat
from gpt2_ddp.config.cli import read_yaml
from gpt2_ddp.config.jobs import ClassifierConfig, RegressionConfig, TransformerConfig
from gpt2_ddp.config.training import TrainingConfig

GOLDEN = Path(__file__).parent / "golden"
CORPUS = GOLDEN / "corpus"
TIMINGS = ("tokens_per_second", "samples_per_second", "mfu", "data_share", "memory")
STATE = (
    "step",
    "position",
    "samples",
    "order_digest",
    "tokens",
    "skipped",
    "epoch_loss",
    "val_loss",
)
CIFAR = (37, 13)
"""Training and test images of the cases with images: `write_cifar(folder, *CIFAR)`."""


class Case(NamedTuple):
    """A run on each of several numbers of processes.

    Args:
        kind: gpt2, or a small job of KINDS.
        worlds: numbers of processes.
        changes: dotted names in its configuration that differ from the kind's.
        slow: those of the worlds that only `make test-slow` runs, as others are much like them or
            quicker.
    """

    kind: str
    worlds: tuple[int, ...]
    changes: dict[str, Any]
    slow: tuple[int, ...]


FIELDS = {
    "gpt2": {
        "model": {"n_layer": 1, "n_head": 2, "n_embd": 16},
        "optim": {"lr": 0.003, "min_lr": 0.0003, "warmup_steps": 3},
        "train": {"steps": 10},
        "eval": {"every": 5, "tokens": 500},
        "checkpoint": {"every": 5},
    },
    "regression": {
        "data": {"points": 101, "test_points": 31},
        "optim": {"momentum": 0.9},
        "train": {"global_batch_size": 12},
    },
    "mlp": {
        "data": {"points": 101, "test_points": 31},
        "model": {"hidden": [30, 20]},
        "optim": {"name": "adam"},
        "train": {"global_batch_size": 24, "micro_batch_size": 4, "mixed_precision": "bf16"},
    },
    "lenet": {
        "data": {"name": "cifar100", "augment": True},
        "model": {"name": "lenet"},
        "optim": {"name": "adam", "lr": 0.001},
        "train": {"global_batch_size": 12, "micro_batch_size": 4},
    },
    "resnet18": {
        "data": {"name": "cifar100"},
        "model": {"name": "resnet18"},
        "optim": {"lr": 0.0003},
        "train": {"global_batch_size": 12, "micro_batch_size": 4},
        "checkpoint": {"every": 2},
    },
    "transformer": {
        "data": {"sequences": 19},
        "model": {"dropout": 0.1},
        "train": {"global_batch_size": 6},
    },
}
COMMANDS = {
    "gpt2": TrainingConfig,
    "regression": RegressionConfig,
    "transformer": TransformerConfig,
}
KINDS = {
    kind: (COMMANDS.get(kind, ClassifierConfig), flat(fields)) for kind, fields in FIELDS.items()
}
ALL = {"seed": 1337, "train.mixed_precision": "no", "train.device": "cpu", "tracking.log_every": 1}
JOB = {"train.epochs": 2, "eval.batch_size": 8}
"""What all cases, and what those of small jobs have in common."""


SIXTEEN = {
    "model.block_size": 16,
    "train.global_batch_tokens": 256,
    "train.micro_batch_size": 4,
}
FIFTEEN = {
    "model.block_size": 15,
    "train.global_batch_tokens": 270,
    "train.micro_batch_size": 3,
}
DROPOUT = {"model.dropout": 0.1}
CASES = {
    "even": Case("gpt2", worlds=(1, 2), slow=(2,), changes=SIXTEEN),
    "even-dropout": Case("gpt2", worlds=(1, 2), slow=(1,), changes=SIXTEEN | DROPOUT),
    "even-bf16": Case(
        "gpt2", worlds=(1, 2), slow=(1,), changes=SIXTEEN | {"train.mixed_precision": "bf16"}
    ),
    "even3-dropout": Case(
        "gpt2",
        worlds=(3,),
        slow=(3,),
        changes=SIXTEEN | DROPOUT | {"train.global_batch_tokens": 384},
    ),
    "odd": Case("gpt2", worlds=(1, 2, 3), slow=(1, 2, 3), changes=FIFTEEN),
    "odd-dropout": Case("gpt2", worlds=(1, 2, 3), slow=(1, 2), changes=FIFTEEN | DROPOUT),
    # 750 windows, so that steps 3, 6 and 9 lie in two epochs; and all of the validation split,
    # its tail too
    "epochs": Case(
        "gpt2",
        worlds=(1, 2),
        slow=(1,),
        changes={
            "model.block_size": 16,
            "train.global_batch_tokens": 4096,
            "train.micro_batch_size": 32,
            "eval.tokens": None,
        },
    ),
    "regression-even": Case(
        "regression",
        worlds=(1, 2),
        slow=(1, 2),
        changes={"data.points": 128, "data.test_points": 32, "train.global_batch_size": 16},
    ),
    "regression": Case("regression", worlds=(1, 2), slow=(1, 2), changes={}),
    # last steps of one sample
    "regression-lone": Case("regression", worlds=(1, 2), slow=(1,), changes={"data.points": 97}),
    "mlp-bf16": Case("mlp", worlds=(1, 2), slow=(1,), changes={}),
    "lenet-augment": Case("lenet", worlds=(1, 2), slow=(2,), changes={}),
    "resnet18": Case("resnet18", worlds=(1, 2), slow=(1, 2), changes={}),
    "transformer-dropout": Case("transformer", worlds=(1, 2), slow=(1,), changes={}),
}
LONGER = CASES["even-dropout"].changes | {"optim.decay_steps": 20, "checkpoint.keep_last": 2}
RESUMED = {
    "gpt2_run": (CASES["even"]._replace(changes=LONGER), {"train.steps": 20}),
    "regression_run": (CASES["regression"]._replace(slow=(1,)), {"train.epochs": 4}),
}
"""Run folders in `golden/`, which one process left halfway: the case that made them, and what takes
them to their end. The case's worlds are those that go on with it."""


def make_config(case, output_dir, cifar=None):
    """The configuration of a case. `cifar`: folder of the images, for the kinds that need them."""
    command, own = KINDS[case.kind]
    data = {"data.path": str(CORPUS)} if case.kind == "gpt2" else JOB
    if own.get("data.name") == "cifar100":
        assert cifar is not None, "this case needs images"
        data = data | {"data.path": str(cifar)}
    folder = {"output_dir": str(output_dir), "run_name": "run"}
    return command.model_validate(change(folder, ALL | data | own | case.changes))


def summary(run):
    """What a run came to: its metrics but for timings,
    and its newest checkpoint's state and weights."""
    checkpoint = max((run / "checkpoints").glob("step-*"))
    state = parse_state((checkpoint / "state.json").read_text())
    config = read_yaml(str(run / "config.yaml"), "run")
    items = state.feed.consumed
    units = {"samples": items}
    if state.kind == "gpt2":
        units = {"tokens": items * config["model"]["block_size"]}
    found = state.record | units | {"epoch_loss": state.losses.epoch[0]}
    return {
        "rows": [
            {name: value for name, value in row.items() if name not in TIMINGS} for row in rows(run)
        ],
        "state": {name: found[name] for name in STATE if name in found},
        "weights": weights(load_file(checkpoint / "model.safetensors")),
    }


def weights(tensors):
    """Of a model's tensors, of each its size, 2-norm and sum in fp64."""
    exact = {name: tensor.double() for name, tensor in sorted(tensors.items())}
    return {
        "tensors": {
            name: [of.numel(), of.norm().item(), of.sum().item()] for name, of in exact.items()
        }
    }


def draws():
    """SHA-256 of what torch's generator gives on this machine, whose kernels differ between
    processors.

    Where `masks` are others than the recorder's, dropout and crops are others, and so is all that
    follows. Where `normals` are, the points of a regression differ in their last bits, and a run
    may not go on with them.
    """
    generator_state = torch.get_rng_state()
    torch.manual_seed(0)
    masks = (
        F.dropout(torch.ones(3, 1001), 0.1) > 0,
        torch.randint(9, (2, 50)),
        torch.rand(50) < 0.5,
    )
    normals = (torch.randn(2, 101), torch.randn(2, 31))
    torch.set_rng_state(generator_state)
    return {
        name: hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in drawn)).hexdigest()
        for name, drawn in (("masks", masks), ("normals", normals))
    }
