"""The average of the weights: what it averages, where it is used, and that nothing changes it but
steps. tests/training/test_loop.py compares it with a hand-written loop."""

import math
import shutil
from functools import partial

import pytest
import torch
from close import assert_close
from commands import expect_error
from ranks import run_ranks
from runs import (
    built,
    checkpoint_at,
    events,
    expect_defect,
    forge,
    is_intact,
    newest_checkpoint,
    reseal,
    rows,
    same,
    started,
    tensors_of,
    train,
    train_all,
    train_with_faults,
    training_config,
    weights,
)
from safetensors.torch import load_file, save_file

from gpt2_ddp.checkpoint.verify import find_checkpoint
from gpt2_ddp.config.saved import check_resumable
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.tasks.trained_model import load_model
from gpt2_ddp.training import loop
from gpt2_ddp.training.average import WeightAverage, rate_at

PREFIX = "trained_weights."
CHANGES = {
    "optim.average": 0.3,
    "optim.name": "muon",
    "optim.schedule": "constant",
    "model.dropout": 0.1,
    "eval.every": 2,
    "tracking.sample_every": 3,
}


def trained_weights(checkpoint):
    """The trained weights beside the average, by their plain names."""
    found = tensors_of(checkpoint, "optimizer").items()
    return {name.removeprefix(PREFIX): one for name, one in found if name.startswith(PREFIX)}


def start_of(config):
    """The tensors of a run before its next step: model, trained weights."""
    with built(config) as trainer:
        snapshot = trainer.snapshot()
        return snapshot.model, trainer.run.task.model.state_dict()


def local(tensor):
    return tensor


# What it averages


@pytest.mark.parametrize("fraction", [0.02, 0.05, 0.25, 0.5])
def test_the_mean_age_is_the_fraction_of_the_steps(fraction):
    """The weights are 1 at one step and 0 at all others: the average is that step's share."""
    steps = 1000
    shares = torch.zeros(steps + 1, dtype=torch.float64)
    for step in range(1, steps + 1):
        shares *= 1 - rate_at(step, fraction)
        shares[step] = rate_at(step, fraction)
    assert_close(shares.sum(), 1.0)
    ages = steps - torch.arange(steps + 1, dtype=torch.float64)
    assert abs((shares * ages).sum().item() / steps - fraction) < 0.001
    exponent = 1 / fraction - 2  # the share of step s is in proportion to s^(c - 1)
    ratio = shares[1000] / shares[990]
    assert abs(ratio.log() / math.log(1000 / 990) - exponent) < 0.03 * exponent + 1e-9


def recorded_training(config, *faults):
    """Trains; the weights after each step of the run's final history, from before the first."""
    step = loop.train_step
    history = {}

    def train_step(trainer):
        model = trainer.run.task.model

        def keep():
            tensors = {name: value.clone() for name, value in model.state_dict().items()}
            history[trainer.run.step] = tensors

        keep()
        result = step(trainer)
        keep()
        return result

    loop.train_step = train_step
    try:
        assert train_with_faults(config, *faults) == "completed"
    finally:
        loop.train_step = step
    return history


def test_of_all_steps_after_bad_ones_and_a_rollback(corpus, tmp_path):
    """Bit for bit, although evaluations and samples use the average in between. A skipped step
    counts as any other; the steps that a rollback took back do not."""
    more = {"guard": {"patience": 3}, "checkpoint.every": 2}
    config = training_config(corpus, tmp_path, CHANGES | more)
    run = tmp_path / "run"
    history = recorded_training(config, (60, 108))
    assert len(events(run, "rollback")) == 1
    average = history[0]
    for step in range(1, 11):
        for name, value in average.items():
            value.lerp_(history[step][name], rate_at(step, 0.3))
    end = newest_checkpoint(run)
    assert same(trained_weights(end), history[10])
    assert same(weights(run), average)
    assert not same(weights(run), history[10])
    assert is_intact(run)

    model, _ = load_model(find_checkpoint(run))  # of evaluate.py, generate.py and the exports
    assert same({**model.state_dict()}, average)


