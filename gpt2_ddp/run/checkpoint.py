"""Checkpoints that verify themselves: `step-XXXXXXXX/` folders written by the main process.

Each holds model.safetensors (plain module names, fp32), optimizer.safetensors, state.json, config.yaml, the tokenizer
where it is a file, and manifest.json with the size and SHA-256 of each of them. A checkpoint is made in a hidden folder
beside its place, fsynced and renamed, so that it is there whole or not at all; a flipped bit is found when it is read.
Nothing in it is a pickle.
"""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt2_ddp.config.training import ModelConfig
from gpt2_ddp.data.tokenizer import Tokenizer, load_tokenizer
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import fsync_file, fsync_folder, sha256_file, write_atomically
from gpt2_ddp.model.gpt import GPT

MODEL, OPTIMIZER, STATE, CONFIG, MANIFEST = (
    "model.safetensors",
    "optimizer.safetensors",
    "state.json",
    "config.yaml",
    "manifest.json",
)


class Damaged(Exception):
    """A checkpoint that is not what was written.

    Args:
        file: the file that is wrong.
        reason: what is wrong with it.
    """

    def __init__(self, file: Path, reason: str):
        self.file = file
        self.reason = reason
        super().__init__(f"{file}: {reason}")


@dataclass
class CheckpointFolder:
    """The checkpoints of one run, as its main process sees them."""

    folder: Path
    keep_last: int = 3

    def __post_init__(self) -> None:
        self._verified: dict[Path, dict[str, Any]] = {}  # checked by this process, with their state

    def save(
        self, model: nn.Module, optimizer: Optimizer, state: dict[str, Any], config: str, extra: tuple[Path, ...] = ()
    ) -> Path:
        """Writes the checkpoint of step `state["step"]`, durably, and only then removes what is no longer kept.

        Args:
            model: the plain module, unwrapped.
            optimizer: the raw optimizer over its parameters.
            state: what state.json holds; plain JSON values.
            config: the run's configuration as YAML.
            extra: files to copy into it, such as a tokenizer.
        """
        place = self.folder / f"step-{state['step']:08d}"
        temporary = self.folder / f".{place.name}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file({name: _plain(tensor) for name, tensor in model.state_dict().items()}, temporary / MODEL)
        save_file(flatten_optimizer(model, optimizer), temporary / OPTIMIZER)
        (temporary / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
        (temporary / CONFIG).write_text(config, encoding="utf-8")
        for file in extra:
            shutil.copyfile(file, temporary / file.name)
        files = {}
        for file in sorted(temporary.iterdir()):
            fsync_file(file)
            files[file.name] = {"bytes": file.stat().st_size, "sha256": sha256_file(file)}
        write_atomically(temporary / MANIFEST, json.dumps({"version": 1, "files": files}, indent=1))
        if place.exists():  # the same step again: identical, unless it was damaged
            shutil.rmtree(place)
        temporary.rename(place)
        fsync_folder(self.folder)
        self._verified[place] = state
        self.prune()
        return place

    def newest_intact(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest checkpoint whose hashes are right, and its state; None when there is none at all.

        A damaged one on the way is renamed to `*.corrupt`, with a warning on stderr that names file and reason.

        Raises:
            UserError: when checkpoints exist, but none is intact.
        """
        found = list_checkpoints(self.folder)
        for place in reversed(found):
            try:
                return place, self._verify(place)
            except Damaged as damage:
                aside = _free_name(place.with_name(f"{place.name}.corrupt"))
                place.rename(aside)
                print(f"warning: {damage}; moved to {aside.name}, trying the one before it", file=sys.stderr)
        if found or any(self.folder.glob("*.corrupt*")):
            cure = "holds checkpoints, but none is intact; restore one from a copy, or choose another run_name"
            raise UserError("run folder", self.folder, cure)
        return None

    def prune(self) -> None:
        """Removes verified checkpoints but the newest `keep_last` and the best; a damaged one is left as it is."""
        intact = []
        for place in list_checkpoints(self.folder):
            try:
                intact.append((place, self._verify(place)))
            except Damaged as damage:
                print(f"warning: {damage}; not counted, not removed", file=sys.stderr)
        scored = [(state["val_loss"], place) for place, state in intact if state.get("val_loss") is not None]
        keep = {place for place, _ in intact[-self.keep_last :]} | ({min(scored)[1]} if scored else set())
        for place, _ in intact:
            if place not in keep:
                hidden = place.with_name(f".{place.name}.removed")
                place.rename(hidden)  # so that a crash halfway leaves nothing that looks like a checkpoint
                shutil.rmtree(hidden)
                del self._verified[place]

    def clean(self) -> None:
        """Removes what a killed process left half made or half removed."""
        for leftover in self.folder.glob(".step-*"):
            shutil.rmtree(leftover)

    def _verify(self, place: Path) -> dict[str, Any]:
        if place not in self._verified:
            self._verified[place] = verify(place)
        return self._verified[place]


def list_checkpoints(folder: Path) -> list[Path]:
    """The folders `step-XXXXXXXX` in a run's checkpoints folder, oldest step first; damaged or not."""
    return sorted(place for place in folder.glob("step-*") if place.is_dir() and place.name[5:].isdigit())


def verify(checkpoint: Path) -> dict[str, Any]:
    """Checks every file of a checkpoint against its manifest and returns what state.json holds.

    Raises:
        Damaged: naming the first file that is missing, cut short or changed.
    """
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        files = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(checkpoint / MANIFEST, f"cannot be read ({error})") from error
    for name in (MODEL, OPTIMIZER, STATE, CONFIG):
        if name not in files:
            raise Damaged(checkpoint / MANIFEST, f"does not list {name}")
    for name, (size, sha256) in files.items():
        file = checkpoint / name
        if not file.is_file():
            raise Damaged(file, "is missing")
        if file.stat().st_size != size:
            raise Damaged(file, f"has {file.stat().st_size} bytes instead of {size}")
        if sha256_file(file) != sha256:
            raise Damaged(file, "its SHA-256 is not the one that was written")
    return json.loads((checkpoint / STATE).read_text(encoding="utf-8"))


def find_checkpoint(path: Path) -> Path:
    """The verified checkpoint that a user means: `path` itself, or the newest intact one of the run folder `path`.

    Raises:
        UserError: when there is none, or the one named is damaged.
    """
    if (path / MANIFEST).is_file() or (path / MODEL).is_file():
        try:
            verify(path)
        except Damaged as damage:
            raise UserError("checkpoint", damage.file, f"{damage.reason}; name another checkpoint") from damage
        return path
    for place in reversed(list_checkpoints(path / "checkpoints")):
        try:
            verify(place)
        except Damaged as damage:
            print(f"warning: {damage}; trying the one before it", file=sys.stderr)
        else:
            return place
    raise UserError("checkpoint", path, "holds no intact checkpoint; name a run folder or a step-XXXXXXXX folder in it")


def load_model(checkpoint: Path) -> tuple[GPT, Tokenizer]:
    """The model (fp32, on the CPU, in evaluation mode) and the tokenizer of a verified checkpoint.

    Raises:
        UserError: when the tokenizer cannot be had, or the weights do not fit the configuration.
    """
    config = yaml.safe_load((checkpoint / CONFIG).read_text(encoding="utf-8"))
    state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    name = state["tokenizer"]
    tokenizer = load_tokenizer(str(checkpoint / name) if (checkpoint / name).is_file() else name)
    model = GPT(ModelConfig(**config["model"]), state["vocab_size"])
    load_weights(checkpoint, model)
    return model.eval(), tokenizer


def load_weights(checkpoint: Path, model: nn.Module) -> None:
    """Copies a checkpoint's weights into the plain module.

    Raises:
        UserError: when names or shapes differ.
    """
    tensors = load_file(checkpoint / MODEL)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        reason = "; ".join(line.strip() for line in str(error).splitlines()[1:3])
        raise UserError("checkpoint", checkpoint, f"does not fit the model section: {reason}") from error


def flatten_optimizer(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as `<kind>.<parameter name>` tensors on the CPU, such as `exp_avg.h.0.ln_1.weight`."""
    return {
        f"{kind}.{name}": _plain(value)
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Restores what `flatten_optimizer` gave, each tensor on its parameter's device."""
    parameters = dict(model.named_parameters())
    for key, value in load_file(checkpoint / OPTIMIZER).items():
        kind, name = key.split(".", 1)
        optimizer.state[parameters[name]][kind] = value.to(parameters[name].device)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _free_name(path: Path) -> Path:
    number = 1
    free = path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free
