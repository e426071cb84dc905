"""Configurations of the scripts that do not train."""

import os
import re
import warnings
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from gpt2_ddp.config.base import Command, Count, Fraction, OnlyFlag, Text

Device = Annotated[
    Literal["auto", "cpu", "cuda", "mps"],
    Field(description="device to use; auto: the first available of cuda, mps, cpu"),
]
TrustRunCode = Annotated[
    bool,
    OnlyFlag(),
    Field(
        description="execute the class that the run recorded (docs/extend.md), even if it was never"
        " given on this machine"
    ),
]
Steps = Annotated[
    str, Field(pattern=r"^[0-9]{1,15}:[0-9]{1,15}$", title="FROM:TO (like 1000:1100)")
]
Chain = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", title="a chain (64 digits 0-9 and a-f)")]


class CheckpointCommand(Command):
    """A script that reads a checkpoint"""

    positional = "checkpoint"
    reads = "checkpoints"

    checkpoint: str = "runs/stdlib"
    """run folder (its newest intact checkpoint) or checkpoint"""
    trust_run_code: TrustRunCode = False


def before_glob(path: str) -> Path:
    """The beginning of a path, up to the first part with a wildcard."""
    return Path(*takewhile(lambda part: not set(part) & set("*?["), Path(path).parts))


def common_folder(paths: Sequence[Path]) -> Path:
    """The longest path that all begin with: of one path itself, of relative and absolute ones the
    empty path."""
    if len({path.is_absolute() for path in paths}) > 1:
        return Path()
    return Path(os.path.commonpath(paths))


class PrepareConfig(Command):
    """prepare_data.py: text to token shards"""

    in_one_process = True

    source: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=("stdlib",), min_length=1
    )
    """`stdlib` (the source of Python's standard library); local text and tables: JSON, CSV, TSV,
    parquet (files, folders, globs, one or several); a folder of `save_to_disk`; or
    `hub:OWNER/NAME`, a dataset on the Hub"""
    output: str | None = None
    """folder for the shards and their manifest.json; null: data/ and the source's name, of several
    that of the folder that holds them all"""
    tokenizer: str = "bpe"
    """`bpe` (trains a byte-level BPE on the training split), `bytes` (256 ids and end-of-text), the
    name of a tiktoken encoding (gpt2, r50k_base, cl100k_base, ...), or a tokenizer.json"""
    vocab_size: int | None = Field(default=None, ge=257, le=2**31 - 1)
    """bpe: tokens of the vocabulary, end-of-text included; null: 1,024 for 1 MB of text, 4,096 for
    10 MB, 8,192 for 100 MB, 32,768 for 1 GB and more"""
    workers: NonNegativeInt = 0
    """encoding processes; 0: one per core; the result does not depend on their number"""
    val_fraction: Fraction = 0.05
    """fraction of the documents for the validation split, chosen by the hash of their text; of the
    text's bytes, the last ones, if that would be fewer than about ten documents; a BPE is trained
    on the rest alone"""
    shard_tokens: int = Field(default=100_000_000, ge=1024, lt=2**31)
    """most tokens per shard"""
    column: str = "text"
    """column of the text, in tables and Hub sources; `meta.text`: the field text of column meta"""
    split: str = "train"
    """Hub: the dataset's split"""
    subset: str | None = None
    """Hub: the dataset's configuration, such as sample-10BT; null: its default"""
    revision: str | None = None
    """Hub: branch, tag or commit; null: the default branch"""
    document_separator: Text | None = Field(default=None, min_length=1, max_length=1000)
    """text between the documents of a file, such as `<|endoftext|>`, or one line break for lines,
    two for paragraphs; line breaks around it count as part of it; null: a file is one document"""
    max_documents: PositiveInt | None = None
    """number of documents to stop after; null: all"""

    @property
    def source_name(self) -> str:
        """The source as messages and the manifest name it: several are joined by blanks."""
        return " ".join(self.source)

    @property
    def folder(self) -> str:
        """`output`, or data/NAME with the name of the file, folder or dataset: `texts/*.txt` goes
        to data/texts."""
        if self.output:
            return self.output
        if self.source_name.startswith("hub:"):
            name = self.source_name.rpartition("/")[2]
            return f"data/{name}-{self.subset}" if self.subset else f"data/{name}"
        paths = [before_glob(re.sub(r"^\w+:", "", source)) for source in self.source]
        name = common_folder(paths).stem
        return f"data/{'text' if name in ('', '..') else name}"

    def mistakes(self) -> Iterator[tuple[str, object, str]]:
        """Settings that would have no effect."""
        if self.vocab_size and self.tokenizer != "bpe":
            hint = "has an effect with --tokenizer bpe only; leave it out"
            yield "vocab_size", self.vocab_size, hint


