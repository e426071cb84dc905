"""The files of cloud/: manifests fit their schemas; what
no schema knows agrees with image, trainer and torchrun."""

import os
import re
import subprocess
import sys
import time
from typing import Any, NamedTuple

import psutil
import pytest
import yaml
from commands import TORCHRUN, environment, launch
from pages import ROOT, load_docs, parse_script
from ranks import wait_until
from test_container import COMPOSED, COPIED, DOCKERFILE, UID, VOLUMES, pins

from gpt2_ddp.config import cli
from gpt2_ddp.distributed.environment import DIVERGED, STOPPED

CLOUD = ROOT / "cloud"
LAUNCH = ROOT / "cloud/launch.sh"


def documents(name, rdma=False):
    text = (CLOUD / name).read_text()
    return list(yaml.safe_load_all(text.replace("# rdma: ", "") if rdma else text))


def one(name, kind):
    (found,) = (document for document in documents(name) if document["kind"] == kind)
    return found


class Machine(NamedTuple):
    """The pod of one machine, as the Job or the TrainJob has it."""

    pod: dict[str, Any]
    container: dict[str, Any]
    nodes: int
    processes: int

    @property
    def env(self):
        return {entry["name"]: entry.get("value", "1") for entry in self.container["env"]}


def words_of(container):
    return [*container["command"], *container["args"]]


def loaded(script, folder):
    """The configuration of a script and its flags, which its parser takes."""
    parse_script(script, " ".join(script), folder)
    command, default = load_docs("reference").command_of(ROOT / script[0])
    return cli.load(command, script[1:], default)


def job_machine():
    spec = one("kubernetes.yaml", "Job")["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["completions"] == spec["parallelism"]  # all machines at once
    return Machine(
        pod, container, spec["completions"], container["resources"]["limits"]["nvidia.com/gpu"]
    )


def expanded(words, variables):
    """With values in place of $(NAME), as Kubernetes expands
    them, and of ${NAME:-DEFAULT}, as compose does."""
    named = [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word) for word in words]
    return [
        re.sub(r"\$\{(\w+):-(.+)\}", lambda found: variables.get(found[1], found[2]), word)
        for word in named
    ]


@pytest.mark.parametrize("url", [None, "s3://bucket/runs"])
def test_a_bucket_is_optional(tmp_path, monkeypatch, url):
    """For pods and compose. Credentials are in no file."""
    monkeypatch.chdir(ROOT)
    machine = job_machine()
    given = {"MIRROR": url} if url else {}
    for words in (
        expanded(words_of(machine.container), machine.env | given),
        expanded(COMPOSED["command"], given),
    ):
        script = words[words.index("scripts/train_gpt2.py") :]
        assert loaded(script, tmp_path).checkpoint.mirror == url
    assert {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} < {*COMPOSED["environment"]}
    assert machine.container["envFrom"] == [
        {"secretRef": {"name": "gpt2-secrets", "optional": True}}
    ]
    assert not [name for name in machine.env if name.startswith("AWS")]
    assert "s3fs" in pins("docker/requirements.lock")
    assert "dependencies.txt s3fs " in DOCKERFILE


def train_job_machine():
    spec = one("kubeflow.yaml", "TrainJob")["spec"]
    (patch,) = spec["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert job["name"] == container["name"] == "node", "of torch-distributed"
    trainer = spec["trainer"]
    merged = {**container, **trainer, "resources": trainer["resourcesPerNode"]}
    return Machine(pod, merged, trainer["numNodes"], trainer["numProcPerNode"])


MACHINES = (job_machine, train_job_machine)


@pytest.mark.parametrize("rdma", [False, True])
@pytest.mark.parametrize("name", ["prepare.yaml", "kubernetes.yaml", "kubeflow.yaml"])
def test_each_manifest_fits_its_schema(name, rdma):
    """The models hold the schemas of Kubernetes and of Kubeflow
    Trainer; they drop a field that they do not know."""
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api"
    )
    kinds = {
        "Service": models.IoK8sApiCoreV1Service,
        "Job": models.IoK8sApiBatchV1Job,
        "PersistentVolumeClaim": models.IoK8sApiCoreV1PersistentVolumeClaim,
        "TrainJob": models.TrainerV1alpha1TrainJob,
    }
    for document in documents(name, rdma):
        assert kinds[document["kind"]].from_dict(document).to_dict() == document


