"""Configurations of the small supervised jobs."""

# Sections are frozen, so a narrower type is sound.
# pyright: reportIncompatibleVariableOverride=false

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from gpt2_ddp.config.base import Count, Fraction, Section, Size
from gpt2_ddp.config.run import (
    MOST_ITEMS,
    ClipConfig,
    GuardConfig,
    KeepConfig,
    LoopConfig,
    RunConfig,
    TrackingConfig,
)


class LaunchConfig(Section):
    """Processes"""

    processes: int | None = Field(default=None, ge=1, le=64)
    """processes to start on this machine, on a GPU each or on the CPU; null: the launcher's
    processes, or one"""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """backend of the process group; auto: nccl on GPUs, gloo on CPUs"""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads per process; null: this machine's cores, divided by its processes. Tiny models
    are fastest with 1"""


class JobOptimConfig(ClipConfig):
    """The optimizer and its schedule"""

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    """fused optimizer"""
    lr: PositiveFloat = 0.01
    """peak learning rate"""
    schedule: Literal["constant", "cosine"] = "constant"
    """learning rate after the warm-up; cosine: decays to 0 at the end of train.epochs, which then
    must not change"""
    warmup_epochs: NonNegativeFloat = 0
    """epochs of linear warm-up to lr"""
    momentum: Fraction = 0.0
    """sgd: momentum"""
    weight_decay: NonNegativeFloat = 0.0
    """sgd and adam: L2 penalty; adamw: decoupled weight decay"""


class JobTrainConfig(LoopConfig):
    """The training loop"""

    epochs: Count = 10
    """passes over the training samples"""
    global_batch_size: int = Field(default=32, ge=1, le=MOST_ITEMS)
    """samples per optimizer step over all processes"""
    micro_batch_size: PositiveInt = 1024
    """most samples per forward pass and process; gradients of a larger batch are accumulated in
    equal parts"""


class JobEvalConfig(Section):
    """Scores on the test samples"""

    every: PositiveInt = 1
    """epochs between evaluations; the untrained model and the last epoch are always evaluated"""
    batch_size: Count = 256
    """samples per forward pass and process"""


class JobCheckpointConfig(KeepConfig):
    """Checkpoints"""

    every: PositiveInt = 1
    """epochs between checkpoints; a stop and the last epoch always save one"""
    keep_last: PositiveInt = 2
    """newest intact checkpoints to keep; the one with the lowest loss on the test samples is kept,
    too"""

    @model_validator(mode="before")
    @classmethod
    def _accept_old_name(cls, values: object) -> object:
        """Configurations of earlier runs have `save_every`."""
        if not isinstance(values, dict):
            return values
        saved = cast(dict[str, object], values)
        if "save_every" not in saved or "every" in saved:
            return saved
        return {"every" if name == "save_every" else name: saved[name] for name in saved}


class JobTrackingConfig(TrackingConfig):
    """Metrics"""

    log_every: PositiveInt = 50
    """steps between rows of metrics.jsonl"""


class JobConfig(RunConfig):
    """A small supervised job"""

    kept = ("seed", "data", "model", "optim", "train.global_batch_size", "train.epochs")

    optim: JobOptimConfig = JobOptimConfig()
    train: JobTrainConfig = JobTrainConfig()
    eval: JobEvalConfig = JobEvalConfig()
    guard: GuardConfig = GuardConfig()
    checkpoint: JobCheckpointConfig = JobCheckpointConfig()
    tracking: JobTrackingConfig = JobTrackingConfig()
    launch: LaunchConfig = LaunchConfig()

    @property
    def backend(self) -> Literal["auto", "nccl", "gloo"]:
        return self.launch.backend

    def may_change(self, name: str, before: object, step: int) -> bool:
        """Allows a new number of epochs, except with a cosine schedule."""
        return name == "train.epochs" and self.optim.schedule != "cosine"

    def mistakes(self) -> Iterator[tuple[str, object, str]]:
        if self.train.compile == "blocks":
            hint = "is for GPTs only; use model or off; the default is auto"
            yield "train.compile", "blocks", hint


class RegressionDataConfig(Section):
    """Points on a noisy line"""

    points: Count = 10_000
    """number of training points"""
    test_points: Count = 2_000
    """number of test points"""
    weight: float = 2.0
    """slope of the line"""
    bias: float = 3.0
    """intercept of the line: y at x = 0"""
    noise: NonNegativeFloat = 0.1
    """standard deviation of the noise; its square is the lowest expected loss"""


class RegressionConfig(JobConfig):
    """train_regression.py: linear regression, y = weight * x + bias"""

    kind = "regression"

    data: RegressionDataConfig = RegressionDataConfig()


CIFAR_CLASSES = {"cifar10": 10, "cifar100": 100}
"""Number of classes of each CIFAR data set. Their images have 32 x 32 pixels."""


HubName = Annotated[str, Field(pattern=r"^\w[\w.-]*/\w[\w.-]*$", title="OWNER/NAME")]


class ClassifierDataConfig(Section):
    """The samples to classify"""

    name: Literal["clusters", "cifar10", "cifar100", "images"] | HubName = "clusters"
    """data set: `clusters`, two uniform ones in a cube; `cifar10`; `cifar100`; `images`, your own,
    in path; or OWNER/NAME, images of a data set on the Hub"""
    path: str | None = None
    """images: local folder (class folders, parquet files, archives: docs/small-jobs.md); null: from
    the Hub"""
    image_size: int | None = Field(default=None, ge=1, le=4096)
    """images: width and height in pixels, after a crop to the centred square; null: unchanged, all
    of one size"""
    image_column: str | None = None
    """images of parquet files or the Hub: column of images; null: img or image"""
    label_column: str | None = None
    """the same sources: column of classes; null: label, fine_label, labels or class"""
    test_fraction: float = Field(default=0.1, gt=0, lt=1)
    """images without a test split: fraction of the training images to test on instead"""
    augment: bool = False
    """images: random crops after 4 pixels of padding, and random horizontal flips"""
    points: Count = 20_000
    """clusters: number of training points"""
    test_points: Count = 5_000
    """clusters: number of test points"""
    features: Size = 10
    """clusters: dimensions of a point"""

    @property
    def images(self) -> bool:
        """Whether the samples are images."""
        return self.name != "clusters"


class ClassifierModelConfig(Section):
    """The classifier"""

    name: Literal["mlp", "lenet", "resnet18"] = "mlp"
    """mlp for the clusters; lenet or resnet18 for images"""
    hidden: tuple[Count, ...] = (10_000, 5_000)
    """mlp: widths of the hidden layers"""
    sync_batchnorm: bool = False
    """resnet18 on GPUs: BatchNorm computes its statistics over the samples of all processes; false:
    of each process"""


class ClassifierConfig(JobConfig):
    """train_classifier.py: an MLP on clusters, LeNet or ResNet-18 on images"""

    kind = "classifier"

    data: ClassifierDataConfig = ClassifierDataConfig()
    model: ClassifierModelConfig = ClassifierModelConfig()

    def mistakes(self) -> Iterator[tuple[str, object, str]]:
        yield from super().mistakes()
        images = self.data.images
        if images == (self.model.name == "mlp"):
            hint = f"is not for data.name {self.data.name}"
            needed = "clusters need mlp, images need lenet or resnet18"
            yield "model.name", self.model.name, f"{hint}: {needed}"
        if self.data.name == "images" and not self.data.path:
            hint = "should be the folder of your images; or name a data set on the Hub"
            yield "data.path", self.data.path, hint
        if self.data.path and (not images or "/" in self.data.name):
            hint = f"conflicts with data.name {self.data.name}"
            yield (
                "data.path",
                self.data.path,
                f"{hint}; set data.name to images, or remove data.path",
            )
        if self.model.sync_batchnorm and self.model.name != "resnet18":
            hint = f"{self.model.name} has no BatchNorm; use resnet18, or remove the flag"
            yield "model.sync_batchnorm", "true", hint


CLUSTERS = "configs/jobs/mlp_clusters.yaml"
OWN_IMAGES = "configs/jobs/images.yaml"


def classifier_default(flags: Mapping[str, Any]) -> str:
    """The preset of train_classifier.py without `--config`, for clusters or images."""
    data = flags.get("data.path") or flags.get("data.name") or "clusters"
    return CLUSTERS if data == "clusters" else OWN_IMAGES


class SequenceDataConfig(Section):
    """Sequences of one token each, repeated"""

    sequences: Count = 12
    """number of sequences; sequence i repeats token i; the test sequences are the training
    sequences"""
    length: int = Field(default=10, ge=2, le=10_000)
    """tokens per sequence; the model predicts each token but the first from the tokens before it"""


class TransformerModelConfig(Section):
    """A small transformer"""

    vocab_size: Count = 100
    """number of different tokens"""
    n_layer: Size = 2
    """number of blocks"""
    n_head: PositiveInt = 4
    """attention heads per block"""
    n_embd: Size = 12
    """width of the residual stream (d_model); a multiple of n_head, and even"""
    d_ff: Count = 24
    """width inside the feed-forward layers"""
    dropout: Fraction = 0.0
    """dropout probability"""


class TransformerConfig(JobConfig):
    """train_transformer.py: a small transformer language model"""

    kind = "transformer"

    data: SequenceDataConfig = SequenceDataConfig()
    model: TransformerModelConfig = TransformerModelConfig()

    def mistakes(self) -> Iterator[tuple[str, object, str]]:
        yield from super().mistakes()
        model = self.model
        if model.n_embd % model.n_head or model.n_embd % 2:
            hint = f"should be even and a multiple of model.n_head ({model.n_head})"
            yield "model.n_embd", model.n_embd, f"{hint}, like {2 * model.n_head}"
        if self.data.sequences > model.vocab_size:
            most = f"should be at most model.vocab_size ({model.vocab_size})"
            hint = f"{most}: each sequence has its own token"
            yield "data.sequences", self.data.sequences, hint
