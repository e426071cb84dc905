"""Bits per byte of a text, by trainers in equal time and by compressors.

    python -m benchmarks own_text book.txt --nanogpt ../nanoGPT --minutes 4.67

Each trainer has the training part of the text, and its own README's recipe with as many steps as
fit into the time. All are scored on the same bytes: the whole validation part, as prepare_data.py
cuts it off. docs/benchmarks.md has the recipes.
"""

import json
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field, PositiveFloat

from benchmarks.harness import environment_info
from gpt2_ddp import load_rows
from gpt2_ddp.config.base import Command
from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.data.tokenizer import load_tokenizer
from gpt2_ddp.errors import UserError
from gpt2_ddp.evaluation.compressors import bits_per_byte, compressors, split_text
from gpt2_ddp.output import make_output_folder, markdown_table, write_json
from gpt2_ddp.project import PROJECT
from gpt2_ddp.script import run_command

ORDERS = (6, 16)
"""Of PPMd: its default, and the best for prose."""
HEADER = [
    "trainer",
    "parameters",
    "steps",
    "tokens",
    "seconds",
    "bits per byte",
    "with context",
    "note",
]
RUN = "own_text"
"""Name of our run."""
NANOGPT_RECIPE = (
    *("--device=cpu", "--compile=False", "--eval_iters=20", "--log_interval=1"),
    *("--block_size=64", "--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128"),
    "--dropout=0.0",
)
"""nanoGPT's README: "I only have a macbook (or other cheap computer)"."""
NANOGPT_EVALUATION = 250
"""Steps between its evaluations, of which the best one's checkpoint is kept."""
NANOGPT_WARMUP = 100
"""Steps of warm-up, of its config/train_shakespeare_char.py."""
NANOCHAT_RECIPE = (
    *("--depth=4", "--head-dim=64", "--window-pattern=L", "--max-seq-len=512"),
    *("--device-batch-size=8", "--total-batch-size=4096", "--device-type=cpu"),
    *("--eval-every=-1", "--core-metric-every=-1", "--sample-every=-1"),
)
"""nanochat's runs/runcpu.sh, made smaller for minutes: 4 layers instead of 6, steps of 4,096 tokens
instead of 16,384."""
NANOCHAT_VOCABULARY = 8192
NANOCHAT_DOCUMENT = 2000
"""Characters of a document. nanochat crops documents to its context, so a book is many."""
TRIAL_STEPS = {"nanogpt": 100, "nanochat": 6}
"""Steps by which the speed is measured first."""


class OwnTextConfig(Command):
    """python -m benchmarks own_text: trainers and compressors on a text of one's own"""

    positional = "texts"

    texts: tuple[str, ...] = Field(default=(), min_length=1, validate_default=True)
    """text files, one or several; each has a table"""
    minutes: PositiveFloat = 4.67
    """time of each trainer"""
    nanogpt: str | None = None
    """folder of a nanoGPT checkout; null: without it"""
    nanochat: str | None = None
    """folder of a nanochat checkout; null: without it"""
    nanochat_python: str | None = None
    """python of an environment with nanochat's requirements; null: this one"""
    output: str = "runs/own_text"
    """folder for own_text.md, own_text.json, and the runs and logs of each text"""


class Score(NamedTuple):
    """A line of the table; None is unknown, or does not exist."""

    trainer: str
    parameters: int | None = None
    steps: int | None = None
    tokens: int | None = None
    """trained on; characters where these are the tokens"""
    seconds: float | None = None
    """of training; of a compressor, for both texts"""
    bits_per_byte: float | None = None
    with_context: float | None = None
    """bits per byte where each token has at least half a window before it"""
    note: str = ""

    @property
    def cells(self) -> list[str]:
        counts = [f"{n:,}" if n else "" for n in (self.parameters, self.steps, self.tokens)]
        seconds = f"{self.seconds:.0f}" if self.seconds else ""
        bits = [f"{n:.3f}" if n else "" for n in (self.bits_per_byte, self.with_context)]
        return [self.trainer, *counts, seconds, *bits, self.note]


class PeerScore(NamedTuple):
    """What peer_scores.py prints; fields as of `Score`."""

    parameters: int
    bits_per_byte: float
    with_context: float


class Parts(NamedTuple):
    """A text, cut in two."""

    training: bytes
    validation: bytes


class Failed(Exception):
    """A command of a trainer failed; the reason is its last line."""


class Line(NamedTuple):
    """A line that a command printed."""

    second: float  # since its start
    text: str


