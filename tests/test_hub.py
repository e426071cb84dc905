"""Uploading: what the Hub's own client sends to a server of ours, on this machine. It was never run against the Hub."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from gpt2_ddp.config.tools import ExportConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.export.export import export_hf, upload


class Server(ThreadingHTTPServer):
    """Answers as the Hub does to who uploads small files.

    Attributes:
        refuse: part of a path that is forbidden.
        repositories: what was asked to be made. files: what was committed.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.refuse, self.repositories, self.files = "", [], {}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        known = self.headers["Authorization"] == "Bearer hf_of_me"
        self.answer({"name": "me", "type": "user", "orgs": []}, 200 if known else 401)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.refuse and self.server.refuse in self.path:
            self.answer({"error": "not for you"}, 403)
            return
        url = f"http://127.0.0.1:{self.server.server_port}/me/mine"
        if self.path == "/api/repos/create":
            self.server.repositories.append(json.loads(body))
            self.answer({"url": url, "name": "me/mine"})
        elif "/preupload/" in self.path:
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            self.answer({"files": [file | {"shouldIgnore": False} for file in files]})
        elif "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            sent = {line["value"]["path"]: line["value"]["content"] for line in lines if line["key"] == "file"}
            self.server.files |= {path: base64.b64decode(content) for path, content in sent.items()}
            self.answer({"success": True, "commitOid": "0" * 40, "commitUrl": f"{url}/commit/0", "hookOutput": ""})
        else:
            self.answer({"files": []})

    def answer(self, content: object, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_of_me")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("# mine")
    return tmp_path


def test_the_folder_is_uploaded_to_a_repository_that_is_private(server, folder):
    assert upload(folder, "me/mine", private=True).endswith("/me/mine")
    (made,) = server.repositories
    assert made["name"] == "mine"
    assert made.get("private") or made["visibility"] == "private"  # by the client's release
    assert server.files == {"config.json": b"{}", "README.md": b"# mine"}


def test_refusals_are_told_with_a_cure(server, folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    with pytest.raises(UserError, match=r"push_to_hub = me/mine: .*; log in with `hf auth login`"):
        export_hf(ExportConfig(checkpoint="nowhere", push_to_hub="me/mine"))
    monkeypatch.setenv("HF_TOKEN", "hf_of_me")
    server.refuse = "/commit/"
    with pytest.raises(UserError, match=r"the export is whole; `hf upload me/mine .*` uploads it later"):
        upload(folder, "me/mine", private=False)
    assert not server.files
