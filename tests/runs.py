"""Configurations of runs that take seconds, functions that
train them on ranks, and what is done to their records."""

import contextlib
import hashlib
import io
import json
import math
import os
import signal
from contextlib import contextmanager
from copy import deepcopy
from functools import partial

import torch
from ranks import run_ranks
from safetensors.torch import load_file

from gpt2_ddp.checkpoint.format import MANIFEST, list_checkpoints, seal, steps_of
from gpt2_ddp.checkpoint.store import CheckpointStore
from gpt2_ddp.config.base import flat
from gpt2_ddp.config.jobs import ClassifierConfig, JobConfig, RegressionConfig, TransformerConfig
from gpt2_ddp.config.run import KeepConfig
from gpt2_ddp.config.tools import VerifyConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.manifest import content_sha256
from gpt2_ddp.files import read_json, sha256_file
from gpt2_ddp.records.rows import field_of
from gpt2_ddp.records.run_folder import RunFolder, RunLog
from gpt2_ddp.reports.verify import verify_run
from gpt2_ddp.state import FIRST_CHAIN, FeedState, GPTData, Progress, Setup, State, next_chain

KINDS = {
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
        "train": {"global_batch_size": 48, "micro_batch_size": 16},
    },
    "resnet18": {
        "data": {"name": "cifar100"},
        "model": {"name": "resnet18"},
        "train": {"global_batch_size": 12, "micro_batch_size": 4},
    },
    "transformer": {
        "data": {"sequences": 19},
        "model": {"dropout": 0.1},
        "train": {"global_batch_size": 6},
    },
}
JOB = {
    "run_name": "run",
    "train": {"epochs": 4, "device": "cpu"},
    "tracking": {"log_every": 1},
    "eval": {"batch_size": 8},
    "checkpoint": {"background": False},  # or rows and kills would come in any order
}
GPT = {
    "run_name": "run",
    "model": {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32},
    "optim": {"lr": 0.003, "min_lr": 0.0003, "warmup_steps": 2},
    "train": {"steps": 10, "global_batch_tokens": 384, "micro_batch_size": 3, "device": "cpu"},
    "eval": {"every": 10, "tokens": 500},
    "checkpoint": {"every": 5, "background": False},
    "tracking": {"log_every": 1},
}


def job_config(kind, output_dir, changes=None):
    """A tiny job of this kind on the CPU; dotted names in `changes` differ from it."""
    command = {"regression": RegressionConfig, "transformer": TransformerConfig}.get(
        kind, ClassifierConfig
    )
    values = changed(
        deepcopy(JOB), {"output_dir": str(output_dir)} | flat(KINDS[kind]) | (changes or {})
    )
    return command.model_validate(values)


def changed(values, changes):
    """Nested values after changes of fields by their dotted names."""
    for name, value in changes.items():
        section, _, key = name.rpartition(".")
        (values.setdefault(section, {}) if section else values)[key] = value
    return values


def open_folder(run, lock=True):
    """The run folder of a small regression, which is made and locked."""
    folder = RunFolder(job_config("regression", run.parent, {"run_name": run.name}), lock)
    folder.open()
    return folder


def open_store(run, keep_last=3, background=False, lock=True):
    """The checkpoints of a run folder, which is made and locked."""
    folder = open_folder(run, lock)
    keep = KeepConfig(keep_last=keep_last, background=background)
    return CheckpointStore(folder, RunLog(folder), keep)


def state_after(step, val_loss=None, **progress):
    """The state of a small regression whose weights of this step were evaluated."""
    progress = {"step": step, "scored_at": step, "scores": {"val_loss": val_loss}} | progress
    task = {"global_batch_size": 12, "lr": 0.1, "data_hash": ""}
    return State.of("regression", progress=progress, feed={}, setup={"epoch_size": 101}, task=task)


def run_small_job(config):
    from gpt2_ddp.tasks.jobs import run_job

    return run_job(config)


def train(config):
    """Trains what the configuration describes, in this process or as one of its ranks; the outcome.
    A test's own configuration names its task."""
    from gpt2_ddp.tasks.pretraining import make_pretraining
    from gpt2_ddp.training import loop

    if isinstance(config, JobConfig):
        return run_small_job(config).outcome
    return loop.train(
        config, make_pretraining if isinstance(config, TrainingConfig) else config.task
    ).outcome


def train_all(configs, *faults):
    """Trains one run after another on the ranks of this process, with faults of
    `train_with_faults`; the outcomes. Ranks that start and connect for each run would take longer
    than its steps."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    Accelerator.end_training = lambda self: None  # which would disconnect the ranks
    outcomes = []
    for config in configs:
        outcomes.append(train_with_faults(config, *faults))
        for state in (AcceleratorState, GradientState):  # whose precision is that of the first run
            state._reset_state()
    return outcomes


def before_each_step(action):
    """From now on, each step of a training in this process begins with `action(run)`, of the
    `OpenRun`."""
    from gpt2_ddp.training import loop

    step = loop.train_step
    loop.train_step = lambda trainer: (action(trainer.run), step(trainer))[1]


def said(function, *args):
    """The value of a call, and what it printed to stdout and to stderr."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        return function(*args), out.getvalue(), errors.getvalue()