class ImportTokensConfig(Command):
    """import_tokens.py: token files of llm.c, modded-nanogpt or nanoGPT as token shards"""

    in_one_process = True
    positional = "source"

    source: tuple[str, ...] = ()
    """files, or folders of `*.bin` files, one or several; the name of each has its split, train or
    val, as fineweb_train_000001.bin and val.bin have"""
    output: str | None = None
    """folder for the shards and their manifest.json; null: data/ and the name of the first source,
    of a file that of its folder"""
    tokenizer: str = "gpt2"
    """tokenizer of the files, which do not name it: a tiktoken encoding, or a tokenizer.json"""
    shard_tokens: int = Field(default=100_000_000, ge=1024, lt=2**31)
    """most tokens per shard"""

    @property
    def folder(self) -> str:
        """`output`, or data/NAME."""
        if self.output:
            return self.output
        first = Path(self.source[0]).absolute()
        return f"data/{first.name if first.is_dir() else first.parent.name}"

    def mistakes(self) -> Iterator[tuple[str, object, str]]:
        """No file."""
        if not self.source:
            yield "source", "(none)", "name token files, or folders of them"


class EvaluateConfig(CheckpointCommand):
    """evaluate.py: scores of a checkpoint in a split, in test samples or in tasks; predictions of
    small jobs"""

    data: tuple[str, ...] = ()
    """folders of token shards, one or several, or a folder of images in folders of classes; none:
    the run's own"""
    split: str = "val"
    """split to score: each of its tokens except the first, once"""
    tokens: PositiveInt | None = None
    """number of tokens to score, evenly spread; null: all"""
    stride: PositiveInt | None = None
    """score with context: windows begin this number of tokens apart, at most block_size, and only
    the last `stride` tokens of each are scored, all of the first; half of block_size takes twice as
    long; null: block_size, windows side by side"""
    tasks: tuple[str, ...] = ()
    """tasks to score instead of the split: `hellaswag` or `lambada` (from the Hub), or jsonl files
    of items (docs/evaluation.md); `TASK:5` puts five examples before each item"""
    task_items: PositiveInt | None = None
    """items of each task, evenly spread; null: all"""
    images: tuple[str, ...] = ()
    """classifiers of images: images of unknown classes, or folders of them, to classify instead of
    scoring"""
    output: str | None = None
    """folder for the tasks' items and scores, or a small job's predictions; null:
    evaluations/CHECKPOINT in the run folder, but none for other samples than the run's own"""
    batch_size: PositiveInt = 16
    """windows, continuations of a task, or samples of a small job per forward pass and process"""
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
    """precision of autocast; auto: as `accelerate launch` says, else bf16 on GPUs that have it"""
    device: Device = "auto"


class GenerateConfig(CheckpointCommand):
    """generate.py: text from a checkpoint"""

    in_one_process = True

    prompts: tuple[Text, ...] = ("",)
    """texts to continue, one or several; empty: the start of a document"""
    max_new_tokens: Count = 256
    """most tokens to add to each prompt, up to 1,000,000; the end-of-text token ends the text
    earlier"""
    temperature: NonNegativeFloat = 0.8
    """divisor of the logits; 0: always the likeliest token"""
    top_k: PositiveInt | None = 50
    """sample among the k likeliest tokens; null: all"""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """sample among the likeliest tokens whose probabilities add up to this; 1: all"""
    seed: NonNegativeInt = 0
    """seed of the samples"""
    num_samples: int = Field(default=1, ge=1, le=100_000)
    """continuations per prompt, up to 100,000"""
    device: Device = "auto"


class ExportConfig(CheckpointCommand):
    """export_hf.py: a checkpoint as a folder in transformers' format"""

    in_one_process = True

    output: str | None = None
    """folder to create; null: exports/RUN-step-STEP"""
    gguf: bool = False
    """also write model.gguf for llama.cpp; llama.cpp's own converter accepts no tokenizer that was
    trained here"""


class ImportConfig(Command):
    """import_hf.py: a transformers model as a checkpoint in the user's cache"""

    in_one_process = True
    positional = "source"

    source: str = "hub:openai-community/gpt2"
    """folder with config.json, safetensors and tokenizer.json, or `hub:OWNER/NAME[@REVISION]`"""


class ReportConfig(Command):
    """report.py: report.html and report.png of one or several runs; runs that differ only in their
    seed are a group"""

    in_one_process = True
    positional = "runs"

    runs: tuple[str, ...] = Field(default=("runs/stdlib",), min_length=1)
    """run folders"""
    output: str | None = None
    """folder for report.html and report.png. FOLDER/NAME.json: NAME.html, NAME.png, and NAME.json
    with the groups of seeds. null: the run's folder; for several runs comparison.html and
    comparison.png in the first run's folder"""
    every: PositiveFloat | None = None
    """seconds; writes the report again so often, until no run is running; null: once"""


class StatusConfig(Command):
    """status.py: the state of runs"""

    in_one_process = True
    positional = "runs"

    runs: tuple[str, ...] = ()
    """run folders; none: all in runs/"""


