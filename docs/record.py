"""Records the README's picture: a killed run resumes with another number of processes, and is
verified.

    python docs/record.py  # a minute on two cores; writes docs/resume-{dark,light}.svg

Needs `rich`, which requirements-dev.txt brings. What the picture shows is what the commands
printed.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI, TerminalTheme
from rich.text import Text

ROOT = Path(__file__).parents[1]
CONFIG = """\
run_name: demo
data: {prepare: configs/data_stdlib.yaml}
model: {n_layer: 4, n_head: 4, n_embd: 192, block_size: 128}
optim: {name: muon, lr: 0.03, muon_lr: 0.03, min_lr: 0, warmup_steps: 30}
train: {steps: 80, global_batch_tokens: 2048, device: cpu}
eval: {every: 40, tokens: 8192}
checkpoint: {every: 20}
tracking: {log_every: 10, sample_every: 0}
"""
TWO = "torchrun --nproc_per_node 2 scripts/train_gpt2.py --config demo.yaml"
ONE = "python scripts/train_gpt2.py --config demo.yaml"
VERIFY = "python scripts/verify_run.py runs/demo"
KILLED_AT, WIDTH = 50, 112
LIGHT = TerminalTheme(
    (255, 255, 255), (36, 41, 47), [(36, 41, 47), (190, 30, 30), (20, 120, 40)] + [(36, 41, 47)] * 5
)
SVG = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>.{unique_id}-matrix {{ font: {char_height}px ui-monospace, Menlo, Consolas, \
"DejaVu Sans Mono", monospace;
line-height: {line_height}px; font-variant-ligatures: none }} \
svg > rect {{ stroke: #8886 }} {styles}</style>
<defs><clipPath id="{unique_id}-clip-terminal">\
<rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>{chrome}<g transform="translate({terminal_x}, {terminal_y})" \
clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g></svg>
"""


def record(folder: Path) -> list[tuple[str, str]]:
    """Commands, each with what it printed."""
    (folder / "demo.yaml").write_text(CONFIG)
    for name in ("scripts", "configs"):
        (folder / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def run(command: str) -> subprocess.Popen:
        return subprocess.Popen(
            command.split(),
            cwd=folder,
            env=environment,
            stdout=-1,
            stderr=subprocess.STDOUT,
            text=True,
        )

    done, killed = [], ""
    process = run(TWO)
    assert process.stdout
    for line in process.stdout:
        killed += line
        if re.match(rf"step +{KILLED_AT}/", line):
            break
    trainers = [process, *psutil.Process(process.pid).children(recursive=True)]
    for trainer in trainers:
        trainer.kill()
    process.wait()
    done += [(TWO, killed), (f"kill -9 {' '.join(str(trainer.pid) for trainer in trainers)}", "")]
    return [*done, *((command, run(command).communicate()[0]) for command in (ONE, VERIFY))]


def shown(command: str, printed: str) -> Text:
    """The text of the picture, without the lines about the data and the next commands."""
    text = Text.assemble(
        ("$ ", "bold"), (command, "bold red" if command[:4] == "kill" else "bold"), "\n"
    )
    for line in printed.partition("report: ")[0].splitlines():
        if not re.match(r"demo |step |ok |runs/demo", line):
            continue
        same = re.match(rf"step +{KILLED_AT}/", line) or "resumes" in line or "intact" in line
        text.append(re.sub(r"  [\d:]+ left$", "", line) + "\n", "green" if same else "")
    return text


def main() -> None:
    with TemporaryDirectory(prefix="record-") as folder:
        done = record(Path(folder))
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(Text("\n").join(shown(*one) for one in done), end="")
    for name, theme in (("dark", DIMMED_MONOKAI), ("light", LIGHT)):
        svg = console.export_svg(title="", theme=theme, clear=False, code_format=SVG, unique_id="r")
        Path(__file__).with_name(f"resume-{name}.svg").write_text(svg)


if __name__ == "__main__":
    main()
