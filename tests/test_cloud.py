"""The files of cloud/: each fits its schema, and what a schema cannot know agrees with image, trainer and torchrun."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from pages import ROOT, load_docs, parse_script

from gpt2_ddp.config import cli
from gpt2_ddp.distributed.environment import DIVERGED, STOPPED

CLOUD, LAUNCH = ROOT / "cloud", ROOT / "cloud/launch.sh"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
"""What cloud/launch.sh ends with then."""


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((CLOUD / name).read_text()))


def one(name: str, kind: str) -> dict[str, Any]:
    (found,) = (document for document in documents(name) if document["kind"] == kind)
    return found


class Machine(NamedTuple):
    """The pod of one machine, as the Job or the TrainJob has it."""

    pod: dict[str, Any]
    container: dict[str, Any]
    nodes: int
    processes: int

    @property
    def env(self) -> dict[str, str]:
        return {entry["name"]: entry.get("value", "1") for entry in self.container["env"]}


def job_machine() -> Machine:
    spec = one("kubernetes.yaml", "Job")["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert spec["completions"] == spec["parallelism"], "all machines at once"
    assert spec["completions"] == int(env["PET_NNODES"])
    return Machine(pod, container, spec["completions"], int(env["PET_NPROC_PER_NODE"]))


def train_job_machine() -> Machine:
    spec = one("kubeflow.yaml", "TrainJob")["spec"]
    (patch,) = spec["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert job["name"] == container["name"] == "node", "of torch-distributed"
    trainer = spec["trainer"]
    merged = {**container, **trainer, "resources": trainer["resourcesPerNode"]}
    return Machine(pod, merged, trainer["numNodes"], trainer["numProcPerNode"])


MACHINES = [pytest.param(job_machine, id="kubernetes.yaml"), pytest.param(train_job_machine, id="kubeflow.yaml")]


@pytest.mark.parametrize("name", ["kubernetes.yaml", "kubeflow.yaml"])
def test_each_manifest_fits_its_schema(name):
    """The models hold the schemas of Kubernetes and of Kubeflow Trainer; they drop a field that they do not know."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    kinds = {
        "Service": models.IoK8sApiCoreV1Service,
        "PersistentVolumeClaim": models.IoK8sApiCoreV1PersistentVolumeClaim,
        "Job": models.IoK8sApiBatchV1Job,
        "TrainJob": models.TrainerV1alpha1TrainJob,
    }
    for document in documents(name):
        assert kinds[document["kind"]].from_dict(document).to_dict() == document


def test_the_sky_task_fits_its_schema():
    schemas = pytest.importorskip("sky.utils.schemas", reason="pip install skypilot")
    from jsonschema import validate

    (task,) = documents("skypilot.yaml")
    resources = task.pop("resources")
    validate(task, schemas.get_task_schema())
    validate(resources, schemas.get_resources_schema())


@pytest.mark.parametrize("machine", MACHINES)
def test_a_pod_is_one_of_the_image(machine):
    pod, container, *_ = machine()
    image = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["train"]["image"]
    assert re.fullmatch(rf"[^/]+/{image}:\S+", container["image"])
    copied = " ".join(re.findall(r"^COPY ((?!--from).+) \S+$", DOCKERFILE, re.MULTILINE)).split()
    files = [word for word in (*container["command"], *container["args"]) if word.endswith((".sh", ".py", ".yaml"))]
    assert len(files) == 3
    assert [file for file in files if not {file, file.partition("/")[0]} & set(copied)] == []
    uid = int(re.search(r"--uid (\d+)", DOCKERFILE)[1])
    user = pod["securityContext"]
    assert (user["runAsUser"], user["runAsGroup"], user["fsGroup"]) == (uid, uid, uid)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert set(yaml.safe_load(re.search(r"^VOLUME (.*)$", DOCKERFILE, re.MULTILINE)[1])) < set(mounts)
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    claims = {d["metadata"]["name"] for d in documents("kubernetes.yaml") if d["kind"] == "PersistentVolumeClaim"}
    assert {v["persistentVolumeClaim"]["claimName"] for v in volumes.values() if "persistentVolumeClaim" in v} == claims


@pytest.mark.parametrize("machine", MACHINES)
def test_a_pod_has_a_gpu_for_each_process_and_time_to_save(machine):
    pod, container, _, processes = machine()
    assert container["resources"]["limits"]["nvidia.com/gpu"] == processes
    documented = [
        int(s) for s in re.findall(r"docker stop -t (\d+)", DOCKERFILE + (ROOT / "docs/cloud.md").read_text())
    ]
    assert pod["terminationGracePeriodSeconds"] >= max(documented)


def check_launch(words: list[str], folder: Path) -> None:
    """Holds `cloud/launch.sh RUN torchrun ...` against torchrun's parser, the script's, and where the run will be."""
    from torch.distributed.run import get_args_parser

    launch, run, program, *rest = words
    assert program == "torchrun"
    assert os.access(ROOT / launch, os.X_OK)
    assert "cloud" not in (ROOT / ".dockerignore").read_text().split()
    found = get_args_parser().parse_args(rest)
    script = [found.training_script, *found.training_script_args]
    parse_script(script, " ".join(words), folder)
    config = cli.load(*_loaded(script))
    assert run == f"{config.output_dir}/{config.run_name}"


