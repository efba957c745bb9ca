"""A small model hub on loopback: as much of the hub's HTTP interface as fetching a model takes."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote, urlsplit

import pytest

_API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(/revision/(?P<revision>[^/]+))?")
_FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")

_RANGE = re.compile(r"bytes=(\d+)-")


@dataclass
class FakeRepo:
    """One model: its files, and the commit that "main" stands for (other revisions do not exist)."""

    files: dict[str, bytes]
    commit: str = "c" * 40
    gated: bool = False

    def knows(self, revision: str | None) -> bool:
        """Whether there is such a revision."""
        return revision in (None, "main", self.commit)


@dataclass
class Scripted:
    """An answer as a hostile hub gives it: these headers and no others, and a body that may have no end."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Iterable[bytes] = ()


@dataclass
class FakeHub:
    """The hub's content and what was asked of it.

    requests: "METHOD path" of each request.  resumed: the first byte that was asked for, of each file asked for from
    its middle on.  tokens: paths that an Authorization header came with.  hold: a file of which the second half is sent
    only once `release` is set; `half_sent` is set when the first half is out.  ranges: whether files can be asked for
    from their middle on.  status: answered to everything, if set.  script: answers in the hub's place where it returns
    something, by method and path.  etags: ETag headers that are given in place of the right ones, by file.
    """

    url: str
    repos: dict[str, FakeRepo] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    ranges: bool = True
    hold: str | None = None
    half_sent: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)
    status: int | None = None
    script: Callable[[str, str], Scripted | None] = lambda method, path: None
    etags: dict[str, str] = field(default_factory=dict)

    def fetched(self) -> list[str]:
        """Names of the files that were downloaded, in order."""
        return [match["file"] for line in self.requests if line.startswith("GET") and (match := _FILE.search(line))]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: ClassVar[FakeHub]

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if "Authorization" in self.headers:
            self.hub.tokens.append(path)
        if (scripted := self.hub.script(self.command, path)) is not None:
            self._send_scripted(scripted, with_body)
        elif self.hub.status is not None:
            self._send(self.hub.status, {}, b"", with_body)
        elif match := _API.fullmatch(path):
            self._send_info(match["repo"], match["revision"], with_body)
        elif match := _FILE.fullmatch(path):
            self._send_file(match["repo"], match["revision"], match["file"], with_body)
        else:
            self._refuse(404, "EntryNotFound", with_body)

    def _send_info(self, name: str, revision: str | None, with_body: bool) -> None:
        repo = self._repo(name, revision, with_body)
        if repo is None:
            return
        files = [{"rfilename": file, "size": len(body)} for file, body in repo.files.items()]
        info = {"id": name, "modelId": name, "sha": repo.commit, "siblings": files}
        self._send(200, {"Content-Type": "application/json"}, json.dumps(info).encode(), with_body)

    def _send_file(self, name: str, revision: str, file: str, with_body: bool) -> None:
        repo = self._repo(name, revision, with_body)
        if repo is None:
            return
        if repo.gated:
            self._refuse(403, "GatedRepo", with_body)
        elif file not in repo.files:
            self._refuse(404, "EntryNotFound", with_body)
        else:
            body = repo.files[file]
            etag = self.hub.etags.get(file, f'"{hashlib.sha256(body).hexdigest()}"')
            headers = {"X-Repo-Commit": repo.commit, "ETag": etag}
            first = self._first_byte()
            if first:
                self.hub.resumed.append(first)
                headers["Content-Range"] = f"bytes {first}-{len(body) - 1}/{len(body)}"
            self._send(206 if first else 200, headers, body[first:], with_body, hold=file == self.hub.hold)

    def _first_byte(self) -> int:
        """Where the client wants the file from."""
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        return int(asked[1]) if asked and self.hub.ranges else 0

    def _repo(self, name: str, revision: str | None, with_body: bool) -> FakeRepo | None:
        repo = self.hub.repos.get(name)
        if repo is None:
            self._refuse(404, "RepoNotFound", with_body)
        elif not repo.knows(revision):
            self._refuse(404, "RevisionNotFound", with_body)
        else:
            return repo
        return None

    def _refuse(self, status: int, code: str, with_body: bool) -> None:
        self._send(status, {"X-Error-Code": code}, b"", with_body)

    def _send(self, status: int, headers: dict[str, str], body: bytes, with_body: bool, hold: bool = False) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if not with_body:
            return
        half = len(body) // 2 if hold else len(body)
        self.wfile.write(body[:half])
        if hold:
            self.wfile.flush()
            self.hub.half_sent.set()
            self.hub.release.wait(60)
            self._write_rest(body[half:])

    def _send_scripted(self, scripted: Scripted, with_body: bool) -> None:
        self.close_connection = True
        self.send_response(scripted.status)
        for name, value in scripted.headers.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            for chunk in scripted.body if with_body else ():
                self.wfile.write(chunk)
        except OSError:
            pass  # the client has had enough

    def _write_rest(self, rest: bytes) -> None:
        try:
            self.wfile.write(rest)
        except OSError:
            self.close_connection = True  # the client has gone, as a cancelled download does


@contextmanager
def serve_hub() -> Iterator[FakeHub]:
    """A running hub without models; it stops at the end."""
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub = FakeHub(f"http://127.0.0.1:{server.server_address[1]}")
    handler.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.release.set()
        server.shutdown()
        server.server_close()
        thread.join()


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    """Have downloads go to the hub at `url`, without a token, into an empty cache, and look often."""
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_TOKEN_PATH", str(cache.parent / "no-token"))
    for variable in ("HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("engine.models.hub_download._POLL_S", 0.005)
    monkeypatch.setattr("engine.models.hub_download._PATIENCE_S", 0.05)
