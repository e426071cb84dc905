"""Starting a training: what it imports, which weights it makes, and what a complete run does not do
again."""

import json
import os
import sys

import pytest
import torch
from commands import SCRIPTS, launch
from runs import training_config

from gpt2_ddp import __main__ as front_door
from gpt2_ddp.config.cli import dump
from gpt2_ddp.config.training import ModelConfig
from gpt2_ddp.model.gpt import GPT, without_init

HEAVY = (
    *("datasets", "huggingface_hub", "pandas", "PIL", "pyarrow", "scipy", "tokenizers"),
    *("matplotlib", "tensorboard", "trackio", "transformers", "wandb"),
    *("sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor"),
)
"""What a training on the CPU with one process has no use for; each takes a tenth of a second to
two."""

PROBE = """
import json, runpy, sys
commands, modules, scripts, watches_trainings = json.loads(sys.argv[1])

def print_loaded(when):
    print(when, [name for name in modules if name in sys.modules])

if watches_trainings:
    from gpt2_ddp.training import loop
    train = loop.train

    def watched(*args):
        result = train(*args)
        print_loaded("after train")
        return result

    loop.train = watched
else:
    from gpt2_ddp.distributed import process
    process.run_module = lambda *words, **streams: None  # which draws the report

for name, *flags in commands:
    sys.argv = [f"{scripts}/{name}", *flags]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        assert not end.code, sys.argv
    print_loaded("at the end")
"""


def loaded(folder, commands, modules=HEAVY, watches_trainings=True):
    """What a fresh process prints that runs scripts one after the other: also which of `modules` it
    has imported, at each one's end, and after each training."""
    words = json.dumps([commands, modules, str(SCRIPTS), watches_trainings])
    done = launch([sys.executable, "-c", PROBE, words], folder, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_command_imports_nothing_that_it_does_not_use(corpus, trained, tmp_path):
    """Of the help, the status, a plan and a training of three steps, in one process: what one of
    them imports, the later ones have, too."""
    config = tmp_path / "config.yaml"
    config.write_text(dump(training_config(corpus, tmp_path, {"train.steps": 3})))
    commands = [
        ("train_gpt2.py", "--help"),
        ("status.py", str(trained)),
        ("plan.py", "--config", str(config)),
        ("train_gpt2.py", "--config", str(config)),
    ]
    printed = loaded(tmp_path, commands, ("torch", "accelerate", *HEAVY), watches_trainings=False)
    ends = [line.removeprefix("at the end ") for line in printed if line.startswith("at the end ")]
    assert ends == ["[]", "[]", "['torch', 'accelerate']", "['torch', 'accelerate']"], printed


@pytest.mark.slow
def test_a_training_with_its_report_imports_nothing_that_it_does_not_use(corpus, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(dump(training_config(corpus, tmp_path, {"train.steps": 2})))
    small = (
        "train_regression.py",
        "--train.epochs",
        "1",
        "--data.points",
        "100",
        "--output_dir",
        str(tmp_path),
    )
    train = ("train_gpt2.py", "--config", str(config))
    heavy = [
        line
        for line in loaded(tmp_path, [train, small])
        if line.startswith(("after train", "at the end"))
    ]
    assert heavy[0] == heavy[2] == "after train []"
    assert heavy[3] == "at the end []", "another process draws the report"
    report, rows = tmp_path / "run/report.html", tmp_path / "run/metrics.jsonl"
    os.utime(rows)
    printed = loaded(tmp_path, [train])
    assert {"after train []", "at the end []"} <= {*printed}
    assert all(part in "".join(printed) for part in ("is complete at step 2", "report: ")), printed
    assert report.stat().st_mtime_ns > rows.stat().st_mtime_ns, (
        "a complete run whose report is older gets one"
    )


def test_a_model_without_init_is_the_same_but_for_its_weights():
    config = ModelConfig(n_layer=1, n_head=2, n_embd=8, block_size=8)
    whole, before = GPT(config, 100), torch.get_rng_state()
    with without_init():
        bare = GPT(config, 100)
    assert torch.equal(torch.get_rng_state(), before), "nothing was drawn"
    shapes, others = (
        {name: value.shape for name, value in one.state_dict().items()} for one in (bare, whole)
    )
    assert shapes == others
    bare.load_state_dict(whole.state_dict())
    tokens = torch.arange(8)[None]
    assert torch.equal(bare(tokens), whole(tokens)), (
        "what is no parameter is there: the padding's mask"
    )


def test_the_front_door_lists_every_script_once_runs_a_script_and_refuses_other_names(
    capsys, monkeypatch
):
    def front(*words):
        monkeypatch.setattr("sys.argv", ["gpt2-ddp", *words])
        front_door.main()
        return capsys.readouterr().out

    lines = [line for line in front().splitlines() if line.startswith("  ")]
    assert sorted(line.split()[0] for line in lines) == [
        file.stem for file in sorted(SCRIPTS.glob("*.py"))
    ]
    assert all(len(line.split()) > 3 and len(line) <= 120 for line in lines), lines
    with pytest.raises(SystemExit) as end:
        front("status", "--help")
    assert not end.value.code
    assert "usage: status.py" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        front("plna")
    assert capsys.readouterr().err.startswith("error: script = plna: ")
