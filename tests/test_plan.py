"""The plan of a training: what it refuses is what training refuses, word for word, and it leaves nothing behind."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from close import assert_close, distance
from commands import SCRIPTS, expect_error, held, run_script
from golden_runs import CORPUS, GOLDEN
from pages import ROOT
from ranks import run_ranks
from runs import edit_manifest, training_config

from gpt2_ddp.config.cli import dump, load
from gpt2_ddp.config.plan import PlanConfig
from gpt2_ddp.config.training import ModelConfig, TrainingConfig
from gpt2_ddp.model import compiled as compiling
from gpt2_ddp.model.memory import Setting, estimate, moments_of
from gpt2_ddp.plan import plan as planning
from gpt2_ddp.plan.plan import CPU_MARGIN, Plan, Rate, count, find_gpu, find_target, format_plan, make_plan, seconds
from gpt2_ddp.plan.preflight import Seen
from gpt2_ddp.training.peaks import GPUS


def everything(folder: Path) -> dict[Path, bytes]:
    """Every file and folder, hidden ones too, with its content."""
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def with_a_run(place: Path) -> None:
    shutil.copytree(GOLDEN / "gpt2_run", place / "runs/run")
    shutil.rmtree(place / "data")
    shutil.copytree(CORPUS, place / "data")
    config = yaml.safe_load((place / "runs/run/config.yaml").read_text())
    config |= {"output_dir": str(place / "runs"), "run_name": "run"}
    config["data"]["path"] = str(place / "data")
    config["train"]["steps"] = 20
    (place / "config.yaml").write_text(yaml.safe_dump(config))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[5000] ^= 1
    file.write_bytes(content)


def no_validation(place: Path) -> None:
    manifest = json.loads((place / "data/manifest.json").read_text())
    edit_manifest(place / "data", splits={"train": manifest["splits"]["train"]})


def no_intact_checkpoint(place: Path) -> None:
    with_a_run(place)
    for file in place.glob("runs/run/checkpoints/*/model.safetensors"):
        file.write_bytes(b"")


REFUSALS: dict[str, tuple[Callable[[Path], Any], list[str], str]] = {
    "a mistake in the configuration": (lambda place: None, ["--model.n_head", "3"], "model.n_embd = 32"),
    "no data": (lambda place: shutil.rmtree(place / "data"), [], "no such folder"),
    "a recipe for another folder": (lambda place: shutil.rmtree(place / "data"),
     ["--data.prepare", "configs/data_stdlib.yaml"], "writes to data/stdlib"),
    "a shard with a flipped bit": (lambda place: flip(place / "data/train_000001.bin"), [], "SHA-256 differs"),
    "patience without a validation split": (no_validation, ["--eval.patience", "2"], "eval.patience = 2"),
    "a window longer than the data": (lambda place: None,
     ["--model.block_size", "99999", "--train.global_batch_tokens", "99999"], "a window needs 100000 tokens"),
    "a file for an output folder": (lambda place: None, ["--output_dir", "/dev/null"], "Not a directory"),
    "init_from another model": (lambda place: None, ["--train.init_from", str(GOLDEN / "gpt2_run")],
     "model.n_layer = 2"),
    "resuming with other fields": (with_a_run, ["--seed", "5", "--optim.lr", "0.01"], "seed = 5"),
    "fresh in a folder in use": (with_a_run, ["--fresh"], "nothing is overwritten"),
    "no intact checkpoint": (no_intact_checkpoint, [], "none is intact"),
}  # fmt: skip


def refusals(place: Path, script: str, arguments: list[str]) -> tuple[int, list[str]]:
    """Exit code and the `error:` lines."""
    code, errors = run_script(script, ["--config", str(place / "config.yaml"), *arguments])
    assert "Traceback" not in errors
    return code, [line for line in errors.splitlines() if line.startswith("error:")]


def both(corpus: Path, folder: Path) -> dict[str, tuple[Any, Any, bool]]:
    """Of each case, what plan and train refuse, and whether plan has left everything as it was."""
    found = {}
    for number, (case, (damage, arguments, _)) in enumerate(REFUSALS.items()):
        place = folder / str(number)
        shutil.copytree(corpus, place / "data")
        (place / "config.yaml").write_text(dump(training_config(place / "data", place / "runs")))
        damage(place)
        before = everything(place)
        plan = refusals(place, "plan", arguments)
        untouched = everything(place) == before
        found[case] = (plan, refusals(place, "train_gpt2", arguments), untouched)
    return found


def test_plan_refuses_what_train_refuses_word_for_word(corpus, tmp_path):
    (answers,) = run_ranks(both, 1, corpus, tmp_path)
    for case, (plan, train, untouched) in answers.items():
        assert (plan, plan[0], untouched) == (train, 2, True), case
        assert REFUSALS[case][2] in plan[1][0], case


@pytest.mark.slow
def test_a_folder_that_another_trainer_holds(corpus, tmp_path):
    (tmp_path / "config.yaml").write_text(dump(training_config(corpus, tmp_path / "runs")))
    (tmp_path / "runs/run").mkdir(parents=True)
    with held(tmp_path / "runs/run/.lock"):
        before = everything(tmp_path)
        plan = run_ranks(refusals, 1, tmp_path, "plan", [])[0]
        assert everything(tmp_path) == before
        assert plan == run_ranks(refusals, 1, tmp_path, "train_gpt2", [])[0]
        assert "another trainer is running" in plan[1][0]
    few = ["--train.global_batch_tokens", "64"]  # two windows
    three = run_ranks(refusals, 1, tmp_path, "plan", ["--gpus", "3", *few])[0]
    assert three == run_ranks(refusals, 3, tmp_path, "train_gpt2", few)[0]


def peak_of_a_run(arguments: list[str], script: str) -> tuple[int, float, str]:
    """Exit code, a fresh process's most memory (`ru_maxrss` would begin with its parent's), and what it printed."""
    command = [sys.executable, str(SCRIPTS / f"{script}.py"), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    most = 0
    while process.poll() is None:
        found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
        most = int(found[1]) * 1024 if found else most
        time.sleep(0.02)
    assert process.stdout
    return process.returncode, most, process.stdout.read()


MEMORY = {"logits": "--model.n_embd 192 --model.block_size 128 --eval.batch_size 16"}
MEMORY |= {"activations": "--model.n_layer 6 --model.n_embd 256 --model.block_size 256"}
MEMORY["nanochat"] = f"{MEMORY['activations']} --model.architecture nanochat"


@pytest.mark.slow
@pytest.mark.parametrize("case", MEMORY)
def test_memory_is_what_a_run_takes(corpus, tmp_path, case):
    edited = {"train.micro_batch_size": 16, "train.global_batch_tokens": 4096, "train.steps": 1, "eval.tokens": 256}
    (tmp_path / "config.yaml").write_text(dump(training_config(corpus, tmp_path / "runs", edited)))
    arguments = ["--config", str(tmp_path / "config.yaml"), *MEMORY[case].split()]
    code, _, said = peak_of_a_run([*arguments, "--json"], "plan")
    assert code == 0
    planned = json.loads(said)["memory"]["peak"]
    for name in ("one", "two", "three"):  # on a busy machine, one in ten holds memory for longer
        code, measured, _ = peak_of_a_run([*arguments, "--run_name", name], "train_gpt2")
        assert code == 0
        if distance(planned, measured) <= CPU_MARGIN:
            break
    print(f"{case}: planned {planned / 1e6:.0f} MB, measured {measured / 1e6:.0f} MB")
    assert distance(planned, measured) <= CPU_MARGIN


def setting(**changes: Any) -> Setting:
    values: dict[str, Any] = {
        "config": memory_config(), "kind": "cuda", "processes": 8, "precision": "bf16", "parameters": 124_475_904,
        "matrices": 124_354_560, "state": 2 * 124_475_904, "vocab_size": 50_304, "micro_batch": 16, "base": 0.0,
        "background": True,
    }  # fmt: skip
    return Setting(**(values | changes))


def memory_config(model: dict[str, Any] | None = None, **train: Any) -> TrainingConfig:
    train = {"steps": 1, "loss_chunk": None, "activation_checkpointing": False, **train}
    return TrainingConfig.model_validate({"train": train, "model": model or {}, "eval": {"batch_size": 16}})


def test_memory_by_part():
    memory = estimate(setting())
    n = 16 * 1024
    assert_close(sum(memory.parts.values()), memory.peak)
    assert memory.moment == "training"
    states = sum(memory.parts[name] for name in ("weights", "gradients", "optimizer state"))
    assert_close(states, 16 * 124_475_904)
    assert memory.parts["logits"] == 12 * n * 50_304
    per_layer = 36 * n * 768  # bytes, half of them in bf16: docs/plan.md has the sum
    assert_close(memory.parts["activations"], 12 * per_layer + 12 * n * 768 + 24 * n * 768)
    chunked = estimate(setting(config=memory_config(loss_chunk=8192))).parts["logits"]
    assert chunked == 12 * 8192 * 50_304 + 4 * 50_304 * 768, "and the head's gradient"
    recomputed = estimate(setting(config=memory_config(activation_checkpointing=True))).parts["activations"]
    assert recomputed < memory.parts["activations"] / 4


def test_a_checkpoint_behind_the_training_takes_its_copy():
    parameters = setting().parameters
    for kind in ("cpu", "cuda"):
        behind, still = (estimate(setting(kind=kind, background=it)) for it in (True, False))
        assert_close(behind.peak - still.peak, 12 * parameters if kind == "cpu" else 0)
        assert (behind.host, still.host) == ((0, 0) if kind == "cpu" else (12 * parameters, 4 * 50_304 * 768))


def test_muon_keeps_one_moment_of_the_blocks_matrices():
    muon = setting(state=2 * 124_475_904 - 84_934_656)
    fewer = {part: size - estimate(muon).parts[part] for part, size in estimate(setting()).parts.items()}
    assert_close({part: size for part, size in fewer.items() if size}, {"optimizer state": 4 * 84_934_656})
    assert estimate(setting()).host - estimate(muon).host == 4 * 84_934_656
    cpu = [setting(kind="cpu", background=True, state=2 * 124_475_904 - less) for less in (0, 84_934_656)]
    saving, fewer = (sum(block.total for block in moments_of(one)["saving"]) for one in cpu)
    assert_close(saving - fewer, 8 * 84_934_656, says="it and its copy")


@pytest.mark.parametrize(("kind", "key_heads"), [("gpt2", None), ("llama", 2), ("qwen3", None), ("nanochat", None)])
def test_what_training_saves_is_what_autograd_saves(kind, key_heads):
    import torch

    from gpt2_ddp.model.gpt import GPT

    def saved(layers: int, dropout: float, half: bool) -> tuple[int, float]:
        config = ModelConfig(architecture=kind, n_layer=layers, n_head=4, n_kv_head=key_heads, n_embd=192)
        config = config.model_copy(update={"block_size": 64, "dropout": dropout})
        model, storages = GPT(config, 128), {}
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

        def pack(tensor: Any) -> Any:
            storage = tensor.untyped_storage()
            is_weight = half and tensor.dim() == 2 and 128 not in tensor.shape  # in half, which is not told here
            if storage.data_ptr() not in own and not is_weight:
                storages[storage.data_ptr()] = tensor, storage.nbytes()
            return tensor

        tokens = torch.zeros(2, 64, dtype=torch.int64)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = model(tokens, tokens)
            kept = sum(size for _, size in storages.values())
            del loss
        precision, training = "bf16" if half else "no", memory_config(config.model_dump())
        known = setting(kind="cpu", config=training, precision=precision, micro_batch=2)
        return kept, sum(block.total for block in moments_of(known)["training"] if block.part == "activations")

    for dropout, half in ((0.0, False), (0.1, False), (0.0, True)):
        (one, known_one), (three, known_three) = (saved(layers, dropout, half) for layers in (1, 3))
        rel = 0.03 if kind == "gpt2" else 0.06  # copies that SDPA or autocast may avoid
        assert distance(three - one, known_three - known_one) < rel, (dropout, half)


def sharded(reduce: str = "last", reshard: bool = True, replicas: int = 1, **changes: Any) -> Setting:
    """GPT-2 (124M) on 8 GPUs; 64 micro-batches of 1 per process and step."""
    launch = {"parallel": "fsdp", "reduce": reduce, "reshard": reshard, "replicas": replicas}
    sections = {"train": {"steps": 1}, "eval": {"batch_size": 1}, "launch": launch}
    config = TrainingConfig.model_validate(sections)
    return setting(**{"config": config, "block": 7_087_872, "micro_batch": 1, **changes})


def test_memory_of_shards():
    numbers, block = 124_475_904, 7_087_872
    root = numbers - 12 * block
    parts = estimate(sharded()).parts
    assert_close(parts["weights"], 4 * numbers / 8)
    assert_close(parts["optimizer state"], 8 * numbers / 8)
    assert_close(parts["gradients"], 4 * numbers, says="whole, until the last micro-batch")
    assert parts["gathered weights"] == 2 * (root + 2 * block), "in bf16, the next block too"
    for setting in (sharded("each"), sharded(micro_batch=64)):
        assert_close(estimate(setting).parts["gradients"], 4 * (numbers / 8 + root + block))
    assert estimate(sharded(reshard=False)).parts["gathered weights"] == 2 * numbers
    assert estimate(sharded(precision="no")).parts["gathered weights"] == 4 * (root + 2 * block)
    assert_close(estimate(sharded(replicas=2)).parts["weights"], 4 * numbers / 4)
    for background in (True, False):
        assert estimate(sharded(background=background)).host == 12 * numbers, "whole on rank 0"
        peaks = estimate(sharded(kind="cpu", background=background)).peaks
        assert peaks["saving"] >= 12 * numbers + 12 * numbers / 8, "and so in a CPU's"


def test_bytes_that_a_process_sends():
    weights, blocks = 124_475_904, 12 * 7_087_872
    assert setting().sent == 2 * 7 / 8 * 4 * weights, "DDP"
    assert setting(processes=1).sent == sharded(processes=1).sent == 0
    gathered = 2 * (weights + blocks)  # in bf16; the blocks' twice
    assert_close(sharded(micro_batch=64).sent, 7 / 8 * (gathered + 4 * weights))
    assert_close(sharded().sent, 7 / 8 * (64 * gathered + 4 * weights))
    assert_close(sharded("each").sent, 7 / 8 * 64 * (gathered + 4 * weights))
    assert_close(sharded(micro_batch=64, reshard=False).sent, 7 / 8 * (2 * weights + 4 * weights))
    two = 3 / 4 * (gathered + 4 * weights) + 2 * 1 / 2 * 4 * weights / 4  # the parts of two replicas
    assert_close(sharded(micro_batch=64, replicas=2).sent, two)


def plan_config(**changes: Any) -> PlanConfig:
    return PlanConfig.model_validate({"train": {"steps": 100}, **changes})


def test_machines_and_gpus_by_a_part_of_their_names():
    machine = find_target(plan_config(gpu="H100 80GB HBM3", gpus=8, nodes=2), 1)
    assert (machine.processes, machine.memory, machine.peak) == (16, 80e9, 989.5e12)
    for name in GPUS:  # each has a memory, by its name or by the table
        assert 16e9 <= find_target(plan_config(gpu=name), 1).memory <= 300e9
    assert find_target(plan_config(gpu="NVIDIA A100-SXM4-40GB"), 1).memory == 40e9
    unknown = find_target(plan_config(gpu="H100 SXM", gpu_memory=80), 1)
    assert (unknown.device, unknown.memory, unknown.peak) == ("H100 SXM", 80e9, None)
    assert "set --tracking.peak_flops" in format_plan(Plan(plan_config(), unknown, "bf16", Seen()))[-1]

    names = {"RTX 4090": "GeForce RTX 4090", "H100 80GB": "H100 80GB HBM3", "a100-sxm4 80gb": "A100-SXM4-80GB"}
    for said, name in (names | {"A4000": "RTX A4000", "a10": "A10", "L40": "L40"}).items():
        assert find_gpu(said) == f"NVIDIA {name}"
    assert all(find_gpu(name.lower()) == name for name in GPUS)

    several = {"H100": r"NVIDIA H100 80GB HBM3 \(80 GB\), NVIDIA H100 PCIe .*, NVIDIA H100 NVL \(94 GB"}
    for said, names in (several | {"A100 80GB": r"NVIDIA A100-SXM4-80GB \(80 GB\), NVIDIA A100 80GB PCIe"}).items():
        expect_error(f"names; name one of {names}", find_target, plan_config(gpu=said), 1)
    for said in ("MI300X", "T4", "RTX 4090 D"):
        message = f"gpu = {said}: is no known name of nvidia-smi; set --gpu_memory, in GB, and --tracking"
        expect_error(message, find_target, plan_config(gpu=said), 1)


def test_what_is_done_and_how_long_it_takes():
    config = TrainingConfig.model_validate({"train": {"steps": 1050}})  # evaluations every 250, checkpoints every 1000
    counted = count(config, 0, 1050, True)
    assert counted == {"steps": 1050, "evaluations": 1 + 4 + 1, "saves": 2, "samples": 0}
    assert count(config, 1000, 1050, True)["evaluations"] == 1
    assert count(config, 0, 1000, False)["evaluations"] == 0
    spent = seconds(counted, Rate(524_288.0, "", 2.0, 3.0, start=10), 524_288)
    assert spent == {"start": 10, "steps": 1050, "evaluations": 12, "checkpoints": 6}


def test_a_rate_is_of_its_precision_and_an_evaluation_ends_with_its_split():
    config = plan_config(gpu="H100 80GB HBM3", eval={"tokens": 10**9})
    machine = find_target(config, 1)
    unknown = Plan(config, machine, "no", Seen())
    assert (unknown.rate, unknown.price) == (None, None), "the peak is bf16's"
    assert list(unknown.splits) == [1, 2, 4, 8, 16, 32, 64]
    of_data = {"manifest": SimpleNamespace(vocab_size=50_257), "manifests": [], "validates": True}
    of_data |= {"epoch_size": 9, "total_steps": lambda windows: 100, "config": config.training}
    for task, scored in ((None, 10**9), (SimpleNamespace(validation_tokens=300, **of_data), 300)):
        plan = Plan(config, machine, "bf16", Seen(task=task))
        assert plan.rate.tokens_per_second == 0.4 * 989.5e12 / plan.flops_per_token
        assert plan.rate.evaluation == scored / (3 * plan.rate.tokens_per_second)


@pytest.mark.parametrize(("edit", "flags", "speed"), [
    ("nothing", [], 1000.0), ('"processes": 1', [], 2000.0),  # the first session had another number
    ("nothing", ["--tokens_per_second", "500"], 500.0),
    ("nothing", ["--train.micro_batch_size", "2"], None), ("nothing", ["--gpus", "2"], None),
])  # fmt: skip
def test_a_run_is_planned_at_its_recorded_speed(tmp_path, monkeypatch, edit, flags, speed):
    """Golden rows in two sessions: five rows of 1,000 tokens per second, and three of 2,000."""
    run = tmp_path / "gpt2_run"
    shutil.copytree(GOLDEN / "gpt2_run", run)
    text = re.sub(r'"tokens_per_second": [\d.]+', '"tokens_per_second": 1000.0', (run / "metrics.jsonl").read_text())
    first, *others = text.splitlines(keepends=True)
    fast = [line.replace("1000.0", "2000.0") for line in others]
    (run / "metrics.jsonl").write_text("".join([first.replace(edit, edit + "0"), *others, first, *fast[-3:]]))
    monkeypatch.setattr(planning, "base_memory", lambda config: 0.0)
    plan = make_plan(load(PlanConfig, ["--config", str(GOLDEN / "gpt2_run/config.yaml"), "--train.steps", "20",
                                       "--output_dir", str(tmp_path), *flags]))  # fmt: skip
    assert not plan.refused
    assert (plan.rate.tokens_per_second if plan.rate else None) == speed
    assert any(f"tokens/s, as {run} recorded" in line for line in format_plan(plan)) == (not flags)


def test_the_cost_of_padding_and_the_nearest_batch_without():
    for gpus, split in ((6, (11, 8, 16, 504)), (7, (15, 5, 13, 504)), (8, (16, 4, 0, 512)), (600, (1, 1, 0, 512))):
        config = plan_config(gpu="H100 80GB HBM3", gpus=gpus, train={"micro_batch_size": 16, "steps": 100})
        plan = Plan(config, find_target(config, 1), "bf16", Seen())
        assert (plan.micro_batch, plan.accumulation, plan.padding, plan.nearest_batch) == split
        assert any(f"padding    {plan.padding} rows" in line for line in format_plan(plan)) == (plan.padding > 0)


def test_what_a_run_settled_and_what_compiles(corpus, tmp_path, monkeypatch):
    changes = {"train.micro_batch_size": "auto", "train.compile": "auto", "train.mixed_precision": "bf16"}
    training = training_config(corpus, tmp_path, {**changes, "tracking.peak_flops": 1e12})
    config = PlanConfig.model_validate(training.model_dump(mode="json"))
    state = {"processes": 1, "device": "cpu", "micro_batch": 2, "compile": "model"}
    monkeypatch.setattr(planning, "base_memory", lambda config: 0.0)

    def planned(**state: Any) -> tuple[int, bool]:
        monkeypatch.setattr(planning, "preflight", lambda *_: Seen(record=state))
        plan = make_plan(config)
        assert plan.rate is not None
        (memory,) = (line for line in format_plan(plan) if line.startswith("  memory"))
        assert "(estimate, ±20%) of" in memory
        return plan.micro_batch, plan.rate.start > planning.START

    fresh = planned()
    assert fresh[0] > 2
    assert not fresh[1], "so few steps are over before a graph pays"
    assert planned(**state) == (2, True)
    assert planned(**state | {"processes": 2}) == fresh
    assert planned(**state | {"device": "NVIDIA H200"}) == fresh
    monkeypatch.setattr(compiling, "WORTH_IT", 1.0)
    assert planned() == (fresh[0], True)


def test_the_figures_of_the_pages(tmp_path, monkeypatch):
    """The table of docs/plan.md, and the output in docs/gpt2-124m.md but for the disk, which is this machine's."""
    monkeypatch.chdir(tmp_path)
    table, output = ((ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("plan", "gpt2-124m"))
    rows = re.findall(r"^\| `(gpt2_\d+m)\.yaml` \|.*$", table, re.MULTILINE)
    assert len(rows) == 4
    for name in rows:
        words = ["--config", f"configs/{name}.yaml", "--gpu", "H100 80GB HBM3", "--gpus", "8", "--price", "2.5"]
        plan = make_plan(load(PlanConfig, words))
        gigabytes, hours = plan.memory.peak / 1e9, plan.device_hours / 8
        figures = f"{plan.accumulation} x {plan.micro_batch} | {gigabytes:.1f} | {plan.largest_micro_batch}"
        figures += f" | {hours:.1f} | {plan.price:.0f} | {plan.disk['checkpoints'] / 1e9:.0f}"
        assert f"| `{name}.yaml` | {figures} |\n" in table
        if name == "gpt2_124m":
            block = output.split("```\ngpt2_124m on ")[1].split("```")[0]
            assert {*f"gpt2_124m on {block}".strip().split("\n")} <= {*format_plan(plan)}


@pytest.mark.parametrize(("preset", "gpu"), [("llama_1b", "RTX 4090"), ("llama_7b", "H100 80GB HBM3")])
def test_sharded_presets_fit_where_ddp_does_not(tmp_path, monkeypatch, preset, gpu):
    monkeypatch.chdir(tmp_path)

    def planned(gpus: int, *flags: str) -> Plan:
        words = ["--config", f"configs/{preset}.yaml", "--gpu", gpu, "--gpus", str(gpus), *flags]
        return make_plan(load(PlanConfig, words))

    plan = planned(8)
    assert (plan.fits, plan.fits_sharded, plan.refused) == (True, None, [])
    assert any(line.endswith(" GB per step (estimate)") for line in format_plan(plan))
    ddp = planned(8, "--launch.parallel", "ddp")
    assert not ddp.fits
    assert ddp.fits_sharded
    figures = f"| {ddp.memory.peak / 1e9:.1f} GB | {plan.memory.peak / 1e9:.1f} GB | {plan.sent / 1e9:.0f} GB |"
    assert figures in (ROOT / "docs/sharded.md").read_text(encoding="utf-8")
    fewest = ddp.fits_sharded["gpus"]
    assert f"    --launch.parallel fsdp fits on {fewest} GPUs (estimate)" in format_plan(ddp)
    assert planned(fewest).fits
    assert not planned(fewest // 2).fits
    assert planned(8, "--launch.replicas", "2").refused == []
    (error,) = planned(8, "--launch.replicas", "3").refused
    assert error == "launch.replicas = 3: is no divisor of the 8 processes"


def test_a_plan_follows_accelerate_config(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    words = ["--gpu", "H100 80GB HBM3", "--gpus", "8", "--train.steps", "5"]
    assert "gathered weights" in make_plan(load(PlanConfig, words)).memory.parts


def test_the_flags_of_the_plan():
    expect_error("remove one of the two", plan_config, gpu="NVIDIA A10", train={"steps": 1, "device": "cpu"})
    config = plan_config(gpu="NVIDIA A10", price=2.5)
    assert dump(config) == dump(config.training), "what --print_config prints is the training's"