def _loaded(script: list[str]) -> tuple[Any, list[str], Any]:
    command, default = load_docs("reference").command_of(ROOT / script[0])
    return command, script[1:], default


@pytest.mark.parametrize("machine", MACHINES)
def test_a_pod_runs_what_there_is(machine, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    container = machine().container
    check_launch([*container["command"], *container["args"]], tmp_path)


def test_the_sky_task_runs_what_there_is(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (task,) = documents("skypilot.yaml")
    (line,) = re.findall(r"cloud/launch\.sh .*", task["run"].replace("\\\n", ""))
    check_launch(line.replace("$RUN", task["envs"]["RUN"]).split(), tmp_path)
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [STOPPED]
    assert (ROOT / re.search(r"-r (\S+)", task["setup"])[1]).is_file()
    for script in (task["setup"], task["run"]):
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_torchrun_reads_the_pods_variables(monkeypatch):
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config
    from torch.distributed.run import get_args_parser

    machine = job_machine()
    for name, value in machine.env.items():
        monkeypatch.setenv(name, value)
    found = get_args_parser().parse_args(["train.py"])
    assert (found.nnodes, found.nproc_per_node) == (str(machine.nodes), str(machine.processes))
    assert (found.node_rank, found.rdzv_backend, found.master_port) == (1, "static", 29500)
    assert int(_parse_rendezvous_config(found.rdzv_conf)["timeout"]) > 900
    job, service = one("kubernetes.yaml", "Job"), one("kubernetes.yaml", "Service")
    subdomain = job["spec"]["template"]["spec"]["subdomain"]
    assert subdomain == service["metadata"]["name"]
    assert found.master_addr == f"{job['metadata']['name']}-0.{subdomain}"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}


def test_the_train_job_leaves_the_runtimes_variables_alone():
    """Kubeflow refuses a TrainJob that sets them itself."""
    reserved = {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}
    assert not reserved & set(train_job_machine().env)


def test_the_job_starts_again_what_was_stopped():
    spec = one("kubernetes.yaml", "Job")["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    actions = {}
    for rule in spec["podFailurePolicy"]["rules"]:
        if codes := rule.get("onExitCodes"):
            assert (codes["containerName"], codes["operator"]) == (container["name"], "In")
            actions |= dict.fromkeys(codes["values"], rule["action"])
        else:
            assert [condition["type"] for condition in rule["onPodConditions"]] == ["DisruptionTarget"]
            assert rule["action"] == "Ignore"
    assert actions == {STOPPED: "Ignore", DIVERGED: "FailJob", 2: "FailJob"}
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "asked for by podFailurePolicy"
    assert spec["completionMode"] == "Indexed"
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}


@pytest.mark.parametrize(
    ("code", "state", "expected"),
    [
        (0, "completed", 0),
        (0, "stopped", STOPPED),
        (0, "running", STOPPED),  # another machine's: rank 0 has not written how it ended yet
        (0, None, 2),
        (1, "diverged", DIVERGED),
        (1, "failed", 1),
        (1, "stopped", 1),  # of the session before: this one did not come up
        (1, "completed", 1),
        (1, None, 1),
    ],
)
def test_launch_ends_with_what_the_run_came_to(tmp_path, code, state, expected):
    if state:
        (tmp_path / "status.json").write_text(f'{{"state": "{state}", "step": 3, "reason": ""}}\n')
    ended = subprocess.run([LAUNCH, tmp_path, "bash", "-c", f"exit {code}"], capture_output=True, text=True)
    assert (ended.returncode, "has no status.json" in ended.stderr) == (expected, state is None and code == 0)


LAUNCHER = """#!/bin/bash
trap 'touch launcher-signalled' TERM
for rank in 0 1; do
    (trap "touch saved-$rank; exit" TERM; touch ready-$rank; while :; do sleep 0.02; done) &
done
wait; wait; wait
exit 0
"""


def test_a_stop_goes_to_the_ranks_alone(tmp_path):
    (tmp_path / "status.json").write_text('{"state": "stopped", "step": 3, "reason": "SIGTERM"}\n')
    launcher = tmp_path / "torchrun"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    process = subprocess.Popen([LAUNCH, ".", launcher], cwd=tmp_path)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("ready-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == STOPPED
    assert {"saved-0", "saved-1"} <= {file.name for file in tmp_path.iterdir()}
    assert not (tmp_path / "launcher-signalled").exists()


@pytest.mark.slow
def test_a_launcher_that_waits_for_other_machines_is_ended_after_its_ranks(tmp_path):
    """As an elastic one does, whose other machines go on."""
    launcher = tmp_path / "torchrun"
    launcher.write_text("#!/bin/bash\nsleep 300 &\ntouch begun; wait $!\nsleep 60 & wait $!\n")
    launcher.chmod(0o755)
    process = subprocess.Popen([LAUNCH, "-", launcher], cwd=tmp_path)
    while not (tmp_path / "begun").exists():
        time.sleep(0.02)
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
