"""Keys: what is kept of them, where, and who knows of a change."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import hmac
import re
import stat
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from console.api.http.key_file import KeyFile, KeyRecords, KeysUnavailable
from console.api.http.keys import Keys
from console.api.http.scopes import allows, scope_needed
from console.link.api import KeyLimits, NewKey, Scope
from engine.errors import InvalidRequest
from tests.fakes.owners import belongs_to_another


def opened(folder: Path) -> Keys:
    """The keys of a folder; those of other programs are known at the next look, without a second's wait."""
    keys = Keys(folder, reload_s=0.0)
    keys.open()
    return keys


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_key_is_eric_and_32_url_safe_characters() -> None:
    made = Keys().make("app", ("use",)).key
    assert re.fullmatch(r"eric_[A-Za-z0-9_-]{32}", made)
    assert Keys().make("app", ("use",)).key != made


async def test_a_made_key_is_found_with_its_name_and_scopes_and_nothing_like_it_is() -> None:
    keys = Keys()
    made = keys.make("app", ("watch", "use"))
    found = await keys.find(made.key)
    assert found is not None
    assert (found.name, found.scopes) == ("app", ("use", "watch"))
    for wrong in ("", made.key[:-1], made.key + "x", made.key.upper(), "\udcff"):
        assert await keys.find(wrong) is None


def test_only_a_hash_of_a_key_is_kept_in_a_file_of_the_owner_s_alone(tmp_path: Path) -> None:
    made = opened(tmp_path).make("app", ("use",))
    path = tmp_path / "keys.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    assert made.key not in text
    assert made.key.removeprefix("eric_") not in text
    assert '"app"' in text


def test_the_same_key_has_another_digest_in_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_urlsafe", lambda _: "A" * 32)
    digests = set()
    for name in ("one", "two"):
        opened(tmp_path / name).make("app", ("use",))
        records = KeyFile(tmp_path / name).read()
        assert records is not None
        digests.update(part for kept in records.keys for part in kept.key_hash)
    assert len(digests) == 6


async def test_what_is_kept_is_scrypt_with_a_salt_of_each_key_s_own(tmp_path: Path) -> None:
    keys = opened(tmp_path)
    made = [keys.make(name, ("use",)).key for name in ("one", "two")]
    records = KeyFile(tmp_path).read()
    assert records is not None
    assert len({kept.salt for kept in records.keys}) == 2
    for key, kept in zip(made, records.keys, strict=True):
        digested = hmac.digest(bytes.fromhex(records.secret), key.encode(), "sha256")
        assert kept.tag == digested.hex()[:8]
        expected = hashlib.scrypt(digested, salt=bytes.fromhex(kept.salt), n=2**14, r=8, p=1, dklen=32)
        assert kept.hash == expected.hex()


async def test_a_key_is_put_through_scrypt_once_and_a_wrong_one_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = opened(tmp_path).make("app", ("use",))
    keys = opened(tmp_path)
    slow: list[str] = []
    scrypt = hashlib.scrypt

    def noted(*given: Any, **options: Any) -> bytes:
        slow.append(threading.current_thread().name)
        return scrypt(*given, **options)

    monkeypatch.setattr(hashlib, "scrypt", noted)
    found = await asyncio.gather(*(keys.find(made.key) for _ in range(8)), keys.find(made.key + "x"))
    assert [key.name if key else None for key in found] == ["app"] * 8 + [None]
    assert len(slow) == 1
    assert slow[0] != threading.main_thread().name


async def test_a_file_from_before_scrypt_is_taken_and_written_anew(tmp_path: Path) -> None:
    secret, key = "5e" * 32, "eric_" + "k" * 32
    digest = hmac.digest(bytes.fromhex(secret), key.encode(), "sha256").hex()
    old = {"name": "app", "scopes": ["use"], "digest": digest, "made_at": 7.0, "use": {"requests": 3}}
    (tmp_path / "keys.json").write_bytes(msgspec.json.encode({"secret": secret, "keys": [old]}))
    keys = opened(tmp_path)
    assert digest not in (tmp_path / "keys.json").read_text()
    for each in (keys, opened(tmp_path)):
        found = await each.find(key)
        assert found is not None
        assert (found.name, found.reading.made_at, found.reading.requests) == ("app", 7.0, 3)
        assert await each.find(key + "x") is None


def test_limits_of_a_key_outlive_the_program(tmp_path: Path) -> None:
    limits = KeyLimits(requests_per_min=60, tokens_per_min=9000, concurrent=2)
    opened(tmp_path).make("app", ("use",), limits)
    (reading,) = opened(tmp_path).readings()
    assert reading.limits == limits
    assert limits.in_words() == "60 requests/min, 9,000 tokens/min, 2 concurrent"


async def test_keys_and_what_they_did_outlive_the_program(tmp_path: Path) -> None:
    keys = opened(tmp_path)
    made = keys.make("app", ("use",))
    found = await keys.find(made.key)
    assert found is not None
    keys.record_usage(found, requests=1, prompt_tokens=7, output_tokens=9)
    keys.save()
    (reading,) = opened(tmp_path).readings()
    assert (reading.requests, reading.prompt_tokens, reading.output_tokens) == (1, 7, 9)
    assert reading.last_used_at is not None
    assert reading.made_at is not None
    assert await opened(tmp_path).find(made.key) is not None


