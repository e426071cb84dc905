"""The end of a run on one's own text: bits per byte beside those of compressors."""

import json
from functools import partial

import pytest
from commands import ROOT, launch
from conftest import module_text
from runs import training_config

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.distributed import process
from gpt2_ddp.errors import UserError
from gpt2_ddp.evaluation.compressors import bits_per_byte, compressors
from gpt2_ddp.files import read_json
from gpt2_ddp.preparation.prepare import prepare
from gpt2_ddp.records.rows import COMPRESSORS, compressor_scores
from gpt2_ddp.reports.report import write_report
from gpt2_ddp.tasks import comparison
from gpt2_ddp.tasks.comparison import CACHE, ComparisonConfig, compare, print_comparison

ROWS = [
    {"step": 0, "val_loss": 9.0, "val_tokens": 5000, "val_bits_per_byte": 1.0},
    {"step": 1, "val_loss": 3.0, "val_tokens": 400, "val_bits_per_byte": 3.25},
    {"step": 2, "val_loss": 4.0, "val_tokens": 400, "val_bits_per_byte": 4.5},
    {"step": 3, "loss": 1.0},
]
SCORES = {"xz -9e": 1.25, "PPMd of order 16": 1.5}


@pytest.fixture
def run(tmp_path):
    """A run folder of these rows."""
    folder = tmp_path / "out/run"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A text of one file, prepared; and the text."""
    folder = tmp_path_factory.mktemp("text")
    text = module_text("argparse")
    (folder / "text.txt").write_text(text)
    config = PrepareConfig(
        source=(str(folder / "text.txt"),),
        output=str(folder / "data"),
        tokenizer="bytes",
        workers=1,
    )
    prepare(config)
    return folder / "data", text.encode()


@pytest.fixture
def gentle(monkeypatch):
    """The process of the compressors, as a function of this one."""
    monkeypatch.setattr(comparison.os, "nice", lambda _: 0)
    monkeypatch.setattr(comparison.signal, "alarm", lambda _: 0)
    started = []

    def run_module(module, data, run, **_):
        started.append(module)
        compare(ComparisonConfig(data=data.removeprefix("--data="), run=run.removeprefix("--run=")))

    monkeypatch.setattr(process, "run_module", run_module)
    return started


def test_the_scores_are_those_of_the_texts_last_bytes(run, data, gentle, capsys):
    folder, text = data
    config = training_config(folder, run.parent)
    print_comparison(run, config)
    validation = read_json(folder / "manifest.json")["splits"]["val"][0]["tokens"]
    cut = len(text) - validation
    assert abs(validation / len(text) - 0.05) < 0.02
    for name, compressor in compressors().items():
        expected = bits_per_byte(compressor, text[:cut], text[cut:])
        assert compressor_scores(run)[name] == expected
    first, second = capsys.readouterr().out.splitlines()
    sample = f"by 400 of its {validation - 1:,} tokens"
    assert first == f"best evaluation: 3.250 bits per byte of validation text, {sample}"
    bits = compressor_scores(run)["xz -9e"]
    assert second.startswith(
        f"compressors on that text, after the training text: xz -9e {bits:.3f},"
    )
    (run / COMPRESSORS).write_text(json.dumps({"bits_per_byte": SCORES}))
    print_comparison(run, config)
    assert "xz -9e 1.250, PPMd of order 16 1.500" in capsys.readouterr().out
    assert len(gentle) == 1, "the run folder has them already"


def test_another_run_on_these_data_compresses_nothing(run, data, gentle, monkeypatch):
    folder, _ = data
    compare(ComparisonConfig(data=str(folder), run=str(run)))
    first = compressor_scores(run)
    cache = read_json(folder / CACHE)
    monkeypatch.setattr(comparison, "_score", lambda *_: SCORES)
    compare(ComparisonConfig(data=str(folder), run=str(run)))
    assert compressor_scores(run) == first == cache["bits_per_byte"]
    stale = {
        "other data": {**cache, "data_manifest": "0"},
        "fewer compressors": {**cache, "bits_per_byte": {"xz -9e": 1.0}},
        "no numbers": {**cache, "bits_per_byte": None},
    }
    for content in stale.values():
        (folder / CACHE).write_text(json.dumps(content))
        compare(ComparisonConfig(data=str(folder), run=str(run)))
        assert compressor_scores(run) == SCORES
    # preparing these data again keeps them
    (folder / CACHE).write_text("{")
    compare(ComparisonConfig(data=str(folder), run=str(run)))
    assert compressor_scores(run) == SCORES


def test_prepared_data_with_a_cache_are_still_the_same_data(data, capsys):
    folder, _ = data
    (folder / CACHE).write_text("{}")
    source = str(folder.parent / "text.txt")
    prepare(PrepareConfig(source=(source,), output=str(folder), tokenizer="bytes", workers=1))
    assert "already prepared" in capsys.readouterr().out


def test_a_process_that_fails_prints_nothing(run, data, monkeypatch, capsys):
    def fail(error, *_, **__):
        raise error

    config = training_config(data[0], run.parent)
    for error in (UserError("data", "x", "y"), OSError("no memory")):
        monkeypatch.setattr(process, "run_module", partial(fail, error))
        print_comparison(run, config)
    assert capsys.readouterr().out == ""


def test_which_runs_are_compared(run, data, gentle, monkeypatch, capsys):
    folder, _ = data
    (run / COMPRESSORS).write_text(json.dumps({"bits_per_byte": SCORES}))

    def lines(config):
        print_comparison(run, config)
        return len(capsys.readouterr().out.splitlines())

    config = training_config(folder, run.parent)
    assert lines(config) == 2
    assert lines(training_config(folder.parent / "nothing", run.parent)) == 0, "no data"
    with monkeypatch.context() as patch:
        patch.setattr(comparison, "LARGEST_TEXT", 1000)
        assert lines(config) == 0, "too much text"
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        assert lines(config) == 0, "one of several processes"
    (run / "metrics.jsonl").write_text(json.dumps({"step": 0, "loss": 1.0}) + "\n")
    assert lines(config) == 0, "no evaluation"
    assert gentle == []


def test_a_report_has_the_same_comparison(run, tmp_path):
    without = write_report([run], tmp_path / "a").read_text()
    (run / COMPRESSORS).write_text(json.dumps({"bits_per_byte": SCORES}))
    page = write_report([run], tmp_path / "b").read_text()
    for label, value in {"best bits per byte": "3.250", "xz -9e, bits per byte": "1.250"}.items():
        assert f"<th>{label}</th><td>{value}</td>" in page
        assert label not in without
    for damaged in ('{"bits_per_byte": {"xz": "<b>"}}', "[]", "{"):
        (run / COMPRESSORS).write_text(damaged)
        assert "best bits per byte" not in write_report([run], tmp_path / "c").read_text()


@pytest.mark.slow
def test_the_process_by_itself(run, data, tmp_path):
    words = [f"--data={data[0]}", f"--run={run}"]
    command = [process.sys.executable, "-P", "-m", "gpt2_ddp.tasks.comparison", *words]
    (data[0] / CACHE).unlink(missing_ok=True)
    done = launch(command, tmp_path, PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert compressor_scores(run).keys() == compressors().keys()
