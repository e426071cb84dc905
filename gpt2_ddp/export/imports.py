"""import_hf.py: a model that transformers reads, as a checkpoint in the user's cache. Trainings
start from it (`train.init_from`), and the commands that take a checkpoint read it.

`setup.versions` of its state has the SHA-256 of each file that it was made of. It is kept while
they, and the release of this project, are the same.
"""

import json
import math
import re
import shutil
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import safe_open
from torch import Tensor

from gpt2_ddp.checkpoint.format import Snapshot, write_manifest, write_part
from gpt2_ddp.checkpoint.verify import newest_intact
from gpt2_ddp.config.cli import dump
from gpt2_ddp.config.tools import ImportConfig
from gpt2_ddp.config.training import ModelConfig, TrainConfig, TrainingConfig
from gpt2_ddp.data.tokenizer import TOKENIZER_FILE, load_tokenizer
from gpt2_ddp.errors import UserError, print_line
from gpt2_ddp.export.transformers_layout import HEAD, LAYOUTS, fixed_fields, to_transformers
from gpt2_ddp.files import LFS_HINT, is_lfs_pointer, no_such_folder, read_json, regular, sha256_file
from gpt2_ddp.model.architecture import ARCHITECTURES, mlp_width
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.output import locked_output, publish
from gpt2_ddp.preparation.tokenizer_check import export_fault
from gpt2_ddp.project import VERSION
from gpt2_ddp.remote.objects import describe
from gpt2_ddp.state import FeedState, GPTData, Progress, Setup, State
from gpt2_ddp.training.initial_weights import HUB, ON_THE_HUB, TRANSFORMERS, import_place

FIELD = "source"
FILES = [TRANSFORMERS, "model*.safetensors*", TOKENIZER_FILE]
"""Files that are fetched and hashed."""
HUB_NAME = re.compile(rf"{HUB}[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")
MOST_LABELS = 10_000
"""Most labels of a classifier; transformers names each."""
SLACK = 10
"""A config.json may claim so many times the size of the weights: then transformers names what does
not fit."""
TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
"""Names of the tanh-GELU: config.json may have any in place of another."""


def import_hf(config: ImportConfig) -> None:
    """The command. Raises: UserError for a missing file, a model that `GPT` does not support, or a
    failed write."""
    source = config.source
    try:
        checkpoint = _import(source)
    except UserError:
        raise
    except Exception as error:  # transformers and tokenizers raise any
        hint = "check the files in it"
        if source.startswith(HUB):
            hint = "check its name and the network"
        raise UserError(FIELD, source, f"cannot be used ({describe(error)}); {hint}") from error
    print(f"{checkpoint}: a checkpoint with the weights of {source}")


def _import(source: str) -> Path:
    """The checkpoint, which is written unless it is there already."""
    _check_source(source)
    checkpoint = import_place(source)
    waiting = f"another process is writing {checkpoint}; waiting for it"
    with locked_output(checkpoint, waiting) as aside:
        model = _read_config(source, _folder(source, [TRANSFORMERS]))
        folder = _folder(source, FILES)
        versions = {
            file.name: sha256_file(file) for pattern in FILES for file in folder.glob(pattern)
        }
        versions["gpt2_ddp"] = VERSION
        kept = newest_intact(checkpoint.parent)
        if not kept or kept.state.setup.versions != versions:
            train = TrainConfig(init_from=source, steps=1, global_batch_tokens=model.block_size)
            settings = dump(TrainingConfig(model=model, train=train))
            snapshot = _convert(folder, model, Setup(epoch_size=0, versions=versions), settings)
            write_manifest(write_part(snapshot, aside), aside)
            shutil.rmtree(checkpoint, ignore_errors=True)
            publish(aside, checkpoint)
    return checkpoint


def _check_source(source: str) -> None:
    """Raises: UserError for a missing folder or file, and for what is no name of a model on the
    Hub."""
    if source.startswith(HUB):
        if not HUB_NAME.fullmatch(source):
            examples = f"{HUB}OWNER/NAME or {HUB}OWNER/NAME@main"
            raise UserError(FIELD, source, f"is no name of a model on the Hub, like {examples}")
        return
    if hint := no_such_folder(source):
        raise UserError(FIELD, source, f"{hint}; {ON_THE_HUB}")
    missing = [pattern for pattern in FILES if not any(Path(source).glob(pattern))]
    if missing:
        hint = f"save the model by transformers; {ON_THE_HUB}"
        if Path(source, "checkpoints").is_dir():
            hint = "it is a run, which needs no import"
        raise UserError(FIELD, source, f"has no {' and no '.join(missing)}; {hint}")


def _convert(folder: Path, model: ModelConfig, setup: Setup, settings: str) -> Snapshot:
    """A run before its first step, without optimizer state. Raises: UserError, which names what
    does not fit."""
    _check_size(folder, model)
    weights = _read_weights(folder, LAYOUTS[model.architecture].class_name)
    file = folder / TOKENIZER_FILE
    tokenizer = load_tokenizer(str(file))
    if fault := export_fault(file, tokenizer):
        note = "a run with this tokenizer trains, but export_hf.py would refuse it"
        print_line(f"note: {note}: {fault}")
    torch.manual_seed(0)  # of the padding rows of the vocabulary
    ours = GPT(model, tokenizer.vocab_size)
    for name, target in to_transformers(ours.state_dict(), ours).items():
        # raises for a vocabulary that is smaller than the tokenizer's
        target.copy_(weights[name][: len(target)])
    data = GPTData(
        tokenizer=TOKENIZER_FILE,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        data_manifest="",
        micro_batch=1,
    )
    state = State.of("gpt2", progress=Progress(), feed=FeedState(), setup=setup, task=data)
    return Snapshot(state, settings, ours.state_dict(), {}, {file.name: file.read_bytes()})