def test_the_data_of_the_pods_are_prepared_by_the_job_before(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (container,) = (prepare := one("prepare.yaml", "Job")["spec"]["template"]["spec"])["containers"]
    prepared = loaded(words_of(container)[1:], tmp_path)
    for machine in (make() for make in MACHINES):
        words = words_of(machine.container)
        assert loaded(words[words.index("scripts/train_gpt2.py") :], tmp_path).data.path == (
            prepared.output,
        )
        assert machine.pod["securityContext"] == prepare["securityContext"]
        assert machine.container["image"] == container["image"]
        assert machine.container["volumeMounts"][0] == container["volumeMounts"][0]
        assert machine.pod["volumes"][0] == prepare["volumes"][0]
    assert "nvidia.com/gpu" not in str(container)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_pod_is_one_of_the_image_with_a_gpu_for_each_process_and_time_to_save(machine):
    pod, container, _, processes = machine()
    assert re.fullmatch(rf"[^/]+/{COMPOSED['image']}:\S+", container["image"])
    files = [word for word in words_of(container) if word.endswith((".sh", ".py", ".yaml"))]
    assert len(files) == 3
    assert [file for file in files if not {file, file.partition("/")[0]} & {*COPIED}] == []
    user = pod["securityContext"]
    assert {user["runAsUser"], user["runAsGroup"], user["fsGroup"]} == {UID}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert {*VOLUMES} < {*mounts}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    claims = {
        d["metadata"]["name"]
        for d in documents("prepare.yaml")
        if d["kind"] == "PersistentVolumeClaim"
    }
    assert {
        v["persistentVolumeClaim"]["claimName"]
        for v in volumes.values()
        if "persistentVolumeClaim" in v
    } == claims
    resources = container["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == processes
    assert resources["requests"]["cpu"] >= processes
    shm = volumes["shm"]["emptyDir"]["sizeLimit"]
    memory = resources["requests"]["memory"]
    assert int(shm.removesuffix("Gi")) < int(memory.removesuffix("Gi"))  # it counts
    documented = re.findall(
        r"docker stop -t (\d+)", DOCKERFILE + (ROOT / "docs/cloud.md").read_text()
    )
    assert pod["terminationGracePeriodSeconds"] >= max(map(int, documented))


def check_launch(words, folder):
    """Holds `cloud/launch.sh torchrun ...` against torchrun's
    parser and the script's; returns the run folder."""
    from torch.distributed.run import get_args_parser

    launch, program, *rest = words
    assert program == "torchrun"
    assert os.access(ROOT / launch, os.X_OK)
    found = get_args_parser().parse_args(rest)
    config = loaded([found.training_script, *found.training_script_args], folder)
    return f"{config.output_dir}/{config.run_name}"


def test_pods_and_the_sky_task_run_what_there_is(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for machine in (make() for make in MACHINES):
        check_launch(words_of(machine.container), tmp_path)
    (task,) = documents("skypilot.yaml")
    (line,) = re.findall(r"cloud/launch\.sh .*", task["run"].replace("\\\n", ""))
    assert check_launch(line.split(), tmp_path) == "runs/gpt2_124m"
    assert line.endswith("--checkpoint.mirror $MIRROR")
    assert task["envs"]["MIRROR"].startswith("s3://")
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [STOPPED]
    assert (ROOT / re.search(r"-r (\S+)", task["setup"])[1]).is_file()
    for script in (task["setup"], task["run"]):
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


SERVICE = """
apiVersion: v1
kind: Service
metadata: {name: gpt2-124m}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector: {batch.kubernetes.io/job-name: gpt2-124m}
"""


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
    assert found.master_addr == "gpt2-124m-0.gpt2-124m"
    assert (one("kubernetes.yaml", "Job")["metadata"]["name"], machine.pod["subdomain"]) == (
        "gpt2-124m",
        "gpt2-124m",
    )
    assert one("kubernetes.yaml", "Service") == yaml.safe_load(SERVICE)
    reserved = {
        "PET_NNODES",
        "PET_NPROC_PER_NODE",
        "PET_NODE_RANK",
        "PET_MASTER_ADDR",
        "PET_MASTER_PORT",
    }
    assert not reserved & set(train_job_machine().env), (
        "Kubeflow refuses a TrainJob that sets them itself"
    )


RULES = """
- {action: Ignore, onPodConditions: [{type: DisruptionTarget, status: "True"}]}
- {action: Ignore, onExitCodes: {containerName: trainer, operator: In, values: [75]}}
- {action: FailJob, onExitCodes: {containerName: trainer, operator: In, values: [2, 3]}}
"""


def test_the_job_starts_again_what_was_stopped():
    assert (STOPPED, DIVERGED) == (75, 3)
    spec = one("kubernetes.yaml", "Job")["spec"]
    assert spec["podFailurePolicy"]["rules"] == yaml.safe_load(RULES)
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "asked for by podFailurePolicy"
    assert spec["completionMode"] == "Indexed"
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}


def launcher(folder, text):
    """A shell script that stands in for torchrun."""
    file = folder / "torchrun"
    file.write_text(f"#!/bin/bash\n{text}")
    file.chmod(0o755)
    return file


ENDS = [
    ("", 0, 0),
    ("", 1, 1),
    ("0 0", 0, 0),
    ("75 75", 0, 75),
    ("3 3", 1, 3),
    ("2", 1, 2),
    ("2 75", 1, 2),
    ("75 75 0 0", 0, 0),  # restarted by the launcher, as an elastic one does
    ("75 75", 1, 1),  # stopped by the launcher, since another rank crashed before training began
]
"""The codes that ranks have recorded, the launcher's, and that of launch.sh."""


@pytest.mark.parametrize(("codes", "code", "expected"), ENDS)
def test_launch_ends_with_what_the_run_came_to(tmp_path, codes, code, expected):
    torchrun = launcher(
        tmp_path, f'for code in {codes}; do echo $code >>"$GPT2_DDP_EXIT_CODES"; done; exit {code}'
    )
    ended = subprocess.run([LAUNCH, torchrun], env=os.environ | {"TMPDIR": str(tmp_path)})
    assert ended.returncode == expected
    assert [file.name for file in tmp_path.iterdir()] == ["torchrun"]  # the file of codes is gone


def test_a_user_error_and_a_command_that_is_not_there_end_launch_with_2(tmp_path):
    torchrun = launcher(tmp_path, f'TORCHELASTIC_RUN_ID=1 {sys.executable} "$@" || exit 1')
    wrong = [torchrun, ROOT / "scripts/train_gpt2.py", "--optim.nonsense", "3"]
    for words, error in (
        (wrong, "error: "),
        (["runs/mine", "torchrun"], "error: command = runs/mine: not found"),
    ):
        ended = subprocess.run([LAUNCH, *words], cwd=tmp_path, capture_output=True, text=True)
        assert (ended.returncode, ended.stderr.count(error)) == (2, 1)


@pytest.mark.slow
def test_torchrun_ends_with_the_code_of_its_script(tmp_path):
    """A user error that the ranks find; a stop before training begins."""
    command = [
        str(LAUNCH),
        *TORCHRUN,
        "--nproc_per_node",
        "2",
        "scripts/train_gpt2.py",
        "--train.device",
        "cpu",
    ]
    command += ["--output_dir", str(tmp_path)]
    assert launch([*command, "--data.path", "nowhere"]).returncode == 2
    process = subprocess.Popen(command, cwd=ROOT, env=environment())
    children = psutil.Process(process.pid).children
    wait_until(lambda: len(children(recursive=True)) >= 2)  # the launcher, and what it has started
    time.sleep(1)
    process.terminate()
    assert process.wait(60) == STOPPED
    assert list(tmp_path.iterdir()) == []


LAUNCHER = """
trap 'touch launcher-signalled' TERM
for rank in 0 1; do
    (trap "touch saved-$rank; exit" TERM; touch begun-$rank; while :; do sleep 0.02; done) &
done
wait; wait; wait
exit 0
"""


def check_stop(folder, text, ranks=1):
    """Stops a launch of these ranks once they have begun."""
    process = subprocess.Popen([LAUNCH, launcher(folder, text)], cwd=folder)
    wait_until(lambda: len([*folder.glob("begun*")]) == ranks)
    process.terminate()
    assert process.wait(60) == STOPPED


def test_a_stop_goes_to_the_ranks_alone(tmp_path):
    check_stop(tmp_path, LAUNCHER, 2)
    assert {"saved-0", "saved-1"} <= {file.name for file in tmp_path.iterdir()}
    assert not (tmp_path / "launcher-signalled").exists()


@pytest.mark.slow
def test_ranks_that_missed_a_signal_get_it_again(tmp_path):
    """As those that handle it later, and whose launcher
    ignores it, as that of slurm/train.sbatch does."""
    wait = "do sleep 0.02; done"
    late = (
        f"trap 'touch missed' TERM; touch begun; until [[ -e missed ]]; {wait}; trap - TERM; "
        f"while :; {wait}"
    )
    check_stop(tmp_path, f'bash -c "{late}" &\nwait; exit 1')


@pytest.mark.slow
def test_a_launcher_that_waits_for_other_machines_is_ended_after_its_ranks(tmp_path):
    """As an elastic one does, whose other machines go on."""
    check_stop(tmp_path, "mkfifo pipe\nsleep 300 &\ntouch begun; wait $!\nread <>pipe\n")
