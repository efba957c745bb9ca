"""A hub that means harm, as HF_ENDPOINT may name one: it writes nothing outside of the cache, nor without an end."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import itertools
import json
import logging
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from engine.errors import EngineError, ModelLoadFailed, ModelNotFound
from engine.models import hub_client
from engine.models.hub_cache import part_file, repo_folder, snapshot_of
from engine.models.resolve import resolve
from tests.fakes.bounds import outcome
from tests.fakes.hub import FakeHub, FakeRepo, Scripted, serve_hub, use_hub
from tests.fakes.model_folders import write_model

WEIGHTS = "model.safetensors"
OTHER_DIGEST = hashlib.sha256(b"something else").hexdigest()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that has org/name, and a cache in a folder of its own."""
    folder = write_model(tmp_path / "made", {"w": ("BF16", (100, 100))})
    with serve_hub() as hub:
        use_hub(monkeypatch, hub.url, tmp_path / "place" / "cache")
        hub.repos["org/name"] = FakeRepo({file.name: file.read_bytes() for file in folder.iterdir()})
        yield hub


@pytest.fixture
def repo(hub: FakeHub) -> FakeRepo:
    """org/name."""
    return hub.repos["org/name"]


def refused(expected: type[EngineError] = ModelLoadFailed) -> str:
    """The sentence that org/name is refused with, within bounds."""
    said = outcome(lambda: resolve("org/name", []), 0, expected)
    assert isinstance(said, str), f"org/name was taken: {said}"
    for thread in threading.enumerate():
        if thread.name.startswith("hub "):
            thread.join()
    return said


def files_outside(tmp_path: Path) -> list[Path]:
    """What lies beside the cache and the model that the hub serves."""
    cache, made = tmp_path / "place" / "cache", tmp_path / "made"
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    return [path for path in found if not path.is_relative_to(cache) and not path.is_relative_to(made)]


def listing(repo: FakeRepo, **changes: object) -> Callable[[str, str], Scripted | None]:
    """A script in which the list of files has these fields in place of its own."""
    files = [{"rfilename": name, "size": len(body)} for name, body in repo.files.items()]
    body = json.dumps({"sha": repo.commit, "siblings": files} | changes).encode()
    return lambda method, path: Scripted(200, {}, [body]) if path.startswith("/api/") else None


def for_file(name: str, answer: Callable[[str], Scripted | None]) -> Callable[[str, str], Scripted | None]:
    """A script of the answers to GET and HEAD of one file."""
    return lambda method, path: answer(method) if path.endswith(f"/{name}") else None


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
@pytest.mark.parametrize("header", ["ETag", "X-Linked-Etag"])
@pytest.mark.parametrize("etag", ["../../../../OUTSIDE", "{place}/OUTSIDE", "..", "a" * 39, "A" * 64, "a" * 64 + "/x"])
def test_an_etag_that_is_no_digest_names_no_file(
    hub: FakeHub, repo: FakeRepo, tmp_path: Path, name: str, header: str, etag: str
) -> None:
    headers = {header: f'"{etag.format(place=tmp_path)}"', "X-Repo-Commit": repo.commit, "Content-Length": "4"}
    hub.script = for_file(name, lambda method: Scripted(200, headers, [b"evil"]))
    assert "names no SHA-1 or SHA-256" in refused()
    assert files_outside(tmp_path) == []
    assert "evil" not in [file.read_text("latin-1") for file in tmp_path.rglob("*") if file.is_file()]


@pytest.mark.parametrize("commit", ["../../../../OUTSIDE", "c" * 40 + "\n", "", 7, None])
def test_a_commit_that_is_no_hash_names_no_folder(hub: FakeHub, repo: FakeRepo, tmp_path: Path, commit: object) -> None:
    hub.script = listing(repo, sha=commit)
    assert "no list of files" in refused()
    assert [path for path in tmp_path.rglob("*") if "OUTSIDE" in path.name] == []


def test_a_pinned_commit_is_that_commit_and_no_other(hub: FakeHub, repo: FakeRepo) -> None:
    hub.script = listing(repo, sha="d" * 40)
    repo.commit = "c" * 40
    with pytest.raises(ModelLoadFailed, match=f"answers for commit {'c' * 40} of org/name with {'d' * 40}"):
        resolve(f"org/name@{'c' * 40}", [])


