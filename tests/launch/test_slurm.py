"""slurm/train.sbatch under a real Slurm of two nodes:
whatever happens to a job, the run ends as if nothing had."""

import fcntl
import re
import time
from pathlib import Path

import psutil
import pytest
from commands import ROOT
from runs import rows, same, status, training_config, weights
from slurm_here import SBATCH, TRAINER, WHY_NOT, slurm_in

from gpt2_ddp.config.cli import dump
from gpt2_ddp.distributed.environment import STOPPED

pytestmark = pytest.mark.cluster
STEPS = 120


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    with slurm_in(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture(scope="session")
def alone(slurm, corpus, tmp_path_factory):
    """The project folder of a job that was left alone."""
    folder = tmp_path_factory.mktemp("alone")
    changes = {
        "train.steps": STEPS,
        "train.global_batch_tokens": 8 * 32,
        "eval.every": 60,
        "checkpoint.every": 50,
    }
    (folder / "config.yaml").write_text(dump(training_config(corpus, Path("runs"), changes)))
    (folder / "scripts").mkdir()
    (folder / "scripts/train_gpt2.py").write_text(TRAINER)
    for name in ("cloud", "slurm", "configs"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "scripts/check_cluster.py").symlink_to(ROOT / "scripts/check_cluster.py")
    hurry(folder)
    completes(slurm, folder, slurm.sbatch(folder))
    return folder


@pytest.fixture
def reference(alone):
    return alone / "runs/run"


@pytest.fixture
def project(slurm, alone, tmp_path):
    """A folder to submit jobs from, whose steps are slow until `hurry`."""
    for name in ("config.yaml", "scripts", "cloud", "slurm", "configs"):
        (tmp_path / name).symlink_to(alone / name)
    (tmp_path / "pace").write_text("0.3")
    yield tmp_path
    slurm("scancel", "--user", "root")
    slurm.wait("an empty queue", lambda: not slurm("squeue", "-h"))


@pytest.fixture
def run(project):
    return project / "runs/run"


def trains(run):
    """Whether it runs, and has made a step."""
    return (
        status(run).get("state") == "running" and '"loss":' in (run / "metrics.jsonl").read_text()
    )


def said(project):
    return "\n".join(file.read_text() for file in project.glob("*.out"))


def hurry(project):
    (project / "pace.new").write_text("0")
    (project / "pace.new").rename(project / "pace")  # ranks read it at any moment


def completes(slurm, project, job):
    assert slurm.ended(job) == "COMPLETED", said(project)


def equal(run, reference):
    """Whether every step had the same data and the
    same loss, and the final weights the same bits."""
    mine = steps_of(run)
    other = steps_of(reference)
    return mine == other and len(mine) == STEPS and same(weights(run), weights(reference))


def steps_of(run):
    return [(row["step"], row["order_digest"], row["loss"]) for row in rows(run) if "loss" in row]


def begun(slurm, project):
    """The number of a job that has made a step."""
    job = slurm.sbatch(project)
    slurm.wait("a step", lambda: trains(project / "runs/run"))
    return job


def goes_on(slurm, project, job, reference, run="runs/run"):
    """Once the steps are fast, the job ends as if it had been left alone, after one restart."""
    hurry(project)
    completes(slurm, project, job)
    assert slurm.job(job)["Restarts"] == "1"
    assert equal(project / run, reference)


def test_the_time_limit(slurm, project, run, reference):
    # Slurm looks every 30 s, and warns of a limit that may come before it looks again: 25 to 55 s
    # after the start
    (warning,) = re.findall(r"--signal=(\S+)@", SBATCH.read_text())
    job = slurm.sbatch(project, "--time", "1", "--signal", f"{warning}@5")
    slurm.restarted(job)
    assert status(run)["state"] == "stopped"
    assert 0 < status(run)["step"] < STEPS
    goes_on(slurm, project, job, reference)
    assert "the time limit is near: stopping" in said(project)
    logs = [
        file.parent for file in project.glob("logs/run-*/restart-*/node-*/*/attempt_0/0/stdout.log")
    ]
    assert len(logs) == 4, "one of each rank of each attempt"


def test_a_preemption(slurm, project, run, reference):
    job = begun(slurm, project)
    slurm(
        "sbatch",
        "--partition",
        "urgent",
        "--nodes",
        "2",
        "--exclusive",
        "--wrap",
        "sleep 1",
        cwd=project,
    )
    slurm.restarted(job)
    assert status(run)["state"] == "stopped", said(project)
    goes_on(slurm, project, job, reference)


def test_an_administrators_requeue_while_the_old_trainer_is_still_dying(
    slurm, project, run, reference
):
    job = begun(slurm, project)
    slurm("scontrol", "requeue", job)
    slurm.wait("a stop", lambda: status(run).get("state") == "stopped")
    with (run / ".lock").open("r+") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        slurm.restarted(job)
        hurry(project)
        slurm.wait("begun again", lambda: slurm.job(job)["JobState"] == "RUNNING")
        time.sleep(8)  # longer than the trainer takes until it asks for the lock
    goes_on(slurm, project, job, reference)


def test_a_lost_node(slurm, project, reference):
    job = begun(slurm, project)
    slurm("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    slurm.wait("requeued", lambda: slurm.job(job)["Restarts"] == "1")
    slurm("scontrol", "update", "NodeName=n2", "State=RESUME")
    slurm.restarted(job)
    goes_on(slurm, project, job, reference)


def test_the_check_of_the_nodes_and_a_command_of_one_task(slurm, project, monkeypatch):
    """Without a launcher: srun's tasks are the ranks."""
    monkeypatch.setitem(slurm.env, "MASTER_ADDR", "127.0.0.1")  # the nodes' names lead nowhere here
    check = ("python", "scripts/check_cluster.py")
    said = slurm(
        "srun", "--nodes", "2", "--ntasks-per-node", "1", "slurm/run.sh", *check, cwd=project
    )
    assert "2 processes; " in said
    alone = slurm(
        "srun", "--ntasks", "1", "slurm/run.sh", "bash", "-c", "echo ${RANK:-none}", cwd=project
    )
    assert alone == "none"


def test_a_run_folder_elsewhere(slurm, project, reference):
    run = project / "scratch/mine"
    training = ("--output_dir", "scratch", "--run_name", "mine")
    job = slurm.sbatch(project, training=training)
    slurm.wait("a step", lambda: run.exists() and trains(run))
    slurm("scancel", "--signal=TERM", job)
    slurm.restarted(job)
    assert (status(run)["state"], "-> step-" in said(project)) == ("stopped", True), said(project)
    goes_on(slurm, project, job, reference, "scratch/mine")


@pytest.mark.parametrize("wrong", [("--optim.lr", "nowhere"), ("--data.path", "nowhere")])
def test_a_user_error(slurm, project, wrong):
    """Before the ranks are started, or by them."""
    job = slurm.sbatch(project, training=wrong)
    assert slurm.ended(job) == "FAILED", said(project)
    assert slurm.job(job)["ExitCode"] == "2:0", said(project)
    assert re.search(r"error: .* = nowhere", said(project))


def test_scancel_and_a_job_that_ends_before_its_first_step(slurm, project, run, reference):
    job = begun(slurm, project)
    slurm("scancel", job)
    assert slurm.ended(job) == "CANCELLED"
    slurm.wait("a stop", lambda: status(run).get("state") == "stopped")
    assert slurm.job(job)["Restarts"] == "0"
    hurry(project)
    completes(slurm, project, slurm.sbatch(project))
    assert equal(run, reference)


def test_a_stop_before_training_begins(slurm, project, run):
    """With and without a run of before; what waits for the run's end is not started."""
    for _ in range(2):
        job = slurm.sbatch(project)
        after = slurm(
            "sbatch", "--parsable", f"--dependency=afterok:{job}", "--wrap", "true", cwd=project
        )
        slurm.wait(
            "a step of srun", lambda number=job: slurm("squeue", "-h", "--steps", f"{number}.0")
        )
        slurm("scancel", "--batch", "--signal=USR1", job)
        assert slurm.ended(job) == "FAILED", said(project)
        assert slurm.job(job)["ExitCode"] == f"{STOPPED}:0", said(project)
        assert "the job was stopped before its first checkpoint" in said(project)
        assert slurm.job(job)["Restarts"] == "0"
        slurm.wait(
            "refused",
            lambda number=after: slurm.job(number)["Reason"] == "DependencyNeverSatisfied",
        )
        if not run.exists():
            run.mkdir(parents=True)
            (run / "status.json").write_text('{"state": "completed", "step": 120, "reason": ""}\n')


def test_a_failed_run_is_not_requeued(slurm, project, run):
    job = slurm.sbatch(project)
    slurm.wait(
        "a checkpoint, so that there is something new", lambda: list(run.glob("checkpoints/step-*"))
    )
    ranks = [p for p in psutil.process_iter(["cwd", "environ"]) if p.info["cwd"] == str(project)]
    next(p for p in ranks if p.info["environ"].get("RANK") == "1").kill()
    assert (slurm.ended(job), status(run)["state"], slurm.job(job)["Restarts"]) == (
        "FAILED",
        "failed",
        "0",
    )


def test_of_an_array_one_element_is_stopped_and_goes_on(slurm, project, reference):
    job = slurm.sbatch(project, "--array", "0-1")
    for element in "01":
        slurm.wait("a step", lambda run=project / f"runs/run-{element}": trains(run))
    numbers = {element: slurm.job(f"{job}_{element}")["JobId"] for element in "01"}
    # the one whose number is the array's
    master = next(element for element in "01" if numbers[element] == job)
    for _ in range(2):
        slurm("scancel", "--signal=TERM", f"{job}_{master}")
    slurm.restarted(f"{job}_{master}")
    hurry(project)
    for element in "01":
        completes(slurm, project, f"{job}_{element}")
        assert slurm.job(f"{job}_{element}")["Restarts"] == str(int(element == master))
        assert equal(project / f"runs/run-{element}", reference)
