"""Launches as people type them: they train together,
or end with one line that says what to type instead."""

import contextlib
import io
import os
import re
import shutil
import subprocess
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from commands import ACCELERATE, NO_REPORT, ROOT, environment, expect_error, run_script
from ranks import RankError, rank_environment, run_ranks, wait_until
from runs import complete, events, state_of, train, training_config

from gpt2_ddp.config.cli import dump
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.distributed import launch as launching
from gpt2_ddp.distributed import peers, precision
from gpt2_ddp.distributed.environment import usable_cores
from gpt2_ddp.distributed.launch import pick_precision, start_run
from gpt2_ddp.distributed.precision import settle_fast
from gpt2_ddp.distributed.spawn import reserve_port
from gpt2_ddp.errors import is_main_process
from gpt2_ddp.training.start import describe_precision

SCRIPT = str(ROOT / "scripts/train_gpt2.py")


SHORT = {
    "train.steps": 2,
    "train.global_batch_tokens": 6 * 32,
    "eval.every": 2,
    "checkpoint.every": 2,
}


@pytest.fixture
def config_file(corpus, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(dump(training_config(corpus, tmp_path, SHORT)))
    return file


def train_command(config_file, name):
    return [SCRIPT, "--config", str(config_file), "--run_name", name]


def digest(run):
    """(order digest, processes) of the run's last checkpoint."""
    state = state_of(run)
    return state["feed"]["order_digest"], state["setup"]["processes"]


@pytest.mark.slow
def test_two_machines_on_loopback(config_file, corpus, tmp_path):
    """docs/several-machines.md's template, each "machine"
    with a process of its own, trains like one process."""
    complete(training_config(corpus, tmp_path, SHORT))
    port = str(reserve_port())
    template = str(ROOT / "configs/accelerate/multi_node.yaml")
    words = ["--num_processes", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", port]
    words += ["--mixed_precision", "no", "--config_file", template]
    two = train_command(config_file, "two")
    commands = ([*ACCELERATE, *words, "--machine_rank", rank, *two] for rank in "01")
    env = environment(PYTHONPATH=NO_REPORT, OMP_NUM_THREADS="1")
    options = {"env": env, "cwd": ROOT, "stderr": subprocess.PIPE, "text": True}
    machines = [subprocess.Popen(command, **options) for command in commands]
    for machine in machines:
        _, errors = machine.communicate(timeout=120)
        assert machine.returncode == 0, errors
    assert digest(tmp_path / "two") == (digest(tmp_path / "run")[0], 2)


def run_apart(words):
    """Each rank has its number in its words."""
    return run_script("train_gpt2", [word.replace("RANK", os.environ["RANK"]) for word in words])


def test_ranks_with_other_paths_train_together_and_other_settings_are_named(
    config_file, corpus, tmp_path
):
    """As on machines that share no disk."""
    shutil.copytree(corpus, tmp_path / "data-1")
    (tmp_path / "data-0").symlink_to(corpus)
    words = [*train_command(config_file, "two")[1:], "--output_dir", f"{tmp_path}/runs-RANK"]
    (code, errors), other = run_ranks(run_apart, 2, [*words, "--optim.lr", "0.01RANK"])
    assert (code, other) == (2, (2, ""))
    assert errors == "error: optim.lr = 0.01: rank 1 has 0.011; give all ranks the same\n"
    assert not list(tmp_path.glob("runs-*"))
    ended = run_ranks(run_apart, 2, [*words, "--data.path", f"{tmp_path}/data-RANK"])
    assert [code for code, _ in ended] == [0, 0]
    assert not (tmp_path / "runs-1").exists()
    assert digest(tmp_path / "runs-0/two")[1] == 2


def wait_for_main(config):
    """Connects; then the main process works for longer
    than collectives may take where no watchdog runs."""
    from gpt2_ddp.distributed import launch, ranks

    launch.COLLECTIVE = timedelta(seconds=1)
    start_run(config)

    def work():
        return time.sleep(2.5) or "done"

    return [ranks.on_main(work), ranks.on_every_rank(work if is_main_process() else lambda: "done")]


def test_an_interface_that_is_not_there_is_named_by_each_rank(tiny_config):
    why = (
        r"processes = 2: rank \d on \S+ cannot connect to the others .*Unable to find address "
        "for: eth7"
    )
    with pytest.raises(RankError, match=why):
        run_ranks(train_in, 2, {"GLOO_SOCKET_IFNAME": "eth7"}, tiny_config())


@pytest.mark.slow
def test_once_connected_ranks_wait_as_long_as_the_watchdog_allows(tiny_config):
    """While they connect it is `train.patience_seconds`."""
    config = tiny_config({"train.patience_seconds": 40})
    assert run_ranks(wait_for_main, 2, config) == [["done"] * 2] * 2


def train_in(env, config):
    os.environ.update(env)
    return train(config)


def test_settings_of_accelerate_that_would_change_nothing_are_refused(monkeypatch):
    """The other variables of Accelerate are heeded (USE_CPU,
    MIXED_PRECISION, DEBUG_MODE, CPU_AFFINITY, TORCH_DEVICE), belong
    to plugins that are refused, or change no training (LOG_LEVEL)."""
    check = partial(launching._check_environment, torch.device("cpu"), "auto")
    launched_by(monkeypatch, "accelerate launch --gradient_accumulation_steps 8 train.py")
    expect_error("^--gradient_accumulation_steps = 8: .*--train.global_batch_tokens", check)
    launched_by(monkeypatch, "accelerate launch --gradient-clipping=1.0 train.py")
    expect_error("^--gradient_clipping = 1.0: .*--optim.grad_clip", check)
    launched_by(monkeypatch, "accelerate launch --gradient_accumulation_steps 1 train.py")
    check()
    for name in ("GRADIENT_ACCUMULATION_STEPS", "GRADIENT_CLIPPING", "USE_PARALLELISM_CONFIG"):
        with monkeypatch.context() as patch:
            patch.setenv(f"ACCELERATE_{name}", "8")
            expect_error(f"^ACCELERATE_{name} = 8: ", check)


def test_a_device_of_accelerate_that_is_not_the_one_of_the_command(monkeypatch):
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "meta")
    state = SimpleNamespace(num_processes=1, device=torch.device("meta"))
    monkeypatch.setattr(launching, "PartialState", lambda **_: state)
    expect_error(
        "^device = meta: by ACCELERATE_TORCH_DEVICE", launching.connect_processes, "cpu", "no"
    )


def test_a_rank_that_waits_says_which_variables_it_has(monkeypatch):
    """Others may never come: the variables may be left over in a shell."""
    monkeypatch.setattr(peers, "PATIENT", 0.01)
    for name, value in rank_environment(1, 3, 29500).items():
        monkeypatch.setenv(name, value)

    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        peers.connect(lambda timeout: wait_until(lambda: told.getvalue().endswith("\n")), None)
    variables = "RANK 1, WORLD_SIZE 3, MASTER_ADDR 127.0.0.1, MASTER_PORT 29500"
    assert told.getvalue() == f"note: this rank waits for all others to connect ({variables})\n"


@pytest.mark.parametrize(
    ("words", "file", "default", "asked"),
    [
        ("--config_file FILE", "MULTI_CPU 2", "", 2),
        ("--config-file=FILE", "MULTI_CPU 2", "NO 1", 2),
        ("", "", "MULTI_CPU 3", 3),
        ("--cpu", "", "MULTI_CPU 3", 1),
        ("--config_file FILE", "NO 1", "MULTI_CPU 3", 1),
        ("--num_processes 1 --config_file FILE", "MULTI_CPU 2", "", 1),
        ("", "", "", 1),
    ],
)
def test_processes_that_accelerate_s_configuration_asks_for(
    monkeypatch, tmp_path, words, file, default, asked
):
    """Accelerate starts one for MULTI_CPU; it is refused, as it would train alone."""
    paths = tmp_path / "given file.yaml", tmp_path / "default.yaml"
    for path, answers in zip(paths, (file, default), strict=True):
        if answers:
            kind, number = answers.split()
            path.write_text(f"distributed_type: '{kind}'\nnum_processes: {number}\n")
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", str(paths[1]))
    command = ["python", "/bin/accelerate", "launch", *words.split(), "train.py"]
    parent = SimpleNamespace(
        cmdline=lambda: [word.replace("FILE", str(paths[0])) for word in command]
    )
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(parent=lambda: parent))
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "default")
    assert launching.processes_asked_for() == asked
    if asked > 1:
        expect_error(
            f"^processes = {asked}: only 1 started", launching.connect_processes, "cpu", "no"
        )


