"""What can be configured in the scripts beside the trainings."""

import codecs
import difflib
import re
from collections.abc import Iterator
from contextlib import suppress
from encodings.aliases import aliases
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from gpt2_ddp.config.base import Command, Tasks
from gpt2_ddp.errors import UserError

DEVICES = "where to run; auto: cuda, then mps, then cpu"
Device = Annotated[Literal["auto", "cpu", "cuda", "mps"], Field(description=DEVICES)]
RunOrCheckpoint = Annotated[str, Field(description="a run folder (its newest intact checkpoint) or one checkpoint")]


class PrepareConfig(Command):
    """prepare_data.py: text to token shards"""

    source: str = "stdlib"
    """`stdlib` (the source of Python's own standard library), local text, jsonl or parquet files (a file, a folder
    or a glob), `hub:OWNER/NAME` for a dataset on the Hub, or `bin:GLOB` to index existing llm.c shards in place"""
    output: str | None = None
    """folder for the shards and their manifest.json; null: data/ and the source's name (`bin:`: where they are)"""
    tokenizer: str = "bpe"
    """`bpe` to train a byte-level BPE on the source, `chars` for its characters, `bytes` (256 ids and end-of-text), a
    tiktoken encoding by name (gpt2, r50k_base, cl100k_base, ...), or a tokenizer.json"""
    vocab_size: int | None = Field(default=None, ge=257, le=2**31 - 1)
    """size of the BPE to train, end-of-text token included; null: by the size of the files, a power of two: 4,096 for
    1 MB, 8,192 for 10 MB, 32,768 for 100 MB and more"""
    workers: int = Field(default=0, ge=0)
    """encoding processes; 0: one per core. They do not change the result"""
    val_fraction: float = Field(default=0.05, ge=0, lt=1)
    """share of the validation split: of the documents, chosen by the hash of their text, or, where that would choose
    fewer than about ten, the last part of the tokens"""
    shard_tokens: int = Field(default=100_000_000, ge=1024, lt=2**31)
    """tokens per shard, at most"""
    encoding: str = "auto"
    """text and jsonl files: `auto` takes UTF-8, and UTF-16 or UTF-32 by its mark, and asks for the rest; the name of a
    codec of Python's (cp1252, latin-1, shift_jis, ...) is for the files that are none of these"""
    on_bad_file: Literal["skip", "stop"] = "skip"
    """a file that is not text, or is damaged: leave it out and say so, or stop before any work"""
    column: str = "text"
    """column that holds the text, in jsonl, parquet and Hub sources; `meta.text` is the text in meta"""
    split: str = "train"
    """Hub: the dataset's split"""
    subset: str | None = None
    """Hub: the dataset's configuration, such as sample-10BT"""
    revision: str | None = None
    """Hub: branch, tag or commit"""
    documents: Literal["file", "line", "paragraph"] = "file"
    """text files: one document per file, per line, or per paragraph (blank lines between)"""
    document_separator: str | None = Field(default=None, min_length=1, max_length=1000)
    """what is written between documents inside a text, such as `<|endoftext|>`; line breaks around it belong to it"""
    max_documents: int | None = Field(default=None, ge=1)
    """stop after this many documents"""

    @property
    def folder(self) -> str:
        """`output`, or data/NAME after the file, folder or dataset: `texts/*.txt` goes to data/texts."""
        if self.output:
            return self.output
        if self.source.startswith("hub:"):
            name = self.source.rpartition("/")[2]
            return f"data/{name}-{self.subset}" if self.subset else f"data/{name}"
        parts = takewhile(lambda part: not set(part) & set("*?["), Path(self.source).parts)
        return f"data/{Path(*parts).stem or 'text'}"

    @field_validator("encoding")
    @classmethod
    def _a_codec(cls, encoding: str) -> str:
        with suppress(LookupError, ValueError):
            if encoding == "auto" or codecs.lookup(encoding)._is_text_encoding:
                return encoding
        near = difflib.get_close_matches(encoding, sorted({*aliases, *aliases.values()}), n=1)
        raise ValueError("; did you mean ".join(["Python has no such codec for text", *near]))


