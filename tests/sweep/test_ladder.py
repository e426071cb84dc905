"""A ladder: what is refused before it, its runs, how it goes on, and what it answers."""

import json
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml
from close import assert_close
from commands import (
    NO_REPORT,
    ROOT,
    SCRIPTS,
    environment,
    expect_error,
    last_of_each,
    launch,
    run_and_read,
    run_script,
    stopped_and_killed,
)
from conftest import write_shards
from runs import train

from gpt2_ddp.config.cli import dump, load
from gpt2_ddp.config.own_text import Text, choose
from gpt2_ddp.config.plan import LadderConfig, PlanConfig
from gpt2_ddp.config.tools import VerifyConfig
from gpt2_ddp.config.training import OWN_TEXT, TrainingConfig, training_default
from gpt2_ddp.data import fetch
from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.evaluation.ladder import FILE, expectation_of, find_ladder, read_ladder, settings_of
from gpt2_ddp.evaluation.scaling import PRIORS
from gpt2_ddp.files import local_copy, read_json
from gpt2_ddp.plan import plan as plan_module
from gpt2_ddp.records.rows import is_locked
from gpt2_ddp.remote.objects import fetch_data
from gpt2_ddp.reports.verify import verify_run
from gpt2_ddp.sweep import design
from gpt2_ddp.sweep import ladder as ladder_module
from gpt2_ddp.training import own_text

PRESET = "configs/ladder_small.yaml"
SMALL = (
    "--run_name book --shapes 1x32 2x32 --lengths 20000 40000 80000 --repeats 2"
    " --model.block_size 32 --train.device cpu --train.mixed_precision no"
)
"""A ladder of seven runs of 4 to 20 steps."""


@pytest.fixture
def place(corpus, tmp_path, monkeypatch):
    """Flags of a small ladder in a new folder, with data of its own."""
    monkeypatch.setattr(own_text, "measure_speed", lambda device, dtype: 1e11)
    monkeypatch.setattr(ladder_module, "measure_speed", lambda device, dtype: 1e11)
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    return ["--data.path", str(data), "--output_dir", str(tmp_path / "runs"), *SMALL.split()]


def config_of(words):
    return load(LadderConfig, words, PRESET)


def bits_of(config):
    """What a run that is not trained has reached."""
    size = config.model.n_layer * config.model.n_embd
    tokens = config.train.steps * config.train.global_batch_tokens
    return 1 + 10 / size + 200 / tokens**0.5 + 0.003 * (config.seed % 3)


