"""The image: what its files say of each other, and what a built one does (`make test-image`)."""

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from functools import cache
from pathlib import Path

import pytest
import yaml

import gpt2_ddp
from gpt2_ddp.distributed.environment import STOPPED

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PIN = re.compile(r"^([\w.-]+)==([\w.+]+)", re.MULTILINE)


def pins(file: str) -> dict[str, str]:
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in PIN.findall((ROOT / file).read_text())}


def test_every_path_that_is_copied_goes_to_the_builder():
    copied = " ".join(re.findall(r"^COPY ((?!--from).+) \S+$", DOCKERFILE, re.MULTILINE)).split()
    taken = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert len(copied) > 6
    assert [path for path in copied if not (ROOT / path).exists()] == []
    assert {path.split("/")[0] for path in copied} == taken


def test_the_lock_has_what_requirements_txt_pins():
    lock = pins("docker/requirements.lock")
    assert pins("requirements.txt").items() <= lock.items(), "`make lock` renews it"
    assert "nvidia-nccl-cu13" in lock, "the CUDA build's own dependencies"
    cuda = ".".join(lock["cuda-toolkit"].split(".")[:2])
    assert f"contains CUDA {cuda}." in (ROOT / "docs/cloud.md").read_text(), "the page names the driver that it needs"
    assert "://" not in (ROOT / "docker/requirements.lock").read_text()


def test_compose_mounts_the_volumes_and_names_files_that_the_image_has():
    assert f'image.version="{gpt2_ddp.__version__}"' in DOCKERFILE
    train = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["train"]
    volumes = re.search(r"^VOLUME (.+)$", DOCKERFILE, re.MULTILINE)
    assert volumes
    assert [volume.split(":")[1] for volume in train["volumes"]] == json.loads(volumes[1])
    uid = re.search(r"--uid (\d+)", DOCKERFILE)
    assert uid
    assert train["user"] == f"${{OWNER:-{uid[1]}:{uid[1]}}}"
    files = [word for word in train["command"] if "/" in word]
    assert len(files) == 2
    assert [file for file in files if not (ROOT / file).is_file()] == []


IMAGE = os.environ.get("IMAGE", "gpt2_ddp")
TINY = (
    "--data.path data/tiny --run_name tiny --train.device cpu --model.n_layer 1 --model.n_head 2 --model.n_embd 32"
    " --model.block_size 32 --train.global_batch_tokens 256 --train.steps 1000000 --eval.every 1000000"
    " --optim.warmup_steps 2 --tracking.sample_every 0"
)


TRAINER = """trap 'echo saved; exit "${1:-0}"' TERM; echo up; for _ in {1..500}; do sleep 0.02; done; exit 9"""
LAUNCHER = """trap 'echo launcher hit; exit 1' TERM; bash trainer 0; exit $?"""


@pytest.mark.parametrize(("words", "code"), [
    ("-q train.py", 75), ("torchrun train.py", 75), ("python -u -m torch.distributed.run train.py", 75),
    ("bash trainer 75", 75), ("bash -c exit\\ 3", 3),
])  # fmt: skip
def test_the_entry_point_tells_the_trainer_to_stop_and_ends_as_it_does(tmp_path, words, code):
    """With shells in place of the programs. A launcher would end with 1 if it were signalled itself."""
    for name, text in {"trainer": TRAINER, **dict.fromkeys(("accelerate", "torchrun", "python"), LAUNCHER)}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [str(ROOT / "docker/entrypoint.sh"), *shlex.split(words)]
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as found:
        assert found.stdout
        if code != 3:
            assert found.stdout.readline() == "up\n"
            found.terminate()
            assert found.stdout.read() == "saved\n"
    assert found.returncode == code


@cache
def runs_it() -> list[str]:
    """The command that runs an image, with the flags of its own that a machine needs."""
    docker = shutil.which("docker") and not subprocess.run(["docker", "info"], capture_output=True).returncode
    return shlex.split(os.environ.get("RUN", "docker run" if docker else "podman run"))


def manage(*words: str) -> str:
    program = runs_it()[: runs_it().index("run")]
    return subprocess.run([*program, *words], check=True, capture_output=True, text=True, timeout=120).stdout.strip()