def test_exchanged_and_back_after_an_exception():
    """The values move, and the tensors stay. A name that shares a parameter has its average."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).double()
    model.shared = model[0]
    average = WeightAverage(model, 0.5, local)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    average.update(4)
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    saved = {name: value.clone() for name, value in average.model_state(model).items()}
    assert_close(saved["0.weight"], trained["0.weight"] - 0.75)
    assert torch.equal(saved["shared.weight"], saved["0.weight"])
    places = [parameter.data_ptr() for parameter in model.parameters()]

    def fail():
        with average.in_use():
            assert same({**model.state_dict()}, saved)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert same({**model.state_dict()}, trained)
    assert same(average.model_state(model), saved)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


def test_samples_are_of_the_average(corpus, tmp_path):
    with started(training_config(corpus, tmp_path, {"optim.average": 0.5})) as training:
        run = training.run
        for _ in range(3):
            loop.train_step(training.trainer)
        average = training.trainer.average.values["wte.weight"].clone()
        weight = run.task.model.wte.weight
        trained = weight.detach().clone()
        run.task.sample = lambda poll: [weight.detach().clone()]
        assert torch.equal(training.sample()[0], average)
        assert torch.equal(weight, trained)
        assert not torch.equal(trained, average)


def test_without_one_there_is_nothing():
    model = torch.nn.Linear(2, 2)
    average = WeightAverage(model, 0.0, local)
    average.update(1)
    average.restart()
    with average.in_use():
        assert same(average.model_state(model), model.state_dict())
    assert average.values == average.trained_weights() == {}


# Kept through a resume


def resumed_and_alone(corpus, folder, changes=()):
    """Configurations of a run of 8 steps, of its first 5 in another folder, and of the rest."""
    make = partial(training_config, corpus)
    length = {"train.steps": 8, "optim.decay_steps": 8, "checkpoint.every": 4}
    changes = CHANGES | length | dict(changes)
    return (
        make(folder / "alone", changes),
        make(folder / "resumed", changes | {"train.steps": 5}),
        make(folder / "resumed", changes),
    )


def expect_resumed(folder):
    """The resumed run is the one that was left alone, but for the evaluation at its first end."""
    alone, resumed = (folder / name / "run" for name in ("alone", "resumed"))
    ours, theirs = (
        [(row["step"], row.get("loss"), row.get("grad_norm")) for row in rows(run)]
        for run in (resumed, alone)
    )
    assert ours == theirs
    assert rows(resumed)[-1]["val_loss"] == rows(alone)[-1]["val_loss"]
    for file in ("model", "optimizer"):
        assert same(*(tensors_of(checkpoint_at(run, 8), file) for run in (resumed, alone)))


class OwnOptimizer(Pretraining):
    """With an optimizer that makes its state once `len(state) == 0`."""

    def build_optimizer(self):
        return torch.optim.Adam(self.model.parameters(), lr=1e-3)


def test_resumed_with_an_optimizer_of_ones_own(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(Pretraining, "build_optimizer", OwnOptimizer.build_optimizer)
    for config in resumed_and_alone(corpus, tmp_path, {"optim.name": "adamw"}):
        assert train(config) == "completed"
    expect_resumed(tmp_path)


def test_on_two_ranks_whole_or_in_parts(corpus, tmp_path):
    """A resumed run has the bits of one left alone. A sharded run has its weights but for the
    order of sums, and is resumed by one that is not sharded."""
    whole, part, rest = resumed_and_alone(corpus, tmp_path)
    fsdp = {"launch.parallel": "fsdp"}
    alone, half, _ = resumed_and_alone(corpus, tmp_path / "fsdp", fsdp)
    _, _, other = resumed_and_alone(corpus, tmp_path / "fsdp")
    configs = [whole, part, rest, alone, half, other]
    outcomes = run_ranks(train_all, 2, configs, timeout=300)
    assert outcomes == [["completed"] * len(configs)] * 2
    expect_resumed(tmp_path)
    right = checkpoint_at(tmp_path / "alone/run", 8)
    for name in ("alone", "resumed"):
        run = tmp_path / "fsdp" / name / "run"
        found = checkpoint_at(run, 8)
        assert_close(rows(run)[-1]["val_loss"], rows(right.parents[1])[-1]["val_loss"], 1e-5)
        for one, other in (
            (tensors_of(found, "model"), tensors_of(right, "model")),
            (trained_weights(found), trained_weights(right)),
        ):
            assert one.keys() == other.keys()
            assert max((one[name] - other[name]).abs().max() for name in one) < 1e-4
        assert is_intact(run)


def test_another_average_is_refused():
    """As any other field of the optimizer; runs of older releases have none."""
    config = TrainingConfig.model_validate({"train": {"steps": 1}, "optim": {"average": 0.05}})
    saved = config.model_dump(mode="json")
    check_resumable(config, "gpt2", saved, 1)
    del saved["optim"]["average"]
    expect_error(
        "optim.average = 0.05: .*started with 0.0", check_resumable, config, "gpt2", saved, 1
    )
    plain = TrainingConfig.model_validate({"train": {"steps": 1}})
    check_resumable(plain, "gpt2", saved, 1)


def test_branches_with_and_without(corpus, tmp_path):
    """A branch without an average takes the trained weights; an average begins at the weights that
    its parent has, or is the parent's average."""
    half = {"train.steps": 5, "eval.every": 5, "optim.decay_steps": 9}
    parents = {0.3: {"run_name": "averaged"}, 0.0: {"run_name": "plain"}}
    for average, changes in parents.items():
        config = training_config(corpus, tmp_path, half | changes | {"optim.average": average})
        assert train(config) == "completed"
        for own in (0.3, 0.2, 0.0):
            begun = checkpoint_at(tmp_path / config.run_name, 5)
            name = f"{config.run_name}-{own}"
            branch = {"run_name": name, "train.steps": 6, "train.branch_from": str(begun)}
            branch |= {"optim.average": own}
            branch = training_config(corpus, tmp_path, half | branch)
            model, trained = start_of(branch)
            saved = tensors_of(begun, "model")
            before = trained_weights(begun) or saved
            assert same(trained, before)
            assert same(model, saved if own else before)


