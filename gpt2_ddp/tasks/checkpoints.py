"""What is done with a checkpoint once it is there: evaluate.py scores it, generate.py writes with it."""

import sys
import time
from pathlib import Path

from accelerate import Accelerator

from gpt2_ddp.config.jobs import JobConfig
from gpt2_ddp.config.kinds import read_config
from gpt2_ddp.config.tools import EvaluateConfig, GenerateConfig
from gpt2_ddp.data.shards import TokenStream, read_manifest
from gpt2_ddp.data.tokenizer import check_tokenizer
from gpt2_ddp.errors import UserError
from gpt2_ddp.model.evaluate import evaluate
from gpt2_ddp.model.generate import generate
from gpt2_ddp.processes.launch import build_accelerator, pick_device
from gpt2_ddp.processes.ranks import check_ranks_agree, on_every_rank
from gpt2_ddp.run.checkpoint import CONFIG, Checkpoint, find_checkpoint
from gpt2_ddp.tasks.jobs import make_job
from gpt2_ddp.tasks.pretraining import find_gpt, load_model, load_weights
from gpt2_ddp.tasks.supervised import score_job


def evaluate_checkpoint(config: EvaluateConfig) -> int:
    """evaluate.py: prints the scores of a checkpoint, whatever it is a training of; returns the exit code.

    Raises:
        UserError: on every rank, for whatever the user has to mend.
    """
    accelerator = build_accelerator(config.device, config.mixed_precision)
    checkpoint = on_every_rank(accelerator, lambda: find_checkpoint(Path(config.checkpoint)))
    check_ranks_agree("checkpoint", config.checkpoint, str(checkpoint.path))
    score = _score_gpt if checkpoint.kind == "gpt2" else _score_small_job
    accelerator.print(f"{checkpoint.path}: {score(accelerator, config, checkpoint)}")
    accelerator.end_training()
    return 0


def _score_gpt(accelerator: Accelerator, config: EvaluateConfig, checkpoint: Checkpoint) -> str:
    def load():
        model, tokenizer = load_model(checkpoint)
        folder = Path(config.data or checkpoint.config["data"]["path"])
        manifest = read_manifest(folder)
        if manifest.tokenizer_sha256 != tokenizer.sha256:
            cure = (
                f"its tokens are of another tokenizer ({manifest.tokenizer}) than the checkpoint's ({tokenizer.name})"
            )
            raise UserError("data", folder, f"{cure}; prepare the text with the checkpoint's tokenizer")
        check_tokenizer(tokenizer, manifest, folder)
        if config.split not in manifest.splits:
            raise UserError("split", config.split, f"is not in {folder}; it has {', '.join(sorted(manifest.splits))}")
        return model, tokenizer, TokenStream(folder, manifest, config.split)

    model, tokenizer, stream = on_every_rank(accelerator, load)
    size, lengths = model.config.block_size, tokenizer.token_bytes()
    prepared = accelerator.prepare_model(model, evaluation_mode=True)
    result = evaluate(accelerator, prepared, stream, size, config.batch_size, config.tokens, lengths)
    return (
        f"{config.split} loss {result.loss:.6f}, perplexity {result.perplexity:.4f}, "
        f"{result.bits_per_byte:.6f} bits per byte over {result.tokens:,} tokens ({result.bytes:,} bytes)"
    )


def _score_small_job(accelerator: Accelerator, config: EvaluateConfig, checkpoint: Checkpoint) -> str:
    """A small job is scored on its own test samples; `data` may name another folder of images."""
    saved = dict(checkpoint.config)
    given = {"tokens": config.tokens, "split": config.split if config.split != "val" else None, "data": config.data}
    if saved.get("data", {}).get("path"):
        given.pop("data")
    for field, value in given.items():
        if value is not None:
            cure = f"is for others; this {checkpoint.kind} run is scored on all of its own test samples: leave it away"
            raise UserError(field, value, cure)
    if config.data:
        saved["data"] = {**saved.get("data", {}), "path": config.data}
    settings = read_config(checkpoint.kind, saved, checkpoint.path / CONFIG)
    assert isinstance(settings, JobConfig), "the other kinds"
    job = make_job(settings, accelerator)
    on_every_rank(accelerator, lambda: load_weights(checkpoint, job.model))
    prepared = accelerator.prepare_model(job.model, evaluation_mode=True)
    scores = score_job(accelerator, job, prepared, config.batch_size)
    count = scores.pop("val_samples")
    return ", ".join(f"{name[4:]} {value:.6f}" for name, value in scores.items()) + f" over {count:,} test samples"


def generate_text(config: GenerateConfig) -> int:
    """generate.py: prints the samples that `config` asks for, and the speed on stderr; returns the exit code.

    Raises:
        UserError: for whatever the user has to mend, such as a checkpoint that is no GPT's.
    """
    device = pick_device(config.device)
    model, tokenizer = load_model(find_gpt(Path(config.checkpoint), "checkpoint"))
    model.to(device)
    prompts = [tokenizer.encode(prompt).tolist() for prompt in config.prompts for _ in range(config.num_samples)]
    begun = time.perf_counter()
    samples = generate(
        model,
        prompts,
        config.max_new_tokens,
        tokenizer.eot,
        config.temperature,
        config.top_k,
        config.top_p,
        config.seed,
    )
    seconds = time.perf_counter() - begun
    for index, (prompt, new) in enumerate(zip(prompts, samples, strict=True)):
        if index:
            print("-" * 80)
        print(tokenizer.decode(prompt + new))
    count = sum(map(len, samples))
    print(f"{count} tokens in {seconds:.1f} s, {count / seconds:.0f} tokens/s on {device}", file=sys.stderr)
    return 0
