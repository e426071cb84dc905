"""The mutation script's table fits the tree; `make mutants` runs it."""

import ast

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
        source = (ROOT / "gpt2_ddp" / module).read_text(encoding="utf-8")
        assert "".join(before.split()) in "".join(source.split()), (module, before)
