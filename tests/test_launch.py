"""Launches as people type them: they train together, or end with one line that says what to type instead."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import yaml
from commands import ACCELERATE, ROOT, TORCHRUN, environment, launch
from ranks import RankError, free_port, run_ranks
from runs import training_config

from gpt2_ddp.config.cli import dump
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.processes.cores import usable_cores
from gpt2_ddp.processes.launch import COLLECTIVE, pick_precision, spell_precision, start_run

SCRIPT = str(ROOT / "scripts/train_gpt2.py")


@pytest.fixture
def config_file(corpus, tmp_path) -> str:
    changes = {"train.steps": 4, "train.global_batch_tokens": 8 * 32, "eval.every": 4, "checkpoint.every": 4}
    file = tmp_path / "config.yaml"
    file.write_text(dump(training_config(corpus, tmp_path, changes)))
    return str(file)


def train_command(config_file: str, name: str) -> list[str]:
    return [SCRIPT, "--config", config_file, "--run_name", name]


def digest(config_file: str, name: str) -> tuple[str, int]:
    """(order digest, processes) of the run's last checkpoint."""
    run = Path(config_file).parent / name
    state = json.loads((run / "checkpoints/step-00000004/state.json").read_text())
    return state["order_digest"], state["processes"]


@pytest.fixture
def one_process_digest(config_file) -> str:
    found = launch([sys.executable, *train_command(config_file, "one")])
    assert found.returncode == 0, found.stderr
    assert digest(config_file, "one")[1] == 1
    return digest(config_file, "one")[0]


@pytest.mark.slow
def test_one_process_is_launched_quietly():
    """As `make train` does: of a mistake there is the one line that says what it is."""
    quiet = ["-q", "--config_file", str(ROOT / "configs/accelerate/one_process.yaml")]
    assert " ".join(quiet[:2]) in (ROOT / "Makefile").read_text()
    found = launch([*ACCELERATE, *quiet, SCRIPT, "--train.stps", "3"])
    assert found.returncode == 1, "the launcher's own code"
    assert found.stderr == "error: --train.stps: there is no such flag; did you mean --train.steps?\n"


CPU_TEMPLATE = str(ROOT / "configs/accelerate/cpu_processes.yaml")
TORCHRUN_TWO = [*TORCHRUN, "--nproc_per_node", "2", "--master_port", "{port}"]
MULTI_GPU = [*ACCELERATE, "--multi_gpu", "--num_processes", "2", "--main_process_port", "{port}"]
CPU_PROCESSES = [*ACCELERATE, "--config_file", CPU_TEMPLATE, "--main_process_port", "{port}"]
TWO_PROCESSES = [  # the other two are on README, whose commands test_docs.py runs
    pytest.param(TORCHRUN_TWO, id="torchrun", marks=pytest.mark.soak),
    pytest.param(MULTI_GPU, id="multi_gpu"),
    pytest.param(CPU_PROCESSES, id="cpu_processes", marks=pytest.mark.soak),
]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", TWO_PROCESSES)
def test_launches_of_two_processes_train_together(config_file, one_process_digest, launcher):
    port = str(free_port())
    found = launch([word.format(port=port) for word in launcher] + train_command(config_file, "two"))
    assert found.returncode == 0, found.stderr
    assert digest(config_file, "two") == (one_process_digest, 2)
    assert (Path(config_file).parent / "two/report.html").exists()


