"""Each command of README.md and docs/*.md: it fits the
real parsers, and where it can run here it is run."""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cifar import write_cifar, write_sets_of_images
from commands import environment, forked
from conftest import once
from pages import (
    PAGES,
    PROGRAMS,
    ROOT,
    SMALLER,
    TRANSLATED,
    commands,
    parse_script,
    write_texts,
)

LONG = ("optimizers.md", "speedrun.md")
"""Pages with runs of hundreds of steps, which `make faults` runs."""
README = ROOT / "README.md"
ABOUT = ("small-jobs.md", "ddp-lab.md", "export.md")


def runnable(*pages):
    """The commands of pages that can run here, each once, by their words."""
    found = (command for page in pages for command in commands(page) if not command.reason)
    return {shlex.join(command.words): command for command in found}


ELSEWHERE = runnable(*(ROOT / "docs" / name for name in ABOUT))
"""What README shows of pages that are about it: it runs
there, and nothing on README needs what it makes."""


def here(page):
    """The commands that run on a page, in its order:
    what other pages have of README runs there alone."""
    others = ELSEWHERE if page == README else runnable(README).keys() - ELSEWHERE.keys()
    return [command for words, command in runnable(page).items() if words not in others]


RUN = [
    pytest.param(page, marks=pytest.mark.soak if page.name in LONG else (), id=page.name)
    for page in PAGES
    # the docstrings of scripts; other pages run such commands
    if page.name != "commands.md" and here(page)
]
"""Pages with a command that can run here, and that README does not have."""


def test_the_speedruns_record_is_of_the_shipped_entry():
    """A change of the entry needs a new record, and README quotes no other."""
    entry = json.dumps(yaml.safe_load((ROOT / "configs/speedrun.yaml").read_text()), sort_keys=True)
    digest = hashlib.sha256(entry.encode()).hexdigest()[:16]
    (figure,) = re.findall(
        rf"^\| `{digest}` .*?\*\*(.*?)\*\*", (ROOT / "docs/speedrun.md").read_text(), re.MULTILINE
    )
    for name in ("README.md", "README.zh-CN.md"):
        assert f" {figure} " in (ROOT / name).read_text()


def parse(command, folder):
    """Raises where a program does not take the command, or a file that it names is not there."""
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser

    text = command.text
    words = command.words
    program = words[0] if words else "export"
    if program == "docker":
        words = words[words.index("gpt2_ddp") + 1 :] if words[1] == "run" else []
        if words[:1] in ([], ["health"]):
            return
        if words[0].startswith("-") or words[0].endswith(".py"):  # as docker/entrypoint.sh has it
            words = ["accelerate", "launch", *words]
        program = words[0]
    assert program in PROGRAMS, f"{text}: what is {program}? Say in pages.py"
    if program == "cloud/launch.sh":
        program = words[1]
        words = words[1:]
    script = next(
        (at for at, word in enumerate(words) if word.endswith((".py", ".sbatch"))), len(words)
    )
    if words[:4] == ["python", "-m", "benchmarks", "own_text"]:
        parse_script(["benchmarks/own_text.py", *words[4:]], text, folder)
        return
    for word in words[: script + 1]:
        assert not word.endswith((".yaml", ".txt", ".sbatch")) or (ROOT / word).is_file(), (
            f"{text}: no {word}"
        )
    if program == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), text
    elif words[:3] == ["python", "-m", "benchmarks"]:
        parse_script(["benchmarks/__main__.py", *words[3:]], text, folder)
    elif program == "torchrun" or words[:2] == ["accelerate", "launch"]:
        parser = launch_command_parser() if program == "accelerate" else get_args_parser()
        parser.parse_args(words[2:] if program == "accelerate" else words[1:])
    if program == "sbatch":
        words = [*words[:script], "scripts/train_gpt2.py", *words[script + 1 :]]
    if program in ("python", "srun", "sbatch", "torchrun", "accelerate") and words[script:]:
        parse_script(words[script:], text, folder)