@pytest.mark.parametrize(
    "name",
    [
        "additional_chat_templates/../../../../../OUTSIDE",
        "additional_chat_templates//x.jinja",
        "additional_chat_templates/.git/config",
        "..\\..\\OUTSIDE.json",
        "x\0.json",
        "\x1b]52;c;RVZJTA==\x1b\\.json",
        "\u202etxt.json",
        "x" * 300 + ".json",
        ".json",
    ],
)
def test_a_file_of_a_name_that_leads_elsewhere_is_refused(
    hub: FakeHub, repo: FakeRepo, tmp_path: Path, name: str
) -> None:
    repo.files[name] = b"{}"
    assert "has a file with a refused name" in refused()
    assert hub.fetched() == []
    assert files_outside(tmp_path) == []


@pytest.mark.parametrize("name", ["../../OUTSIDE.json", "/OUTSIDE.safetensors", ".git/hooks/post-checkout.json"])
def test_files_in_other_folders_are_never_asked_for(hub: FakeHub, repo: FakeRepo, tmp_path: Path, name: str) -> None:
    repo.files[name] = b"{}"
    resolve("org/name", [])
    assert name not in hub.fetched()
    assert files_outside(tmp_path) == []


@pytest.mark.parametrize("revision", ["../../../../OUTSIDE", "a/../../../../../OUTSIDE", "x" * 300, "./x"])
def test_a_revision_that_leads_elsewhere_is_none(hub: FakeHub, tmp_path: Path, revision: str) -> None:
    hub.script = lambda method, path: None
    hub.repos["org/name"].knows = lambda revision: True  # type: ignore[method-assign]
    with pytest.raises(ModelNotFound, match="org/name has no revision"):
        resolve(f"org/name@{revision}", [])
    assert hub.requests == []
    assert files_outside(tmp_path) == []


def test_a_reference_that_holds_a_path_leads_to_no_snapshot(tmp_path: Path, hub: FakeHub) -> None:
    snapshot = resolve("org/name", [])
    (repo_folder("org/name") / "refs" / "main").write_text(f"../../../../{snapshot.name}")
    assert snapshot_of(repo_folder("org/name"), "main") is None
    assert snapshot_of(repo_folder("org/name"), "../refs") is None


# -- lists of files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"siblings": [{"rfilename": 5}]},
        {"siblings": {"a": "b"}},
        {"siblings": [{"rfilename": "config.json", "size": -5}]},
        {"siblings": [{"rfilename": "config.json", "size": 10**400}]},
        {"siblings": [{"rfilename": "config.json", "size": "5"}]},
    ],
)
def test_a_list_of_files_of_other_types_is_refused(hub: FakeHub, repo: FakeRepo, changes: dict[str, object]) -> None:
    hub.script = listing(repo, **changes)
    assert "no list of files" in refused()


@pytest.mark.parametrize("body", [b"[" * 10**6, b"{" * 100, b"\xff\xfe", b"null", b"", b'{"sha":"\xff"}'])
def test_an_answer_that_is_no_list_of_files_is_refused(hub: FakeHub, body: bytes) -> None:
    hub.script = lambda method, path: Scripted(200, {}, [body])
    assert "no list of files" in refused()


def test_a_list_of_files_without_an_end_is_not_held(hub: FakeHub) -> None:
    start = b'{"sha":"' + b"c" * 40 + b'","siblings":['
    body = itertools.chain([start], itertools.repeat(b'{"rfilename":"a.json"},' * 2000))
    hub.script = lambda method, path: Scripted(200, {}, body)
    assert "answers with more than 8 MiB" in refused()


def test_a_list_of_files_of_any_number_takes_little_memory(hub: FakeHub, repo: FakeRepo) -> None:
    many = [{"rfilename": f"{number}.json"} for number in range(200_000)]
    files = [{"rfilename": name, "size": len(body)} for name, body in repo.files.items()]
    hub.script = listing(repo, siblings=[*files, *many])
    del many
    assert "files; the limit is 2,000" in refused()
    assert hub.fetched() == []


@pytest.mark.parametrize("of", ["/api/models/org/name", WEIGHTS])
def test_an_answer_in_pieces_of_a_few_bytes_is_ended_soon(hub: FakeHub, repo: FakeRepo, of: str) -> None:
    repo.files[WEIGHTS] = bytes(2**20)
    pieces = Scripted(200, {"Transfer-Encoding": "chunked"}, itertools.repeat(b"1\r\n\0\r\n" * 2000))
    hub.script = lambda method, path: pieces if method == "GET" and path.endswith(of) else None
    assert "in pieces of a few bytes" in refused()


@pytest.mark.parametrize("status", [404, 500])
def test_a_refusal_without_an_end_is_not_held(hub: FakeHub, status: int) -> None:
    hub.script = lambda method, path: Scripted(status, {}, itertools.repeat(b"no" * 2**15))
    assert f"answered {status} for org/name" in refused()