def write_run(member):
    """A completed run of these flags, of made-up numbers."""
    text = Text(60_000, 512)
    config = choose(member.config, text, own_text.Machine(1e9)).config
    rows = [{"event": "start", "step": 0, "steps": config.train.steps}]
    batch = config.train.global_batch_tokens
    for quarter, ratio in enumerate((3, 1.2, 1.1, 1.03, 1)):
        step = quarter * config.train.steps // 4
        bits = ratio * bits_of(config)
        row = {"step": step, "tokens": step * batch, "val_loss": 2 * bits, "val_tokens": 99}
        row |= {"val_bits_per_byte": bits, "loss": 2 * bits}
        row |= {"tokens_per_second": 1e5 / config.model.n_layer} if step else {}
        rows.append(row)
    member.folder.mkdir(parents=True)
    lines = [json.dumps(row) for row in rows]
    (member.folder / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    (member.folder / "config.yaml").write_text(dump(config))
    status = {"state": "completed", "step": config.train.steps, "reason": ""}
    (member.folder / "status.json").write_text(json.dumps(status))


@pytest.fixture
def untrained(monkeypatch):
    """Runs are made up. Returns the names of those that would have been trained, by command."""
    started = []
    broken = []

    def train_all(members, at_once, gpus):
        started.append([member.folder.name for member in members])
        ends = {}
        for member in members:
            if member.folder.name in broken:
                ends[member.folder] = "diverged"
            else:
                write_run(member)
        return ends

    monkeypatch.setattr(ladder_module, "train_all", train_all)
    monkeypatch.setattr(ladder_module, "check_sizes", lambda *_: None)
    return started, broken


def climb(words):
    return ladder_module.climb(config_of(words))


def test_a_ladder_answers_keeps_and_draws(place, untrained, tmp_path, capsys):
    assert climb([*place, "--for_minutes", "0.02", "600"]) == 0
    output = capsys.readouterr().out
    data = tmp_path / "data"
    kept = read_ladder(data)
    assert len(kept.rungs) == 7
    for rung in kept.rungs:
        folder = tmp_path / "runs" / rung.name
        config = load(TrainingConfig, ["--config", str(folder / "config.yaml")])
        assert (rung.layers, rung.width) == (config.model.n_layer, config.model.n_embd)
        assert_close(rung.bits, bits_of(config))
        assert_close(rung.seconds_per_token, 1e-5 * rung.layers)
        assert_close([ratio / rung.bits for _, ratio in rung.curve], [1.2, 1.1, 1.03, 1])
    assert "7 runs of 2 sizes on" in output
    assert re.search(
        r"in 0\.02 minutes on this machine: \d+ layers of \d+ .*: expect 1\.\d", output
    )
    assert "in 600 minutes on this machine: beyond 10 times the ladder's largest run" in output
    command = re.search(r"scripts/train_gpt2\.py (.*)", output)[1].split()
    found = load(TrainingConfig, command, training_default)
    assert found.train.minutes == 0.02
    assert find_ladder(found, [read_manifest(data)]) is None, "of another context: 256"
    content = read_json(tmp_path / "runs/book-ladder.json")
    assert len(content["rungs"]) == len(content["runs"]) == 7
    assert content["law"].keys() == {*PRIORS, "noise"}
    assert [answer["minutes"] for answer in content["answers"]] == [0.02, 600]
    page = (tmp_path / "runs/book-ladder.html").read_text()
    assert page.count('class="band"') >= 4
    for text in ("1x32, law", "2x32, measured", "book-1x32", "nothing is said above"):
        assert text in page
    assert "http" not in re.sub(r"http-equiv|xmlns=\S+", "", page), "it links to nothing"


def test_it_goes_on_with_the_same_runs_on_another_machine(
    place, untrained, tmp_path, monkeypatch, capsys
):
    started, _ = untrained
    words = [*by_time(place), "--minutes", "8"]
    monkeypatch.setattr(design, "FEWEST_STEPS", 30)  # for so little text
    assert climb(words) == 0
    first = started[0]
    shutil.rmtree(tmp_path / "runs" / first[2])
    monkeypatch.setattr(ladder_module, "measure_speed", lambda device, dtype: 1e13)
    capsys.readouterr()
    assert climb(words) == 0
    assert started[1] == [first[2]], "only what is missing is trained"
    assert "  complete already: 5 of 6 runs; the others take about " in capsys.readouterr().out
    assert climb(words) == 0
    assert started[2] == []
    assert "  complete already: 6 of 6 runs; nothing is trained" in capsys.readouterr().out


def test_another_ladder_of_that_name_is_refused(place, untrained, tmp_path):
    climb(place)
    for words, has in (
        ("--seed 3", "1337"),
        ("--optim.muon_lr 0.03", "the rule's"),
        ("--minutes 9", r"30\.0"),
        ("--train.mixed_precision bf16", "no"),
    ):
        name, value = words.removeprefix("--").split()
        message = rf"^{name} = {value}\S*: the ladder of .*book-ladder\.json has {has}; repeat"
        expect_error(message, climb, last_of_each([*place, *words.split()]))
    data = tmp_path / "data"
    write_shards(data, "text", {"train": ["words " * 60_000], "val": ["some words " * 9000]})
    expect_error(r"data\.path = .*: has another text than the ladder of .*", climb, place)
    file = tmp_path / "runs/book-ladder.json"
    for damage in ("{", "[]", '{"runs": 5}', '{"runs": [], "speed": 1}'):
        file.write_text(damage)
        expect_error(r"book-ladder\.json: is no file of a ladder; remove it", climb, place)


def test_runs_of_another_ladder_are_refused(place, untrained, tmp_path):
    """Of folders that a deleted ladder has left."""
    started, _ = untrained
    climb(place)
    (tmp_path / "runs/book-ladder.json").unlink()
    message = r"optim\.muon_lr = 0\.03: the run was started with 0\.012; .* another run_name"
    expect_error(message, climb, [*place, "--optim.muon_lr", "0.03"])
    run = tmp_path / "runs" / started[0][1]
    edit = replacing(run / "metrics.jsonl", '"event"', '"data_manifest": "0", "event"')
    with edit:
        expect_error(rf"run_name = {run}: has a run on another text; choose", climb, place)
    with replacing(run / "config.yaml", "steps: 4\n", "steps: 400\n"):
        message = rf"run_name = {run}: has a run of 400 steps, the ladder one of 4; choose"
        expect_error(message, climb, place)
    assert climb(place) == 0
    assert started[1:] == [[]], "those of the same ladder count"


@contextmanager
def replacing(file, before, after):
    """The file has another text meanwhile."""
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after, 1))
    yield
    file.write_text(text)