async def test_what_a_key_did_in_two_programs_adds_up(tmp_path: Path) -> None:
    first = opened(tmp_path)
    made = first.make("app", ("use",))
    second = opened(tmp_path)
    for keys in (first, second, first):
        found = await keys.find(made.key)
        assert found is not None
        keys.record_usage(found, requests=1)
        keys.save()
    assert [reading.requests for reading in first.readings()] == [3]


async def test_a_key_revoked_by_another_program_is_refused_here(tmp_path: Path) -> None:
    here, there = opened(tmp_path), opened(tmp_path)
    kept, lost = there.make("kept", ("use",)), there.make("lost", ("use",))
    assert await here.find(lost.key) is not None
    there.revoke("lost")
    assert await here.find(lost.key) is None
    assert await here.find(kept.key) is not None


async def test_a_file_that_goes_bad_lets_nobody_in_who_was_refused_before(tmp_path: Path) -> None:
    keys = opened(tmp_path)
    made = keys.make("app", ("use",))
    for damage in ("{", '{"secret": "xyz", "keys": []}'):
        (tmp_path / "keys.json").write_text(damage)
        assert keys.required
        assert await keys.find(made.key) is not None
        with pytest.raises(KeysUnavailable, match=r"keys\.json cannot be read"):
            opened(tmp_path)
    (tmp_path / "keys.json").unlink()
    assert keys.required


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o600])
async def test_keys_that_another_user_could_have_put_there_let_nobody_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    here = opened(tmp_path)
    here.make("mine", ("use",))
    planted = opened(tmp_path / "theirs").make("theirs", ("admin",))
    (tmp_path / "theirs" / "keys.json").replace(tmp_path / "keys.json")
    (tmp_path / "keys.json").chmod(mode)
    if mode == 0o600:
        belongs_to_another(tmp_path / "keys.json", monkeypatch)
    assert await here.find(planted.key) is None
    with pytest.raises(KeysUnavailable, match=r"keys\.json cannot be read: .*(other|another) user"):
        opened(tmp_path)


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    keys = Keys(tmp_path / "file")
    with pytest.raises(KeysUnavailable, match=r"keys\.json cannot be written"):
        keys.make("app", ("use",))
    assert not keys.required


def test_a_folder_that_knows_no_locks_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(KeysUnavailable, match=r"keys\.json cannot be written: No locks available"):
        opened(tmp_path).make("app", ("use",))


async def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = opened(tmp_path)
    made = keys.make("app", ("use",))
    before = (tmp_path / "keys.json").read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(KeysUnavailable, match="No space left on device"):
        keys.make("other", ("use",))
    assert (tmp_path / "keys.json").read_bytes() == before
    assert await keys.find(made.key) is not None
    assert _names(tmp_path) == ["keys.json", "keys.lock"]


@pytest.mark.parametrize("name", ["", " ", "settings", "a" * 41, "-dash", "new\nline", "app"])
def test_a_name_that_is_taken_or_is_none_is_refused(name: str) -> None:
    keys = Keys()
    keys.make("app", ("use",))
    with pytest.raises(InvalidRequest) as refused:
        keys.make(name, ("use",))
    assert refused.value.details["param"] == "name"
    assert [reading.name for reading in keys.readings()] == ["app"]


@pytest.mark.parametrize("scopes", [(), ("everything",), ("use", "more")])
def test_a_key_needs_scopes_that_there_are(scopes: tuple[Scope, ...]) -> None:
    with pytest.raises(InvalidRequest, match="use, load, watch, admin"):
        Keys().make("app", scopes)


async def test_the_settings_key_may_do_all_and_is_not_revoked_here() -> None:
    keys = Keys(settings_key="open sesame")
    found = await keys.find("open sesame")
    assert found is not None
    assert (found.name, found.scopes) == ("settings", ("admin",))
    with pytest.raises(InvalidRequest, match="--api-key"):
        keys.revoke("settings")


def test_a_key_is_needed_as_soon_as_there_is_one() -> None:
    keys = Keys()
    assert not keys.required
    keys.make("app", ("use",))
    assert keys.required
    keys.revoke("app")
    assert not keys.required
    with pytest.raises(InvalidRequest, match="no key app"):
        keys.revoke("app")


def test_a_new_key_does_not_print_itself() -> None:
    assert "eric_" not in repr(NewKey(name="app", scopes=("use",), key="eric_secret"))


def test_a_file_of_another_shape_is_none(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_bytes(msgspec.json.encode({"keys": []}))
    with pytest.raises(KeysUnavailable):
        KeyFile(tmp_path).read()
    KeyFile(tmp_path).write(KeyRecords(secret="00"))
    assert KeyFile(tmp_path).read() == KeyRecords(secret="00")


@pytest.mark.parametrize(
    ("method", "path", "needed"),
    [
        ("POST", "/v1/chat/completions", "use"),
        ("GET", "/v1/models", "use"),
        ("POST", "/generate", "use"),
        ("GET", "/nowhere", "use"),
        ("GET", "/metrics", "watch"),
        ("GET", "/admin/snapshot", "watch"),
        ("HEAD", "/admin/models", "watch"),
        ("POST", "/admin/estimate", "admin"),
        ("DELETE", "/admin/adapters/x", "admin"),
        ("GET", "/", None),
    ],
)
def test_what_each_path_needs(method: str, path: str, needed: Scope | None) -> None:
    assert scope_needed(method, path) == needed
    assert allows(("admin",), needed)
    assert allows(("use",), needed) == (needed in (None, "use"))
    assert allows(("watch",), needed) == (needed in (None, "watch"))