def train_with_faults(
    config,
    bad=(0, 0),
    times=math.nan,
    dies_at=0,
    sent=signal.SIGKILL,
):
    """Trains. The last rank's gradient is multiplied by `times` in each step that begins at a
    position in `bad`. The last rank is sent the signal `sent` before the `dies_at`-th step that
    this process takes. Samples are two tokens longer than the context. Returns the outcome."""
    from gpt2_ddp.model import generate
    from gpt2_ddp.training import loop

    step = loop.train_step
    sample_texts = generate.sample_texts
    taken = []

    def train_step(trainer):
        run = trainer.run
        taken.append(run.step)
        if run.accelerator.process_index < run.accelerator.num_processes - 1:
            return step(trainer)
        if len(taken) == dies_at:
            os.kill(os.getpid(), sent)
        if not bad[0] <= run.task.feed.next_position < bad[1]:
            return step(trainer)
        backward = trainer.optimizer.backward
        trainer.optimizer.backward = lambda loss, last: backward(loss * times, last)
        try:
            return step(trainer)
        finally:
            del trainer.optimizer.backward

    def sample_less(model, tokenizer, prompts, sampling, poll):
        tokens = model.config.block_size + 2
        return sample_texts(
            model, tokenizer, prompts, sampling._replace(max_new_tokens=tokens), poll
        )

    loop.train_step = train_step
    generate.sample_texts = sample_less
    try:
        return train(config)
    finally:
        loop.train_step = step
        generate.sample_texts = sample_texts


def complete(config, world=1, *faults):
    """Trains to the end on so many ranks, with faults of `train_with_faults`."""
    assert run_ranks(train_with_faults, world, config, *faults) == ["completed"] * world


def all_rows(run):
    """The rows, events included, without their chain."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "chain"} for row in found]


def rows(run):
    """What a resumed run's rows have in common with those of one that was left alone, but for their
    timings: its steps and rollbacks."""
    return [row for row in all_rows(run) if row.get("event", "rollback") == "rollback"]


def untimed(run):
    """The rows without timings: those of a resumed run
    are equal to those of the same run left alone."""
    return [
        {name: value for name, value in row.items() if field_of(name).kind != "measured"}
        for row in rows(run)
    ]


def events(run, event):
    """The rows of an event, such as `start`."""
    return [row for row in all_rows(run) if row.get("event") == event]


def status(run):
    """What status.json holds; nothing before there is one."""
    file = run / "status.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def is_intact(run, **options):
    """Whether verify_run.py finds the run intact."""
    return verify_run(VerifyConfig(run=str(run), **options)) == 0


def checkpoint_at(run, step):
    return run / f"checkpoints/step-{step:08d}"


def saved_steps(run):
    """The steps whose checkpoints a run has."""
    return steps_of(list_checkpoints(run / "checkpoints"))


def spoil(file):
    """Changes the last byte of a file."""
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def state_of(run):
    """The state in the newest checkpoint."""
    return read_json(newest_checkpoint(run) / "state.json")


def lasting_state(checkpoint):
    """The state in a checkpoint without run id and log,
    which differ between a run left alone and one resumed."""
    state = read_json(checkpoint / "state.json")
    del state["progress"]["run_id"], state["log"]
    return state


def gpt_state(step=0, epoch_size=1000, **sections):
    """The state of a GPT run after a step, with defaults for what is not given."""
    task = GPTData(
        tokenizer="none", tokenizer_sha256="", vocab_size=512, data_manifest="", micro_batch=1
    )
    sections = {
        "progress": Progress(step=step),
        "feed": FeedState(),
        "setup": Setup(epoch_size=epoch_size),
    } | sections
    return State.of("gpt2", **{"task": task} | sections)


def newest_checkpoint(run):
    return max((run / "checkpoints").glob("step-*"))


def weights(run):
    return tensors_of(newest_checkpoint(run), "model")


def tensors_of(place, what):
    """The tensors of a checkpoint's `model` or `optimizer`,
    whole: the rows of all parts, in their order."""
    parts = [load_file(file) for file in sorted(place.glob(f"{what}*.safetensors"))]
    found = {
        name: [part[name] for part in parts if name in part] for part in parts for name in part
    }
    return {name: rows[0] if len(rows) == 1 else torch.cat(rows) for name, rows in found.items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def assert_same(one, other):
    """Two runs have the same rows but for timings, and the same newest weights, bit for bit."""
    assert untimed(one) == untimed(other)
    assert same(weights(one), weights(other))


def training_config(corpus, output_dir, changes=None):
    """A tiny GPT of ten steps on the CPU, a quarter of a
    second; dotted names in `changes` differ from it."""
    own = {"output_dir": str(output_dir), "data.path": str(corpus)} | (changes or {})
    return TrainingConfig.model_validate(changed(deepcopy(GPT), own))


def edit_manifest(folder, **changes):
    """Changes values of a manifest.json, and its own hash
    with them, so that only what they mean is wrong."""
    file = folder / "manifest.json"
    values = {**json.loads(file.read_text()), **changes}
    values.pop("sha256", None)
    file.write_text(json.dumps({**values, "sha256": content_sha256(values)}))


def change(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def reseal(file):
    """Makes the manifest beside a checkpoint's file fit what is in it now."""
    manifest = read_json(file.parent / MANIFEST)
    manifest["files"][file.name] = {"bytes": file.stat().st_size, "sha256": sha256_file(file)}
    (file.parent / MANIFEST).write_text(json.dumps({**manifest, "sha256": seal(manifest)}))


