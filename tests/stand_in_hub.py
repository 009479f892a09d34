"""A stand-in of the Hugging Face hub: an HTTP server of this machine that speaks what `huggingface_hub` needs."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import close_session, constants

LARGE = (".safetensors", ".gguf", ".bin", "tokenizer.json")  # kept by SHA-256, as in Git LFS
PATH = re.compile(r"/(?P<api>api/models/)?(?P<name>[\w.-]+/[\w.-]+)(/(?P<verb>revision|tree|resolve)/(?P<rest>.*))?")


@dataclass
class Repository:
    """Files by name, and how the server misbehaves for it."""

    files: dict[str, bytes]
    commit: str = "c" * 40
    gated: bool = False
    token: str | None = None  # without it, the repository does not exist
    changes: dict[str, Any] = field(default_factory=dict)  # of the description


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    headers: dict[str, str]

    @property
    def file(self) -> str:
        return self.path.partition("/resolve/")[2].partition("/")[2]


class StandInHub(ThreadingHTTPServer):
    """`cut`: connections are closed after so many bytes of a file; `failing`: paths that are answered with 503, also
    those of files that were cut; `elsewhere`: content is on another host, to which requests are redirected;
    `ranges_count`: False if files are always sent from their beginning."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.asked: list[Asked] = []
        self.cut: int | None = None
        self.failing = set[str]()
        self.elsewhere = False
        self.ranges_count = True
        self.delay = 0.0  # seconds between pieces
        self.piece = 1 << 16

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def add(self, name: str, files: dict[str, bytes] | Path, **options: Any) -> Repository:
        if isinstance(files, Path):
            files = {str(file.relative_to(files)): file.read_bytes() for file in files.rglob("*") if file.is_file()}
        self.repositories[name] = Repository(dict(files), **options)
        return self.repositories[name]

    def fetched(self) -> list[str]:
        """Files whose content was asked for."""
        return sorted({each.file for each in self.asked if each.method == "GET" and each.file})

    def ranges(self) -> list[str]:
        return [each.headers["range"] for each in self.asked if "range" in each.headers]


@contextmanager
def serving_hub() -> Iterator[StandInHub]:
    hub = StandInHub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()


@contextmanager
def the_only_hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    """For this process and those that it starts, with the empty cache of `home`."""
    for variable in ("HF_TOKEN", "SSD_HF_CACHE", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    with serving_hub() as hub:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.setenv("HF_HOME", str(home))
        yield hub
        close_session()


def described(name: str, content: bytes) -> dict[str, Any]:
    """A file as the hub's API describes it."""
    oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    about: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": oid}
    if name.endswith(LARGE):
        about["lfs"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest(), "pointerSize": 130}
    return about


def _listed(about: dict[str, Any]) -> dict[str, Any]:
    """The same in a listing of a tree."""
    entry = {"type": "file", "path": about["rfilename"], "size": about["size"], "oid": about["blobId"]}
    if "lfs" in about:
        entry["lfs"] = {"oid": about["lfs"]["sha256"], "size": about["lfs"]["size"], "pointerSize": 130}
    return entry


class _Handler(BaseHTTPRequestHandler):
    server: StandInHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(Asked(self.command, path, {k.lower(): v for k, v in self.headers.items()}))
        found = PATH.fullmatch(path)
        if found is None:
            return self._send(404, {})
        repository = self.server.repositories.get(found["name"])
        sent = self.headers.get("Authorization")
        if repository is None or (repository.token and not repository.gated and sent != f"Bearer {repository.token}"):
            return self._send(401, {"X-Error-Code": "RepoNotFound"})
        if found["verb"] == "resolve":
            revision, _, name = found["rest"].partition("/")
            return self._send_file(repository, revision, name, sent)
        revision = found["rest"].partition("/")[0] if found["rest"] else "main"
        if revision not in ("main", repository.commit):
            return self._send(404, {"X-Error-Code": "RevisionNotFound"})
        files = [described(name, content) for name, content in repository.files.items()]
        files = [{**each, **repository.changes.get(each["rfilename"], {})} for each in files]
        if found["verb"] == "tree":
            return self._send(200, {}, json.dumps([_listed(each) for each in files]).encode())
        about = {"id": found["name"], "sha": repository.commit, "siblings": files}
        self._send(200, {}, json.dumps({**about, **repository.changes.get("", {})}).encode())

    def _send_file(self, repository: Repository, revision: str, name: str, sent: str | None) -> None:
        if repository.gated and sent != f"Bearer {repository.token}":
            return self._send(401 if sent is None else 403, {"X-Error-Code": "GatedRepo"})
        if name not in repository.files or revision not in ("main", repository.commit):
            return self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repository.commit})
        if self.path in self.server.failing:
            return self._send(503, {})
        if self.server.elsewhere and self.headers["Host"].startswith("127.0.0.1"):
            return self._send(302, {"Location": f"http://localhost:{self.server.server_port}{self.path}"})
        content = repository.files[name]
        about = {**described(name, content), **repository.changes.get(name, {})}
        etag = about["lfs"]["sha256"] if "lfs" in about else about["blobId"]
        headers = {"X-Repo-Commit": repository.commit, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        if "lfs" in about:
            headers |= {"X-Linked-ETag": f'"{etag}"', "X-Linked-Size": str(about["lfs"]["size"])}
        status, start = 200, 0
        if span := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "") * self.server.ranges_count):
            start = int(span[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            status = 206
        self._send(status, headers, content[start:])

    def _send(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.server.cut if "ETag" in headers else None
        try:
            for start in range(0, len(body[:cut]), self.server.piece):
                self.wfile.write(body[:cut][start : start + self.server.piece])
                self.wfile.flush()
                if self.server.delay:
                    threading.Event().wait(self.server.delay)
        except OSError:  # the client has gone
            self.close_connection = True
        if cut is not None and cut < len(body):
            self.server.failing.add(self.path)  # and the attempts that follow at once
            self.close_connection = True
