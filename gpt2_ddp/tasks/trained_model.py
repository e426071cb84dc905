"""A trained GPT and its tokenizer from a checkpoint, and the text that it writes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn

from gpt2_ddp.checkpoint.format import CONFIG, MODEL, Checkpoint
from gpt2_ddp.checkpoint.loading import check_weights, fit_weights, saved_tokenizer
from gpt2_ddp.checkpoint.verify import find_checkpoint
from gpt2_ddp.config.saved import read_config
from gpt2_ddp.config.tools import GenerateConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.tokenizer import Tokenizer
from gpt2_ddp.distributed.launch import pick_device
from gpt2_ddp.errors import UserError
from gpt2_ddp.model.generate import Sampling, generate
from gpt2_ddp.model.gpt import GPT, without_init
from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.tasks.user_task import trusted


def load_model(checkpoint: Checkpoint, trust_code: bool = False) -> tuple[GPT, Tokenizer]:
    """The model (fp32, on the CPU, in evaluation mode) and the tokenizer of a GPT's checkpoint.

    `trust_code`: execute the class that the run recorded, even if it was never given on this
    machine. Raises: UserError if the tokenizer cannot be loaded, or state, configuration and
    weights do not fit each other.
    """
    config = read_settings(checkpoint)
    task = own_task(checkpoint, trust_code)
    with still_there(checkpoint):
        weights = checkpoint.tensors(MODEL)
        tokenizer = saved_tokenizer(checkpoint)
    if not task and config.model.n_layer > len(weights):  # to make 10,000 layers takes minutes
        sizes = f"{len(weights)} tensors for {config.model.n_layer} layers"
        hint = f"does not fit the model section: it has {sizes}"
        raise UserError("checkpoint", checkpoint.path, hint)
    with torch.device("meta"), without_init():  # a stranger's configuration may claim any size
        if task:
            model = task.make_model(tokenizer.vocab_size, tokenizer.eot)
        else:
            model = GPT(config.model, tokenizer.vocab_size, tokenizer.eot)
    check_weights(weights, model, checkpoint.path)
    with still_there(checkpoint):
        model.load_state_dict({**weights}, assign=True)
    return model.eval(), tokenizer


def own_task(checkpoint: Checkpoint, trust_code: bool) -> "Pretraining | None":
    """The task of a class of one's own, without its data; None for runs of this package's."""
    if code := trusted(checkpoint, trust_code):
        return code.load(Pretraining)(read_settings(checkpoint))
    return None


def read_settings(checkpoint: Checkpoint) -> TrainingConfig:
    """The validated configuration of a GPT's checkpoint. Raises: UserError for a value that no
    training accepts."""
    config = read_config(checkpoint.kind, checkpoint.config, checkpoint.path / CONFIG)
    assert isinstance(config, TrainingConfig), "a GPT's"
    return config


def load_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Copies a checkpoint's weights into the plain module. Raises: UserError if names or shapes
    differ, or the checkpoint was removed since it was verified."""
    with still_there(checkpoint):
        fit_weights(checkpoint.tensors(MODEL), model, checkpoint.path)


@contextmanager
def still_there(checkpoint: Checkpoint) -> Iterator[None]:
    """Raises: UserError if a file of a verified checkpoint was removed since, or if no training
    wrote its content."""
    try:
        yield
    except FileNotFoundError as error:
        reason = "was deleted, since a running training deletes old checkpoints"
        hint = f"{reason}; run the same command again"
        raise UserError("checkpoint", checkpoint.path, hint) from error
    except (SafetensorError, KeyError) as error:
        reason = " ".join(str(error).split())[:150]
        hint = f"is not of a training ({reason}); name another checkpoint"
        raise UserError("checkpoint", checkpoint.path, hint) from error


def generate_text(config: GenerateConfig) -> int:
    """generate.py: prints the samples of `config`; returns the exit code. Raises: UserError, as for
    a checkpoint that is no GPT's."""
    device = pick_device(config.device)
    checkpoint = find_checkpoint(Path(config.checkpoint), kind="gpt2")
    model, tokenizer = load_model(checkpoint, config.trust_run_code)
    if not isinstance(model, GPT):
        hint = "makes a model that is no GPT; only a GPT writes text"
        raise UserError("task", checkpoint.config.get("task"), hint)
    model.to(device)
    _print_samples(config, model, tokenizer)
    return 0


def _print_samples(config: GenerateConfig, model: GPT, tokenizer: Tokenizer) -> None:
    """Prints the samples; a single sample while it is generated. After a stop, prints the
    incomplete samples."""
    rows = [
        tokenizer.encode(prompt).tolist()
        for prompt in config.prompts
        for _ in range(config.num_samples)
    ]
    waiting = [[*row] for row in rows]  # tokens that are not printed yet
    sampling = Sampling(
        config.max_new_tokens, config.temperature, config.top_k, config.top_p, config.seed
    )
    try:
        for row, token in generate(model, rows, tokenizer.eot, sampling):
            waiting[row].append(token)
            if len(rows) > 1:
                continue
            text = tokenizer.decode(waiting[0])
            if not text.endswith(
                "\N{REPLACEMENT CHARACTER}"
            ):  # half a character waits for the rest
                print(text, end="", flush=True)
                waiting[0].clear()
    finally:
        print(f"\n{'-' * 80}\n".join(map(tokenizer.decode, waiting)))