@pytest.mark.parametrize("page", [*PAGES, *TRANSLATED], ids=lambda page: page.name)
def test_every_command_is_one_that_the_programs_take(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in commands(page):
        print(f"{page.name}: {command.text}")  # shown if the next line fails
        parse(command, tmp_path)


@pytest.mark.parametrize("page", TRANSLATED, ids=lambda page: page.name)
def test_a_translation_has_the_commands_of_its_page(page):
    """In their order; it may have more, for its language."""
    original = page.with_name(page.name.replace(".zh-CN", ""))
    wanted, found = ([command.words for command in commands(each)] for each in (original, page))
    assert [words for words in found if words in wanted] == wanted


def run(text, folder):
    """Runs a command of a page as a shell would. A plain `python SCRIPT` is forked, and takes a
    tenth of the time. So are the two ranks that a launcher would start."""
    env = {"PYTHONPATH": str(folder), "MPLBACKEND": "agg", "WANDB_MODE": "offline"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    words = shlex.split(text, comments=True)
    if "$" not in text and not {*words} & {"|", "||", "&", "&&", ";", ">", "<"}:
        script = next(
            (number for number, word in enumerate(words) if word.startswith("scripts/")), 0
        )
        if words[:2] == ["python", words[script]]:
            return forked(words[1:], folder, **env)
        if words[0] in ("torchrun", "accelerate"):
            assert "--nproc_per_node 2" in text or "--num_processes 2" in text, text
            return forked(words[script:], folder, world=2, **env)
    command = ["bash", "-c", text]
    pipes = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    return subprocess.run(command, cwd=folder, env=environment(**env), timeout=300, **pipes)


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory):
    """What the pages' commands have before them: the
    project, texts, images, tiny data and a run of it."""
    return once(tmp_path_factory, "pages", make_stand_ins)


def make_stand_ins(folder):
    for name in ("gpt2_ddp", "scripts", "benchmarks", "configs", "Makefile", "requirements.txt"):
        (folder / name).symlink_to(ROOT / name)
    write_texts(folder)
    write_more(folder)
    write_cifar(folder / "FOLDER", 200, 50)
    write_sets_of_images(folder)
    train = "train_gpt2.py --data.path data/stdlib " + SMALLER["train_gpt2.py"].format(steps=4)
    own = (
        "prepare_data.py --workers 1 --source texts/{}.txt --tokenizer data/stdlib/tokenizer.json"
        " --output data/{}"
    )
    for command in (
        "prepare_data.py --workers 1 --source texts --output data/stdlib --vocab_size 512",
        "prepare_data.py --workers 1 --source texts --output dumps --tokenizer gpt2",
        *(train, *(own.format(text, name) for name, text in MIXED.items())),
    ):
        made = run(f"python scripts/{command}", folder)
        assert made.returncode == 0, made.stdout + made.stderr
    (folder / "dumps/manifest.json").unlink()  # llm.c's format
    shutil.copytree(folder / "runs/stdlib", folder / "runs/other")
    (folder / "exports").mkdir()
    # which a page will make
    (folder / "exports/stdlib-step-00000700").symlink_to("stdlib-step-00000004")
    for name in ("RUN", "runs/NAME"):
        (folder / name).symlink_to(folder / "runs/other")


MIXED = {"web": "heapq", "code": "shlex", "books": "textwrap"}


def write_more(folder):
    (folder / "dump").mkdir()
    (folder / "dump/some.jsonl").write_text(
        "".join(f'{{"text": "Truth {n} of many."}}\n' for n in range(3000))
    )
    (folder / "stories.txt").write_text(
        "\n<|endoftext|>\n".join(f"Once upon {n} times." for n in range(3000))
    )
    (folder / "prompts.txt").write_text("def \nimport \n")
    shutil.copy(folder / "stories.txt", folder / "book.txt")
    (folder / "mine.py").write_text(
        "from gpt2_ddp import Pretraining\n\n\nclass Mine(Pretraining): ...\n"
    )
    (folder / "mixture.py").write_text(
        "from gpt2_ddp import Pretraining, Section\n\n\nclass Mixture(Pretraining):\n"
        "    class Settings(Section):\n        experts: int = 4\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_the_commands_of_a_page_run_one_after_another(page, stand_ins, tmp_path):
    """Each that can run here, once, in the page's order, with what those before it have made."""
    folder = tmp_path / "project"
    own = here(page)
    shutil.copytree(stand_ins, folder, symlinks=True)
    if page == README:  # it makes this itself
        shutil.rmtree(folder / "runs/stdlib")
    if not any("--output data/mine" in command.text for command in own):
        (folder / "data/mine").symlink_to("stdlib")
    for number, command in enumerate(own):
        text = command.smaller(number)
        if not any(folder.glob("runs/*/checkpoints/step-00000400")):
            text = text.replace("step-00000400", "step-00000004")  # the stand-in's only checkpoint
        found = run(text, folder)
        print(f"{page.name}: {command.text} -> {found.returncode}")
        assert (found.returncode, "Traceback" in found.stderr) == (0, False), (
            found.stdout + found.stderr
        )


def test_contributing_names_each_test_file():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`((?:\w+/)?test_\w+\.py)`", text))
    there = {str(file.relative_to(ROOT / "tests")) for file in (ROOT / "tests").rglob("test_*.py")}
    assert named == there