def _folder(source: str, patterns: list[str]) -> Path:
    """Local folder: `source`, or of these files of `hub:OWNER/NAME`, or of its branch, tag or
    commit `@…`. Raises: UserError for a file that git-LFS did not fetch."""
    if not source.startswith(HUB):
        for file in (file for pattern in patterns for file in Path(source).glob(pattern)):
            if is_lfs_pointer(regular(file)):
                raise UserError(FIELD, file, LFS_HINT)
        return Path(source)
    import huggingface_hub  # noqa: PLC0415  a folder needs none

    name, _, revision = source.removeprefix(HUB).partition("@")
    return Path(
        huggingface_hub.snapshot_download(name, revision=revision or None, allow_patterns=patterns)
    )


def _read_config(source: str, folder: Path) -> ModelConfig:
    """The model section of a config.json. Raises: UserError, which names all that a `GPT` does not
    support. (`reorder_and_upcast_attn` only changes the order.)"""
    import transformers  # noqa: PLC0415  optional

    if int(read_json(folder / TRANSFORMERS).get("num_labels") or 0) > MOST_LABELS:
        hint = f"has more than {MOST_LABELS:,} num_labels; a language model has none"
        raise UserError(FIELD, source, hint)
    theirs = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict()
    kind = theirs["model_type"]
    if kind not in LAYOUTS:
        hint = f"is a model of type {kind}; only {', '.join(LAYOUTS)} are supported"
        raise UserError(FIELD, source, hint)
    theirs |= theirs.get("rope_parameters") or {}
    names = LAYOUTS[kind].shape
    shape = {name: theirs[field] for name, field in names.items()}
    tied = bool(theirs["tie_word_embeddings"])
    if tied != ARCHITECTURES[kind].tied:
        shape["tie_word_embeddings"] = tied
    try:
        model = ModelConfig(architecture=kind, **shape)
    except ValidationError as error:
        first = error.errors()[0]
        field = names.get(str(first["loc"][0]), TRANSFORMERS)
        raise UserError(FIELD, source, f"has {field}: {first['input']}; {first['msg']}") from error
    unsupported = []
    for field, ours in (fixed_fields(model) | {"quantization_config": None}).items():
        value = theirs.get(field, ours)
        if value not in (TANH_GELUS if ours in TANH_GELUS else (ours,)):
            hint = f"has {field}: {json.dumps(value)}; only {json.dumps(ours)} is supported"
            unsupported.append(str(UserError(FIELD, source, hint)))
    if unsupported:
        raise UserError.join(unsupported)
    return model


def _check_size(folder: Path, model: ModelConfig) -> None:
    """Raises: UserError for a config.json that claims far more than the weights are. transformers
    would make it all."""
    numbers = tensors = 0
    for file in folder.glob("model*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  it is no mapping
                numbers += math.prod(opened.get_slice(name).get_shape())
                tensors += 1
    rows = int(read_json(folder / TRANSFORMERS).get("vocab_size") or 0)
    if not ARCHITECTURES[model.architecture].rotary:
        rows += model.block_size
    needed = model.n_embd * (rows + model.n_layer * (model.n_embd + mlp_width(model)))
    if model.n_layer > SLACK * tensors or needed > SLACK * numbers:
        claim = f"a model of {model.n_layer:,} layers and {needed:,} numbers or more"
        reason = f"its {TRANSFORMERS} claims {claim}; its weights are {numbers:,} in {tensors}"
        raise UserError(FIELD, folder, reason)


def _read_weights(folder: Path, class_name: str) -> dict[str, Tensor]:
    """The weights that transformers' class reads, in fp32: all tensors of the folder. Raises:
    UserError for others than it has."""
    import transformers  # noqa: PLC0415  optional

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # eager: a config.json may name another implementation, even one of the Hub
    theirs, complaints = getattr(transformers, class_name).from_pretrained(
        folder,
        local_files_only=True,
        use_safetensors=True,
        attn_implementation="eager",
        dtype=torch.float32,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    weights: dict[str, Tensor] = theirs.state_dict()
    unfit = [f"{name} is missing" for name in complaints["missing_keys"]]
    # older releases of transformers saved constants, too
    unfit += [
        f"{name} is unknown"
        for name in complaints["unexpected_keys"]
        if not name.endswith(".attn.masked_bias")
    ]
    unfit += [
        f"{name} has shape {[*has]} instead of {[*wants]}"
        for name, has, wants in complaints["mismatched_keys"]
    ]
    unfit += [
        f"{name} is not finite" for name, value in weights.items() if not value.isfinite().all()
    ]
    embedding = theirs.get_input_embeddings().weight
    if theirs.config.tie_word_embeddings and not theirs.lm_head.weight.equal(embedding):
        unfit.append(f"{HEAD} differs from the embedding")
    if unfit:
        reasons = "; ".join(sorted(unfit))
        raise UserError(FIELD, folder, f"has other weights than its {TRANSFORMERS}: {reasons}")
    return weights
