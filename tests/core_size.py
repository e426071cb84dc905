"""Prints the size of core and product in tokens, to be compared with that of another commit.

    .venv/bin/python tests/core_size.py

Comments and docstrings do not count, so lines are free. `loaded` is what a training on prepared
data imports. `reachable` is what scripts/train_gpt2.py can import, imports inside functions
included. Both count gpt2_ddp only. `product` is all that is not a test.
"""

import ast
import json
import os
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("gpt2_ddp", "scripts", "benchmarks")

PROBE = """
import json, runpy, sys
out, sys.argv = sys.argv[1], sys.argv[2:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    assert not end.code
own = [module for name, module in sys.modules.items() if name.partition(".")[0] == "gpt2_ddp"]
files = [module.__file__ for module in own]
json.dump(files, open(out, "w"))
"""
DATA = "--source stdlib --tokenizer gpt2 --max_documents 200"
TRAINING = (
    "--run_name a --model.n_layer 1 --model.n_head 2 --model.n_embd 32 --model.block_size 32"
    " --train.steps 3 --train.global_batch_tokens 256 --train.micro_batch_size 4"
    " --eval.tokens 256 --optim.warmup_steps 1"
)


def loaded_files() -> list[Path]:
    """The package's files that a training of three steps has imported."""
    with tempfile.TemporaryDirectory() as folder:
        data = f"{folder}/data"
        out = f"{folder}/files.json"
        prepare = ["scripts/prepare_data.py", "--output", data, *DATA.split()]
        train = [
            "scripts/train_gpt2.py",
            "--data.path",
            data,
            "--output_dir",
            folder,
            *TRAINING.split(),
        ]
        for command in ([sys.executable, *prepare], [sys.executable, "-c", PROBE, out, *train]):
            done = subprocess.run(
                command,
                cwd=ROOT,
                capture_output=True,
                text=True,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )
            assert done.returncode == 0, done.stderr
        return [Path(file) for file in json.loads(Path(out).read_text())]


def reachable_files(script: Path) -> set[Path]:
    """The package's files that a script can import."""
    seen: set[Path] = set()
    todo = [script]
    while todo:
        file = todo.pop()
        if file not in seen:
            seen.add(file)
            todo += _imports(file)
    return seen - {script}


def _imports(file: Path) -> Iterator[Path]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            place = ROOT.joinpath(*name.split("."))
            if name.partition(".")[0] == "gpt2_ddp":
                yield from (
                    path
                    for path in (place.with_suffix(".py"), place / "__init__.py")
                    if path.is_file()
                )


def tokens(file: Path) -> int:
    """Number of tokens in a file, without comments, docstrings and line ends."""
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER)
    ends = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
    count = 0
    begins = True  # a statement, which is a docstring if it is a string
    with tokenize.open(file) as source:
        for token in tokenize.generate_tokens(source.readline):
            if token.type in ends:
                begins = True
            elif token.type not in silent:
                count += not (begins and token.type == tokenize.STRING)
                begins = False
    return count


def main() -> None:
    """Prints the sizes."""
    files = {
        "loaded": loaded_files(),
        "reachable": reachable_files(ROOT / "scripts/train_gpt2.py"),
        "product": [file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py")],
        "tests": (ROOT / "tests").rglob("*.py"),
    }
    for name, measured in files.items():
        print(f"{name}: {sum(map(tokens, measured)):,} tokens")


if __name__ == "__main__":
    main()