def test_a_compressed_answer_is_not_unpacked(hub: FakeHub) -> None:
    bomb = gzip.compress(bytes(2**28))
    hub.script = lambda method, path: Scripted(200, {"Content-Encoding": "gzip"}, [bomb])
    assert "sends compressed content" in refused()


# -- a cache that several users share ---------------------------------------------------------------------------------


@pytest.mark.parametrize("planted", ["part", "reference"])
def test_a_link_that_another_user_put_into_the_cache_is_not_written_through(
    hub: FakeHub, repo: FakeRepo, tmp_path: Path, planted: str
) -> None:
    mine = tmp_path / "mine"
    mine.write_text("what only I may change, and longer than a commit or a config.json" * 10)
    before = mine.read_text()
    reference = repo_folder("org/name") / "refs" / "main"
    link = reference if planted == "reference" else part_file("org/name", repo.commit, "config.json")
    link.parent.mkdir(parents=True)
    link.symlink_to(mine)
    assert f"{link} is a link" in refused()
    assert mine.read_text() == before
    assert link.is_symlink()


def test_a_cache_behind_a_link_of_ones_own_is_used(hub: FakeHub, repo: FakeRepo, tmp_path: Path) -> None:
    elsewhere = tmp_path / "large-disk"
    elsewhere.mkdir()
    repo_folder("org/name").parent.mkdir(parents=True)
    repo_folder("org/name").symlink_to(elsewhere)
    assert (resolve("org/name", []) / WEIGHTS).read_bytes() == repo.files[WEIGHTS]


