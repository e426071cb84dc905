"""The plan of a training: what it refuses is what training
refuses, word for word, and it leaves nothing behind."""

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from close import assert_close, distance
from commands import NO_REPORT, SCRIPTS, expect_error, held, run_script
from golden_runs import CORPUS, GOLDEN
from pages import ROOT
from ranks import run_ranks
from runs import spoil, training_config

from gpt2_ddp.config.cli import dump, load
from gpt2_ddp.config.plan import PlanConfig
from gpt2_ddp.config.saved import complete
from gpt2_ddp.config.training import ModelConfig, TrainingConfig
from gpt2_ddp.model.architecture import ARCHITECTURES
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.plan.plan import CPU_MARGIN, Seen, build_plan, find_target, format_plan, make_plan
from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.training import memory as memory_module
from gpt2_ddp.training.gpus import GPUS
from gpt2_ddp.training.memory import Setting, estimate, moments_of


def everything(folder):
    """Every file and folder, hidden ones too, with its content."""
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def with_a_run(place):
    shutil.copytree(GOLDEN / "gpt2_run", place / "runs/run")
    config = complete(TrainingConfig, yaml.safe_load((place / "runs/run/config.yaml").read_text()))
    config |= {"output_dir": str(place / "runs"), "run_name": "run"}
    config["data"]["path"] = str(CORPUS)
    config["train"]["steps"] = 20
    (place / "config.yaml").write_text(yaml.safe_dump(config))


def no_intact_checkpoint(place):
    with_a_run(place)
    for file in place.glob("runs/run/checkpoints/*/model.safetensors"):
        file.write_bytes(b"")


REFUSALS = [
    (lambda place: None, "--model.n_head 3", "model.n_embd = 32"),
    (lambda place: None, "--output_dir /dev/null", "Not a directory"),
    (lambda place: None, f"--train.init_from {GOLDEN}/gpt2_run", "model.n_layer = 2"),
    (
        lambda place: shutil.rmtree(place / "data"),
        "--data.prepare configs/data_stdlib.yaml",
        "manifest.json cannot",
    ),
    (lambda place: spoil(place / "data/train_000001.bin"), "", "SHA-256 differs"),
    (with_a_run, "--seed 5 --optim.lr 0.01", "seed = 5"),
    (no_intact_checkpoint, "", "none is intact"),
]
"""What was done to a folder, flags, and a part of the first error."""


def both(corpus, folder):
    """Of each case, what plan and train refuse, and whether plan has left everything as it was."""
    found = []
    for number, (damage, arguments, _) in enumerate(REFUSALS):
        place = folder / str(number)
        shutil.copytree(corpus, place / "data")
        (place / "config.yaml").write_text(dump(training_config(place / "data", place / "runs")))
        damage(place)
        before = everything(place)
        words = ["--config", str(place / "config.yaml"), *arguments.split()]
        plan = run_script("plan", words)
        untouched = everything(place) == before
        found.append((plan, run_script("train_gpt2", words), untouched))
    return found


def test_plan_refuses_what_train_refuses_word_for_word(corpus, tmp_path):
    (answers,) = run_ranks(both, 1, corpus, tmp_path)
    for (plan, train, untouched), (*_, words) in zip(answers, REFUSALS, strict=True):
        errors = [
            [line for line in text.splitlines() if line.startswith("error:")]
            for _, text in (plan, train)
        ]
        assert (plan[0], train[0], untouched, errors[0]) == (2, 2, True, errors[1])
        assert words in errors[0][0]


def test_a_folder_that_another_trainer_holds(place):
    (place / "runs/run").mkdir(parents=True)
    words = ["--config", str(place / "config.yaml")]
    with held(place / "runs/run/.lock"):
        found = [run_ranks(run_script, 1, script, words)[0] for script in ("plan", "train_gpt2")]
    assert [(code, "another trainer is running" in errors) for code, errors in found] == [
        (2, True)
    ] * 2