def settled(device="cpu", before=""):
    """The precision that replaces `fast`."""
    config = TrainingConfig.model_validate({"train": {"steps": 1, "mixed_precision": "fast"}})
    return settle_fast(config, torch.device(device), before).train.mixed_precision


@pytest.mark.parametrize(("bf16", "fast"), [(84, "no"), (109, "no"), (111, "bf16")])
def test_fast_is_bf16_on_a_cpu_where_it_is_clearly_faster(monkeypatch, bf16, fast):
    monkeypatch.setattr(precision, "measure", lambda matrix: {"no": 1 / 100, "bf16": 1 / bf16})
    assert settled() == settled(before="fp16") == fast
    assert [settled(before=before) for before in ("no", "bf16")] == ["no", "bf16"]


def test_a_measurement_leaves_threads_and_random_numbers(monkeypatch):
    monkeypatch.setattr(precision, "SECONDS", 0)
    monkeypatch.setattr(precision, "WIDEST", 16)
    generator = torch.get_rng_state()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    clock = iter([0, 4, 4, 13, 13, 14, 14, 22, 22, 24, 24, 28])
    assert precision.measure((8, 32), clock=clock.__next__) == {"no": 1, "bf16": 4}
    left = torch.get_num_threads()
    torch.set_num_threads(threads)
    assert left == 2
    assert torch.equal(torch.get_rng_state(), generator)


