"""What can be configured in the scripts that do not train."""

import re
from typing import Literal

from pydantic import Field, field_validator

from gpt2_ddp.config.base import Command


class PrepareConfig(Command):
    """prepare_data.py: text to token shards"""

    source: str = "stdlib"
    """`stdlib` (the source of Python's own standard library), local text, jsonl or parquet files (a file, a folder
    or a glob), `hub:OWNER/NAME` for a dataset on the Hub, or `bin:GLOB` to index existing llm.c shards in place"""
    output: str | None = None
    """folder for the shards and their manifest.json; null: data/ and the source's name (`bin:`: where they are)"""
    tokenizer: str = "bpe"
    """a tiktoken encoding by name (gpt2, r50k_base, cl100k_base, ...), a tokenizer.json, or `bpe` to train a
    byte-level BPE on the source"""
    vocab_size: int = Field(default=8192, ge=257, le=2**31 - 1)
    """size of the BPE to train, end-of-text token included"""
    workers: int = Field(default=0, ge=0)
    """encoding processes; 0: one per core. They do not change the result"""
    val_fraction: float = Field(default=0.05, ge=0, lt=1)
    """share of the validation split: of the documents, chosen by the hash of their text, or, where that would choose
    fewer than about ten, the last part of the tokens"""
    shard_tokens: int = Field(default=100_000_000, ge=1024, lt=2**31)
    """tokens per shard, at most"""
    column: str = "text"
    """column that holds the text, in jsonl, parquet and Hub sources"""
    split: str = "train"
    """Hub: the dataset's split"""
    subset: str | None = None
    """Hub: the dataset's configuration, such as sample-10BT"""
    revision: str | None = None
    """Hub: branch, tag or commit"""
    documents: Literal["file", "line", "paragraph"] = "file"
    """text files: one document per file, per line, or per paragraph (blank lines between)"""
    max_documents: int | None = Field(default=None, ge=1)
    """stop after this many documents"""


class EvaluateConfig(Command):
    """evaluate.py: loss, perplexity and bits per byte of a checkpoint"""

    positional = "checkpoint"

    checkpoint: str = "runs/stdlib"
    """a run folder (its newest intact checkpoint) or one checkpoint"""
    data: str | None = None
    """folder of token shards; null: the one the run was trained on"""
    split: str = "val"
    """split to score: every one of its tokens but the first, once"""
    tokens: int | None = Field(default=None, ge=1)
    """score this many tokens, evenly spread; null: all"""
    batch_size: int = Field(default=16, ge=1)
    """windows per forward pass and process"""
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
    """autocast; auto follows `accelerate config`"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """where to run; auto: cuda, then mps, then cpu"""


class GenerateConfig(Command):
    """generate.py: text from a checkpoint"""

    positional = "checkpoint"

    checkpoint: str = "runs/stdlib"
    """a run folder (its newest intact checkpoint) or one checkpoint"""
    prompts: tuple[str, ...] = ("",)
    """what to continue, one or several; empty: the start of a document"""
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
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """where to run; auto: cuda, then mps, then cpu"""


class ReportConfig(Command):
    """report.py: report.html and PNG of one or several runs, overlaid"""

    positional = "runs"

    runs: tuple[str, ...] = ("runs/stdlib",)
    """run folders"""
    output: str | None = None
    """folder for report.html and report.png; null: the first run's folder"""


class StatusConfig(Command):
    """status.py: how runs are doing"""

    positional = "runs"

    runs: tuple[str, ...] = Field(default=("runs/stdlib",), min_length=1)
    """run folders"""


class VerifyConfig(Command):
    """verify_run.py: recompute a run's order digests and check its checkpoints' hashes"""

    positional = "run"

    run: str = "runs/stdlib"
    """run folder"""
    data: str | None = None
    """folder of token shards; null: the one the run was trained on"""
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
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """where to run; auto: cuda, then mps, then cpu"""
    output: str | None = None
    """JSON file for everything that was found"""

    @field_validator("sizes")
    @classmethod
    def _whole_floats(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if not sizes or any(size < 4 or size % 4 for size in sizes):
            raise ValueError("each should be a positive multiple of 4, the bytes of a float")
        return sizes


class LabConfig(Command):
    """ddp_lab.py: what people get wrong in DDP, measured on two CPU processes"""

    only: tuple[str, ...] = ()
    """names of experiments; empty: all of them"""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """fixes data and initial weights of the experiments"""
    output: str | None = None
    """file for the table: .json, or else markdown"""
