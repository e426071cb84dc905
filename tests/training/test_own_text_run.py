"""A text of one's own, without --config: the run has plain numbers, and goes on with them."""

import json
import re
import shutil

import pytest
import yaml
from close import assert_close
from ladders import make_ladder
from runs import events, is_intact, train

from gpt2_ddp.config.cli import resolve
from gpt2_ddp.config.plan import PlanConfig
from gpt2_ddp.config.training import TrainingConfig, training_default
from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.errors import UserError
from gpt2_ddp.evaluation.ladder import describe_interval, expectation_of, settings_of
from gpt2_ddp.plan import plan
from gpt2_ddp.tasks.comparison import print_forecast
from gpt2_ddp.training import own_text


@pytest.fixture
def config_of(corpus, tmp_path, monkeypatch):
    """Makes the configuration of a command line without --config. The machine is measured to be
    twice as fast each time."""
    speeds = iter(2**n * 1e9 for n in range(99))
    monkeypatch.setattr(own_text, "measure_speed", lambda device, dtype: next(speeds))

    def make(**flags):
        given = {"data.path": str(corpus), "output_dir": str(tmp_path), "run_name": "book"}
        small = {"model.block_size": "16", "train.global_batch_tokens": "64"}
        # other tests of this process are in fp32
        precision = {"train.mixed_precision": "no"}
        flags = given | small | precision | flags
        return resolve(TrainingConfig, [], flags, training_default)

    return make


def test_a_run_records_numbers_and_is_resumed_with_them(config_of, tmp_path, capsys):
    run = tmp_path / "book"
    ends = {"optim.decay_steps": "9", "checkpoint.every": "3"}
    train(config_of(**{"train.steps": "6"}, **ends))
    said = capsys.readouterr()
    first = next(line for line in said.err.splitlines() if "active parameters (" in line)
    forecast = events(run, "start")[0]["forecast"]
    assert first.endswith(f"; expect about {forecast['bits_per_byte']:.1f} bits per byte")
    print_forecast(run)
    expected, *_ = capsys.readouterr().out.splitlines()
    assert expected.startswith(f"expected: about {forecast['bits_per_byte']:.1f} bits per byte")
    changes = [int(percent) for percent in re.findall(r"([-+]\d+)%", expected)]
    assert len(changes) == 3
    assert changes == sorted(changes)
    recorded = yaml.safe_load((run / "config.yaml").read_text())
    assert recorded["own_text"] is False
    assert recorded["model"]["architecture"] == "qwen3"
    assert recorded["model"]["block_size"] == 16
    assert recorded["train"]["micro_batch_size"] == 4  # all of the step
    train(config_of(**{"train.steps": "9"}, **ends))  # the machine is faster now
    again = yaml.safe_load((run / "config.yaml").read_text())
    assert again["model"] == recorded["model"]
    assert again["optim"]["lr"] == recorded["optim"]["lr"]
    assert [event["step"] for event in events(run, "start")] == [0, 6]
    print_forecast(run)
    longer = capsys.readouterr().out.splitlines()[-1]
    assert " bits per byte by 0.0M tokens, " in longer, "half as much again was trained on"
    assert is_intact(run)


def test_a_given_field_that_differs_is_refused(config_of):
    train(config_of(**{"train.steps": "2"}))
    with pytest.raises(UserError, match=r"model\.n_layer = 7: the run was started with"):
        train(config_of(**{"train.steps": "2", "model.n_layer": "7"}))


def test_a_branch_has_its_parent_s_numbers(config_of, tmp_path):
    train(config_of(**{"train.steps": "4"}))
    flags = {"train.steps": "6", "run_name": "branch", "train.branch_from": str(tmp_path / "book")}
    train(config_of(**flags, **{"optim.decay_steps": "6"}))
    first, second = (
        yaml.safe_load((tmp_path / name / "config.yaml").read_text()) for name in ("book", "branch")
    )
    assert second["model"] == first["model"]