def peak_of_a_run(arguments, script):
    """A fresh process's most memory (`ru_maxrss` would
    begin with its parent's), and what it printed."""
    command = [sys.executable, str(SCRIPTS / f"{script}.py"), *arguments]
    env = os.environ | {"PYTHONPATH": NO_REPORT}
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    most = 0
    while process.poll() is None:
        found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
        most = int(found[1]) * 1024 if found else most
        time.sleep(0.02)
    assert process.returncode == 0
    return most, process.stdout.read()


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--model.n_embd 192 --model.block_size 128",  # logits
        # activations
        "--model.n_layer 6 --model.n_embd 256 --model.block_size 256 --model.architecture nanochat",
    ],
)
def test_memory_is_what_a_run_takes(corpus, tmp_path, flags):
    edited = {
        "train.micro_batch_size": 16,
        "train.global_batch_tokens": 4096,
        "train.steps": 1,
        "eval.tokens": 256,
    }
    (tmp_path / "config.yaml").write_text(dump(training_config(corpus, tmp_path / "runs", edited)))
    arguments = ["--config", str(tmp_path / "config.yaml"), *flags.split()]
    _, said = peak_of_a_run(arguments, "plan")
    planned = 1e9 * float(said.partition("\n  memory ")[2].split()[0])
    # on a busy machine, one in ten holds memory for longer
    measured = (
        peak_of_a_run([*arguments, "--run_name", name], "train_gpt2")[0] for name in ("one", "two")
    )
    assert any(distance(planned, size) <= CPU_MARGIN for size in measured)


WEIGHTS = 124_475_904
BLOCK = 7_087_872
IDS = 50_304
"""Of GPT-2 (124M)."""


def memory_config(model=None, **train):
    train = {"steps": 1, "activation_checkpointing": False, **train}
    return TrainingConfig.model_validate({"train": train, "model": model or {}})


GPT2 = Setting(memory_config(), "cuda", 8, "bf16", WEIGHTS, BLOCK, 2 * WEIGHTS, IDS, 0.0, 16, True)
setting = partial(replace, GPT2)


def test_a_loss_in_one_pass_has_its_gradient_beside_the_logits(monkeypatch):
    monkeypatch.setattr(memory_module, "FUSED_ON", ("cuda",))
    logits = 2 * 16 * 1024 * IDS
    assert estimate(setting()).parts["logits"] == 2 * logits
    assert estimate(setting(precision="fp16")).parts["logits"] == logits


@pytest.mark.parametrize(("how", "chunk", "each"), [("auto", 16_384, 4), ("off", 2_048, 24)])
def test_a_head_in_fp8_has_chunks_of_logits(how, chunk, each):
    """Logits and their gradients, and the head in fp8 by rows and columns, with its gradient."""
    config = memory_config(compile=how, fp8_head=True, micro_batch_size=64)
    parts = estimate(setting(config=config, micro_batch=64, validates=False)).parts
    assert parts["logits"] == each * chunk * IDS + 6 * IDS * 768
    small = estimate(setting(config=config, micro_batch=1, validates=False)).parts
    assert small["logits"] == each * min(chunk, 1024) * IDS + 6 * IDS * 768


def test_memory_by_part():
    memory = estimate(setting())
    n = 16 * 1024
    assert memory.moment == "training"
    states = sum(memory.parts[name] for name in ("weights", "gradients", "optimizer state"))
    assert_close(states, 16 * WEIGHTS)
    assert memory.parts["logits"] == 2 * n * IDS
    per_layer = 36 * n * 768  # bytes, half of them in bf16: docs/plan.md has the sum
    assert_close(memory.parts["activations"], 12 * per_layer + 12 * n * 768 + 24 * n * 768)
    chunked = estimate(setting(config=memory_config(compile="off"))).parts["logits"]
    assert chunked == 12 * 8192 * IDS
    recomputed = estimate(setting(config=memory_config(activation_checkpointing=True))).parts[
        "activations"
    ]
    assert recomputed < memory.parts["activations"] / 4
    fewer = estimate(setting(state=2 * WEIGHTS - 1000))  # as Muon's
    assert memory.peak - fewer.peak == memory.host - fewer.host == 4000