# Recorded and verified


@pytest.fixture(scope="module")
def averaged(corpus, tmp_path_factory):
    """The folder of a complete run with an average."""
    folder = tmp_path_factory.mktemp("averaged")
    assert train(training_config(corpus, folder, {"optim.average": 0.3})) == "completed"
    return folder / "run"


@pytest.fixture
def run(averaged, tmp_path):
    """A copy of the run."""
    return shutil.copytree(averaged, tmp_path / "run")


def test_a_replay_has_the_same_bits(averaged, corpus, capsys):
    assert is_intact(averaged, replay="5:10", data=[str(corpus)])
    assert "all tensors, bit for bit" in capsys.readouterr().out


def test_trained_weights_that_are_missing_or_too_many(run, capsys):
    file = checkpoint_at(run, 10) / "optimizer.safetensors"
    place = "checkpoints/step-00000010/optimizer.safetensors"
    whole = load_file(file)
    name = f"{PREFIX}ln_f.weight"

    def forged(tensors):
        save_file(tensors, file)
        reseal(file)
        forge(run)

    forged({key: value for key, value in whole.items() if key != name})
    expect_defect(run, capsys, f"{place}: {name} has shape None, in the model [32]")
    forged(whole | {f"{PREFIX}foo": torch.zeros(3)})
    expect_defect(run, capsys, f"{place}: {PREFIX}foo has shape [3], in the model None")
    forged({key: value for key, value in whole.items() if not key.startswith(PREFIX)})
    expect_defect(run, capsys, f"{place}: {PREFIX}h.0.attn")


def test_trained_weights_without_an_average(trained, tmp_path, capsys):
    run = shutil.copytree(trained, tmp_path / "run")
    file = checkpoint_at(run, 10) / "optimizer.safetensors"
    save_file(load_file(file) | {f"{PREFIX}ln_f.weight": torch.zeros(32)}, file)
    reseal(file)
    forge(run)
    place = "checkpoints/step-00000010/optimizer.safetensors"
    expect_defect(run, capsys, f"{place}: {PREFIX}ln_f.weight has shape [32], in the model None")


def test_a_resume_refuses_trained_weights_of_another_shape(run, corpus):
    file = checkpoint_at(run, 10) / "optimizer.safetensors"
    save_file(load_file(file) | {f"{PREFIX}ln_f.weight": torch.zeros(31)}, file)
    reseal(file)
    forge(run)
    changes = {"optim.average": 0.3, "train.steps": 12, "optim.decay_steps": 10}
    config = training_config(corpus, run.parent, changes)
    expect_error(f"{PREFIX}ln_f.weight has shape .31., in the model .32.", built(config).__enter__)