def test_a_plan_is_of_the_model_that_would_be_trained(config_of, capsys):
    training = config_of(**{"train.minutes": "10"})
    seen = plan.preflight(training, 8, 1e15)
    assert not seen.mistakes
    assert seen.completed.train.global_batch_tokens == 64
    assert seen.completed.model.n_layer > plan.preflight(training, 1).completed.model.n_layer


@pytest.fixture
def with_ladder(config_of, corpus, tmp_path):
    """Makes configurations as `config_of`, on data that keep a ladder of their settings."""
    data = tmp_path / "data"
    shutil.copytree(corpus, data)

    def make(**flags):
        return config_of(**flags, **{"data.path": str(data)})

    manifest = read_manifest(data)
    ladder = make_ladder(
        data_manifest=manifest.hash,
        settings=settings_of(make(**{"train.steps": "6"})),
        text_tokens=manifest.tokens("train"),
        val_tokens=1248,
    )
    ladder.write(data)
    return make, ladder


def test_a_ladder_foretells_a_run(with_ladder, tmp_path, capsys):
    make, ladder = with_ladder
    run = tmp_path / "book"
    train(make(**{"train.steps": "6"}))
    said = capsys.readouterr()
    first = next(line for line in said.err.splitlines() if "active parameters (" in line)
    start = events(run, "start")[0]
    forecast = start["forecast"]
    expected = ladder.expect(forecast["parameters"], 6 * 64)
    text = f"{describe_interval(expected)} bits per byte"
    assert first.endswith(f"; expect {text}, by the ladder on this text")
    assert_close([*expectation_of(start).at_end(6 * 64)], [*expected])
    scored = [row for row in rows_of(run) if "val_tokens" in row]
    assert {row["val_tokens"] for row in scored} == {1248}, "those of the ladder"
    print_forecast(run)
    reached = scored[-1]["val_bits_per_byte"]
    line = f"expected by the ladder: {text}, reached {reached:.3f}; what would change it"
    assert line in capsys.readouterr().out
    assert is_intact(run)


def rows_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_other_settings_and_lengths_have_no_interval(with_ladder, tmp_path):
    make, _ = with_ladder
    train(make(**{"train.steps": "2", "optim.muon_lr": "0.03"}))
    assert "ladder" not in events(tmp_path / "book", "start")[0]["forecast"]
    flags = {"train.steps": "2", "eval.tokens": "96", "run_name": "other"}
    train(make(**flags))
    assert {row["val_tokens"] for row in rows_of(tmp_path / "other") if "val_tokens" in row} == {96}
    seen = plan.preflight(make(**{"train.steps": "400000", "run_name": "long"}), 1)
    assert "ladder" not in seen.task.start_fields["forecast"], "beyond ten times the longest run"


def test_a_plan_has_the_ladder_s_interval_and_best_size(with_ladder, tmp_path):
    make, ladder = with_ladder
    config = make(**{"train.minutes": "0.05"})
    planned = plan.make_plan(
        PlanConfig.model_validate(
            {name: getattr(config, name) for name in type(config).model_fields}
        )
    )
    lines = [*plan.format_plan(planned)]
    (expected,) = [line for line in lines if line.startswith("  expect ")]
    assert expected.endswith(" bits per byte, by the ladder (90 %)")
    best = ladder.answer(lambda size: ladder.tokens_in(0.05, size))
    (advice,) = [line for line in lines if "best size by the ladder" in line]
    assert f"{best.layers} layers of {best.width}" in advice
    assert describe_interval(best.interval) in advice
    plain = plan.make_plan(
        PlanConfig.model_validate(
            {name: getattr(config, name) for name in type(config).model_fields}
            | {"optim": config.optim.model_copy(update={"muon_lr": 0.5})}
        )
    )
    lines = [*plan.format_plan(plain)]
    assert any(re.fullmatch(r"  expect       about \d\.\d bits per byte", line) for line in lines)
    assert not any("by the ladder" in line for line in lines)
