"""The mutation script's table fits the tree; `make mutants` runs it. And what a comparison of
numbers finds."""

import ast
import math

import close
import margins
import numpy as np
import pytest
import torch
from mutants import EQUIVALENT, MODULES, ROOT, digest_of, find_equivalent, mutants_of, place_of


def test_each_module_has_mutants_that_parse_and_tests_that_are_there():
    found = {module: mutants_of(module) for module in MODULES}
    assert sum(map(len, found.values())) >= 200
    for module, mutants in found.items():
        sources = {mutant.source for mutant in mutants} - {
            (ROOT / "gpt2_ddp" / module).read_bytes()
        }
        assert len(sources) == len(mutants)
        assert all(ast.parse(source) for source in sources)
        for test in (argument for argument in MODULES[module][1] if argument.startswith("tests/")):
            file, _, name = test.partition("::")
            assert f"def {name}" in (ROOT / file).read_text()


def test_an_equivalent_mutant_counts_as_long_as_its_function_is_the_same():
    """Changes elsewhere in the module keep the entry; one of the function asks for another look, in
    `make mutants`."""
    source = "LIMIT = 1\n\n\nclass A:\n    def f(self):\n        return 2 * LIMIT\n"
    name, node = place_of(ast.parse(source), 6)
    assert name == "A.f"
    assert place_of(ast.parse(source), 1)[0] == ""
    longer = "# new\n" + source.replace("LIMIT = 1", "LIMIT = 1  # bytes")
    assert digest_of(longer, place_of(ast.parse(longer), 7)[1]) == digest_of(source, node)
    changed = source.replace("2 *", "3 *")
    assert digest_of(changed, place_of(ast.parse(changed), 6)[1]) != digest_of(source, node)


def test_equivalent_mutants_are_mutants_of_the_table():
    assert {entry.module for entry in EQUIVALENT} <= MODULES.keys()
    mutant = mutants_of("model/optim.py")[0]
    assert find_equivalent("model/optim.py", mutant._replace(function="none")) is None


def test_a_comparison_measures_at_the_scale_of_the_whole(monkeypatch):
    monkeypatch.setattr(close, "MARGINS", {})
    whole, zero = torch.tensor([2.0, -400.0]), np.array([1e-8])
    # 0 in exact arithmetic
    close.assert_close({"a": whole, "zero": zero}, {"a": whole, "zero": [0]}, 1e-9)
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