class EvaluateConfig(Command):
    """evaluate.py: loss, perplexity and bits per byte of a checkpoint, or its scores in tasks"""

    positional = "checkpoint"

    checkpoint: RunOrCheckpoint = "runs/stdlib"
    data: str | None = None
    """folder of token shards; null: the one the run was trained on"""
    split: str = "val"
    """split to score: every one of its tokens but the first, once"""
    tokens: int | None = Field(default=None, ge=1)
    """score this many tokens, evenly spread; null: all"""
    tasks: Tasks = ()
    """score these instead of the split: `cloze` (cut from the split), `hellaswag` or `lambada` (from the Hub), or jsonl
    files of items, as docs/evaluation.md describes them; one or several, also with commas between"""
    task_items: int | None = Field(default=None, ge=1)
    """items of each task, evenly spread; null: all"""
    output: str | None = None
    """folder for the tasks' items and scores; null: evaluations/ and the checkpoint's name, in the run folder"""
    batch_size: int = Field(default=16, ge=1)
    """windows, or continuations of a task, per forward pass and process"""
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
    """precision of autocast; auto: as `accelerate config` says, else bf16 on GPUs that have it"""
    device: Device = "auto"

    def mistakes(self) -> Iterator[tuple[str, object, str]]:
        if self.tasks and self.tokens is not None:
            yield "tokens", self.tokens, "is for the loss, which tasks take the place of; leave one of the two away"
        given = {"task_items": self.task_items, "output": self.output}
        for field, value in given.items():
            if value is not None and not self.tasks:
                yield field, value, "is for tasks; name some, like --tasks cloze"


class GenerateConfig(Command):
    """generate.py: text from a checkpoint"""

    positional = "checkpoint"

    checkpoint: RunOrCheckpoint = "runs/stdlib"
    prompts: tuple[str, ...] = ("",)
    """what to continue, one or several; empty: the start of a document"""
    prompts_file: str | None = None
    """file with a prompt in each line, which takes the place of prompts; -: standard input, where at a terminal each
    line that you type is continued at once, until Ctrl-D"""
    max_new_tokens: int = Field(default=256, ge=1)
    """tokens to add to each prompt, at most; generation also ends at the end-of-text token"""
    temperature: float = Field(default=0.8, ge=0)
    """divides the logits; 0: always the likeliest token"""
    top_k: int | None = Field(default=50, ge=1)
    """sample among the k likeliest tokens; null: all"""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """sample among the likeliest tokens that hold this share of the probability"""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """fixes the samples"""
    num_samples: int = Field(default=1, ge=1)
    """continuations per prompt"""
    device: Device = "auto"


class PredictConfig(Command):
    """predict.py: the classes of images, by a classifier"""

    positional = "run_and_images"

    run_and_images: tuple[str, ...] = ()
    """a run folder of train_classifier.py (its newest intact checkpoint) or one checkpoint; then images, or folders"""
    output: str | None = None
    """jsonl file to write as well, with the probabilities of all classes; null: none"""
    top: int = Field(default=3, ge=1)
    """likeliest classes to print of each image"""
    batch_size: int = Field(default=256, ge=1)
    """images per forward pass"""
    device: Device = "auto"

    def mistakes(self) -> Iterator[tuple[str, object, str]]:
        if len(self.run_and_images) < 2:
            yield "run_and_images", " ".join(self.run_and_images), "should be a run, then images: runs/NAME photo.jpg"


class ExportConfig(Command):
    """export_hf.py: a folder that transformers, and what builds on it, reads"""

    positional = "checkpoint"

    checkpoint: RunOrCheckpoint = "runs/stdlib"
    output: str | None = None
    """folder to make; null: in exports/, by the run's name and the step"""
    gguf: bool = False
    """write model.gguf for llama.cpp, too, whose converter knows GPT-2's tokenizer but none that was trained here"""
    push_to_hub: str | None = Field(default=None, pattern=r"^[\w.-]+/[\w.-]+$")
    """also upload the folder to this repository (OWNER/NAME) on the Hub, by the token of `hf auth login`; it is made
    if it is not there"""
    private: bool = True
    """a repository that is made for it is private; an existing one stays as it is"""


class ReportConfig(Command):
    """report.py: report.html and PNG of one or several runs, overlaid"""

    positional = "runs"

    runs: tuple[str, ...] = ("runs/stdlib",)
    """run folders"""
    output: str | None = None
    """folder for report.html and report.png; null: the first run's folder"""
    axis: Literal["auto", "steps", "tokens", "time"] = "auto"
    """what the picture is drawn along: steps, tokens (or samples), or the time in training steps; auto: steps if a step
    is as many tokens in all runs, else tokens"""


class StatusConfig(Command):
    """status.py: how runs are doing"""

    positional = "runs"

    runs: tuple[str, ...] = Field(default=("runs/stdlib",), min_length=1)
    """run folders"""


