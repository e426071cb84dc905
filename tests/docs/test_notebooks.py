"""docs/notebooks: each notebook runs whole in an empty folder, and is committed without outputs."""

import json
from itertools import product

import pytest
from commands import NO_REPORT, ROOT

FACTS = {
    "own_text": """
assert scores.loss < frequency_loss < log(data.vocab_size)
assert scores.tokens == data.tokens("val") - 1
""",
    "compare_classes": """
low, high = difference["interval"]
assert low < np.mean(mine - base) < high and difference["n"] == 2
assert model.h[0].mlp.activation.__name__ == "relu2"
""",
    "look_into_a_run": """
assert is_intact and not copy_is_intact
assert found == manifest["files"]["model.safetensors"]["sha256"]
assert losses_of["step 40"].mean() < losses_of["step 10"].mean()
""",
}
"""What holds after the last cell."""
SMALLER = {
    '"global_batch_tokens": 1024': '"global_batch_tokens": 256',
    "--seeds 1 2 3": "--seeds 1 2",
    '"steps": 200': '"steps": 40',
    'eval={"every": 50}': 'eval={"every": 10}',
    'checkpoint={"every": 50': 'checkpoint={"every": 10',
    "in (50, 200)": "in (10, 40)",
    "step 200": "step 40",
    "warmup_steps: 20}\ntrain: {steps: 100": "warmup_steps: 2}\ntrain: {steps: 10",
}
"""Sizes in the cells, and those that are run here."""
files = pytest.mark.parametrize(
    "file", sorted(ROOT.glob("docs/notebooks/*.ipynb")), ids=lambda file: file.stem
)


@files
def test_a_notebook_is_committed_without_outputs(file):
    notebook = json.loads(file.read_text())
    assert notebook["metadata"].keys() == {"kernelspec", "language_info"}
    assert notebook["metadata"]["language_info"] == {"name": "python"}
    for cell in notebook["cells"]:
        assert (cell.get("outputs", []), cell.get("execution_count"), cell["metadata"]) == (
            [],
            None,
            {},
        )


@pytest.mark.slow
@files
def test_a_notebook_runs_whole(file, tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", NO_REPORT)
    notebook = nbformat.read(file, 4)
    for cell, sizes in product(notebook.cells, SMALLER.items()):
        cell.source = cell.source.replace(*sizes)
    notebook.cells.append(nbformat.v4.new_code_cell(FACTS[file.stem]))
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