@pytest.mark.slow
def test_two_machines_on_loopback(config_file, one_process_digest):
    """The README's recipe for several nodes, each "machine" with a process of its own."""
    port = str(free_port())
    template = str(ROOT / "configs/accelerate/multi_node.yaml")
    words = ["--num_processes", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", port]
    words += ["--mixed_precision", "no", "--config_file", template]
    two = train_command(config_file, "two")
    machines = [
        subprocess.Popen(
            [*ACCELERATE, *words, "--machine_rank", rank, *two],
            env=environment(),
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    for machine in machines:
        _, errors = machine.communicate(timeout=120)
        assert machine.returncode == 0, errors
    assert digest(config_file, "two") == (one_process_digest, 2)


@pytest.mark.slow
def test_ranks_with_other_paths_train_together_and_other_settings_are_named(config_file, corpus):
    """As on machines that share no disk."""
    place = Path(config_file).parent
    shutil.copytree(corpus, place / "data-1")
    (place / "data-0").symlink_to(corpus)

    def start(flags: str) -> subprocess.CompletedProcess:
        words = [sys.executable, *train_command(config_file, "two"), "--data.path", f"{place}/data-$RANK"]
        line = f"exec {' '.join(words)} --output_dir {place}/runs-$RANK {flags}"
        return launch(
            [*TORCHRUN, "--nproc_per_node", "2", "--master_port", str(free_port()), "--no-python", "sh", "-c", line]
        )

    found = start("--optim.lr 0.00$((RANK + 1))")
    errors = [line for line in found.stderr.splitlines() if line.startswith("error:")]
    assert errors == ["error: optim.lr = 0.001: rank 1 has 0.002; give all ranks the same"], found.stderr
    assert not list(place.glob("runs-*"))
    found = start("")
    assert found.returncode == 0, found.stderr
    assert not (place / "runs-1").exists()
    assert digest(str(place / "runs-0/config.yaml"), "two")[1] == 2


def multi_cpu_file(tmp_path: Path) -> str:
    file = tmp_path / "multi_cpu.yaml"
    values = yaml.safe_load(Path(CPU_TEMPLATE).read_text())
    file.write_text(yaml.safe_dump({**values, "distributed_type": "MULTI_CPU", "use_cpu": True}))
    return str(file)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["--cpu", "MULTI_CPU", "PET", "srun"])
def test_launches_that_would_train_alone_end_with_an_error(config_file, tmp_path, way):
    env = {}
    launcher = {
        "--cpu": [*ACCELERATE, "--cpu", "--num_processes", "2"],
        "MULTI_CPU": [*ACCELERATE, "--config_file", multi_cpu_file(tmp_path)],
        "PET": ACCELERATE,
        "srun": [sys.executable],
    }[way]
    if way == "PET":
        env = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "0"}
    if way == "srun":
        env = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}
    found = launch(launcher + train_command(config_file, "alone"), **env)
    assert found.returncode != 0
    errors = [line for line in found.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, found.stderr
    assert "processes = 2: only 1 started" in errors[0]
    assert "torchrun --nproc_per_node 2" in errors[0]
    assert not (tmp_path / "alone").exists()


@pytest.mark.slow
def test_unconnected_ranks_end_with_an_error(config_file, tmp_path):
    """A launcher that starts two processes and tells them nothing of each other."""
    found = launch([sys.executable, *train_command(config_file, "alone")], OMPI_COMM_WORLD_SIZE="2")
    assert found.returncode == 2
    assert "error: processes = 2: only 1 started" in found.stderr
    assert "Traceback" not in found.stderr


def connect(config: TrainingConfig, interface: str = "") -> timedelta:
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    start_run(config)
    return torch.distributed.group.WORLD._get_backend(torch.device("cpu")).options._timeout


def test_an_interface_that_is_not_there_is_named_by_each_rank(tiny_config):
    why = r"processes = 2: rank \d on \S+ cannot connect to the others .*Unable to find address for: eth7"
    with pytest.raises(RankError, match=why):
        run_ranks(connect, 2, tiny_config(), "eth7")


def test_once_connected_ranks_wait_as_long_as_ever(tiny_config):
    """While they connect it is `train.patience_seconds`."""
    assert run_ranks(connect, 2, tiny_config({"train.patience_seconds": 40})) == [COLLECTIVE] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "field"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, "ACCELERATE_USE_FSDP"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "ACCELERATE_USE_DEEPSPEED"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "ACCELERATE_DYNAMO_BACKEND"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "train.mixed_precision"),
    ],
)
def test_settings_of_accelerate_that_do_not_fit_are_named(config_file, env, field):
    found = launch([sys.executable, *train_command(config_file, "run")], **env)
    assert found.returncode == 2
    assert f"error: {field} = " in found.stderr