class VerifyConfig(Command):
    """verify_run.py: check that all records of a run agree with each other"""

    in_one_process = True
    positional = "run"
    reads = "checkpoints"

    run: str = "runs/stdlib"
    """run folder"""
    data: tuple[str, ...] = ()
    """folder of token shards, or all folders of a mixture in their order; none: the run's own"""
    replay: Steps | None = None
    """FROM:TO, like 1000:1100: also train again from the checkpoint of step FROM to step TO, at
    most the next checkpoint's, and compare, in a temporary folder, on as many processes as the run
    had; null: train nothing"""
    trust_run_code: TrustRunCode = False
    anchor: Chain | None = None
    """chain of a row that was kept elsewhere, as this script and each row show it: the run must
    have that row; null: no anchor"""


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of pydantic, whose method `json` is deprecated

    class ExplainConfig(Command):
        """explain.py: why two recorded runs differ: the first cause, then the others. Exit code 0:
        equal; 1: different and explained; 3: not explained, or changed after it was written"""

        in_one_process = True
        positional = "runs"
        reads = "checkpoints"

        runs: tuple[str, ...] = ()
        """the two run folders"""
        json: bool = False  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
        """print one JSON object (docs/explain.md) instead of text"""

        def mistakes(self) -> Iterator[tuple[str, object, str]]:
            """Another number of runs than two."""
            if len(self.runs) != 2:
                names = " ".join(self.runs) or None
                yield "runs", names, "should be two run folders, like runs/a runs/b"

    class WhereConfig(Command):
        """where.py: the steps that trained on a text, or the texts that a step trained on"""

        in_one_process = True
        positional = "run"
        reads = "code"

        run: str = "runs/stdlib"
        """run folder"""
        text: Text | None = None
        """text to find in the data, in the run's own spelling, blanks and line breaks; any part of
        a document"""
        file: str | None = None
        """file with the text to find, in UTF-8; a line break at its end is left out"""
        step: PositiveInt | None = None
        """print the texts of this step instead"""
        rank: NonNegativeInt | None = None
        """step, spike: only those of this rank; null: of all ranks"""
        spike: Literal["grad_norm", "loss"] | None = None
        """print the texts of the steps where this value stands out after the warm-up: more than 6
        times its usual spread above the ten rows before; values that are not finite come first"""
        spikes: Count = 3
        """spike: most steps to print"""
        data: tuple[str, ...] = ()
        """folder of token shards or its URL, or all folders of a mixture in their order; none: the
        run's own"""
        trust_run_code: TrustRunCode = False
        json: bool = False  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
        """print one JSON object (docs/where.md) instead of text"""

        def mistakes(self) -> Iterator[tuple[str, object, str]]:
            """No question, several, or an empty one."""
            questions = {
                name: value
                for name in ("text", "file", "step", "spike")
                if (value := getattr(self, name)) is not None
            }
            if not questions:
                hint = "ask one: --text TEXT, --file FILE, --step N or --spike grad_norm"
                yield "question", None, hint
            if len(questions) > 1:
                first, second, *_ = questions
                yield second, questions[second], f"{first} is asked, too; remove one of the two"
            if self.text == "":
                yield "text", "''", "is empty; give some words of the document"
            if self.rank is not None and not {"step", "spike"} & questions.keys():
                yield "rank", self.rank, "is for --step and --spike only; remove it"


class CheckClusterConfig(Command):
    """check_cluster.py: whether all processes connect, have equal versions and all-reduce
    correctly, and how fast"""

    timeout_seconds: PositiveFloat = 60
    """seconds to wait for a rank that does not connect, and for an all-reduce that does not end"""
    device: Device = "auto"


class CompareConfig(Command):
    """compare_parallel.py: the same training by one process, nn.DataParallel and DDP, timed"""

    jobs: tuple[str, ...] = ("regression", "classifier", "gpt2")
    """trainings to time: regression, classifier, transformer, gpt2; each may name a configuration
    of its script after a colon, like classifier:configs/jobs/cifar100_lenet.yaml"""
    processes: tuple[Annotated[int, Field(ge=2, le=64)], ...] = (2,)
    """numbers of DDP processes; each has a row in the table"""
    repeats: PositiveInt = 3
    """runs of each strategy, in new processes each; the strategies alternate"""
    steps: PositiveInt | None = None
    """number of timed steps of each run; null: regression 5000, classifier 100, transformer 2000,
    gpt2 20"""
    threads: PositiveInt = 1
    """CPU threads per process, equal for all strategies"""
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """mixed precision of every job; the strategies end with equal parameters only with no (fp32)"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """device to train on; auto: cuda if available, else cpu"""
    output: str = "runs/compare"
    """folder for compare.md and compare.json"""


class LabConfig(Command):
    """ddp_lab.py: common mistakes in DDP, measured on two CPU processes"""

    only: tuple[str, ...] = ()
    """names of the experiments to run; empty: all"""
