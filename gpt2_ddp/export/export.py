"""export_hf.py: a checkpoint as a folder that transformers, lm-eval and llama.cpp's converter read."""

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpt2_ddp.checkpoint.checkpoint import CONFIG, MANIFEST, Checkpoint, as_safetensors
from gpt2_ddp.config.tools import ExportConfig
from gpt2_ddp.data.tokenizer import Tokenizer
from gpt2_ddp.errors import UserError
from gpt2_ddp.export.card import TRAINING, write_card
from gpt2_ddp.export.check import ExportMismatch, Findings, check_export
from gpt2_ddp.export.gguf_file import write_gguf
from gpt2_ddp.export.tokenizer_files import write_tokenizer
from gpt2_ddp.files import free_name, sha256_file, write_hashed, writing
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.model.transformers_layout import to_transformers, transformers_config
from gpt2_ddp.output import locked_output, publish
from gpt2_ddp.tasks.trained_model import find_gpt, load_model, note_best, still_there

GGUF = "model.gguf"


def export_hf(config: ExportConfig) -> int:
    """The command: exports, prints what was compared, uploads; returns the exit code.

    Raises:
        UserError: for whatever the user has to mend, before the weights are read where that can be.
    """
    require_package("transformers", "the export is checked")
    if config.gguf:
        require_package("gguf", "--gguf writes")
    hub = Hub(config.push_to_hub, config.private) if config.push_to_hub else None
    checkpoint = find_gpt(Path(config.checkpoint), "checkpoint")
    print(note_best(config.checkpoint, checkpoint), end="", file=sys.stderr)
    output = Path(config.output or default_output(checkpoint))
    try:
        findings = export(checkpoint, output, config.gguf)
    except ExportMismatch as rejected:
        print(f"rejected: {rejected}; what was written is left in {rejected.left}", file=sys.stderr)
        return 1
    print(f"{output}: {checkpoint.path} for transformers, which agrees in {findings}")
    if hub:
        print(f"uploaded to {hub.upload(output)}")
    return 0


def require_package(name: str, purpose: str) -> None:
    """Raises: UserError for a package that is not installed, before the weights are read."""
    if importlib.util.find_spec(name) is None:
        raise UserError("package", name, f"is not installed, and {purpose} with it; `pip install {name}`")


def default_output(checkpoint: Checkpoint) -> Path:
    """In exports/, by the run's name and the step."""
    return Path("exports", f"{checkpoint.config['run_name']}-step-{checkpoint.state['step']:08d}")


def export(checkpoint: Checkpoint, output: Path, gguf: bool = False) -> Findings:
    """Makes the folder `output` of a GPT's checkpoint; it is there once transformers was found to compute the same.
    `gguf`: with a file for llama.cpp.

    Raises:
        UserError: `output` is in use, the checkpoint was pruned meanwhile, or the disk refuses.
        ExportMismatch: it does not; the folder is left under the name of `.rejected`.
    """
    with atomic_directory(output) as folder:
        with still_there(checkpoint):
            model, tokenizer = load_model(checkpoint)
            shutil.copyfile(checkpoint.path / CONFIG, folder / TRAINING)
            definition = checkpoint.path / checkpoint.state["tokenizer"]
            definition = definition.read_bytes() if definition.is_file() else None
            sha256 = sha256_file(checkpoint.path / MANIFEST)
        write_tokenizer(tokenizer, definition, model.config.block_size, folder)
        write_model(model, tokenizer, folder)
        findings = check_export(folder, model, tokenizer)
        if gguf:
            write_gguf(model, tokenizer, folder / GGUF)
        write_card(checkpoint, sha256, model, tokenizer, findings, folder)
    return findings


@contextmanager
def atomic_directory(output: Path) -> Iterator[Path]:
    """Yields a hidden folder to fill, which becomes `output` at the end. After an ExportMismatch it becomes
    `output` with `.rejected`; after other exceptions it is removed.

    Raises:
        UserError: `output` exists and is not an empty folder, another process makes it, or the disk refuses.
    """
    with locked_output(output) as aside:
        empty = os.path.isdir(output) and not os.path.islink(output) and not os.listdir(output)
        if os.path.lexists(output) and not empty:
            raise UserError("output", output, "is there already, and nothing is overwritten; remove it or name another")
        try:
            with writing(output):
                yield aside
            publish(aside, output)
        except ExportMismatch as rejected:
            rejected.left = free_name(output.with_name(f"{output.name}.rejected"))
            publish(aside, rejected.left)
            raise


def write_model(model: GPT, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes config.json, generation_config.json and model.safetensors."""
    eot = tokenizer.eot
    generation = {"bos_token_id": eot, "eos_token_id": eot, "pad_token_id": eot}
    for name, fields in (
        ("config.json", transformers_config(model.config, model.vocab_size, eot)),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(fields, indent=2), encoding="utf-8")
    file = folder / "model.safetensors"
    with writing(file):
        write_hashed(file, as_safetensors(to_transformers(model.state_dict(), model.vocab_size), {"format": "pt"}))


class Hub:
    """A repository for models on the Hub, by whoever is logged in there.

    Args:
        repository: OWNER/NAME; it is made when something is uploaded.
        private: whether it is made for its owner's eyes alone.

    Raises:
        UserError: nobody is logged in, or the Hub is not reached.
    """

    def __init__(self, repository: str, private: bool):
        from huggingface_hub import HfApi

        self.repository, self.private, self._api = repository, private, HfApi()
        with self._told("log in with `hf auth login`, or leave it away"):
            self._api.whoami()

    def upload(self, folder: Path) -> str:
        """Uploads a folder in one commit; returns the repository's address. Raises: UserError where the Hub refuses."""
        with self._told(f"the export is whole; `hf upload {self.repository} {folder}` uploads it later"):
            url = self._api.create_repo(self.repository, private=self.private, exist_ok=True)
            message = "Export of gpt2_ddp"
            self._api.upload_folder(repo_id=self.repository, folder_path=folder, commit_message=message)
        return str(url)

    @contextmanager
    def _told(self, hint: str) -> Iterator[None]:
        from huggingface_hub.errors import HFValidationError, HTTPError  # pyright: ignore[reportPrivateImportUsage]

        try:
            yield
        except (OSError, HTTPError, HFValidationError) as error:
            reason = str(error).strip().split("\n")[0]
            raise UserError("push_to_hub", self.repository, f"{reason}; {hint}") from error