class VerifyConfig(Command):
    """verify_run.py: hold everything that a run has recorded against everything else"""

    positional = "run"

    run: str = "runs/stdlib"
    """run folder"""
    data: str | None = None
    """folder of token shards, of a mixture all of them, joined by `:`; null: the ones the run was trained on"""
    shards: Literal["full", "sampled", "none"] = "full"
    """which token shards to hash (about a second per GB): all of them, a few that are drawn anew each time, or none"""
    replay: str | None = None
    """also train again from the checkpoint of one step up to another step, like 1000:1100, on as many processes as the
    run had, in a folder of its own (in TMPDIR), and compare; null: train nothing"""

    @field_validator("replay")
    @classmethod
    def _two_steps(cls, replay: str | None) -> str | None:
        if replay is not None and not re.fullmatch(r"[0-9]{1,15}:[0-9]{1,15}", replay):
            raise ValueError("should be two steps, a checkpoint's and a later one, like 1000:1100")
        return replay


class CheckClusterConfig(Command):
    """check_cluster.py: do all processes arrive, agree in versions, and all-reduce correctly, and how fast"""

    timeout_seconds: float = Field(default=60, gt=0)
    """how long to wait for a rank that does not arrive, and for an all-reduce that does not end"""
    sizes: tuple[int, ...] = (8, 4096, 65_536, 1_048_576, 16_777_216, 67_108_864)
    """bytes to all-reduce, in fp32; gradients travel in DDP's buckets of 25 MiB"""
    repeats: int = Field(default=20, ge=1)
    """timed all-reduces per size"""
    device: Device = "auto"
    training: str | None = None
    """a configuration of train_gpt2.py, to be told how long its gradients take on this network"""
    step_seconds: float | None = Field(default=None, gt=0)
    """how long a step of that training computes, as plan.py or a run on one machine says: to be told which share
    communication takes of it"""
    output: str | None = None
    """JSON file for everything that was found"""

    def mistakes(self) -> Iterator[tuple[str, object, str]]:
        if self.step_seconds and not self.training:
            yield "step_seconds", self.step_seconds, "is of a training; name its configuration with --training"

    @field_validator("sizes")
    @classmethod
    def _whole_floats(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if not sizes or any(size < 4 or size % 4 for size in sizes):
            raise ValueError("each should be a positive multiple of 4, the bytes of a float")
        return sizes


class CompareConfig(Command):
    """compare_parallel.py: the same training by one process, nn.DataParallel and DDP, timed"""

    jobs: tuple[str, ...] = ("regression", "classifier", "gpt2")
    """what to train: regression, classifier, transformer or gpt2; a configuration of that script may follow a colon,
    like classifier:configs/jobs/cifar100_lenet.yaml"""
    processes: tuple[int, ...] = (2,)
    """DDP's process counts, one row of the table each"""
    weak: bool = False
    """weak scaling: each process has the job's global batch for itself; otherwise all processes share it"""
    repeats: int = Field(default=3, ge=1)
    """runs of each way, each in fresh processes; the ways take turns"""
    seconds: float = Field(default=10, gt=0)
    """about how long one process is timed; it decides how many steps are timed, the same for every way"""
    steps: int | None = Field(default=None, ge=1)
    """time this many steps, whatever they take"""
    epochs: int | None = Field(default=None, ge=1)
    """train each way for so many passes over the training samples, whatever they take; not together with steps"""
    data_path: str | None = None
    """folder with the data of the one job that reads any: images of a classifier, or tokens of gpt2"""
    threads: int = Field(default=1, ge=1)
    """threads per process, the same for every way, or one process would have the cores of all"""
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """of every job; only without (fp32) do the ways end with the same parameters"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to train; auto: cuda, then cpu"""
    busy_ok: bool = False
    """measure though other programs keep the machine busy; a note below the table says so"""
    output: str = "runs/compare"
    """folder for compare.md, compare.json and compare.png"""

    def mistakes(self) -> Iterator[tuple[str, object, str]]:
        if self.steps and self.epochs:
            yield "epochs", self.epochs, "says how long to train, and so does steps; give one of them"

    @field_validator("processes")
    @classmethod
    def _several_processes(cls, processes: tuple[int, ...]) -> tuple[int, ...]:
        if any(not 2 <= n <= 64 for n in processes) or len(set(processes)) < len(processes):
            raise ValueError("should be different numbers from 2 to 64; one process is always timed")
        return processes


class LabConfig(Command):
    """ddp_lab.py: what people get wrong in DDP, measured on two CPU processes"""

    only: tuple[str, ...] = ()
    """names of experiments; empty: all of them"""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """fixes data and initial weights of the experiments"""
    output: str | None = None
    """file for the table: .json has every number; or else markdown"""
    explain: str | None = None
    """name of an experiment: print its lesson, and the code of both ways, and measure nothing"""


def check_writable(output: str) -> None:
    """Raises UserError if the file `output` cannot be written; for use before long work. Existing files stay as they
    are."""
    path = Path(output)
    try:
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise UserError("output", output, f"cannot be written ({error.strerror}); name another file") from error