def test_a_text_at_a_url_is_copied(place, untrained, tmp_path, monkeypatch):
    """Before the ladder reads it; not by a dry run."""
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    monkeypatch.setattr(fetch, "_copy", lambda url, folder: fetch_data(Path(folder), url))
    url = f"file://{tmp_path}/data"
    words = last_of_each([*place, "--data.path", url])
    message = "data.path = file.*: has no copy on this machine yet; without --dry_run it is copied"
    expect_error(message, climb, [*words, "--dry_run"])
    assert climb(words) == 0
    assert len(read_ladder(Path(local_copy(url))).rungs) == 7


def test_what_became_of_lengths_and_time(place, untrained, monkeypatch, capsys):
    """A dry run says it, after the runs and before what they will tell."""
    climb([*place, "--dry_run"])
    *_, rounded, told = capsys.readouterr().out.splitlines()
    assert rounded == (
        "  lengths in multiples of 4 steps: 20,000 became 16,384, 40,000 became 32,768,"
        " 80,000 became 81,920"
    )
    assert told.startswith("  it will tell the best size for 30 and 120 minutes")
    whole = last_of_each([*place, "--dry_run", "--lengths", "16384", "32768"])
    climb(whole)
    assert "lengths in multiples" not in capsys.readouterr().out
    monkeypatch.setattr(design, "FEWEST_STEPS", 30)  # for so little text
    climb([*by_time(place), "--dry_run", "--minutes", "9000"])
    output = capsys.readouterr().out
    assert "\n  shorter than 9000 minutes: no run reads this text more than 40 times\n" in output


def by_time(words):
    """The flags without the lengths of runs."""
    at = words.index("--lengths")
    return words[:at] + words[at + 4 :]


def test_a_run_that_fails_is_left_out(place, untrained, tmp_path, capsys):
    started, broken = untrained
    broken.append("book-2x32-0.0819M-seed_1337")
    climb(place)
    (lost,) = broken
    assert lost in started[0]
    assert f"{lost} diverged; its output is in" in capsys.readouterr().out
    assert len(read_ladder(tmp_path / "data").rungs) == 6
    broken += started[0]
    shutil.rmtree(tmp_path / "runs")
    expect_error("ladder = 0 completed runs: are fewer than the 3", climb, place)


def test_members_are_ordinary_runs_of_the_rule(place):
    config = config_of([*place, "--optim.muon_lr", "0.02", "--tracking.log_every", "7"])
    planned = ladder_module.plan_ladder(
        config, read_manifest(Path(config.data.path[0])), Path("none"), 1
    )
    member = ladder_module.make_member(
        config, planned.cells[0], planned.record | {"val_tokens": 99}
    )
    assert load(TrainingConfig, member.flags) == member.config
    assert member.config.own_text
    assert member.config.optim.muon_lr == 0.02
    assert member.config.tracking.log_every == 7
    assert member.config.eval.tokens == 99
    plain = load(
        TrainingConfig,
        ["--data.path", "x", "--optim.muon_lr", "0.02", "--model.block_size", "32"],
        training_default,
    )
    assert settings_of(plain) == planned.record["settings"] == settings_of(member.config)
    chosen = choose(member.config, Text(60_000, 512), own_text.Machine(1e9)).config
    cell = planned.cells[0]
    assert (chosen.train.steps, chosen.train.global_batch_tokens) == (cell.steps, cell.batch)
    assert chosen.eval.every * ladder_module.EVALUATIONS == cell.steps


