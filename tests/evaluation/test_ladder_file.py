"""What a data folder keeps of a ladder, and what a run is told by it."""

import json
import math
import shutil
from dataclasses import replace

import pytest
from close import assert_close
from ladders import CURVE, make_ladder
from pydantic import TypeAdapter

from gpt2_ddp.config.cli import resolve
from gpt2_ddp.config.own_text import active_parameters
from gpt2_ddp.config.training import TrainingConfig, training_default
from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.evaluation.ladder import (
    FILE,
    Expectation,
    Ladder,
    describe_interval,
    expectation_of,
    find_ladder,
    read_ladder,
    settings_of,
)
from gpt2_ddp.evaluation.scaling import BEYOND, Interval


@pytest.fixture
def folder(corpus, tmp_path):
    """A folder of shards, and the ladder that it keeps."""
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    config = config_of(data)
    ladder = make_ladder(data_manifest=read_manifest(data).hash, settings=settings_of(config))
    ladder.write(data)
    return data, ladder


def config_of(data, **flags):
    return resolve(TrainingConfig, [], {"data.path": str(data), **flags}, training_default)


def test_a_folder_keeps_a_ladder(folder):
    data, ladder = folder
    assert read_ladder(data) == ladder
    assert find_ladder(config_of(data), [read_manifest(data)]) == ladder
    again = read_ladder(data)
    assert_close([*again.expect(2e6, 3e6)], [*ladder.expect(2e6, 3e6)], 1e-12)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"optim.muon_lr": "0.03"}, "optim.muon_lr"),
        (
            {"model.dropout": "0.1", "model.architecture": "llama"},
            "model.architecture, model.dropout",
        ),
        ({"data.shift_windows": "false"}, "data.shift_windows"),
        ({"train.init_from": "runs/other"}, ""),
        ({"task": "mine.py:Mine"}, ""),
    ],
)
def test_other_settings_have_no_ladder_and_a_note_names_them(folder, flags, named, capsys):
    data, _ = folder
    config = config_of(data, **flags)
    capsys.readouterr()
    assert find_ladder(config, [read_manifest(data)]) is None
    said = capsys.readouterr().err
    expected = f"note: {data / FILE} is of other values of {named}, and foretells nothing"
    assert said.startswith(expected) if named else not said


def test_shape_length_seed_and_reports_do_not_matter(folder):
    data, ladder = folder
    flags = {"model.n_layer": "5", "model.n_embd": "96", "train.minutes": "7", "seed": "3"}
    flags |= {"eval.every": "3", "tracking.log_every": "1", "checkpoint.keep_last": "2"}
    assert find_ladder(config_of(data, **flags), [read_manifest(data)]) == ladder
    manifest = read_manifest(data)
    assert find_ladder(config_of(data), [manifest, manifest]) is None, "a mixture is another text"


def test_a_ladder_of_other_data_or_a_damaged_file_is_none(folder, capsys):
    data, ladder = folder
    content = json.loads((data / FILE).read_text())
    damaged = [
        {**content, "data_manifest": "0" * 64},
        {**content, "version": 2},
        {**content, "rungs": content["rungs"][:2]},
        {**content, "rungs": [{**rung, "bits": -1} for rung in content["rungs"]]},
        {**content, "rungs": "x"},
        {},
        [],
    ]
    for value in damaged:
        (data / FILE).write_text(json.dumps(value))
        assert read_ladder(data) is None
    (data / FILE).write_text("{")
    assert read_ladder(data) is None
    config = config_of(data)
    manifests = [read_manifest(data)]
    capsys.readouterr()
    assert find_ladder(config, manifests) is None
    assert capsys.readouterr().err.startswith(f"note: {data / FILE} is damaged, or of other data")
    (data / FILE).unlink()
    assert read_ladder(data) is None
    assert find_ladder(config, manifests) is None
    assert not capsys.readouterr().err
    assert ladder.version == 1


def test_nothing_is_said_beyond_ten_times():
    ladder = make_ladder()
    largest = max(run.parameters for run in ladder.rungs)
    longest = max(run.tokens for run in ladder.rungs)
    assert ladder.expect(BEYOND * largest, BEYOND * longest)
    assert ladder.expect(1.001 * BEYOND * largest, longest) is None
    assert ladder.expect(largest, 1.001 * BEYOND * longest) is None
    assert ladder.expectation(largest, 1.001 * BEYOND * longest) is None
    table = ladder.expectation(largest, BEYOND * longest / 1.5).by_tokens
    assert max(row[0] for row in table) <= BEYOND * longest


def test_an_expectation_survives_a_row():
    ladder = make_ladder()
    expectation = ladder.expectation(2e6, 3e6)
    row = json.loads(json.dumps({"forecast": {"ladder": expectation.record()}}))
    assert expectation_of(row) == expectation
    for tokens in (0.8e6, 3e6, 11e6):
        here = expectation.at_end(tokens)
        assert_close([*here], [*ladder.expect(2e6, tokens)], 6e-3)
    assert expectation.at_end(0.5e6) is None
    assert expectation.at_end(13e6) is None


