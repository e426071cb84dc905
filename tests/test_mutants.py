"""The mutation script's table fits the tree; `make mutants`
runs it. And what a comparison of numbers finds."""

import ast
import math

import close
import margins
import numpy as np
import pytest
import torch
from mutants import (
    EQUIVALENT,
    MODULES,
    ROOT,
    Source,
    digest_of,
    find_equivalent,
    mutants_of,
    place_of,
)


def test_each_module_has_mutants_that_parse_and_tests_that_are_there():
    found = {module: mutants_of(module) for module in MODULES}
    assert sum(map(len, found.values())) >= 280
    for module, mutants in found.items():
        original = (ROOT / "gpt2_ddp" / module).read_bytes()
        sources = {mutant.source for mutant in mutants} - {original}
        assert len(sources) == len(mutants)
        assert all(ast.parse(source) for source in sources)
        assert all(mutant.before != mutant.after for mutant in mutants)
        for test in MODULES[module].tests:
            file, _, name = test.partition("::")
            assert f"def {name}" in (ROOT / "tests" / file).read_text()


def test_an_equivalent_mutant_counts_as_long_as_its_function_is_the_same():
    """Changes elsewhere in the module keep the entry, and so does another layout; a change of the
    function asks for another look, in `make mutants`."""
    source = "LIMIT = 1\n\n\nclass A:\n    def f(self):\n        return 2 * LIMIT\n"
    name, function = place_of(ast.parse(source), 6)
    assert name == "A.f"
    assert place_of(ast.parse(source), 1)[0] == ""
    longer = source.replace("LIMIT = 1", "OTHER = 1").replace(
        "2 * LIMIT", "(\n  2 * LIMIT  # all\n)"
    )
    assert digest_of(place_of(ast.parse(longer), 6)[1]) == digest_of(function)
    changed = source.replace("2 *", "3 *")
    assert digest_of(place_of(ast.parse(changed), 6)[1]) != digest_of(function)


def test_a_change_is_shown_with_what_surrounds_it():
    """On one line, however the source is laid out."""
    source = (
        b"def f(a=1):\n    if a > 0 and g(\n        a,\n        b=2,\n    ):\n        return 3\n"
    )
    made = Source(source)
    mutants = [made.mutant(change) for change in made.changes]
    assert {("a=1", "a=2"), ("return 3", "return 4")} <= {(m.before, m.after) for m in mutants}
    condition = "a > 0 and g(a, b=2)"
    assert {mutant.after for mutant in mutants if mutant.before == condition} == {
        "a >= 0 and g(a, b=2)",
        "a > 1 and g(a, b=2)",
        "a > 0 or g(a, b=2)",
        "a > 0 and g(a, b=3)",
        "a > 0 and g(a)",
        "True and g(a, b=2)",
        "a > 0 and True",
        "True",
        "False",
    }


def test_an_equivalent_mutant_is_one_of_its_function():
    """As long as the function is what it was when the entry was made."""
    sources = {}
    for entry in EQUIVALENT:
        assert entry.module in MODULES
        if entry.module not in sources:
            sources[entry.module] = Source((ROOT / "gpt2_ddp" / entry.module).read_bytes())
        source = sources[entry.module]
        places = {change: source.place_of(change) for change in source.changes}
        mutants = [
            source.mutant(change)
            for change, (function, node) in places.items()
            if function == entry.function and digest_of(node) == entry.digest
        ]
        shown = [(mutant.before, mutant.after) for mutant in mutants]
        assert not mutants or (entry.before, entry.after) in shown, entry
    mutant = mutants_of("model/optim.py")[0]
    assert find_equivalent("model/optim.py", mutant._replace(function="none")) is None


def test_a_comparison_measures_at_the_scale_of_the_whole(monkeypatch):
    monkeypatch.setattr(close, "MARGINS", {})
    whole = torch.tensor([2.0, -400.0])
    zero = np.array([1e-8])
    # 0 in exact arithmetic
    close.assert_close({"a": whole, "zero": zero}, {"a": whole, "zero": [0]}, 1e-9)
    close.assert_close((1.0, math.inf), (1.0, math.inf))
    assert [*close.MARGINS.values()] == [1e-8 / 400 / 1e-9]
    for ours, theirs in (
        ([1e-8], [0.0]),
        ([math.nan, 1.0], [math.nan, 1.0]),
        ([math.inf, 1.0], [2.0, 1.0]),
        ([1.0], [1.0, 1.0]),
        ([[1.0]], [1.0]),
        ({"a": 1.0}, {"b": 1.0}),
        (whole, whole[:1]),
        (1 + 2e-9, 1.0),
    ):
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