def train_measured(config, *seconds):
    """The first rank measures these seconds in fp32 and bf16, another one the opposite."""
    found = seconds if os.environ["RANK"] == "0" else seconds[::-1]
    precision.measure = lambda matrix: dict(zip(("no", "bf16"), found, strict=True))
    return train(config)


@pytest.mark.slow
def test_a_resumed_run_keeps_the_precision_that_was_measured_first(corpus, tmp_path):
    changes = {"train.mixed_precision": "fast", "optim.decay_steps": 9}
    for steps, seconds in ((1, (2.0, 1.0)), (2, (1.0, 2.0))):
        config = training_config(corpus, tmp_path, changes | {"train.steps": steps})
        assert run_ranks(train_measured, 2, config, *seconds) == ["completed"] * 2
    starts = events(tmp_path / "run", "start")
    assert [row["config"]["train"]["mixed_precision"] for row in starts] == ["bf16"] * 2


def test_fast_on_other_devices(monkeypatch):
    assert settled("mps") == "no"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    gpu = torch.device("cuda")
    assert settled("cuda") == "bf16"
    assert describe_precision("no", gpu).startswith("no, here slower than bf16;")
    assert describe_precision("bf16", gpu) == "bf16"
    assert describe_precision("no", torch.device("cpu")) == "no"


LAUNCHES = [
    (3, "accelerate launch --num_processes 3 train.py --config x --num_processes 8"),
    (3, "accelerate launch --num-processes=3 -m scripts.train --config x"),
    (1, "accelerate launch -m scripts.train --config x"),
    (
        2,
        (
            "python -m accelerate.commands.launch --module --cpu --num_processes 2 scripts.train"
            " --config x"
        ),
    ),
    (
        4,
        (
            "python -m accelerate.commands.accelerate_cli launch --num_machines 2"
            " --num_processes 4 train.py"
        ),
    ),
    (1, "python train.py --config x --num_processes 2"),
]
"""Processes that commands ask for."""