def edit_rows(run, edit, before=lambda *_: None):
    """Edits the rows, and computes all of the chain again. `before` is called with each row, and
    with the new ends of those before it (chain, and bytes of the file) by their old chains."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    edit(rows)
    chain = FIRST_CHAIN
    ends = {chain: {"chain": chain, "bytes": 0}}
    lines = []
    size = 0
    for row in rows:
        old = row.pop("chain", "")
        before(row, ends)
        text = json.dumps(row)
        chain = next_chain(chain, text)
        lines.append(f'{text[:-1]}, "chain": "{chain}"}}\n')
        size += len(lines[-1])
        ends[old] = {"chain": chain, "bytes": size}
    (run / "metrics.jsonl").write_text("".join(lines))


def forge(run, edit=lambda rows: None):
    """Edits the rows, and makes all hashes in rows and
    checkpoints fit again, as a patient forger would."""

    def fit(row, ends):
        saved = row if row.get("event") == "checkpoint" else row.get("checkpoint")
        place = checkpoint_at(run, saved["step"]) if saved else run
        if saved and (place / MANIFEST).is_file():
            state = read_json(place / "state.json")
            state["log"] = ends.get(state["log"]["chain"], state["log"])
            (place / "state.json").write_text(json.dumps(state))
            reseal(place / "state.json")
            saved["sha256"] = sha256_file(place / MANIFEST)

    edit_rows(run, edit, fit)


def verified(run, capsys, **options):
    """The exit code, the defects, and the other lines."""
    code = verify_run(VerifyConfig(run=str(run), **options))
    lines = capsys.readouterr().out.splitlines()
    defects = [line.removeprefix("defect  ") for line in lines if line.startswith("defect  ")]
    return code, defects, [line for line in lines if not line.startswith("defect  ")]


def expect_defect(run, capsys, *defects):
    """Each of `defects` is the beginning of one that is found."""
    code, found, others = verified(run, capsys)
    assert code == 1
    for defect in defects:
        assert any(line.startswith(defect) for line in found), (defect, found)
    assert others[-1].startswith(f"{run} is not intact, defects: ")


def initial_weights(config):
    """A run's whole weights before its first step, as lists."""
    with built(config) as trainer:
        weights = trainer.run.task.model.state_dict()
        return {
            name: getattr(value, "full_tensor", value.clone)().tolist()
            for name, value in weights.items()
        }


@contextmanager
def built(config, make_task=None):
    """The `Trainer` of a configuration, as a training builds it."""
    from gpt2_ddp.tasks.jobs import make_job
    from gpt2_ddp.tasks.pretraining import Pretraining
    from gpt2_ddp.tasks.supervised import Supervised
    from gpt2_ddp.training.start import build, open_run

    usual = Pretraining if isinstance(config, TrainingConfig) else partial(Supervised, make_job)
    with open_run(config, make_task or usual) as run:
        yield build(run)


@contextmanager
def started(config):
    """The `Training` of a configuration, before its first step."""
    from gpt2_ddp.training.start import start

    with built(config) as trainer, start(trainer) as training:
        yield training


def by_definition(seed, n, position):
    """The item at a position, from docs/verify.md in integers alone."""
    epoch, index = divmod(position, n)
    return permuted(seed, str(epoch), n, index)


def permuted(seed, key, n, index):
    """The place of an index among `n`, under this key."""
    base = next(a for a in range(max(math.isqrt(n) - 1, 1), n + 1) if a * a >= n)
    content = hashlib.shake_256(f"{seed}/{key}".encode()).digest(64)
    keys = [int.from_bytes(content[8 * i : 8 * i + 8], "little") for i in range(8)]
    while True:
        left, right = divmod(index, base)
        for k in keys:
            mixed = (right + k) * 0xBF58476D1CE4E5B9 % 2**64
            mixed = (mixed ^ (mixed >> 31)) * 0x94D049BB133111EB % 2**64 >> 33
            left, right = right, (left + mixed) % base
        index = left * base + right
        if index < n:
            return index


def resolved(config, saved=None):
    """The configuration of a GPT run, new or resumed, on 1,900 windows."""
    from gpt2_ddp.tasks.pretraining import Pretraining

    task = Pretraining(config, saved=saved)
    task.epoch_size = 1900
    task.resolve()
    return task.config