@pytest.mark.slow
def test_accumulation_in_the_environment_changes_nothing(config_file, one_process_digest):
    found = launch([sys.executable, *train_command(config_file, "run")], ACCELERATE_GRADIENT_ACCUMULATION_STEPS="8")
    assert found.returncode == 0, found.stderr
    folder = Path(config_file).parent
    one, other = ((folder / name / "metrics.jsonl").read_text().splitlines() for name in ("one", "run"))
    assert [json.loads(row).get("loss") for row in one] == [json.loads(row).get("loss") for row in other]


def test_fast_is_bf16_where_the_device_has_instructions_for_it(monkeypatch):
    for has, precision in ((True, "bf16"), (False, "no")):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda has=has: has)
        assert pick_precision("fast", torch.device("cpu"), "train.") == precision
        on = SimpleNamespace(mixed_precision="bf16", device=torch.device("cpu"))
        assert ("has no instructions for" in spell_precision(on)) != has  # pyright: ignore[reportArgumentType]
    assert pick_precision("fast", torch.device("mps"), "train.") == "no"


LAUNCHES = [
    ("accelerate launch --num_processes 3 train.py --config x --num_processes 8", 3),
    ("accelerate launch --num-processes=3 -m scripts.train --config x", 3),
    ("accelerate launch -m scripts.train --config x --num_processes 8 --config_file y", 1),
    ("python -m accelerate.commands.launch --module --cpu --num_processes 2 scripts.train --config x", 2),
    ("accelerate launch --no_python --num_processes 2 bash train.sh launch", 2),
    ("python -m accelerate.commands.accelerate_cli launch --num_machines 2 --num_processes 4 train.py", 4),
    ("accelerate-launch --num_processes 2 train.py", 2),
    ("python tool.py launch --config x --num_processes 2", 1),
    ("python train.py --config x --num_processes 2", 1),
]


def launched_by(monkeypatch, command: str) -> None:
    """As if the parent process were this command."""
    parent = SimpleNamespace(cmdline=lambda: ["python", *command.split()])
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(parent=lambda: parent))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")


@pytest.mark.parametrize(("command", "processes"), LAUNCHES)
def test_the_launchers_own_flags_are_told_from_the_scripts(monkeypatch, command, processes):
    from gpt2_ddp.processes.launch import processes_asked_for, under_launcher  # slow to import for all who import this

    launched_by(monkeypatch, command)
    assert processes_asked_for() == processes
    assert under_launcher() == (command not in [LAUNCHES[-1][0], LAUNCHES[-2][0]])


@pytest.mark.parametrize(
    ("text", "processes"),
    [("", 1), ("# nothing\n", 1), ("[1, 2]", 1), ("num_processes: null", 1), ("num_processes: 4", 4), ("{}", 1)],
)
def test_a_file_of_accelerates_may_say_nothing(monkeypatch, tmp_path, text, processes):
    from gpt2_ddp.processes.launch import processes_asked_for

    file = tmp_path / "default_config.yaml"
    file.write_text(text)
    launched_by(monkeypatch, f"accelerate launch --config_file {file} train.py")
    assert processes_asked_for() == processes
    monkeypatch.setattr("accelerate.commands.config.config_args.default_yaml_config_file", str(file))
    launched_by(monkeypatch, "accelerate launch --cpu train.py")
    assert processes_asked_for() == processes


@pytest.mark.slow
def test_a_script_launched_as_a_module(config_file):
    found = launch([*ACCELERATE, "-m", "scripts.train_gpt2", *train_command(config_file, "module")[1:]])
    assert found.returncode == 0, found.stderr
    assert digest(config_file, "module")[1] == 1