@pytest.mark.parametrize(
    ("kind", "key_heads"), [*((kind, None) for kind in ARCHITECTURES), ("llama", 2)]
)
def test_what_training_saves_is_what_autograd_saves(kind, key_heads):
    def saved(layers):
        config = ModelConfig(
            architecture=kind,
            n_layer=layers,
            n_head=4,
            n_kv_head=key_heads,
            n_embd=192,
            block_size=32,
        )
        model = GPT(config, 128)
        storages = {}
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                storages[storage.data_ptr()] = storage
            return tensor

        tokens = torch.zeros(4, 32, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(tokens, tokens)
        kept = sum(storage.nbytes() for storage in storages.values())
        known = setting(
            kind="cpu", config=memory_config(config.model_dump()), precision="no", micro_batch=4
        )
        return kept, moments_of(known)["training"]["activations"]

    (one, known_one) = saved(1)
    (three, known_three) = saved(3)
    rel = 0.06 if ARCHITECTURES[kind].rotary else 0.03  # copies that SDPA may avoid
    if ARCHITECTURES[kind].values:
        rel = 0.1  # the sum with the embeddings keeps less than the estimate of the values
    assert distance(three - one, known_three - known_one) < rel


SHARDED = [
    ({}, {}, "weights", (4, Fraction(1, 8), 0, 0)),
    ({}, {}, "gradients", (4, 1, 0, 0)),  # whole, until the last micro-batch
    ({}, {"micro_batch": 64}, "gradients", (4, Fraction(1, 8), 1, 1)),
    ({}, {}, "gathered weights", (2, 0, 1, 2)),  # in bf16, the next block too
    ({}, {"precision": "no"}, "gathered weights", (4, 0, 1, 2)),
    ({"replicas": 2}, {}, "weights", (4, Fraction(1, 4), 0, 0)),
    ({}, {"state": 124475904}, "optimizer state", (4, Fraction(1, 8), 0, 0)),  # as Muon's
]
"""The launch section, changes, a part, and its size: bytes of a number, and how often all weights,
those outside of blocks, and a block's."""


@pytest.mark.parametrize(("launch", "changes", "part", "size"), SHARDED)
@pytest.mark.parametrize("background", [True, False])
def test_memory_of_shards(launch, changes, part, size, background):
    """GPT-2 (124M) on 8 GPUs; 64 micro-batches of 1 per process and step."""
    each, *shares = size
    sections = {"train": {"steps": 1}, "launch": {"parallel": "fsdp", **launch}}
    config = TrainingConfig.model_validate(sections)
    usual = {"config": config, "micro_batch": 1, "background": background, "validates": False}
    shards = setting(**usual | changes)
    numbers = np.dot(shares, [WEIGHTS, WEIGHTS - 12 * BLOCK, BLOCK])
    assert_close(estimate(shards).parts[part], float(each * numbers))
    # all parts, on one machine
    assert estimate(shards).host == 4 * (WEIGHTS + shards.state) * background
    on_cpus = setting(config=config, kind="cpu", background=background)
    assert estimate(on_cpus).host == 0
    parts = moments_of(on_cpus)["evaluation"]
    lasting = sum(
        parts.get(name, 0.0) for name in ("weights", "optimizer state", "checkpoint's copy")
    )
    assert_close(lasting, (1 + background) * 12 * WEIGHTS / (8 // config.launch.replicas))


def test_an_average_is_one_more_value_for_each_weight():
    """In memory, in a checkpoint and in its copy."""
    for launch, processes in (({}, 1), ({"parallel": "fsdp"}, 8)):
        sections = {"train": {"steps": 1}, "launch": launch}
        plain, averaged = (
            setting(config=TrainingConfig.model_validate(sections | {"optim": optim}), kind="cpu")
            for optim in ({}, {"average": 0.05})
        )
        before, after = (
            estimate(replace(one, processes=processes, background=True))
            for one in (plain, averaged)
        )
        assert averaged.checkpoint_bytes - plain.checkpoint_bytes == 4 * WEIGHTS
        assert after.parts["average of weights"] == 4 * WEIGHTS / processes
        assert after.peak - before.peak == 8 * WEIGHTS / processes


def plan_config(**changes):
    return PlanConfig.model_validate({"train": {"steps": 100}, **changes})


def plan_of(precision="bf16", seen=None, **changes):
    config = plan_config(**{"gpu": "H100 80GB HBM3"} | changes)
    return build_plan(config, find_target(config, 1), precision, seen or Seen())


AMBIGUOUS = {
    "h100": "may be H100 80GB HBM3, H100 PCIe, H100 NVL; name one",
    "A100": "may be A100-SXM4-40GB, A100-SXM4-80GB, A100-PCIE-40GB, A100 80GB PCIe; name one",
    "PCIe": "may be A100-PCIE-40GB, ",
    "RTX 4090 D": "is no known name of nvidia-smi .similar: GeForce RTX 4090.; ",
    "V100": "is no known name of nvidia-smi; for another GPU, set --gpu_memory",
}
NEAR = {
    "a100 80gb": "NVIDIA A100-SXM4-80GB",
    "rtx4090": "NVIDIA GeForce RTX 4090",
    "H100-PCIe": "NVIDIA H100 PCIe",
}


def test_machines():
    machine = find_target(plan_config(gpu="H100 80GB HBM3", gpus=16), 1)
    assert (machine.processes, machine.memory, machine.peak) == (16, 80e9, 989.5e12)
    for name, gpu in GPUS.items():
        for said in (name.lower(), name.removeprefix("NVIDIA ").removeprefix("GeForce ")):
            found = find_target(plan_config(gpu=said), 1)
            assert (found.device, found.memory) == (name, gpu.memory * 1e9)
    for said, hint in AMBIGUOUS.items():
        expect_error(f"gpu = {said}: {hint}", find_target, plan_config(gpu=said), 1)
    for said, name in NEAR.items():
        assert find_target(plan_config(gpu=said), 1).device == name
    assert find_target(plan_config(gpu="NVIDIA H200", gpu_memory=70), 2).memory == 70e9
    unknown = plan_of(gpu="H100 SXM", gpu_memory=80)
    assert (unknown.machine.device, unknown.machine.memory, unknown.speed) == (
        "H100 SXM",
        80e9,
        None,
    )
    assert not unknown.seconds
    assert [*format_plan(unknown)]


def test_what_is_done_and_how_long_it_takes():
    plan = plan_of(tokens_per_second=524_288)  # evaluations every 250 steps, checkpoints every 1000
    for steps, done, counts in (
        (1050, 0, (1050, 6, 2)),
        (1050, 1000, (50, 1, 1)),
        (1000, 1000, (0, 0, 0)),
    ):
        # evaluation and save take a second each
        corpus = plan.corpus._replace(steps=steps, scored=3 * 524_288)
        _, *spent = replace(plan, corpus=corpus, step=done, checkpoint=500_000_000).seconds.values()
        assert tuple(spent) == counts
    hour = plan_of(tokens_per_second=524_288, train={"minutes": 60})
    # three minutes until the first step, two evaluations and a save
    for minutes, steps in (60, 3400), (0.1, 0):
        train = hour.config.train.model_copy(update={"minutes": minutes})
        config = hour.config.model_copy(update={"train": train})
        corpus = hour.corpus._replace(scored=3 * 524_288)
        timed = replace(hour, config=config, corpus=corpus, checkpoint=500_000_000)
        assert timed.steps == steps
        assert not steps or 3590 < sum(timed.seconds.values()) <= 3600
        assert f"{minutes:g} minutes" in "".join(format_plan(timed))


@pytest.mark.parametrize(
    ("seconds", "background", "every", "lost"),
    [
        (None, False, 1000, 1000 + 4 + 2),  # four evaluations, and a save at either end
        (60, False, 58, 60),  # a save before 59 s have passed
        (30, False, 39, 41),  # it is 2.5 % of 40 s
        (30, True, 28, 30),  # a copy takes 0.1 s
        (3600, True, 1000, 1006),
    ],
)
def test_what_a_kill_costs(seconds, background, every, lost):
    """A step, an evaluation and a save take a second each."""
    plan = plan_of(tokens_per_second=524_288)
    keep = plan.config.checkpoint.model_copy(update={"seconds": seconds})
    timed = replace(
        plan,
        config=plan.config.model_copy(update={"checkpoint": keep}),
        corpus=plan.corpus._replace(steps=1050, scored=3 * 524_288),
        checkpoint=500_000_000,
        setting=replace(plan.setting, background=background),
    )
    assert timed.save_every == every
    assert_close(timed.lost_seconds, lost)
    assert f"a checkpoint every {every:,} steps" in "\n".join(format_plan(timed))


def test_a_rate_is_of_its_precision_and_an_evaluation_ends_with_its_split():
    assert plan_of("no").speed is None  # the peak is bf16's
    of_data = {"manifest": SimpleNamespace(vocab_size=50_257), "epoch_size": 9}
    of_data |= {"total_steps": lambda windows: 100, "config": plan_config(eval={"tokens": 10**9})}
    of_data["start_fields"] = {}
    of_data["make_model"] = Pretraining(of_data["config"]).make_model
    corpus = SimpleNamespace(validation={"web": (1.0, range(301))})
    for task, scored in ((None, 10**9), (SimpleNamespace(corpus=corpus, **of_data), 300)):
        plan = plan_of(seen=Seen(task=task), eval={"tokens": 10**9})
        assert plan.speed == 0.4 * 989.5e12 / plan.flops_per_token
        assert_close(plan.seconds["evaluations"], 2 * scored / (3 * plan.speed))


def fits_of(plan):
    """What the plan says of memory and of the disk."""
    lines = [*format_plan(plan)]
    (disk,) = (line for line in lines if line.startswith("  disk"))
    return next(
        line for line in lines if line.strip().startswith(("fits", "DOES"))
    ).strip(), disk.rpartition("free: ")[2]


def test_what_does_not_fit_names_what_does():
    """The number fits, and the next larger one does not."""
    usual = {"micro_batch_size": 512, "steps": 100}
    # the best, a new one, and two
    plan = replace(plan_of(train=usual, gpu="RTX 4090"), free=4 * plan_of().checkpoint)
    memory, disk = fits_of(plan)
    assert disk == "DOES NOT FIT: --checkpoint.keep_last 2 fits"
    assert memory == f"DOES NOT FIT: --train.micro_batch_size {plan.largest} fits"
    for size, fits in ((plan.largest, True), (2 * plan.largest, False)):
        assert plan_of(train=usual | {"micro_batch_size": size}, gpu="RTX 4090").fits is fits
    memory, disk = fits_of(replace(plan_of(gpu_memory=1.5, gpus=8), free=0))
    assert "of 1 takes" in memory
    assert "--launch.parallel fsdp" in memory
    assert disk == f"DOES NOT FIT: at least {3 * plan.checkpoint / 1e9:.2f} GB are needed"
    assert fits_of(replace(plan_of(), free=10**12)) == ("fits", "fits")


def test_auto_plans_the_largest_micro_batch_that_fits():
    """The number that the plan names, where one is given that does not fit. On a machine without
    enough memory it is 1."""
    usual = {"steps": 100}
    named = plan_of(train=usual | {"micro_batch_size": 512}, gpu="RTX 4090").largest
    plan = plan_of(train=usual | {"micro_batch_size": "auto"}, gpu="RTX 4090")
    assert (plan.setting.micro_batch, plan.fits) == (named, True)
    assert 0.5 < plan.memory.peak / plan.machine.memory < 0.9
    small = plan_of(train=usual | {"micro_batch_size": "auto"}, gpu_memory=1)
    assert (small.setting.micro_batch, small.fits) == (1, False)
    resumed = SimpleNamespace(
        recorded_micro_batch=8,
        start_fields={},
        corpus=SimpleNamespace(validation={"a": (1.0, range(1000))}),
        manifest=SimpleNamespace(vocab_size=50_257),
        epoch_size=10**6,
        total_steps=lambda windows: 100,
        make_model=lambda vocab_size: GPT(ModelConfig(), vocab_size),
    )
    plan = plan_of(train=usual | {"micro_batch_size": "auto"}, seen=Seen(task=resumed))
    assert plan.setting.micro_batch == 8


def test_no_rate_is_assumed_for_a_narrow_model():
    narrow = plan_of(model={"n_embd": 96, "n_head": 4})
    assert (narrow.speed, narrow.seconds) == (None, {})
    assert "768 on" in "".join(format_plan(narrow))
    assert plan_of(model={"n_embd": 96, "n_head": 4}, tokens_per_second=5).speed == 5


def test_a_plan_for_this_cpu_says_so_where_a_gpu_may_be_meant():
    """The tests have no GPU, or hide it."""
    for changes, note in (
        ({"gpu_memory": 80}, "--gpu_memory without --gpu"),
        ({"gpus": 8}, "--gpus without --gpu"),
        ({}, ""),
    ):
        plan = plan_of("no", gpu=None, **changes, train={"steps": 1, "device": "cpu"})
        notes = [line for line in format_plan(plan) if line.startswith("  note")]
        assert len(notes) == bool(note)
        assert all(note in line for line in notes)


@pytest.mark.parametrize(("gpus", "split"), [(6, (11, 8)), (8, (16, 4)), (600, (1, 1))])
def test_the_batch_of_a_process(gpus, split):
    plan = plan_of(gpus=gpus, train={"micro_batch_size": 16, "steps": 100})
    assert (plan.setting.micro_batch, plan.accumulation) == split


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """Plans a preset for eight GPUs, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def plan(preset, gpu, *flags):
        words = ["--config", f"configs/{preset}.yaml", "--gpu", gpu, "--gpus", "8", *flags]
        return make_plan(load(PlanConfig, words))

    return plan


def test_the_figures_of_the_pages(planned):
    """The table of docs/plan.md, and the output in
    docs/gpt2-124m.md but for the disk, which is this machine's."""
    table, output = ((ROOT / f"docs/{name}.md").read_text() for name in ("plan", "gpt2-124m"))
    rows = re.findall(r"^\| `(gpt2_\d+m)\.yaml` \|.*$", table, re.MULTILINE)
    assert len(rows) == 4
    for name in rows:
        plan = planned(name, "H100 80GB HBM3", "--price", "2.5")
        gigabytes = plan.memory.peak / 1e9
        hours = plan.device_hours
        figures = f"{plan.accumulation} x {plan.setting.micro_batch} | {gigabytes:.1f}"
        figures += f" | {hours / 8:.1f} | {2.5 * hours:.0f} | {plan.checkpoints / 1e9:.0f}"
        assert f"| `{name}.yaml` | {figures} |\n" in table
        if name == "gpt2_124m":
            block = output.split("```\ngpt2_124m on ")[1].split("```")[0]
            assert {*f"gpt2_124m on {block}".strip().split("\n")} <= {*format_plan(plan)}


@pytest.mark.parametrize(
    ("preset", "gpu"), [("llama_1b", "RTX 4090"), ("llama_7b", "H100 80GB HBM3")]
)
def test_sharded_presets_fit_where_ddp_does_not(planned, preset, gpu):
    plan = planned(preset, gpu)
    ddp = planned(preset, gpu, "--launch.parallel", "ddp")
    assert (plan.fits, plan.refused, ddp.fits) == (True, [], False)
    assert not planned(
        preset, gpu, "--launch.parallel", "ddp", "--train.micro_batch_size", "1"
    ).fits
    figures = f"| {ddp.memory.peak / 1e9:.1f} GB | {plan.memory.peak / 1e9:.1f} GB |"
    assert figures in (ROOT / "docs/sharded.md").read_text()
    assert planned(preset, gpu, "--launch.replicas", "2").refused == []
    (error,) = planned(preset, gpu, "--launch.replicas", "3").refused
    assert error.startswith("launch.replicas = 3: ")


def test_a_head_in_fp8_is_refused_where_a_gpu_lacks_it(planned):
    for gpu, refused in (("A100-SXM4-80GB", True), ("H100 80GB HBM3", False)):
        plan = planned("gpt2_124m", gpu, "--train.fp8_head")
        words = "train.fp8_head = true: needs a GPU with fp8, not NVIDIA A100-SXM4-80GB; remove it"
        assert plan.refused == ([words] if refused else [])
        less = planned("gpt2_124m", gpu).memory.parts["logits"]
        assert plan.memory.parts["logits"] < less
    # this machine's CPU is refused as a training is
    here = make_plan(load(PlanConfig, ["--config", "configs/gpt2_124m.yaml", "--train.fp8_head"]))
    needed = "train.fp8_head = true: needs a GPU of compute capability 8.9 or more, not cpu"
    assert here.refused[0].startswith(needed)


def test_a_plan_follows_accelerate_config(planned, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert "gathered weights" in planned("gpt2_124m", "H100 80GB HBM3").memory.parts


def test_the_flags_of_the_plan():
    config = plan_config(gpu="NVIDIA A10", price=2.5)
    assert dump(config) == dump(config.training)  # what --print_config prints is the training's
