"""The mutation script's table fits the tree; `make mutants` runs it. And what a comparison of numbers finds."""

import ast
import math

import close
import margins
import numpy as np
import pytest
import torch
from mutants import EQUIVALENT, MODULES, ROOT, mutants_of


def test_each_module_has_mutants_that_parse_and_tests_that_are_there():
    found = {module: mutants_of(module) for module in MODULES}
    assert sum(map(len, found.values())) >= 200
    for module, mutants in found.items():
        sources = {mutant.source for mutant in mutants} - {(ROOT / "gpt2_ddp" / module).read_bytes()}
        assert len(sources) == len(mutants)
        assert all(ast.parse(source) for source in sources)
        for test in (argument for argument in MODULES[module][1] if argument.startswith("tests/")):
            file, _, name = test.partition("::")
            assert f"def {name}" in (ROOT / file).read_text()


def test_equivalent_mutants_are_of_the_source():
    for module, before, _ in EQUIVALENT:
        source = (ROOT / "gpt2_ddp" / module).read_text()
        assert "".join(before.split()) in "".join(source.split()), (module, before)


def test_a_comparison_measures_at_the_scale_of_the_whole(monkeypatch):
    monkeypatch.setattr(close, "MARGINS", {})
    whole, zero = torch.tensor([2.0, -400.0]), np.array([1e-8])
    close.assert_close({"a": whole, "zero": zero}, {"a": whole, "zero": [0]}, 1e-9)  # 0 in exact arithmetic
    close.assert_close((1.0, math.inf), (1.0, math.inf))
    assert [*close.MARGINS.values()] == [1e-8 / 400 / 1e-9]
    for ours, theirs in [
        ([1e-8], [0.0]), ([math.nan, 1.0], [math.nan, 1.0]), ([math.inf, 1.0], [2.0, 1.0]), ([1.0], [1.0, 1.0]),
        ([[1.0]], [1.0]), ({"a": 1.0}, {"b": 1.0}), (whole, whole[:1]), (1 + 2e-9, 1.0),
    ]:  # fmt: skip
        with pytest.raises(AssertionError):
            close.assert_close(ours, theirs)


def test_a_near_comparison_fails_in_ci(monkeypatch, capsys):
    monkeypatch.setattr(margins, "MARGINS", {"near": 0.11, "far": 0.01})
    monkeypatch.delenv("MARGINS", raising=False)
    for variable, fails in (("CI", True), ("HOME", False)):
        monkeypatch.delenv("CI", raising=False)
        monkeypatch.setenv(variable, "1")
        assert margins.report() is fails
    assert capsys.readouterr().out.count("  0.1100 near\n  0.0100 far\n") == 2