@pytest.fixture(scope="module")
def image() -> str:
    try:
        manage("image", "inspect", IMAGE)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"{runs_it()[0]} has no image {IMAGE}: `make image`, by docker, or by buildah and podman")
    return IMAGE


def flags(folder: Path) -> list[str]:
    """As compose.yaml has it: nothing can be written but /tmp and the volumes."""
    mounts = []
    for name in ("data", "runs"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name).chmod(0o777)
        mounts += ["--volume", f"{folder / name}:/app/{name}"]
    safe = ["--network", "none", "--read-only", "--tmpfs", "/tmp:exec,mode=1777", "--cap-drop", "ALL"]
    return [*safe, "--security-opt", "no-new-privileges", "--shm-size", "256m", "--env", "OMP_NUM_THREADS=1", *mounts]


def run(image: str, folder: Path, *words: str) -> subprocess.CompletedProcess:
    command = [*runs_it(), "--rm", *flags(folder), image, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.image
def test_two_steps_are_trained_where_only_tmp_and_the_volumes_can_be_written(image, tmp_path):
    found = run(image, tmp_path, "health")
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.splitlines()[-1].startswith("health: two steps on ")
    assert list(tmp_path.glob("*/*")) == [], "it leaves nothing"
    found = run(image, tmp_path, "bash", "-c", "id -u; touch /app/x; touch runs/y && cat /proc/1/comm")
    assert found.stdout.splitlines()[0] == "1001"
    assert "Read-only file system" in found.stderr
    assert (tmp_path / "runs/y").stat().st_uid == 1001


@pytest.mark.image
def test_nccl_finds_the_library_and_the_drivers_of_infiniband(image, tmp_path):
    load = "import ctypes, glob; ctypes.CDLL('libibverbs.so.1'); print(glob.glob('/usr/lib/*/libibverbs/libmlx5*'))"
    found = run(image, tmp_path, "python", "-c", load)
    assert "libmlx5" in found.stdout, found.stderr


@pytest.mark.image
def test_nothing_of_the_builder_s_pip_is_left(image, tmp_path):
    history = manage("history", "--no-trunc", image)
    assert "index-url" not in history
    assert "find-links" not in history
    places = "/etc/pip.conf /run/secrets /opt/venv/pip.conf /tmp/requirements.lock"
    found = run(image, tmp_path, "bash", "-c", f"env | grep ^PIP_; ls -A {places} 2>/dev/null; echo looked")
    assert found.stdout == "looked\n"


LAUNCHED = ("", "--config_file configs/accelerate/cpu_processes.yaml", "torchrun --nproc_per_node 2", "python")


@pytest.mark.image
@pytest.mark.parametrize("words", LAUNCHED)
def test_a_stopped_container_has_saved_and_the_same_command_goes_on(image, tmp_path, words):
    prepare = "python scripts/prepare_data.py --source gpt2_ddp/**/*.py --tokenizer bytes --output data/tiny"
    prepared = run(image, tmp_path, *prepare.split())
    assert prepared.returncode == 0, prepared.stderr
    file, last = tmp_path / "runs/tiny/status.json", 0
    for _ in range(2):
        begin = [*runs_it()[runs_it().index("run") :], "--detach"]
        container = manage(*begin, *flags(tmp_path), image, *words.split(), "scripts/train_gpt2.py", *TINY.split())
        try:
            for _ in range(600):
                status = json.loads(file.read_text()) if file.exists() else {}
                if status.get("state") == "running" and status["step"] > last + 3:
                    break
                assert manage("inspect", "--format", "{{.State.Running}}", container) == "true"
                time.sleep(0.3)
            manage("stop", "--time", "60", container)
            assert int(manage("wait", container)) == STOPPED
            status = json.loads(file.read_text())
            assert status["state"] == "stopped"
            assert (tmp_path / f"runs/tiny/checkpoints/step-{status['step']:08d}").is_dir()
            assert status["step"] > last
            last = status["step"]
        except BaseException:
            print(manage("logs", container))
            raise
        finally:
            manage("rm", "--force", container)
    rows = map(json.loads, (tmp_path / "runs/tiny/metrics.jsonl").open())
    assert sum(row.get("event") == "start" for row in rows) == 2, "the second one went on"
