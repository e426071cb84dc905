"""Writes docs/own-class.md: a class of one's own from the first command to an export and a
comparison.

    python docs/own_class.py  # about two minutes on two cores

The page shows what the commands printed. The classes are those of docs/extend.md.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
TINY = """\
data: {path: data/tiny}
model: {n_layer: 2, n_head: 2, n_embd: 64, block_size: 64}
optim: {lr: 0.002, min_lr: 0.0002, warmup_steps: 10, decay_steps: 60}
train: {steps: 60, global_batch_tokens: 1024, device: cpu}
eval: {every: 60, tokens: 8192}
checkpoint: {every: 20}
tracking: {log_every: 20}
"""
TRAIN = "python scripts/train_gpt2.py --config tiny.yaml --run_name mine"
CLASSES = {"trapezoid.py": "Trapezoid", "zloss.py": "ZLoss"}
STEPS = [
    (
        "Prepare a small text, and start a run with the class of `trapezoid.py`. It stops after 40"
        " steps.",
        "python scripts/prepare_data.py --source 'gpt2_ddp/**/*.py' --output data/tiny"
        " --vocab_size 512",
        f"{TRAIN} --train.steps 40 --task trapezoid.py:Trapezoid",
    ),
    ("Go on without a word of the class. The run has recorded it.", f"{TRAIN} --train.steps 60"),
    (
        "Change a number in the file. A resume shows the change and ends.",
        "sed -i 's/= 0.4/= 0.2/' trapezoid.py",
        f"{TRAIN} --train.steps 80",
        "sed -i 's/= 0.2/= 0.4/' trapezoid.py",
    ),
    (
        "Score it, continue a text, and check the records. The schedule is recomputed by the"
        " class.",
        "python scripts/evaluate.py runs/mine",
        "python scripts/generate.py runs/mine --prompts def --max_new_tokens 24",
        "python scripts/verify_run.py runs/mine --replay 40:60",
    ),
    (
        "Export it. The class makes a plain GPT, which transformers has, too.",
        "python scripts/export_hf.py runs/mine --output exports/mine",
    ),
    (
        "Compare two classes with three seeds each.",
        "python scripts/sweep.py --seeds 1 2 3 --vary task=trapezoid.py:Trapezoid,zloss.py:ZLoss"
        " --config tiny.yaml",
    ),
]
HEAD = """\
# A class of your own, step by step

A researcher changes the schedule of a training, and compares it with another loss. The classes are
those of [extend.md](extend.md): save them as `trapezoid.py` and `zloss.py`. `docs/own_class.py` has
typed these commands. What they printed stands below them; some lines are left out.

The runs share this file, `tiny.yaml`:

```yaml
"""
LEFT_OUT = re.compile(
    r"report: |next: |  python|  left out|  note: the text|\d+ tokens in|.*loading PyTorch"
    r"|warning: /tmp/replay|runs/gpt2-.* (starts|is complete)|\s*$"
)


def main() -> None:
    page = (ROOT / "docs/extend.md").read_text(encoding="utf-8")
    files = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    parts = [f"{HEAD}{TINY}```\n"]
    with TemporaryDirectory(prefix="own-class-") as name:
        folder = Path(name)
        for part in ("scripts", "configs", "gpt2_ddp"):
            (folder / part).symlink_to(ROOT / part)
        (folder / "tiny.yaml").write_text(TINY)
        for file, kind in CLASSES.items():
            (folder / file).write_text(next(text for text in files if f"class {kind}(" in text))
        for text, *commands in STEPS:
            shown = "".join(f"$ {command}\n{run(command, folder)}" for command in commands)
            parts.append(f"\n{text}\n\n```text\n{shown}```\n")
    (ROOT / "docs/own-class.md").write_text("".join(parts), encoding="utf-8")


def run(command: str, folder: Path) -> str:
    """What the command prints, without the lines that say nothing of the class."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "XDG_STATE_HOME": str(folder / "state"),
    }
    words = shlex.split(command)
    done = subprocess.run(
        words, cwd=folder, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True
    )
    lines = [
        line.replace(f"{folder}/", "")
        for line in done.stdout.splitlines()
        if not LEFT_OUT.match(line)
    ]
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    main()