def launched_by(monkeypatch, command):
    """As if the parent process were this command."""
    parent = SimpleNamespace(cmdline=lambda: ["python", *command.split()])
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(parent=lambda: parent))
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", "none.yaml")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    if "accelerate" in command:
        monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "default")


@pytest.mark.parametrize(("processes", "command"), LAUNCHES)
def test_processes_that_the_launcher_was_asked_for(monkeypatch, processes, command):
    launched_by(monkeypatch, command)
    assert launching.processes_asked_for() == processes
    assert launching.under_launcher() == ("accelerate" in command)


@pytest.mark.parametrize(
    ("visible", "found"), [(None, True), ("0", True), ("", False), ("-1", False)]
)
def test_auto_is_not_the_cpu_where_an_nvidia_device_is_visible_and_unusable(
    monkeypatch, visible, found
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Path, "glob", lambda *_: iter(["/dev/nvidia0"]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if found:
        expect_error("train.device = auto", launching.pick_device, "auto", "train.")
    else:
        assert launching.pick_device("auto").type == "cpu"


DEVICES = ("GPU", "GPU without bf16", "CPU")
PAGE = (ROOT / "docs/several-machines.md").read_text()
PRECISIONS = {
    command: tuple(cells.split(" | "))
    for command, cells in re.findall(
        r"^\| .*?`([^`]*train\.py)` \| (\w+ \| \w+ \| \w+) \|$", PAGE, re.MULTILINE
    )
}
PRECISIONS |= {
    f"accelerate launch --config_file configs/accelerate/{file.name} train.py": ("no", "no", "no")
    for file in (ROOT / "configs/accelerate").iterdir()
}
PRECISIONS["accelerate launch --config_file bf16.yaml --mixed_precision no train.py"] = (
    "no",
    "no",
    "no",
)
"""Command -> what `train.mixed_precision: auto` is on each of DEVICES."""


@pytest.mark.parametrize(("command", "expected"), PRECISIONS.items())
def test_auto_precision_depends_on_the_device_and_on_what_accelerate_was_configured_with(
    monkeypatch, tmp_path, command, expected
):
    assert len(PRECISIONS) == 9 + 4 + 1
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    for name in ("no", "bf16"):  # as `accelerate config` writes them
        Path(f"{name}.yaml").write_text(
            f"distributed_type: 'NO'\nmixed_precision: '{name}'\nnum_processes: 1\n"
        )
    if command.startswith("accelerate"):
        launched_by(monkeypatch, command)
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", validated(command).mixed_precision)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device, found in zip(DEVICES, expected, strict=True):
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda device=device, **_: device == "GPU"
        )
        target = torch.device("cpu" if device == "CPU" else "cuda")
        if found == "error":
            expect_error("train.mixed_precision = fp16: ", pick_precision, "auto", target, "train.")
        else:
            assert pick_precision("auto", target, "train.") == found, device


def validated(command):
    """What `accelerate launch` makes of its command line."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    return _validate_launch_command(launch_command_parser().parse_args(command.split()[2:]))[0]


@pytest.mark.parametrize(
    ("variable", "threads", "is_replaced"),
    [
        ("ACCELERATE_DYNAMO_MODE", "1", True),
        ("TORCHELASTIC_RUN_ID", "1", True),
        ("TORCHELASTIC_RUN_ID", "3", False),
        ("USER", "1", False),
    ],
)
def test_threads_that_a_user_chose_are_kept_and_the_one_of_a_launcher_is_not(
    monkeypatch, variable, threads, is_replaced
):
    """Launchers set OMP_NUM_THREADS to 1, unless the
    environment or their flags have another number."""
    monkeypatch.setenv(variable, "x")
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    launching.set_cpu_threads()
    assert chosen == [usable_cores()] * is_replaced