HOSTILE = [
    None,
    5,
    {"by_tokens": []},
    {"val_tokens": "x"},
    {"by_tokens": [[1.0, 2.0, 3.0, 1.0]]},
    {"by_tokens": [[3.0, 2.0, 1.0, 3.0], [2.0, 2.0, 1.0, 3.0]]},
    {"by_tokens": [[1.0, math.inf, 1.0, 3.0]]},
    {"by_tokens": [[0.0, 2.0, 1.0, 3.0], [2.0, 2.0, 1.0, 3.0]]},
    {"by_progress": [[0.5, 1e9, 0.1]]},
    {"by_progress": [[1.5, 0.1, 0.1]]},
    {"by_progress": [[0.5, math.nan, 0.1]]},
]


@pytest.mark.parametrize("changes", HOSTILE)
def test_a_row_of_a_stranger_is_no_expectation(changes):
    record = make_ladder().expectation(2e6, 3e6).record()
    value = {**record, **changes} if isinstance(changes, dict) else changes
    assert expectation_of({"forecast": {"ladder": value}}) is None
    assert expectation_of({"forecast": value}) is None
    assert expectation_of({}) is None


def test_the_curve_of_a_run_has_the_ladder_s_shape():
    """Every run of the ladder has been above its end by the same ratios."""
    ladder = make_ladder()
    expectation = ladder.expectation(2e6, 3e6)
    end = expectation.at_end(3e6)
    for share, ratio in CURVE:
        during = expectation.during(3e6, share)
        assert_close(during.bits, end.bits * ratio)
        assert during.high / during.low >= end.high / end.low * (1 - 1e-9)
    between = expectation.during(3e6, 0.6)
    assert expectation.during(3e6, 0.75).bits < between.bits < expectation.during(3e6, 0.5).bits
    assert expectation.during(3e6, 0.1) is None, "too early: no evaluation of the ladder was there"
    assert_close([*expectation.during(3e6, 1.0)], [*end], 1e-3)


def test_an_expectation_without_a_curve_is_of_the_end():
    ladder = make_ladder()
    ladder = replace(ladder, rungs=tuple(replace(run, curve=()) for run in ladder.rungs))
    expectation = ladder.expectation(2e6, 3e6)
    assert expectation.by_progress == ()
    assert expectation.during(3e6, 0.5) is None
    assert Expectation(**expectation.record()) == expectation


def test_speed_by_size():
    ladder = make_ladder(base=2e-5, each=5e-11)
    for parameters in (1e5, 1e6, 1e7):
        assert_close(ladder.seconds_per_token(parameters), 2e-5 + 5e-11 * parameters)
    # timings that a line through all of them would make negative somewhere
    strange = make_ladder(base=-1e-5, each=5e-11)
    assert strange.seconds_per_token(1e4) > 0


def test_the_best_size_grows_with_the_time():
    ladder = make_ladder()
    answers = [
        ladder.answer(lambda size, minutes=minutes: ladder.tokens_in(minutes, size))
        for minutes in (3, 10, 30)
    ]
    assert [answer.parameters for answer in answers] == sorted(
        answer.parameters for answer in answers
    )
    assert answers[0].parameters < answers[-1].parameters
    bits = [answer.interval.bits for answer in answers]
    assert bits == sorted(bits, reverse=True)
    for answer, minutes in zip(answers, (3, 10, 30), strict=True):
        shape = {"model.n_layer": answer.layers, "model.n_embd": answer.width}
        assert answer.parameters == active_parameters(shape, ladder.vocab_size)
        assert_close(answer.tokens, ladder.tokens_in(minutes, answer.parameters))
    assert not answers[0].is_limited


def test_a_time_beyond_the_limits_has_no_answer():
    ladder = make_ladder()
    assert ladder.answer(lambda size: 1e12) is None
    few = ladder.answer(lambda size: 1e6 if size < 3e7 else 1e12)
    assert few is None or not few.is_limited or few.parameters < 3e7
    limited = ladder.answer(lambda size: 2e7)
    assert limited.is_limited, "with so many tokens, larger models would be better"


def test_twice_the_text_is_better_where_it_is_repeated():
    ladder = make_ladder()
    for tokens, is_repeated in ((0.5e6, False), (9e6, True)):
        here, more = (ladder.expect(2e6, tokens, text).bits for text in (1, 2))
        assert (more < here) == is_repeated


def test_texts():
    assert describe_interval(Interval(1.52345, 1.4918, 1.55)) == "1.523 (1.492 to 1.550)"
    record = TypeAdapter(Ladder).dump_python(make_ladder(), mode="json")
    assert len(json.dumps(record)) < 10_000
