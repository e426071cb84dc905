"""A real Slurm of two nodes on this machine, for the
tests: munged, slurmctld and two slurmd in one folder."""

import os
import re
import shutil
import subprocess
import time
from contextlib import contextmanager, suppress

import psutil
from commands import BIN, ROOT, environment

from gpt2_ddp.distributed.spawn import reserve_port

SBATCH = ROOT / "slurm/train.sbatch"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
MISSING = ", ".join(name for name in PROGRAMS if not shutil.which(name))
WHY_NOT = (
    f"no {MISSING}: install slurm-wlm and munge"
    if MISSING
    else ""
    if os.geteuid() == 0
    else "needs root"
)
"""Why there cannot be a Slurm here; empty where there can."""

CONF = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
FirstJobId={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
# TERM reaches the group of a task's process, and not the ranks: torchrun starts them in sessions
# of their own
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1
# the site's own ways that a job must not depend on
JobRequeue=0
KillOnBadExit=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=1
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={port1} CPUs=2
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={port2} CPUs=2
PartitionName=main Nodes=n1,n2 Default=YES PriorityTier=1
PartitionName=urgent Nodes=n1,n2 PriorityTier=2
"""


class Slurm:
    """What a test does with it; `conf` is its slurm.conf."""

    def __init__(self, conf):
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        own = {name: value for name, value in environment().items() if not name.startswith("SLURM")}
        self.env = own | {
            "SLURM_CONF": str(conf),
            "PATH": path,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        self.env["GLOO_SOCKET_IFNAME"] = "lo"

    def __call__(self, *command, cwd=None):
        done = subprocess.run(
            command, env=self.env, cwd=cwd, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def sbatch(self, project, *flags, training=()):
        """Submits train.sbatch from a project folder, without GPUs; returns the job's number."""
        small = (
            "--job-name",
            "run",
            "--gpus-per-node",
            "0",
            "--cpus-per-task",
            "1",
            "--time",
            "10",
        )
        command = (*small, *flags, str(SBATCH), "--config", "config.yaml", *training)
        return self("sbatch", "--parsable", *command, cwd=project)

    def job(self, job):
        """What Slurm says of a job, like its JobState and Restarts."""
        return dict(re.findall(r"(\S+?)=(\S*)", self("scontrol", "show", "job", "--oneliner", job)))

    def wait(self, what, found, seconds=200):
        end = time.monotonic() + seconds
        while not found():
            assert time.monotonic() < end, f"not within {seconds} s: {what}\n{self('squeue')}"
            time.sleep(1)

    def restarted(self, job, times=1):
        """Waits until the job has been requeued, and begins it
        again at once: Slurm itself waits for two minutes."""
        while (found := self.job(job))["Restarts"] != str(times):
            assert found["JobState"] not in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), (
                "not requeued"
            )
            time.sleep(1)
        self.wait("pending", lambda: self.job(job)["JobState"] in ("PENDING", "RUNNING"))
        if self.job(job)["JobState"] == "PENDING":
            self("scontrol", "update", f"JobId={job}", "StartTime=now", "TimeLimit=10")

    def ended(self, job):
        """Waits until the job has ended for good; returns its state."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        self.wait("ended", lambda: self.job(job)["JobState"] in over)
        return self.job(job)["JobState"]


@contextmanager
def slurm_in(folder):
    """Starts the daemons, and ends them and all that they have started, whatever happens."""
    conf = folder / "slurm.conf"
    key = folder / "munge.key"
    conf.write_text(
        CONF.format(folder=folder, port=reserve_port(), port1=reserve_port(), port2=reserve_port())
    )
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    (folder / "state").mkdir()
    slurm = Slurm(conf)
    munge = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    commands = (
        [
            "munged",
            "--foreground",
            "--force",
            "--num-threads=1",
            f"--socket={folder}/munge.socket",
            *munge,
        ],
        ["slurmctld", "-D", "-c"],
        ["slurmd", "-D", "-N", "n1"],
        ["slurmd", "-D", "-N", "n2"],
    )
    daemons = []
    try:
        for command in commands:
            with (folder / f"{len(daemons)}.said").open("w") as said:
                daemons.append(subprocess.Popen(command, env=slurm.env, stdout=said, stderr=said))
            slurm.wait("munge's socket", (folder / "munge.socket").exists, 20)
        slurm.wait(
            "idle nodes",
            lambda: slurm("sinfo", "-h", "-t", "idle", "-o", "%D", "-p", "main") == "2",
            60,
        )
        yield slurm
    finally:
        for process in psutil.process_iter(["environ", "open_files"]):
            # slurmstepd hides its environment
            files = {file.path for file in process.info["open_files"] or ()}
            if (process.info["environ"] or {}).get("SLURM_CONF") == str(conf) or {
                f"{folder}/n1.log",
                f"{folder}/n2.log",
            } & files:
                with suppress(psutil.Error):
                    process.kill()
        for daemon in daemons:
            daemon.kill()
            daemon.wait()


TRAINER = """\
import os
import time
from pathlib import Path

from gpt2_ddp.script import run_command
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.distributed.environment import exit_code


def main(config):
    from gpt2_ddp.training import loop
    from gpt2_ddp.tasks.pretraining import Pretraining

    def paced(function):
        def later(what):
            time.sleep(float(Path("pace").read_text()))
            return function(what)

        return later

    loop.train_step, os.fsync = paced(loop.train_step), paced(os.fsync)
    return exit_code(loop.train(config, Pretraining).outcome)


run_command(TrainingConfig, main)
"""
"""scripts/train_gpt2.py without a report, with steps that last as
long as the file `pace` says, and saves that last ten times as long:
what ends a rank with its launcher ends it before it has saved."""
