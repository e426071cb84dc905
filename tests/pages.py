"""The commands of README.md and docs/*.md, as text taken from the pages; how each is run small, and
which cannot run.

A new page is taken in by itself: all of its commands are run, `python SCRIPT` in a forked process,
and in place of a launcher two ranks of its script are forked. One that cannot run here goes into
CANNOT with the reason, what it needs into `stand_ins` of test_docs.py, and a flag that makes its
script small enough into SMALLER.
"""

import importlib.util
import os
import re
import shlex
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from gpt2_ddp.config import cli

ROOT = Path(__file__).parents[1]
TRANSLATED = [ROOT / "README.zh-CN.md", ROOT / "docs/first-steps.zh-CN.md"]
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page not in TRANSLATED),
]

NEEDED = """\
a package index
make train
make test
make setup
make check
make format
make docs
make lock
pip install 
source .venv/bin/activate

minutes or hours; other tests have its parts
make speedrun
make faults
python -m benchmarks
--run_name nodrop
runs/nodrop/
--output runs/compare_again
scripts/compare_parallel.py$
scripts/ladder.py
runs/stdlib-muon
--config configs/jobs/cifar100_resnet18.yaml
--config configs/data_stdlib.yaml

docker; `make test-image` runs what it built
docker run
docker compose
mkdir -p data runs
export OWNER
make image
make test-image

an exit code that says that two runs differ; test_explain.py
scripts/explain.py

a cluster or a cloud; test_cloud.py
kubectl 
sky jobs
cloud/launch.sh

GPUs
make gpu
--config configs/gpt2_124m.yaml
runs/gpt2_124m
--nproc_per_node 8
configs/llama_
--jobs classifier:configs/jobs/cifar100_resnet18.yaml

several machines; test_several_machines.py has two
--machine_rank 0
--node_rank 0
--rdzv_backend c10d
MASTER_ADDR=ADDRESS_OF_RANK_0
accelerate launch scripts/train_gpt2.py --data.path data/mine

a bucket, and texts for it; test_bucket.py
--source 'data/texts/*.txt'
export AWS_
s3://BUCKET

Slurm; test_slurm.py submits such jobs to one
sbatch 
srun 
export SBATCH_ACCOUNT
make test-cluster

the Hub
--source hub:
hf auth login
hf upload
--tasks hellaswag
--config configs/jobs/cifar100_lenet.yaml$

nothing; test_hello.py or test_hello_gpt.py runs it, and looks at what comes out
scripts/hello_
--train.global_batch_size 10000
--optim.name adamw --optim.muon_lr

a run and a text of the page's own; test_where.py asks such
runs/austen
--file quote.txt

files of one's own; test_lm_eval.py takes the command from the page
--include_path local
"""
CANNOT = {
    why: parts for why, *parts in (block.strip("\n").split("\n") for block in NEEDED.split("\n\n"))
}
"""What is not here -> parts of the commands that need it,
$ being the end of a command. They are still parsed."""

TRAINING = (
    "--train.steps {steps} --train.device cpu --model.n_layer 1 --model.n_head 2 --model.n_embd 32"
    " --model.block_size 32 --train.global_batch_tokens 256 --eval.tokens 512"
    " --optim.warmup_steps 2"
    " --optim.schedule constant"  # the same run is made longer, which a decay to 0 forbids
    " --tracking.sample_every 0"
)
SMALLER = {
    "prepare_data.py": "--workers 1",
    "train_gpt2.py": TRAINING,
    "plan.py": TRAINING,
    "sweep.py": f"--dry_run true {TRAINING}",
    "train_regression.py": "--train.epochs 1 --data.points 100",
    "train_classifier.py": "--train.epochs 1 --data.points 100 --model.hidden 20",
    "train_transformer.py": "--train.epochs 2",
    "ddp_lab.py": "--only set_epoch",
    "generate.py": "--max_new_tokens 8",
}
"""Script -> flags that are added unless the page gives
them; none where a run's own configuration is given."""


class PageCommand(NamedTuple):
    """A command of a page, as it is typed."""

    text: str

    @property
    def reason(self):
        """Why it cannot run here; empty where it can."""
        return next(
            (
                why
                for why, parts in CANNOT.items()
                if any(part in f"{self.text}$" for part in parts)
            ),
            "",
        )

    @property
    def words(self):
        """As a shell takes it apart, without a comment at its
        end, and without variables that are set before it."""
        words = shlex.split(self.text, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        return words

    def smaller(self, number):
        """The text with the flags of SMALLER, the `number`-th
        of its page: a training then goes on for two steps."""
        found = re.search(r"scripts/(\w+\.py)", self.text)
        if not found or found[1] not in SMALLER or "--config runs/" in self.text:
            return self.text
        text = self.text
        if found[1] in ("train_gpt2.py", "plan.py", "sweep.py"):  # in place of its length
            text = re.sub(r" --train\.(minutes|epochs) \S+", "", text)
        given = re.findall(r"--[\w.]+", text)
        flags = re.findall(r"(--\S+) (\S+)", SMALLER[found[1]].format(steps=4 + 2 * number))
        more = "".join(f" {name} {value}" for name, value in flags if name not in given)
        return f"{text[: found.end()]}{more}{text[found.end() :]}"


PROGRAMS = (
    *("python", "torchrun", "accelerate", "make", "pip", "docker", "export", "lm_eval", "hf"),
    *("source", "sbatch", "srun", "mkdir", "cloud/launch.sh", "kubectl", "sky", "aws"),
)
INLINE = (
    r"python (scripts/|-m benchmarks)|sbatch slurm/|(torchrun|accelerate launch) .*scripts/"
    r"|pip install |make [a-z-]+$"
)


def commands(page):
    """The commands of a page, in its order: in blocks for a shell, in plain blocks that begin with
    one, and between single backticks."""
    found = []
    text = page.read_text()
    for language, block, span in re.findall(
        r"^```(.*)\n((?:.*\n)*?)```|`([^`\n]+)`", text, re.MULTILINE
    ):
        if block:
            found += _of_block(language, block)
        elif re.match(INLINE, span) and "…" not in span:
            found.append(span)
    return [PageCommand(command) for command in found]


def _of_block(language, block):
    lines = re.sub(r" *\\\n *", " ", block).splitlines()
    if language in ("", "console"):
        prompted = [line[2:] for line in lines if line.startswith("$ ")]
        first = block.split()[0]
        if not prompted and first not in PROGRAMS and "=" not in first:
            return []  # what a program has written
        lines = prompted or lines
    elif language not in ("sh", "bash"):
        return []
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


@cache
def load_docs(name):
    """A Python file of docs/, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parse_script(words, text, folder):
    script, *flags = words
    assert (ROOT / script).is_file(), f"{text}: no {script}"
    if not (found := load_docs("reference").command_of(ROOT / script)):
        # a program without flags: that it takes the command is shown where the command is run
        return
    command, default = found
    for flag, value in pairwise(flags):
        if flag == "--config" and not (ROOT / value).exists() and not (folder / value).exists():
            assert value.startswith("runs/"), f"{text}: no {value}"  # a run's own
            (folder / value).parent.mkdir(parents=True, exist_ok=True)
            (folder / value).write_text(cli.dump(cli.load(command, [], default)))
    cli.load(command, flags, default)


def write_texts(folder):
    """Texts of one's own: some modules of the standard library."""
    (folder / "texts").mkdir()
    for name in ("abc", "bisect", "heapq", "queue", "sched", "shlex", "textwrap"):
        (folder / f"texts/{name}.txt").write_bytes(
            (Path(os.__file__).parent / f"{name}.py").read_bytes()
        )