def compare_trainers(config: OwnTextConfig) -> dict[str, list[Score]]:
    """The command: the scores of each text. Writes table and JSON after each text. Raises:
    UserError."""
    check_files(config)
    output = make_output_folder(config.output)
    folders = {text: output / Path(text).stem for text in config.texts}
    for folder in folders.values():
        if folder.exists():
            hint = "has a run of this text already; delete it, or name another output"
            raise UserError("output", folder, hint)
    found: dict[str, list[Score]] = {}
    lines: list[str] = []
    for text, folder in folders.items():
        folder.mkdir()
        parts, scores = score_text(config, text, folder)
        found[text] = scores
        sizes = (
            f"{len(parts.training):,} bytes of training, {len(parts.validation):,} of validation"
        )
        table = markdown_table(HEADER, [score.cells for score in scores])
        lines += [f"{Path(text).name}: {sizes}", "", table, ""]
        print("\n".join(lines[-4:]), flush=True)
        (output / "own_text.md").write_text("\n".join(lines))
        record = {**environment_info(), "settings": config.model_dump(mode="json")}
        record["texts"] = {name: [one._asdict() for one in those] for name, those in found.items()}
        write_json(output / "own_text.json", record)
    return found


def check_files(config: OwnTextConfig) -> None:
    """Raises: UserError for files and folders that are not there, and for texts of one name."""
    for text in config.texts:
        if not Path(text).is_file():
            raise UserError("texts", text, "is no file")
    names = [Path(text).stem for text in config.texts]
    if len({*names}) < len(names):
        hint = "have the same name; rename one, as each has a folder of its name in the output"
        raise UserError("texts", " ".join(config.texts), hint)
    checkouts = {
        "nanogpt": (config.nanogpt, "train.py"),
        "nanochat": (config.nanochat, "scripts/base_train.py"),
    }
    for field, (folder, script) in checkouts.items():
        if folder and not Path(folder, script).is_file():
            raise UserError(field, folder, f"is no checkout, as it has no {script}")


def score_text(config: OwnTextConfig, text: str, folder: Path) -> tuple[Parts, list[Score]]:
    """The parts of a text, and all scores. Raises: UserError if the text cannot be prepared."""
    parts = prepare(text, folder)
    seconds = 60 * config.minutes
    python = config.nanochat_python or sys.executable

    def train_nanogpt(checkout: Path) -> Score:
        return nanogpt(checkout, parts, folder / "nanogpt", seconds)

    def train_nanochat(checkout: Path) -> Score:
        return nanochat(checkout, python, parts, folder / "nanochat", seconds)

    scores = [
        attempt("ours", lambda: ours(folder, config.minutes)),
        attempt_peer("nanoGPT", config.nanogpt, train_nanogpt),
        attempt_peer("nanochat", config.nanochat, train_nanochat),
    ]
    return parts, [*scores, *compressed(parts)]


def attempt_peer(trainer: str, checkout: str | None, train: Callable[[Path], Score]) -> Score:
    """The score of a trainer by its checkout, or a line with the reason why there is none."""
    if checkout is None:
        return Score(trainer, note="not given")
    folder = Path(checkout).resolve()
    return attempt(trainer, lambda: train(folder))


def attempt(trainer: str, train: Callable[[], Score]) -> Score:
    """The score of a trainer, or a line with the reason why there is none."""
    print(f"{trainer} trains", file=sys.stderr, flush=True)
    try:
        return train()
    except Failed as failure:
        return Score(trainer, note=f"failed: {failure}")


def compressed(parts: Parts) -> Iterator[Score]:
    """The compressors' scores."""
    for name, compressor in compressors(ORDERS).items():
        begun = time.monotonic()
        bits = bits_per_byte(compressor, *parts)
        yield Score(name, seconds=time.monotonic() - begun, bits_per_byte=bits)
    if not find_spec("pyppmd"):
        yield Score("PPMd", note="not measured: pyppmd is not installed")


def run(
    command: list[str], log: Path, folder: Path = PROJECT, more: dict[str, str] | None = None
) -> list[Line]:
    """Runs a command in a folder, with more environment variables. Returns its lines, which the log
    has, too. Raises: Failed."""
    begun = time.monotonic()
    lines: list[Line] = []
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    log.parent.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment | (more or {}),
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    with process, log.open("w", buffering=1) as file:
        try:
            assert process.stdout
            for text in process.stdout:
                file.write(text)
                lines.append(Line(time.monotonic() - begun, text.rstrip("\n")))
        except BaseException:  # a signal to this process
            process.kill()
            raise
    if process.returncode:
        last = next((line.text for line in reversed(lines) if line.text.strip()), "")
        raise Failed(f"{last.strip()[:200]} (exit code {process.returncode}, see {log})")
    return lines


