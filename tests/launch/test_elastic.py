"""An elastic job on two and three machines with a shared disk: it goes on by itself when a machine
is lost, is stopped or joins. Order digest and losses are those of the run left alone.

`make test-cluster ARGS=-s` prints seconds from each fault to the next step, and the steps that were
lost.
"""

import json
import signal
import time

import pytest
from close import assert_close
from machines import WIRE, Machine, joined_machines, nothing_is_left  # noqa: F401
from pages import ROOT, commands
from ranks import wait_until
from runs import training_config

from gpt2_ddp.config.cli import dump

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("nothing_is_left")]

STEPS = 600
EVERY = 20
"""Steps of the run, and between its checkpoints."""
PACED = """
import runpy, time
from gpt2_ddp.training import loop

step = loop.train_step
loop.train_step = lambda run: (time.sleep(0.1), step(run))[1]
runpy.run_path("scripts/train_gpt2.py", run_name="__main__")
"""
"""The script with steps that last: machines take seconds to join."""
(COMMAND,) = [
    command.text
    for command in commands(ROOT / "docs/several-machines.md")
    if "--nnodes 1:4" in command.text
]


class Job:
    """An elastic run on machines, of which the last has the rendezvous.

    Args:
        folder: on the shared disk.
    """

    def __init__(self, machines, folder, corpus):
        self.machines = machines
        self.run = folder / "run"
        changes = {
            "train.steps": STEPS,
            "checkpoint.every": EVERY,
            "train.patience_seconds": 5,
            "eval.every": STEPS,
        }
        (folder / "config.yaml").write_text(dump(training_config(corpus, folder, changes)))
        (folder / "paced.py").write_text(PACED)
        launcher = COMMAND.partition("scripts/train_gpt2.py")[0].replace(
            "10.0.0.1", machines[-1].address
        )
        self.command = f"{launcher} {folder / 'paced.py'} --config {folder / 'config.yaml'}"

    def start(self, *machines):
        for machine in machines:
            machine.start(self.command)

    def rows(self):
        file = self.run / "metrics.jsonl"
        return (
            [json.loads(line) for line in file.read_text().split("\n")[:-1]]
            if file.is_file()
            else []
        )

    def step(self):
        return max((row["step"] for row in self.rows() if "loss" in row), default=0)

    def starts(self):
        return [row for row in self.rows() if row.get("event") == "start"]

    def goes_on(self, what, processes, fault):
        """Waits until it trains on so many processes after
        the fault; returns how many steps were lost."""
        before = self.step()
        starts = len(self.starts())
        wait_until(lambda: self.step() > before + 5, 300)
        at = self.step()
        begun = time.monotonic()
        fault()

        def own():
            return [row for row in self.starts()[starts:] if row["processes"] == processes]

        wait_until(lambda: own() and self.rows()[-1]["step"] > own()[-1]["step"], 300)
        lost = max(at - own()[-1]["step"], 0)
        print(f"\n{what}: next step after {time.monotonic() - begun:.0f} s, {lost} steps lost")
        return lost

    def ends_as(self, alone):
        wait_until(lambda: '"completed"' in (self.run / "status.json").read_text(), 300)
        assert self.machines[-1].started[-1].wait(60) == 0
        mine = figures(self.rows())
        assert [row[:2] for row in mine] == [row[:2] for row in alone]
        assert_close([row[2] for row in mine], [row[2] for row in alone], 1e-4)


def figures(rows):
    return [(row["step"], row["order_digest"], row["loss"]) for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    with joined_machines(tmp_path_factory.mktemp("machines"), 3) as three:
        yield three


@pytest.fixture(scope="module")
def alone(machines, corpus, tmp_path_factory):
    """Step, digest and loss of each step on one process."""
    job = Job(machines, tmp_path_factory.mktemp("alone"), corpus)
    command = f"python scripts/train_gpt2.py --config {job.run.parent / 'config.yaml'}"
    assert machines[0].start(command).wait(300) == 0, machines[0].said
    return figures(job.rows())


def test_a_machine_is_lost_and_comes_back(machines, alone, corpus, tmp_path):
    """The launcher alone is killed, then it is stopped by a signal; each time it comes back."""
    _, lost, last = machines
    job = Job((lost, last), tmp_path, corpus)
    job.start(lost, last)
    assert job.goes_on("launcher killed", 1, lambda: lost.launcher().kill()) < EVERY
    lost.end()
    assert job.goes_on("a machine joins", 2, lambda: job.start(lost)) == 0
    stop = lost.launcher().send_signal
    code = job.goes_on("launcher told to stop", 1, lambda: stop(signal.SIGTERM))
    assert code == 0
    assert job.goes_on("a machine joins", 2, lambda: job.start(lost)) == 0
    job.ends_as(alone)


def test_rank_0s_machine_of_three_loses_its_cable_and_returns(machines, alone, corpus, tmp_path):
    first, *_ = machines
    job = Job(machines, tmp_path, corpus)
    job.start(*machines)
    wait_until(lambda: job.starts() and job.starts()[-1]["processes"] == 3, 300)
    wait_until(lambda: "only the machine of --rdzv_endpoint must stay up" in first.said, 300)
    assert job.goes_on("cable out", 2, lambda: first.ip(f"link set {WIRE} down")) < EVERY
    assert job.goes_on("cable in again", 3, lambda: first.ip(f"link set {WIRE} up")) == 0
    job.ends_as(alone)


def test_a_run_folder_that_is_not_shared_is_refused(machines, corpus, tmp_path):
    job = Job(machines[1:], tmp_path, corpus)
    job.command += " --output_dir own"
    job.start(*machines[1:])
    wait_until(lambda: any(machine.errors for machine in machines[1:]), 300)
    (error,) = {line for machine in machines[1:] for line in machine.errors[:1]}
    assert error.startswith("error: output_dir = own: is another folder on node-")
