"""What the doctor says of security: each hole has a row with a command, and a machine without one has none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from console.api.http.keys import Keys
from console.runtime.doctor import security_findings
from console.settings.schema import state_dir
from console.settings.sources import Sources
from engine.backends.common.native_build import cache_folder
from engine.doctor.report import Finding
from tests.fakes.certificates import Pair, self_signed

KEY = "eric_what-nobody-else-may-read"
NOBODY = 65534


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user whose files are nobody else's."""
    for kind in ("CONFIG", "DATA", "STATE", "CACHE"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / kind.lower()))
        (tmp_path / kind.lower() / "ericllm").mkdir(parents=True, mode=0o700)
    for name in ("HF_ENDPOINT", "HF_TOKEN", "ERICLLM_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    cache_folder().mkdir(parents=True, mode=0o700)
    return tmp_path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A certificate and its key, which is its owner's alone."""
    pair = self_signed(tmp_path_factory.mktemp("tls"))
    pair.key.chmod(0o600)
    return pair


def rows(**flags: object) -> dict[str, Finding]:
    sources = Sources.read(flags, env={})
    return {finding.name: finding for finding in security_findings(sources.settings(), sources)}


def broken(**flags: object) -> dict[str, str]:
    """The rows that say what is wrong, each with what to do."""
    found = {name: row for name, row in rows(**flags).items() if row.state == "broken"}
    assert all("`" in row.advice for row in found.values())
    assert KEY not in repr(found)
    return {name: f"{row.value} {row.advice}" for name, row in found.items()}


def test_nothing_is_wrong_with_a_server_of_ones_own() -> None:
    assert broken() == {}
    assert len(rows()) == 6


def test_nothing_is_wrong_with_a_server_for_others_that_has_a_key_and_tls(pair: Pair) -> None:
    Keys(state_dir()).make("app", ("use",))
    for name, each in rows(host="0.0.0.0", admin_remote=True, tls_cert=pair.cert, tls_key=pair.key).items():
        assert each.state == "ok", name
    assert broken(host="0.0.0.0", no_auth=True, tls_cert=pair.cert, tls_key=pair.key) == {}


def test_a_server_for_others_that_has_no_key_is_named(pair: Pair) -> None:
    said = broken(host="0.0.0.0", tls_cert=pair.cert, tls_key=pair.key)["API"]
    assert "no key is set" in said and "`ericllm api-keys make NAME`" in said


def test_who_may_use_a_server_of_this_machine_is_said() -> None:
    assert "every user of this machine" in rows()["API"].value
    assert "without a key: the socket's owner and group can" in rows(host="unix:/run/ericllm.sock")["API"].value
    assert "`ericllm api-keys make NAME`" in rows()["API"].advice
    Keys(state_dir()).make("app", ("use",))
    assert rows()["API"].value == "on 127.0.0.1, for local programs with a key"


def test_certificates_that_cannot_be_used_are_named(tmp_path: Path, pair: Pair) -> None:
    assert "--tls-key is missing" in broken(tls_cert=pair.cert)["API"]
    said = broken(host="0.0.0.0", tls_cert=pair.cert, tls_key=tmp_path / "none")["API"]
    assert f"{tmp_path / 'none'} cannot be read" in said


def test_keys_that_cannot_be_had_are_named(tmp_path: Path) -> None:
    for name in ("none", "n" * 300):
        assert f"{tmp_path / name} cannot be read" in broken(api_key_file=tmp_path / name)["keys"]
    (state_dir() / "keys.json").write_text("{")
    assert "keys.json cannot be read" in broken()["keys"]


def test_a_key_in_a_pipe_is_left_there(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert broken(api_key_file=tmp_path / "pipe") == {}


def test_a_server_for_others_without_tls_is_named() -> None:
    Keys(state_dir()).make("app", ("use",))
    found = broken(host="0.0.0.0")
    assert found.keys() == {"API"}
    assert "without TLS" in found["API"] and "--tls-cert" in found["API"]


def test_a_server_for_everybody_without_a_key_is_named() -> None:
    assert "ericllm api-keys make" in broken(host="0.0.0.0", no_auth=True)["API"]


def test_admin_requests_from_afar_without_tls_are_named() -> None:
    assert broken(host="0.0.0.0", admin_remote=True).keys() == {"API", "admin requests"}
    assert "admin requests" not in broken(admin_remote=True)


def test_keys_that_others_can_read_are_named_with_their_files(home: Path) -> None:
    config = home / "config" / "ericllm" / "config.toml"
    config.write_text(f'api_key = "{KEY}"\n')
    made = home / "state" / "ericllm" / "keys.json"
    Keys(made.parent).make("app", ("use",))
    config.chmod(0o600)
    assert broken() == {}
    config.chmod(0o644)
    made.chmod(0o604)
    said = broken()["keys"]
    assert f"`chmod 600 {config}`" in said and f"`chmod 600 {made}`" in said


def test_a_key_in_the_list_of_processes_is_named() -> None:
    assert "--api-key-file" in broken(api_key=KEY)["keys"]


@pytest.mark.parametrize("kind", ["data", "state"])
def test_a_folder_that_others_can_look_into_is_named(home: Path, kind: str) -> None:
    folder = home / kind / "ericllm"
    folder.chmod(0o755)
    assert f"`chmod -R go-rwx {folder}`" in broken()["folders"]


@pytest.mark.parametrize("name", [".", "config.toml"])
def test_settings_that_others_may_change_are_named(home: Path, name: str) -> None:
    path = home / "config" / "ericllm" / name
    if name == "config.toml":
        path.touch()
    path.chmod(0o770)  # whose group may be that user alone
    assert broken() == {}
    path.chmod(0o702)
    assert f"`chmod go-w {path}`" in broken()["folders"]


def test_a_folder_of_another_user_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    assert "belongs to another user" in broken()["folders"]


@pytest.mark.parametrize("above", [0, 1, 2])
def test_a_kernel_cache_that_others_can_write_to_is_named(above: int) -> None:
    folder = (cache_folder(), *cache_folder().parents)[above]
    folder.chmod(0o770)
    said = broken()["kernel cache"]
    assert f"other users may write into {folder}" in said and f"`rm -r {cache_folder().parent}`" in said


def test_a_hub_without_tls_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", KEY)
    monkeypatch.setenv("HF_ENDPOINT", "http://user:password@mirror.example:8080")
    said = broken()["hub"]
    assert "http://mirror.example has no TLS" in said and "HF_TOKEN" in said and "password" not in said
    for none in ("http://[::1", "http://hub:port", "hub.example", "ftp://hub.example", "http://"):
        monkeypatch.setenv("HF_ENDPOINT", none)
        assert "not the address of a hub" in broken()["hub"]
    for private in ("https://mirror.example", "http://127.0.0.1:8080"):
        monkeypatch.setenv("HF_ENDPOINT", private)
        assert broken() == {}
