"""Runs the scripts by name, from any folder: `gpt2-ddp SCRIPT` is `python scripts/SCRIPT.py`.

    gpt2-ddp train_gpt2 --data.path data/mine
    accelerate launch -m gpt2_ddp train_gpt2 --config configs/gpt2_124m.yaml
    torchrun --nproc_per_node 8 -m gpt2_ddp train_gpt2 --config configs/gpt2_124m.yaml

A small job needs no script: `gpt2-ddp train_KIND` trains it.
"""

import os
import sys

if __name__ == "__main__":
    project = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    # `python -m` imports from the working folder first, which may hold a stranger's yaml.py
    if sys.path[0] == os.getcwd() != project:
        del sys.path[0]

import runpy
from pathlib import Path

from gpt2_ddp.config.base import nearest
from gpt2_ddp.config.jobs import JobConfig
from gpt2_ddp.distributed.streams import standard_streams
from gpt2_ddp.errors import UserError
from gpt2_ddp.project import PROJECT
from gpt2_ddp.script import run_command


@standard_streams()
def main() -> None:
    """Runs the script named by the first word of the command line. The other words are its
    arguments."""
    scripts = {file.stem: file for file in sorted((PROJECT / "scripts").glob("*.py"))}
    name, *flags = sys.argv[1:] or ["--help"]
    jobs = {
        f"train_{job.kind}": job
        for job in JobConfig.__subclasses__()
        if f"train_{job.kind}" not in scripts
    }
    if name in ("-h", "--help"):
        print("usage: gpt2-ddp SCRIPT [--help] ...")
        summaries = {script: _summary(file) for script, file in scripts.items()}
        summaries |= {job: str(config.__doc__) for job, config in jobs.items()}
        for script, summary in summaries.items():
            print(f"  {script:20}{summary}")
        print(f"--config configs/NAME.yaml also names a file in {PROJECT / 'configs'}")
        return
    if name in jobs:
        sys.argv = [name, *flags]
        run_command(jobs[name], "gpt2_ddp.tasks.command:start_job")
    if name not in scripts:
        hint = f"unknown script{nearest(name, [*scripts, *jobs])}"
        print(f"error: {UserError('script', name, hint)}", file=sys.stderr)
        sys.exit(2)
    sys.argv = [str(scripts[name]), *flags]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _summary(script: Path) -> str:
    """The first line of a script's docstring."""
    with script.open(encoding="utf-8") as file:
        return file.readline().strip('"\n')


if __name__ == "__main__":
    main()