@pytest.mark.slow
@pytest.mark.parametrize("value", ["", "two"])
def test_variables_of_a_launcher_that_are_no_numbers(config_file, value):
    env = dict.fromkeys(("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "PET_NNODES"), value)
    found = launch([sys.executable, *train_command(config_file, "run")], **env)
    if value:
        assert found.returncode == 2
        assert [line for line in found.stderr.splitlines() if "WORLD_SIZE = two: should be a number" in line]
        assert found.stderr.count("error:") == 1
    else:
        assert found.returncode == 0, found.stderr
        assert digest(config_file, "run")[1] == 1


def start_long_run(launcher: list[str], config_file: str, **env: str) -> subprocess.Popen:
    """Starts a run that would take for ever and waits for its third row."""
    command = [*launcher, *train_command(config_file, "long"), "--train.steps", "1000000", "--checkpoint.every", "9999"]
    process = subprocess.Popen(command, env=environment(**env), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    metrics = Path(config_file).parent / "long/metrics.jsonl"
    deadline = time.monotonic() + 90
    while not metrics.exists() or metrics.read_text().count("\n") < 4:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return process


def status(config_file: str) -> dict:
    return json.loads((Path(config_file).parent / "long/status.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "code"),
    [([sys.executable], 75), ([*TORCHRUN, "--nproc_per_node", "2", "--master_port", "{port}"], 0)],
    ids=["python", "torchrun"],
)
def test_sigterm_saves_and_says_how_to_go_on(config_file, launcher, code):
    process = start_long_run([word.format(port=free_port()) for word in launcher], config_file)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert status(config_file)["state"] == "stopped"
    assert "SIGTERM" in status(config_file)["reason"] or "another rank" in status(config_file)["reason"]
    step = status(config_file)["step"]
    assert (Path(config_file).parent / f"long/checkpoints/step-{step:08d}").is_dir()
    if launcher[0] == sys.executable:  # torchrun makes an error of its own of the SIGTERM that it got
        assert process.returncode == code


@pytest.mark.slow
def test_sigterm_to_accelerate_launch_leaves_no_orphan(config_file):
    process = start_long_run(ACCELERATE, config_file)
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    deadline = time.monotonic() + 30
    while status(config_file)["state"] == "running" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert status(config_file)["state"] == "stopped"


@pytest.mark.slow
def test_a_second_trainer_in_the_folder_is_refused(config_file):
    process = start_long_run([sys.executable], config_file)
    second = launch([sys.executable, *train_command(config_file, "long")])
    process.kill()
    process.wait()
    assert second.returncode == 2
    assert "error: run_name = long: another trainer is running in this folder" in second.stderr


@pytest.mark.slow
def test_one_process_under_a_launcher_uses_all_cores(config_file):
    """`accelerate launch` sets OMP_NUM_THREADS=1 for everybody."""
    code = (
        "import torch; from gpt2_ddp.processes.launch import build_accelerator; build_accelerator('cpu', 'no');"
        "print('threads', torch.get_num_threads())"
    )
    script = Path(config_file).with_name("threads.py")
    script.write_text(code)
    cores = usable_cores()
    port = str(free_port())
    for launcher, env, expected in (
        ([sys.executable], {}, cores),
        (ACCELERATE, {}, cores),
        (ACCELERATE, {"OMP_NUM_THREADS": "1"}, 1),
        ([*ACCELERATE, "--num_cpu_threads_per_process", "1"], {}, 1),
        ([*TORCHRUN, "--nproc_per_node", "2", "--master_port", port], {}, max(cores // 2, 1)),
    ):
        found = launch([*launcher, str(script)], **env)
        assert f"threads {expected}\n" in found.stdout, (launcher, env, found.stdout, found.stderr)