def test_the_preset_is_the_rule_s():
    ours = yaml.safe_load((ROOT / PRESET).read_text())
    rule = yaml.safe_load((ROOT / OWN_TEXT).read_text())
    own = {"minutes", "repeats", "for_minutes"}
    assert {name: value for name, value in ours.items() if name not in own} == rule
    assert own < ours.keys()


MISTAKES = [
    ("--train.steps 9", r"train\.steps = 9: lengths or minutes sets it"),
    ("--model.n_layer 9", r"model\.n_layer = 9: shapes sets it"),
    ("--shapes 4x192", r"shapes = 4x192: should be two sizes or more"),
    ("--shapes 2x33 2x64", r"shapes = 2x33: the width should be a multiple of 2"),
    ("--lengths 20000 -3", r"lengths = -3: should be"),
    ("--lengths 20000 20001", r"lengths = 20,000 20,001: two of them are nearly the same"),
    ("--shapes 4x192 big", r"shapes = big: .* is LAYERSxWIDTH, like 4x192"),
    ("--lengths 1e6", r"lengths = .*: should be two numbers"),
    ("--minutes 0", r"minutes = 0: should be a number"),
    ("--data.path a b", r"data\.path = a b: should be one folder"),
    ("--task mine.py:Mine", r"task = mine\.py:Mine: a ladder is of the trainer's own class"),
    ("--own_text false", r"own_text = false: should be true"),
    ("--data.path /no/such", r"manifest\.json cannot be read"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_a_mistake_is_one_line_before_any_run(place, untrained, tmp_path, words, message):
    given = {word for word in words.split() if word.startswith("--")}
    kept, skips = [], False
    for word in place:
        skips = word in given if word.startswith("--") else skips
        kept += [] if skips else [word]
    more = words.split() + (["--train.steps", "9"] if "own_text" in words else [])
    expect_error(message, climb, [*kept, *more])
    assert untrained[0] == []
    assert not (tmp_path / "runs").exists()


def test_too_little_validation_text_is_refused(place, untrained, tmp_path):
    data = tmp_path / "data"
    expect_error(
        r"has \d+ validation tokens; a ladder needs 2,000",
        climb,
        [*place, "--data.path", str(few_validation(data, tmp_path / "few"))][2:],
    )


def few_validation(data, folder):
    """Shards with hardly any validation text."""
    folder.mkdir()
    shutil.copy(data / "tokenizer.json", folder)
    write_shards(folder, "text", {"train": ["words of a text " * 4000], "val": ["a few words"]})
    return folder


def test_sizes_that_do_not_fit_the_memory_are_named(place, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_module, "free_memory", lambda: 10_000_000)
    started = []
    monkeypatch.setattr(ladder_module, "train_all", lambda *_: started.append(1))
    message = r"shapes = 2x32: needs \d+\.\d\d GB of memory and 0\.01 GB are free"
    expect_error(message, climb, place)
    assert not started
    assert not (tmp_path / "runs").exists()


def test_what_a_training_would_refuse_is_refused(place, tmp_path, monkeypatch):
    monkeypatch.setattr(ladder_module, "train_all", lambda *_: pytest.fail("trained"))
    (tmp_path / "data/train_000000.bin").write_bytes(b"x")
    expect_error(r"train_000000\.bin", climb, place)


def test_a_dry_run_changes_nothing(place, tmp_path):
    code, output, _ = run_and_read("ladder", [*place, "--dry_run"])
    assert code == 0
    lines = output.splitlines()
    runs = [line for line in lines if f"{tmp_path}/runs/book-" in line.split(" ")[0]]
    assert len(runs) == 7
    assert re.search(r"book-1x32-0\.0164M-seed_1337 +4 +16,384 +\d+ s$", runs[0])
    (command,) = [line for line in lines if line.startswith("python scripts/train_gpt2.py ")]
    first = load(TrainingConfig, command.split()[2:])
    assert (first.run_name, first.train.steps) == ("book-1x32-0.0164M-seed_1337", 4)
    (summary,) = [line for line in lines if "7 runs of 2 sizes on" in line and "about" in line]
    last = [line.replace(str(tmp_path), "") for line in lines[lines.index(summary) :]]
    assert max(map(len, last)) < 140, "the summary is last, and short"
    assert lines.index(summary) > lines.index(command)
    assert not (tmp_path / "runs").exists()
    code, output = run_script("ladder", ["--data.path", "/no/such", "--dry_run"])
    assert code == 2
    assert output.splitlines()[-1].startswith("error: data.path = /no/such: ")


@pytest.fixture
def trained_here(monkeypatch):
    """Runs are trained in this process. Returns their names, by command."""
    started = []

    def train_all(members, at_once, gpus):
        started.append([member.folder.name for member in members])
        assert [train(member.config) for member in members] == ["completed"] * len(members)
        return {}

    monkeypatch.setattr(ladder_module, "train_all", train_all)
    return started


@pytest.mark.slow
def test_a_killed_ladder_goes_on_where_it_was(place, trained_here, tmp_path):
    """Killed in its second run; the answer is that of a ladder that was not killed."""
    words = [*place, "--shapes", "1x32", "2x64", "--lengths", "163840", "655360", "--repeats", "1"]
    words = last_of_each(words)
    names = [f"book-{name}-seed_1337" for name in ("1x32-0.164M", "1x32-0.655M", "2x64-0.164M")]
    first, second, third = (tmp_path / "runs" / name for name in names)
    env = environment(PYTHONPATH=NO_REPORT, OMP_NUM_THREADS=str(torch.get_num_threads()))
    command = [sys.executable, str(SCRIPTS / "ladder.py"), *words]
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL) as process:
        while not (second / "checkpoints/step-00000040").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    while is_locked(second):
        time.sleep(0.01)
    assert read_json(first / "status.json")["state"] == "completed"
    left = read_json(second / "status.json")
    assert left["state"] == "stopped"
    assert not third.exists()
    assert climb(words) == 0
    assert trained_here[0][:2] == names[1:], "without the first"
    rows = [json.loads(line) for line in (second / "metrics.jsonl").read_text().splitlines()]
    starts = [row["step"] for row in rows if row.get("event") == "start"]
    assert starts == [0, left["step"]]
    killed = read_json(tmp_path / "runs/book-ladder.json")
    whole = last_of_each([*words, "--output_dir", str(tmp_path / "whole")])
    assert climb(whole) == 0
    expected = read_json(tmp_path / "whole/book-ladder.json")
    assert len(killed["rungs"]) == 4
    for name in ("name", "bits", "curve"):
        assert [run[name] for run in killed["rungs"]] == [run[name] for run in expected["rungs"]]
    assert killed["law"] == expected["law"]


@pytest.mark.slow
def test_a_ladder_that_is_stopped_goes_on_and_foretells_a_run(place, tmp_path):
    """All of it by real launches: stopped, killed, resumed; then a run and a plan that it
    foretells."""
    command = [sys.executable, str(SCRIPTS / "ladder.py"), *place, "--at_once", "2"]
    stopped_and_killed(command, lambda: 5)
    ladder = read_ladder(tmp_path / "data")
    assert len(ladder.rungs) == 7
    for rung in ladder.rungs:
        assert verify_run(VerifyConfig(run=str(tmp_path / "runs" / rung.name))) == 0
    words = ["--data.path", str(tmp_path / "data"), "--output_dir", str(tmp_path / "runs")]
    words += ["--run_name", "later", "--model.block_size", "32", "--train.device", "cpu"]
    words += ["--model.n_layer", "2", "--model.n_embd", "48", "--train.steps", "30"]
    words += ["--train.mixed_precision", "no"]
    planned = plan_module.make_plan(load(PlanConfig, words, training_default))
    (expected,) = [line for line in plan_module.format_plan(planned) if "  expect " in line]
    assert "by the ladder" in expected
    trained = [sys.executable, str(SCRIPTS / "train_gpt2.py"), *words]
    run = launch(trained, PYTHONPATH=NO_REPORT)
    assert run.returncode == 0, run.stderr
    assert "bits per byte, by the ladder on this text" in run.stderr
    start = json.loads((tmp_path / "runs/later/metrics.jsonl").read_text().splitlines()[0])
    assert expectation_of(start).val_tokens == ladder.val_tokens
    rows = (tmp_path / "runs/later/metrics.jsonl").read_text().splitlines()
    scored = [row for row in map(json.loads, rows) if "val_tokens" in row]
    assert {row["val_tokens"] for row in scored} == {ladder.val_tokens}
    assert (tmp_path / "data" / FILE).exists()
