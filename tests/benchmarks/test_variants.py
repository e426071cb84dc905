"""benchmarks.ab: names of variants, tables and rounds on made-up figures; and, slowly, a tiny
comparison."""

import io
import json
import re
import sys
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
from close import assert_close
from commands import ROOT
from test_gpu import TINY_PRESET

from benchmarks import ab, gate, variants
from benchmarks.ab import ABConfig, Worker
from benchmarks.card import CardLog
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import read_json


def found_of(**rates):
    """What `compare_variants` records: the rates of each variant's turns; A has two a round."""
    found = {"rounds": len(rates["A"]) // 2, "variants": {}}
    for name, of in rates.items():
        per_round = 2 if name == "A" else 1
        turns = [
            {"round": n // per_round, "rate": rate, "ms": 1.0, "mib": 2.0}
            for n, rate in enumerate(of)
        ]
        found["variants"][name] = {"state": "ready", "ready_seconds": 1.0, "turns": turns}
    return found


def test_a_name_joins_variants_and_its_baseline_has_the_same_sizes_without_patches():
    assert (variants.split_name("A"), variants.split_name("A+loss+x8")) == ([], ["loss", "x8"])
    names = ("A", "loss", "mask+gelu+x8", "w64+x8+nanogpt", "w64+fp8")
    assert [*map(variants.baseline_of, names)] == ["A", "A", "mask+x8", "w64+x8", "w64"]
    with pytest.raises(UserError, match="lots"):
        variants.split_name("loss+lots")


def test_a_patch_lasts_as_long_as_its_context_and_a_missing_attribute_is_a_user_error(monkeypatch):
    module = SimpleNamespace(USES=False)
    monkeypatch.setitem(sys.modules, "made_up", module)
    monkeypatch.setitem(variants.PATCHES, "loss", {"made_up:USES": True})
    monkeypatch.setitem(variants.PATCHES, "gelu", {"made_up:MISSING": True})
    with variants.patched("loss+x8"):
        assert module.USES
    assert not module.USES
    with pytest.raises(UserError, match="made_up:MISSING"), variants.patched("loss+gelu"):
        pass
    assert not module.USES


def test_every_patch_is_of_an_attribute_that_the_code_has():
    for name in variants.PATCHES:
        with variants.patched(name):
            pass


def test_ratios_are_of_one_round_and_a_difference_counts_beyond_twice_the_spread_of_a():
    found = found_of(A=[100.0, 102.0, 50.0, 50.5], loss=[121.2, 60.3], gelu=[103.0, 50.3])
    assert_close(ab.own_spread(found), [0.02, 0.01])
    assert_close(ab.ratios(found, "loss", "A"), [1.2, 1.2])
    rows = {row[0]: row[ab.HEADER.index("counts")] for row in ab.table_rows(found)}
    assert rows == {"A": "", "loss": "yes", "gelu": ""}
    assert ab.best(found) == "loss"


def test_a_variant_that_was_not_measured_is_named_below_the_table(tmp_path):
    found = found_of(A=[1.0, 1.0])
    found["variants"]["loss"] = {"state": "failed with exit code 1", "turns": []}
    ab.write_results(found, tmp_path)
    assert "loss: failed with exit code 1" in (tmp_path / "ab.md").read_text()
    assert read_json(tmp_path / "ab.json")["rounds"] == 1


def worker_that(answers):
    """A worker whose process has already sent its answers."""
    here, there = Pipe()
    for answer in answers:
        there.send(answer)
    process = SimpleNamespace(kill=lambda: None, join=lambda timeout: None, exitcode=1)
    return Worker(process, here, tokens=1000, steps=3), there


def test_a_round_begins_with_a_and_has_it_again_in_the_middle():
    answers = {name: [{"ms": 10.0, "mib": 1.0}] * 4 for name in ("A", "loss", "gelu")}
    pairs = {name: worker_that(of) for name, of in answers.items()}
    workers = {name: pair[0] for name, pair in pairs.items()}
    asked = []
    found = {"rounds": 0, "variants": {name: {"state": "ready", "turns": []} for name in workers}}
    for _ in range(2):
        ab.take_round(workers, found, CardLog(), 1.0)
    for name, (_, there) in pairs.items():
        while there.poll():
            asked.append((name, there.recv()))
    assert (
        asked == [("A", (3, False))] * 4 + [("loss", (3, False))] * 2 + [("gelu", (3, False))] * 2
    )
    assert found["rounds"] == 2
    assert {turn["rate"] for turn in found["variants"]["A"]["turns"]} == {100_000.0}


def test_a_variant_that_fails_is_left_out_and_the_others_go_on():
    refused, _keep = worker_that([{"failed": "no such attribute"}])
    dead, end = worker_that([])
    end.close()
    late, _open = worker_that([])
    ready, _other = worker_that([{"ready": 2.0}])
    workers = {"loss": refused, "gelu": dead, "muon": late, "A": ready}
    found = {name: {"state": "compiles", "turns": []} for name in workers}
    ab.wait_until_ready(workers, found, begun=0.0, seconds=0.0)
    assert [*workers] == ["A"]
    states = [found[name]["state"] for name in ("loss", "gelu", "muon", "A")]
    assert states[0] == "no such attribute"
    assert states[1] == "failed with exit code 1, see its traceback"
    assert states[2].startswith("no answer after")
    assert states[3] == "ready"


def test_a_trace_that_is_missing_is_named(tmp_path, capsys):
    traced, _there = worker_that([{"kernels": [("product", 2.0, 3.0)]}])
    dead, end = worker_that([])
    end.close()
    workers = {"A": traced, "fp8": dead}
    found = {"variants": {name: {"state": "ready", "turns": []} for name in workers}}
    config = ABConfig(trace=("A", "fp8", "lots"))
    ab.trace_variants(config, workers, found, tmp_path)
    assert "2.000 ms     3.0 x  product" in (tmp_path / "trace_A.txt").read_text()
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("no trace of fp8: failed with exit code 1")
    assert said[1] == "no trace of lots: is no variant"


def test_the_log_of_the_card_gives_medians_of_the_lines_between():
    log = CardLog()
    log.lines = [
        (1.0, "1000, 500.5, 40, 0x1"),
        (2.0, "1200, 600, 50, 0x4"),
        (3.0, "[N/A], 1, 1, 0x0"),
        (9.0, "1, 1, 1, 0x0"),
    ]
    assert log.between(0, 4) == {
        "mhz": 1100.0,
        "watts": 550.25,
        "celsius": 45.0,
        "reasons": ["0x1", "0x4"],
    }
    assert log.between(4, 5) == {}


def write_run(folder, rows, weights="weights"):
    (folder / "checkpoints/step-00000002").mkdir(parents=True)
    (folder / "checkpoints/step-00000002/model.safetensors").write_text(weights)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_gate_compares_losses_norms_and_weights(tmp_path):
    first = {"step": 1, "loss": 3.0, "grad_norm": 1.0}
    for name, loss in (("one", 2.0), ("near", 2.002), ("far", 2.02)):
        rows = [{"event": "start"}, first, {"step": 2, "loss": loss, "grad_norm": 1.0}]
        write_run(tmp_path / name, rows, name)
    verdicts = [
        gate.near(tmp_path / "one", tmp_path / name)["passed"] for name in ("one", "near", "far")
    ]
    assert verdicts == [True, True, False]
    # a norm that is far apart, as is that of a run that differs by rounding
    for name, norm in (("rounded", 1.1), ("apart", 1.19), ("beyond", 1.21)):
        write_run(tmp_path / name, [first, {"step": 2, "loss": 2.0, "grad_norm": norm}])
    one, rounded, apart, beyond = (
        tmp_path / name for name in ("one", "rounded", "apart", "beyond")
    )
    assert not gate.near(one, apart)["passed"]
    found = gate.near(one, apart, one, rounded)
    assert found["passed"]
    assert_close(found["grad_norm_by_rounding"]["mean"], 0.05, 1e-9)
    assert not gate.near(one, beyond, one, rounded)["passed"]
    assert not gate.near(one, tmp_path / "far", one, rounded)["passed"]
    assert [
        gate.equal(tmp_path / "one", tmp_path / name)["passed"] for name in ("one", "near")
    ] == [True, False]


def test_the_gate_does_not_pass_what_it_cannot_compare(tmp_path):
    start = {"event": "start"}
    first = {"step": 1, "loss": 3.0, "grad_norm": 1.0, "lr": 0.1, "tokens_per_second": 5.0}
    second = first | {"step": 2, "loss": 2.0}
    write_run(tmp_path / "straight", [start, first, second])
    write_run(tmp_path / "resumed", [start, first | {"val_loss": 3.0}, start, second])
    write_run(tmp_path / "short", [start, first])
    write_run(tmp_path / "slower", [start, first, second | {"tokens_per_second": 4.0}])
    write_run(tmp_path / "otherwise", [start, first, second | {"lr": 0.2}])
    write_run(tmp_path / "broken", [start, first, second | {"loss": None}])
    write_run(tmp_path / "trained", [start, first, second], "others")

    def judge(kind, name, *others):
        return gate.judge(kind, *(str(tmp_path / run) for run in ("straight", name, *others)))

    # a run whose time was over compares its steps alone
    assert not judge("near", "short")["passed"]
    assert not gate.judge("near", str(tmp_path / "short"), str(tmp_path / "straight"))["passed"]
    assert not judge("equal", "short")["passed"]
    assert judge("equal", "slower")["passed"]
    assert judge("equal", "otherwise")["differ"] == {2: ["lr"]}
    assert not judge("equal", "otherwise")["passed"]
    assert not judge("equal", "trained")["passed"]
    assert not judge("near", "broken")["passed"]
    # a run that began once was not resumed
    assert judge("resumed", "resumed")["passed"]
    assert not judge("resumed", "slower")["passed"]
    for kind in ("near", "equal", "resumed"):
        found = judge(kind, "missing")
        assert not found["passed"]
        assert "metrics.jsonl" in found["reason"]
    # the runs that differ by rounding may be missing, too
    assert not judge("near", "slower", "straight", "missing")["passed"]


def test_the_gate_reads_a_comparison_a_line(tmp_path, capsys, monkeypatch):
    row = {"step": 1, "loss": 3.0, "grad_norm": 1.0}
    write_run(tmp_path / "one", [{"event": "start"}, row])
    lines = [f"{kind} {tmp_path}/one {tmp_path}/one" for kind in ("near", "equal", "resumed")]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    gate.main([])
    gate.main(lines[0].split())
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["passed"] for one in found] == [True, True, False, True]
    assert found[2]["gate"] == lines[2].split()


def test_the_names_of_the_lease_are_known():
    text = (ROOT / "benchmarks/lease.sh").read_text()
    default = re.search(r'default="(.*)"', text)[1].replace("${beside[*]}", "")
    names = default.split()
    assert names[0] == variants.PLAIN
    assert {*map(variants.baseline_of, names)} <= {*names}, "a variant is compared with its own"


@pytest.mark.slow
def test_a_tiny_comparison_writes_table_results_and_traces(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY_PRESET)
    short = {
        "preset": str(tmp_path / "tiny.yaml"),
        "block_size": 32,
        "windows": 2,
        "precision": "no",
        "compile": "off",
    }
    names = ("A", "x8", "muon", "w64+bare")
    config = ABConfig(
        device="cpu",
        variants=names,
        rounds=2,
        turn=2,
        trace=("A",),
        output=str(tmp_path / "out"),
        **short,
    )
    found = ab.compare_variants(config)
    turns = {name: len(one["turns"]) for name, one in found["variants"].items()}
    assert turns == {"A": 4, "x8": 2, "muon": 2, "w64+bare": 2}
    assert read_json(tmp_path / "out/ab.json")["variants"] == found["variants"]
    assert "aten::" in (tmp_path / "out/trace_A.txt").read_text()
