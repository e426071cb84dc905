"""Starting a training: what it imports, which weights
it makes, and what a complete run does not do again."""

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
    "datasets huggingface_hub matplotlib pandas pyarrow scipy sympy tensorboard tokenizers"
    " torch._dynamo torch._inductor torch.distributed.tensor trackio transformers wandb"
)
"""What a training on the CPU with one process has no
use for; each takes a tenth of a second to two."""


def loaded(folder, *commands):
    """What a fresh process prints that runs scripts one after the other: also the heavy modules
    that it has imported, after each one's training and at its end."""
    code = (
        "import json, runpy, sys; import gpt2_ddp.training.loop as loop\n"
        "train = loop.train\n"
        f"said = lambda when: print(when, [name for name in {HEAVY.split()} if name in "
        "sys.modules])\n"
        "def noted(*args):\n"
        "    result = train(*args)\n"
        "    said('after train')\n"
        "    return result\n"
        "loop.train = noted\n"
        "for command in json.loads(sys.argv[1]):\n"
        f"    sys.argv = [{str(SCRIPTS)!r} + '/' + command[0], *command[1:]]\n"
        "    try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "    except SystemExit as end: assert not end.code\n"
        "    said('at the end')\n"
    )
    done = launch([sys.executable, "-c", code, json.dumps(commands)], folder, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_training_imports_nothing_that_it_does_not_use(corpus, tmp_path):
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
        for line in loaded(tmp_path, train, small)
        if line.startswith(("after train", "at the end"))
    ]
    assert heavy[0] == heavy[2] == "after train []"
    assert heavy[3] == "at the end []", "another process draws the report"
    report = tmp_path / "run/report.html"
    rows = tmp_path / "run/metrics.jsonl"
    os.utime(rows)
    printed = loaded(tmp_path, train)
    assert {"after train []", "at the end []"} <= {*printed}
    assert all(part in "".join(printed) for part in ("is complete at step 2", "report: ")), printed
    assert report.stat().st_mtime_ns > rows.stat().st_mtime_ns, (
        "a complete run whose report is older gets one"
    )


def test_a_model_without_init_is_the_same_but_for_its_weights():
    config = ModelConfig(n_layer=1, n_head=2, n_embd=8, block_size=8)
    whole = GPT(config, 100)
    before = torch.get_rng_state()
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
