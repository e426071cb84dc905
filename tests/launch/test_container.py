"""The image: what its files say of each other, and what a built one does (`make test-image`)."""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import time
from functools import cache

import pytest
import yaml
from commands import ROOT
from runs import checkpoint_at, events, status

import gpt2_ddp
from gpt2_ddp.distributed.environment import STOPPED

DOCKERFILE = (ROOT / "Dockerfile").read_text()
COPIED = " ".join(re.findall(r"^COPY ((?!--from).+) \S+$", DOCKERFILE, re.MULTILINE)).split()
(VOLUMES,) = map(json.loads, re.findall(r"^VOLUME (.+)$", DOCKERFILE, re.MULTILINE))
(UID,) = map(int, re.findall(r"--uid (\d+)", DOCKERFILE))
COMPOSED = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["train"]
PIN = re.compile(r"^([\w.-]+)==([\w.+]+)", re.MULTILINE)


def pins(file):
    return {
        re.sub(r"[-_.]+", "-", name).lower(): version
        for name, version in PIN.findall((ROOT / file).read_text())
    }


def test_every_path_that_is_copied_goes_to_the_builder():
    taken = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert [path for path in COPIED if not (ROOT / path).exists()] == []
    assert {path.split("/")[0] for path in COPIED} == taken


def test_the_lock_has_what_requirements_txt_pins():
    lock = pins("docker/requirements.lock")
    assert pins("requirements.txt").items() <= lock.items(), "`make lock` renews it"
    assert "nvidia-nccl-cu13" in lock, "the CUDA build's own dependencies"
    cuda = ".".join(lock["cuda-toolkit"].split(".")[:2])
    assert f"contains CUDA {cuda}." in (ROOT / "docs/cloud.md").read_text(), (
        "the page names the driver that it needs"
    )
    assert "://" not in (ROOT / "docker/requirements.lock").read_text()


def test_compose_mounts_the_volumes_and_names_files_that_the_image_has():
    assert f'image.version="{gpt2_ddp.__version__}"' in DOCKERFILE
    assert [volume.split(":")[1] for volume in COMPOSED["volumes"]] == VOLUMES
    assert COMPOSED["user"] == f"${{OWNER:-{UID}:{UID}}}"
    files = [word for word in COMPOSED["command"] if "/" in word]
    assert len(files) == 2
    assert [file for file in files if not (ROOT / file).is_file()] == []


PIP_LISTED = """
:env:.find-links='{0}/wheels https://wheels.example/x'
:env:.cert='{0}/ca.pem'
global.find-links='/else'
global.constraint='{0}/limits.txt {0}/none.txt'
global.index-url='https://name:secret@index.example/simple'
install.extra-index-url='\\nfile://{0}/my%20index/simple\\nhttps://other.example'
install.trusted-host='index.example'
"""
PIP_SET = """\
[global]
find-links = /run/pip/0/wheels https://wheels.example/x
cert = /run/secrets/ca
constraint = /run/pip/1/limits.txt {0}/none.txt
index-url = https://name:secret@index.example/simple
extra-index-url = file:///run/pip/2/my%20index/simple https://other.example
trusted-host = index.example
"""


def test_what_pip_s_settings_name_is_brought_along(tmp_path):
    """Files, folders of wheels, and an index in a folder with the packages beside its pages."""
    for name in (
        "wheels/a.whl",
        "limits.txt",
        "my index/simple/a/index.html",
        "my index/files/a.whl",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (folder := tmp_path / "brought").mkdir()
    settings = runpy.run_path(str(ROOT / "docker/pip_settings.py"))["settings"]
    assert settings(PIP_LISTED.format(tmp_path), folder) == PIP_SET.format(tmp_path)
    found = {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }
    wanted = (
        "0/wheels/a.whl",
        "1/limits.txt",
        "2/my index/simple/a/index.html",
        "2/my index/files/a.whl",
    )
    assert found == {name: name.partition("/")[2] for name in wanted}


def test_the_builder_gets_what_the_dockerfile_mounts(tmp_path):
    """With a program in place of buildah, and pip's settings of the environment alone."""
    (tmp_path / "limits.txt").write_text("torch<3\n")
    for name, text in {"docker": "exit 1", "buildah": BUILDER}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_CONSTRAINT": f"{tmp_path}/limits.txt",
    }
    command = [str(ROOT / "docker/build.sh"), "--isolation", "chroot"]
    found = subprocess.run(
        command, env=env | {"PYTHON": sys.executable}, capture_output=True, text=True, check=True
    )
    words, settings, content = found.stdout.split("---\n")
    assert {"--isolation", "chroot"} <= {*words.split()}
    assert "constraint = /run/pip/0/limits.txt" in settings
    assert content == "torch<3\n"
    mounted = re.findall(r"--mount=type=\w+,(?:id|from)=(\w+)", DOCKERFILE)
    assert {*mounted} == {*re.findall(r"(?:id=|context )(\w+)", words.replace("pip=", "pip "))}


BUILDER = """echo "$@"
for word in "$@"; do [[ $word != id=pip,src=* ]] || { echo ---; cat "${word#id=pip,src=}"; }; done
for word in "$@"; do [[ $word != pip=* ]] || { echo ---; cat "${word#pip=}"/0/limits.txt; }; done"""

IMAGE = os.environ.get("IMAGE", "gpt2_ddp")
TINY = (
    "--data.path data/tiny --run_name tiny --train.device cpu --model.n_layer 1 --model.n_head 2"
    " --model.n_embd 32 --model.block_size 32 --train.global_batch_tokens 256"
    " --train.steps 1000000 --eval.every 1000000 --optim.warmup_steps 2 --tracking.sample_every 0"
)