def prepare(text: str, folder: Path) -> Parts:
    """The parts of a text, from the shards that prepare_data.py makes of it. Raises: UserError."""
    data = folder / "data"
    words = ["--source", str(Path(text).absolute()), "--output", str(data.absolute())]
    try:
        run([sys.executable, "scripts/prepare_data.py", *words], folder / "logs/prepare.log")
    except Failed as failure:
        raise UserError("texts", text, f"cannot be prepared: {failure}") from failure
    manifest = read_manifest(data)
    if {*manifest.splits} != {"train", "val"}:
        raise UserError("texts", text, "has too little text for both parts; choose a longer one")
    tokenizer = load_tokenizer(str(data))
    parts = (split_text(data, manifest, tokenizer, split) for split in ("train", "val"))
    return Parts(*parts)


# Ours


def ours(folder: Path, minutes: float) -> Score:
    """What a person gets who names the data and the time. Raises: Failed."""
    logs = folder / "logs"
    runs = (folder / "runs").absolute()
    words = ["--data.path", str((folder / "data").absolute()), "--train.minutes", str(minutes)]
    words += ["--run_name", RUN, "--output_dir", str(runs)]
    lines = run([sys.executable, "scripts/train_gpt2.py", *words], logs / "train.log")
    begun = next(line for line in lines if line.text.startswith(f"{RUN} starts: "))
    ended = next(line for line in lines if line.text.startswith(f"{RUN} completed"))
    row = load_rows(runs / RUN)[-1]
    evaluate = [sys.executable, "scripts/evaluate.py", str(runs / RUN)]
    with_context = None
    if "--stride" in "\n".join(line.text for line in run([*evaluate, "--help"], logs / "help.log")):
        block = _config_of(runs / RUN)["model"]["block_size"]
        stride = ["--stride", str(block // 2)]
        with_context = _bits(run([*evaluate, *stride], logs / "evaluate_stride.log"))
    return Score(
        "ours",
        parameters=_number(r"([\d,]+) parameters", begun.text),
        steps=row["step"],
        tokens=row["tokens"],
        seconds=ended.second - begun.second,
        bits_per_byte=_bits(run(evaluate, logs / "evaluate.log")),
        with_context=with_context,
    )


def _config_of(folder: Path) -> dict[str, Any]:
    """The configuration of our run, as its first row has it."""
    with (folder / "metrics.jsonl").open() as rows:
        return json.loads(next(rows))["config"]


def _bits(lines: list[Line]) -> float:
    """The bits per byte that evaluate.py printed."""
    return float(_match(r"([\d.]+) bits per byte", "\n".join(line.text for line in lines)))


def _number(pattern: str, text: str) -> int:
    return int(_match(pattern, text).replace(",", ""))


def _match(pattern: str, text: str) -> str:
    """The first group. Raises: Failed if the text has no such words."""
    found = re.search(pattern, text)
    if not found:
        raise Failed(f"printed nothing like {pattern}")
    return found[1]


# nanoGPT


def nanogpt(checkout: Path, parts: Parts, folder: Path, seconds: float) -> Score:
    """nanoGPT's README for a cheap computer: characters, its best checkpoint. Raises: Failed."""
    write_characters(parts, folder / "data/shakespeare_char")
    (folder / "configurator.py").symlink_to(checkout / "configurator.py")  # read from here
    command = [sys.executable, str(checkout / "train.py")]
    command += [str(checkout / "config/train_shakespeare_char.py"), *NANOGPT_RECIPE]

    def train(steps: int, every: int, name: str) -> list[float]:
        """Seconds of each step and its evaluation, if it has one."""
        decay = max(steps, NANOGPT_WARMUP + 1)  # its schedule divides by what is behind the warm-up
        length = [f"--max_iters={steps}", f"--lr_decay_iters={decay}", f"--eval_interval={every}"]
        lines = run([*command, *length], folder / f"{name}.log", folder)
        return [
            float(found[1]) / 1000
            for line in lines
            if (found := re.match(r"iter \d+: .*time ([\d.]+)ms", line.text))
        ]

    trial = TRIAL_STEPS["nanogpt"]
    times = train(trial, trial, "trial")
    step = median(times[1:-1])
    evaluation = max(times[-1] - step, 0)  # the last step's, which began after `trial` steps
    steps = max(1, int(seconds / (step + evaluation / NANOGPT_EVALUATION)))
    # the last step is evaluated, too, so that its checkpoint may be kept
    every = min(steps, NANOGPT_EVALUATION)
    steps -= steps % every
    times = train(steps, every, "train")
    found = score_peer(sys.executable, "nanogpt", checkout, folder, parts)
    tokens = steps * 12 * 64
    return Score("nanoGPT", found.parameters, steps, tokens, sum(times), *found[1:])


def write_characters(parts: Parts, folder: Path) -> None:
    """The files of nanoGPT's data/shakespeare_char/prepare.py, with its vocabulary: all characters
    of the text. So the characters that only the validation part has are known."""
    folder.mkdir(parents=True)
    texts = {"train": parts.training.decode(), "val": parts.validation.decode()}
    characters = sorted({*texts["train"], *texts["val"]})
    ids = {character: number for number, character in enumerate(characters)}
    for name, text in texts.items():
        np.array([ids[character] for character in text], np.uint16).tofile(folder / f"{name}.bin")
    meta = {"vocab_size": len(characters), "stoi": ids, "itos": dict(enumerate(characters))}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


# nanochat


def nanochat(checkout: Path, python: str, parts: Parts, folder: Path, seconds: float) -> Score:
    """nanochat's runs/runcpu.sh on a small scale, with its tokenizer. Raises: Failed."""
    more = {"NANOCHAT_BASE_DIR": str(folder.absolute()), "OMP_NUM_THREADS": str(os.cpu_count())}
    folder.mkdir()

    def module(name: str, *words: str, log: str) -> list[Line]:
        return run([python, "-m", name, *words], folder / f"{log}.log", checkout, more)

    where = [python, "-c", "from nanochat.dataset import DATA_DIR; print(DATA_DIR)"]
    write_documents(parts, Path(run(where, folder / "where.log", checkout, more)[-1].text))
    module("scripts.tok_train", f"--vocab-size={NANOCHAT_VOCABULARY}", log="tokenizer")

    def train(steps: int, name: str) -> list[float]:
        """Seconds of each step without the first, which compiles."""
        words = [*NANOCHAT_RECIPE, f"--num-iterations={steps}", f"--model-tag={name}"]
        lines = module("scripts.base_train", *words, log=name)
        found = (re.match(r"step \d+/.* dt: ([\d.]+)ms", line.text) for line in lines)
        return [float(one[1]) / 1000 for one in found if one][1:]

    step = median(train(TRIAL_STEPS["nanochat"], "trial"))
    steps = max(2, int(seconds / step))
    times = train(steps, "train")
    found = score_peer(python, "nanochat", checkout, folder, parts, more)
    spent = sum(times) * steps / len(times)
    return Score("nanochat", found.parameters, steps, steps * 4096, spent, *found[1:])


def write_documents(parts: Parts, folder: Path) -> None:
    """Parquet files as nanochat has them: a document a row, and the last file for validation, which
    it does not read here."""
    import pyarrow  # datasets brings it
    import pyarrow.parquet

    folder.mkdir(parents=True)
    for number, part in enumerate(parts):
        table = pyarrow.table({"text": [*documents(part.decode())]})
        path = folder / f"shard_{number:05d}.parquet"
        pyarrow.parquet.write_table(table, path, row_group_size=1024)


def documents(text: str) -> Iterator[str]:
    """The text in pieces of about `NANOCHAT_DOCUMENT` characters, which end with a line."""
    start = 0
    while start < len(text):
        line = text.find("\n", start + NANOCHAT_DOCUMENT)
        end = line + 1 if line >= 0 else len(text)
        yield text[start:end]
        start = end


# Scores


def score_peer(
    python: str,
    peer: str,
    checkout: Path,
    folder: Path,
    parts: Parts,
    more: dict[str, str] | None = None,
) -> PeerScore:
    """The scores of a peer's checkpoint in its folder. Raises: Failed."""
    text = folder / "validation.txt"
    text.write_bytes(parts.validation)
    script = str(Path(__file__).with_name("peer_scores.py"))
    command = [python, script, peer, str(checkout), str(folder.absolute()), str(text.absolute())]
    return PeerScore(**json.loads(run(command, folder / "score.log", checkout, more)[-1].text))


if __name__ == "__main__":
    sys.argv[0] = "python -m benchmarks own_text"
    run_command(OwnTextConfig, "benchmarks.own_text:compare_trainers")
