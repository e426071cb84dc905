"""What a GPU machine must be able to run has no use for the packages that such machines lack."""

import io
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib.machinery import PathFinder
from importlib.util import find_spec

from commands import ROOT
from ranks import run_ranks
from runs import training_config

from gpt2_ddp.config.cli import dump

LACKING = ("datasets", "matplotlib", "PIL", "pyarrow", "tokenizers", "transformers", "wandb")


class Lacking(PathFinder):
    """Finds modules as where these packages are not installed."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in LACKING else PathFinder.find_spec(name, path, target)


def lack() -> None:
    """In a forked process, which has torch and our modules loaded, and none of these."""
    assert not {*LACKING} & {name.split(".")[0] for name in sys.modules}
    sys.meta_path[sys.meta_path.index(PathFinder)] = Lacking
    assert not any(map(find_spec, LACKING))


def run_without(commands: list[list[str]]) -> list[str]:
    """What each script prints in a process that lacks these packages."""
    lack()
    printed = []
    for name, *flags in commands:
        sys.argv, output = [name, *flags], io.StringIO()
        with redirect_stdout(output), redirect_stderr(output):
            code = 0
            try:
                runpy.run_path(str(ROOT / name), run_name="__main__")
            except SystemExit as end:
                code = end.code
        assert not code, output.getvalue()
        printed.append(output.getvalue())
    return printed


def test_a_training_a_sample_and_an_evaluation_lack_nothing(corpus, tmp_path):
    config, run = tmp_path / "config.yaml", str(tmp_path / "run")
    config.write_text(dump(training_config(corpus, tmp_path, {"train.steps": 2})))
    commands = (
        f"train_gpt2.py --config {config}",
        f"generate.py {run} --max_new_tokens 3",
        f"evaluate.py {run} --device cpu",
    )
    ((trained, _, evaluated),) = run_ranks(run_without, 1, [f"scripts/{words}".split() for words in commands])
    assert "run completed at step 2" in trained
    assert "report: none: matplotlib is not installed" in trained
    assert "evaluate.py" in trained.partition("what next:")[2]
    assert "prepare_data" not in trained, "it is own text"
    assert "perplexity" in evaluated