TRAINER = """trap 'echo saved; exit "${1:-0}"' TERM
echo up
for _ in {1..500}; do sleep 0.02; done
exit 9
"""
LAUNCHER = """trap 'echo launcher hit; exit 1' TERM; bash trainer 0; exit $?"""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("-q train.py", 75),
        ("python -u -m torch.distributed.run train.py", 75),
        ("bash trainer 75", 75),
        ("bash -c exit\\ 3", 3),
    ],
)
def test_the_entry_point_tells_the_trainer_to_stop_and_ends_as_it_does(tmp_path, words, code):
    """With shells in place of the programs. A launcher
    would end with 1 if it were signalled itself."""
    for name, text in {"trainer": TRAINER, "accelerate": LAUNCHER, "python": LAUNCHER}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [str(ROOT / "docker/entrypoint.sh"), *shlex.split(words)]
    with subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True
    ) as found:
        if code != 3:
            assert found.stdout.readline() == "up\n"
            found.terminate()
            assert found.stdout.read() == "saved\n"
    assert found.returncode == code


@cache
def runs_it():
    """The command that runs an image, with the flags of its own that a machine needs."""
    docker = (
        shutil.which("docker")
        and not subprocess.run(["docker", "info"], capture_output=True).returncode
    )
    return shlex.split(os.environ.get("RUN", "docker run" if docker else "podman run"))


def manage(*words):
    program = runs_it()[: runs_it().index("run")]
    return subprocess.run(
        [*program, *words], check=True, capture_output=True, text=True, timeout=120
    ).stdout.strip()


@pytest.fixture(scope="module")
def image():
    try:
        manage("image", "inspect", IMAGE)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(
            f"{runs_it()[0]} has no image {IMAGE}: `make image`, by docker, or by buildah and "
            "podman"
        )
    return IMAGE


def flags(folder):
    """As compose.yaml has it: nothing can be written but /tmp and the volumes."""
    mounts = []
    for name in ("data", "runs"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name).chmod(0o777)
        mounts += ["--volume", f"{folder / name}:/app/{name}"]
    safe = [
        "--network",
        "none",
        "--read-only",
        "--tmpfs",
        "/tmp:exec,mode=1777",
        "--cap-drop",
        "ALL",
    ]
    return [
        *safe,
        "--security-opt",
        "no-new-privileges",
        "--shm-size",
        "256m",
        "--env",
        "OMP_NUM_THREADS=1",
        *mounts,
    ]


def run(image, folder, *words):
    command = [*runs_it(), "--rm", *flags(folder), image, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.image
def test_two_steps_are_trained_where_only_tmp_and_the_volumes_can_be_written(image, tmp_path):
    found = run(image, tmp_path, "health")
    assert found.returncode == 0, found.stdout + found.stderr
    assert list(tmp_path.glob("*/*")) == [], "it leaves nothing"
    found = run(
        image, tmp_path, "bash", "-c", "id -u; touch /app/x; touch runs/y && cat /proc/1/comm"
    )
    assert found.stdout.splitlines()[0] == "1001"
    assert "Read-only file system" in found.stderr
    assert (tmp_path / "runs/y").stat().st_uid == 1001


@pytest.mark.image
def test_nccl_finds_the_library_and_the_drivers_of_infiniband(image, tmp_path):
    load = (
        "import ctypes, glob; ctypes.CDLL('libibverbs.so.1'); "
        "print(glob.glob('/usr/lib/*/libibverbs/libmlx5*'))"
    )
    found = run(image, tmp_path, "python", "-c", load)
    assert "libmlx5" in found.stdout, found.stderr


@pytest.mark.image
def test_nothing_of_the_builder_s_pip_is_left(image, tmp_path):
    assert not re.search("index-url|find-links", manage("history", "--no-trunc", image))
    places = "/etc/pip.conf /run/secrets /opt/venv/pip.conf /tmp/requirements.lock"
    found = run(
        image, tmp_path, "bash", "-c", f"env | grep ^PIP_; ls -A {places} 2>/dev/null; echo looked"
    )
    assert found.stdout == "looked\n"


LAUNCHED = (
    "",
    "--config_file configs/accelerate/cpu_processes.yaml",
    "torchrun --nproc_per_node 2",
    "python",
)


@pytest.mark.image
@pytest.mark.parametrize("words", LAUNCHED)
def test_a_stopped_container_has_saved_and_the_same_command_goes_on(image, tmp_path, words):
    prepare = (
        "python scripts/prepare_data.py --source gpt2_ddp/**/*.py --tokenizer bytes"
        " --output data/tiny"
    )
    prepared = run(image, tmp_path, *prepare.split())
    assert prepared.returncode == 0, prepared.stderr
    place = tmp_path / "runs/tiny"
    last = 0
    for _ in range(2):
        begin = [*runs_it()[runs_it().index("run") :], "--detach"]
        container = manage(
            *begin, *flags(tmp_path), image, *words.split(), "scripts/train_gpt2.py", *TINY.split()
        )
        try:
            for _ in range(600):
                now = status(place)
                if now.get("state") == "running" and now["step"] > last + 3:
                    break
                assert manage("inspect", "--format", "{{.State.Running}}", container) == "true"
                time.sleep(0.3)
            manage("stop", "--time", "60", container)
            assert int(manage("wait", container)) == STOPPED
            now = status(place)
            assert now["state"] == "stopped"
            assert checkpoint_at(place, now["step"]).is_dir()
            last = now["step"]
        except BaseException:
            print(manage("logs", container))
            raise
        finally:
            manage("rm", "--force", container)
    assert len(events(place, "start")) == 2, "the second one went on"