def test_a_file_that_another_download_completes_meanwhile_is_left_as_it_is(
    hub: FakeHub, repo: FakeRepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = part_file("org/name", repo.commit, "config.json")
    part.parent.mkdir(parents=True)
    part.write_bytes(b"the whole of it, as the other had it")
    blob = part.with_name("blob")
    lock = fcntl.flock

    def late(stream: BinaryIO, how: int) -> None:
        if Path(stream.name) == part:
            part.rename(blob)
        lock(stream, how)

    monkeypatch.setattr(fcntl, "flock", late)
    assert "config.json is already being downloaded" in refused()
    assert blob.read_bytes() == b"the whole of it, as the other had it"


def test_two_downloads_may_put_the_same_file_in_its_place(
    hub: FakeHub, repo: FakeRepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Path.symlink_to

    def late(self: Path, target: Path) -> None:
        link(self, target)  # the other one's
        link(self, target)

    monkeypatch.setattr(Path, "symlink_to", late)
    assert (resolve("org/name", []) / WEIGHTS).read_bytes() == repo.files[WEIGHTS]


# -- content ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
@pytest.mark.parametrize("digest", [OTHER_DIGEST, OTHER_DIGEST[:40]])
def test_content_of_another_digest_is_thrown_away(hub: FakeHub, repo: FakeRepo, name: str, digest: str) -> None:
    hub.etags[name] = f'"{digest}"'
    said = refused()
    assert f"{name} is damaged or was changed in transit" in said
    assert digest in said
    assert not part_file("org/name", repo.commit, name).exists()
    assert not (repo_folder("org/name") / "blobs" / digest).exists()
    hub.etags.clear()
    assert (resolve("org/name", []) / name).read_bytes() == repo.files[name]


def test_small_files_are_known_by_the_digest_of_their_git_blob(hub: FakeHub, repo: FakeRepo) -> None:
    content = repo.files["config.json"]
    digest = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    hub.etags["config.json"] = f'W/"{digest}"'
    config = resolve("org/name", []) / "config.json"
    assert config.read_bytes() == content
    assert config.resolve().name == digest
    assert not config.readlink().is_absolute()


def test_what_was_there_of_a_file_is_digested_too(hub: FakeHub, repo: FakeRepo) -> None:
    part = part_file("org/name", repo.commit, WEIGHTS)
    part.parent.mkdir(parents=True)
    part.write_bytes(b"changed since")
    assert f"{WEIGHTS} is damaged" in refused()
    assert hub.resumed == [len(b"changed since")]
    assert not part.exists()
    assert (resolve("org/name", []) / WEIGHTS).read_bytes() == repo.files[WEIGHTS]


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_no_more_is_written_than_was_announced(hub: FakeHub, repo: FakeRepo, name: str) -> None:
    size, sent = len(repo.files[name]), itertools.count()
    headers = {"ETag": f'"{OTHER_DIGEST}"', "X-Repo-Commit": repo.commit, "X-Linked-Size": str(size)}
    endless = (bytes(2**16) for _ in sent)
    hub.script = for_file(name, lambda method: Scripted(200, headers, endless))
    assert f"sends more of {name} than the {size:,} bytes" in refused()
    assert next(sent) < 2000  # blocks of 64 KiB, what the sockets take among them
    held = [file for file in (repo_folder("org/name") / "blobs").iterdir() if not file.name.startswith(repo.commit)]
    assert OTHER_DIGEST not in [file.name for file in held]


def test_compressed_content_is_not_unpacked(hub: FakeHub, repo: FakeRepo) -> None:
    bomb = gzip.compress(bytes(2**28))
    headers = {"ETag": f'"{OTHER_DIGEST}"', "X-Linked-Size": str(len(repo.files[WEIGHTS]))}
    packed = headers | {"Content-Encoding": "gzip"}
    hub.script = for_file(WEIGHTS, lambda method: Scripted(200, headers if method == "HEAD" else packed, [bomb]))
    assert "sends compressed content" in refused()


@pytest.mark.parametrize("announced", [10**15, 3])
def test_a_size_that_changes_between_two_answers_is_refused(hub: FakeHub, repo: FakeRepo, announced: int) -> None:
    headers = {"ETag": f'"{OTHER_DIGEST}"', "X-Linked-Size": str(announced)}
    hub.script = for_file(WEIGHTS, lambda method: Scripted(200, headers))
    assert f"then with {announced:,}" in refused()


def test_a_size_that_no_disk_has_is_refused_where_the_list_has_none(hub: FakeHub, repo: FakeRepo) -> None:
    headers = {"ETag": f'"{OTHER_DIGEST}"', "X-Linked-Size": str(10**14)}
    files = [{"rfilename": name} for name in repo.files]
    lists, sizes = listing(repo, siblings=files), for_file(WEIGHTS, lambda method: Scripted(200, headers))
    hub.script = lambda method, path: lists(method, path) or sizes(method, path)
    assert f"{WEIGHTS} needs 93132.3 GiB more" in refused()
    assert f"GET /org/name/resolve/{repo.commit}/{WEIGHTS}" not in hub.requests


def test_a_connection_that_breaks_off_is_made_again(
    hub: FakeHub, repo: FakeRepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.models.hub_download._RETRY_S", 0)
    broken: list[str] = []

    def script(method: str, path: str) -> Scripted | None:
        if method == "HEAD" or not path.endswith(WEIGHTS) or broken:
            return None
        broken.append(path)
        return Scripted(200, {"Content-Length": str(len(repo.files[WEIGHTS]))}, [repo.files[WEIGHTS][:500]])

    hub.script = script
    assert (resolve("org/name", []) / WEIGHTS).read_bytes() == repo.files[WEIGHTS]
    assert hub.resumed == [500]


def test_a_hub_that_is_busy_is_asked_again_but_not_for_ever(
    hub: FakeHub, repo: FakeRepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.models.hub_download.MAX_WAIT_S", 0)
    hub.script = for_file(WEIGHTS, lambda method: None if method == "HEAD" else Scripted(429, {"Retry-After": "9" * 6}))
    assert "answered 429 for org/name" in refused()
    assert len([line for line in hub.requests if line.startswith("GET") and line.endswith(WEIGHTS)]) == 6


# -- redirections and the token ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["/api/models/org/name", "file:///etc/passwd", "gopher://x/", "http://[::1"])
def test_a_redirection_without_an_end_or_to_no_web_address_is_refused(hub: FakeHub, target: str) -> None:
    hub.script = lambda method, path: Scripted(302, {"Location": target}, itertools.repeat(b"x" * 2**16))
    assert "redirects" in refused() or "URL" in refused()
    assert len(hub.requests) <= 2 * (hub_client.MAX_REDIRECTS + 1)


def test_the_token_stays_with_the_endpoint(hub: FakeHub, repo: FakeRepo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with serve_hub() as elsewhere:
        elsewhere.repos["org/name"] = repo
        digest = hashlib.sha256(repo.files[WEIGHTS]).hexdigest()
        stored = {
            "Location": f"{elsewhere.url}/org/name/resolve/main/{WEIGHTS}",
            "X-Linked-Etag": f'"{digest}"',
            "X-Linked-Size": str(len(repo.files[WEIGHTS])),
        }
        away = {"Location": f"{elsewhere.url}/org/name/resolve/main/config.json"}
        hub.script = lambda method, path: (
            Scripted(302, stored)
            if path.endswith(WEIGHTS)
            else Scripted(307, away)
            if path.endswith("/config.json")
            else None
        )
        folder = resolve("org/name", [])
    assert (folder / WEIGHTS).read_bytes() == repo.files[WEIGHTS]
    assert (folder / "config.json").read_bytes() == repo.files["config.json"]
    assert len(elsewhere.fetched()) == 2
    assert elsewhere.tokens == []
    assert len(hub.tokens) == len(hub.requests)


def test_the_token_does_not_cross_a_network_in_the_clear(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from huggingface_hub import close_session

    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.example")
    monkeypatch.setenv("HTTP_PROXY", hub.url)  # which is how this test stands in for hub.example
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    close_session()
    try:
        resolve("org/name", [])
        hub.repos["org/name"].gated = True
        hub.repos["org/name"].commit = "e" * 40
        with pytest.raises(ModelLoadFailed, match="HF_TOKEN was not sent, as it is not an https:// address"):
            resolve("org/name@main", [])
    finally:
        close_session()
    assert hub.fetched()
    assert hub.tokens == []
    assert "HF_TOKEN is not sent to http://hub.example" in caplog.text
    assert "hf_secret" not in caplog.text


def test_the_token_is_not_given_to_a_proxy_on_the_way_to_a_hub_on_this_machine(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import close_session

    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HTTP_PROXY", hub.url)  # which stands in for both
    close_session()
    try:
        for bypassed, given in ("", False), ("127.0.0.1", True):
            monkeypatch.setenv("NO_PROXY", bypassed)
            monkeypatch.setenv("no_proxy", bypassed)
            hub.repos["org/name"].commit = "ef"[given] * 40
            resolve("org/name@main", [])
            assert bool(hub.tokens) == given
            close_session()
    finally:
        close_session()


@pytest.mark.parametrize("token", [b"hf_s3cret\0", b"hf_s3cret\xc3\xb1", b"hf_s3cret\xff", None])
def test_a_token_that_is_none_or_cannot_be_read_is_one_sentence_without_it(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, token: bytes | None
) -> None:
    file = tmp_path / "token"
    file.mkdir() if token is None else file.write_bytes(token)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(file))
    said = refused()
    assert "the hub token" in said
    assert "s3cret" not in said
    assert hub.requests == []


def test_what_a_hub_says_of_a_model_does_not_come_over_plain_http_where_it_was_asked_by_https(
    monkeypatch: pytest.MonkeyPatch, hub: FakeHub
) -> None:
    from huggingface_hub import get_session

    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example")
    http = import_module(type(get_session()).__module__.partition(".")[0])

    def answer(request: Any) -> Any:
        assert request.url.scheme == "https"
        return http.Response(302, headers={"location": str(request.url.copy_with(scheme="http"))})

    session = http.Client(transport=http.MockTransport(answer))
    monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: session)
    assert "redirects to plain HTTP" in refused()


def test_addresses_of_files_are_in_no_log(hub: FakeHub, repo: FakeRepo, caplog: pytest.LogCaptureFixture) -> None:
    digest = hashlib.sha256(repo.files[WEIGHTS]).hexdigest()
    stored = {"Location": f"{hub.url}/org/name/resolve/main/{WEIGHTS}?X-Amz-Signature=s3cret", "X-Linked-Etag": digest}
    asked: list[str] = []

    def redirected(method: str) -> Scripted | None:
        asked.append(method)
        return Scripted(302, stored) if asked.count(method) == 1 else None

    hub.script = for_file(WEIGHTS, redirected)
    with caplog.at_level(logging.DEBUG):
        assert (resolve("org/name", []) / WEIGHTS).read_bytes() == repo.files[WEIGHTS]
    assert "s3cret" not in caplog.text


def test_a_password_in_the_endpoint_is_in_no_message(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url.replace("//", "//user:hunter2@"))
    hub.status = 500
    said = refused()
    assert "answered 500" in said
    assert "hunter2" not in said


@pytest.mark.parametrize("endpoint", ["http://x:notaport", "http://[::1"])
def test_an_endpoint_that_is_no_address_is_told(monkeypatch: pytest.MonkeyPatch, hub: FakeHub, endpoint: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert "HF_ENDPOINT is not the address of a hub" in refused()


def test_a_hub_that_never_answers_can_be_cancelled(hub: FakeHub) -> None:
    asked, release = threading.Event(), threading.Event()

    def script(method: str, path: str) -> Scripted | None:
        asked.set()
        release.wait(60)
        return None

    hub.script = script
    try:
        with pytest.raises(ModelLoadFailed, match="was cancelled"):
            resolve("org/name", [], cancelled=asked.is_set)
    finally:
        release.set()
