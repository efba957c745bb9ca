"""keys.json: the keys that were made, in a folder that several programs may share. Nobody else may read it."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from console.link.api import KeyLimits, Scope
from engine.errors import EngineError
from engine.system.files import make_private_folder

# How keys are kept: as scrypt of what they consist of, so that a file that was read by others is of no use to them.
#
# scrypt is slow and takes memory on purpose. So each kept key has a tag, a few bits of a digest that is keyed with the
# file's secret: what is given is put through scrypt only where its tag is a kept one's, which that of a wrong key is
# once in four thousand million times.

_COST, _BLOCK, _PARALLEL = 2**14, 8, 1
"""16 MiB and some 50 ms (RFC 7914). The keys are random: it is not their guessing that has to be made dear."""

_MAX_MEMORY = 2**26
_HASH_BYTES = 32
_SALT_BYTES = 16
_TAG_DIGITS = 8


class KeyHash(NamedTuple):
    """What is kept of a key, all in hex. tag: see above; salt: its own; hash: scrypt of its digest."""

    tag: str
    salt: str
    hash: str


def digest(secret: str, key: str) -> bytes:
    """HMAC-SHA-256 of a key. secret: in hex."""
    return hmac.digest(bytes.fromhex(secret), key.encode(errors="surrogateescape"), "sha256")


def tag(digested: bytes) -> str:
    """The part of a digest by which a kept key is found."""
    return digested.hex()[:_TAG_DIGITS]


def hashed(secret: str, key: str) -> KeyHash:
    """What to keep of a new key. Blocking, as all that puts something through scrypt."""
    return _hashed(digest(secret, key), secrets.token_bytes(_SALT_BYTES))


def rehashed(secret: str, digested: bytes) -> KeyHash:
    """The same of a key of which the digest alone is known. It gives the same each time."""
    return _hashed(digested, hmac.digest(bytes.fromhex(secret), b"salt" + digested, "sha256")[:_SALT_BYTES])


def matches(kept: KeyHash, digested: bytes) -> bool:
    """Whether that is the key with that digest, in the same time whatever the answer."""
    return hmac.compare_digest(_scrypt(digested, bytes.fromhex(kept.salt)), kept.hash)


def _hashed(digested: bytes, salt: bytes) -> KeyHash:
    return KeyHash(tag(digested), salt.hex(), _scrypt(digested, salt))


def _scrypt(password: bytes, salt: bytes) -> str:
    return hashlib.scrypt(
        password, salt=salt, n=_COST, r=_BLOCK, p=_PARALLEL, maxmem=_MAX_MEMORY, dklen=_HASH_BYTES
    ).hex()


log = logging.getLogger("api")

NAME = "keys.json"
_LOCK = "keys.lock"
_OWN = 0o600
_WRITE_OF_OTHERS = 0o022
_NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC


class KeysUnavailable(EngineError):
    """The file of the keys cannot be read or written."""

    code = "keys_unavailable"
    http_status = 500


class KeyUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a key was used for. last_at: unix time, None for never."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    last_at: float | None = None

    def plus(self, more: KeyUsage) -> KeyUsage:
        """Both together."""
        return KeyUsage(
            requests=self.requests + more.requests,
            prompt_tokens=self.prompt_tokens + more.prompt_tokens,
            output_tokens=self.output_tokens + more.output_tokens,
            last_at=max(filter(None, (self.last_at, more.last_at)), default=None),
        )

    def minus(self, known: KeyUsage | None) -> KeyUsage:
        """What is beyond `known`."""
        if known is None:
            return self
        return KeyUsage(
            requests=self.requests - known.requests,
            prompt_tokens=self.prompt_tokens - known.prompt_tokens,
            output_tokens=self.output_tokens - known.output_tokens,
            last_at=None if self.last_at == known.last_at else self.last_at,
        )


class StoredKey(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a key. tag, salt, hash: as `key_hash.Hashed` has them."""

    name: str
    scopes: tuple[Scope, ...]
    tag: str
    salt: str
    hash: str
    limits: KeyLimits = KeyLimits()
    made_at: float | None = None
    use: KeyUsage = KeyUsage()

    @property
    def hashed(self) -> KeyHash:
        """What a key that is given is compared with."""
        return KeyHash(self.tag, self.salt, self.hash)


class KeyRecords(msgspec.Struct, frozen=True, kw_only=True):
    """The file. secret: what digests are keyed with, in hex."""

    secret: str
    keys: tuple[StoredKey, ...] = ()
    version: Literal[2] = 2

    def __post_init__(self) -> None:
        for text in (self.secret, *(part for kept in self.keys for part in kept.hashed)):
            bytes.fromhex(text)


class _OldKey(msgspec.Struct, frozen=True, kw_only=True):
    """As it was before scrypt. digest: HMAC-SHA-256 of the key with the file's secret, in hex."""

    name: str
    scopes: tuple[Scope, ...]
    digest: str
    made_at: float | None = None
    use: KeyUsage = KeyUsage()

    def now(self, secret: str) -> StoredKey:
        """The same key, as it is kept now."""
        hashed = rehashed(secret, bytes.fromhex(self.digest))
        return StoredKey(name=self.name, scopes=self.scopes, made_at=self.made_at, use=self.use, **hashed._asdict())


class _OldRecords(msgspec.Struct, frozen=True, kw_only=True):
    secret: str
    keys: tuple[_OldKey, ...] = ()

    def now(self) -> KeyRecords:
        """The same keys, as they are kept now. Blocking: scrypt is slow."""
        return KeyRecords(secret=self.secret, keys=tuple(key.now(self.secret) for key in self.keys))


class _Kind(msgspec.Struct, frozen=True):
    version: int = 1


class KeyFile:
    """The file in `folder`; without one there is no file. Blocking, but for a stat: it is a few hundred bytes.

    is_old: whether what was read last is of an earlier version, which takes long to read.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._seen: tuple[int, ...] | None = None
        self.is_old = False

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other program changes the file meanwhile. Raises KeysUnavailable where the folder cannot be written."""
        if self._folder is None:
            yield
            return
        with _told(self._folder / NAME, "written"):
            make_private_folder(self._folder)
            lock = os.open(self._folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, _OWN)
        try:
            with _told(self._folder / NAME, "written"):
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def read(self) -> KeyRecords | None:
        """What is in the file, None where there is none. Raises KeysUnavailable where it cannot be read."""
        if self._folder is None:
            return None
        path = self._folder / NAME
        with _told(path, "read"):
            self._seen = self._stamp()
            try:
                return self._decoded(_read_trusted(path))
            except FileNotFoundError:
                return None

    def read_if_changed(self) -> KeyRecords | None:
        """What is in the file where that is new; None where it is not, or cannot be read, which is logged."""
        if self._folder is None or self._stamp() == self._seen:
            return None
        try:
            return self.read()
        except KeysUnavailable as error:
            log.error("%s; the keys known so far stay valid", error.message)
            return None

    def write(self, records: KeyRecords) -> None:
        """Replace the file at one stroke. Raises KeysUnavailable where it cannot."""
        if self._folder is None:
            return
        path = self._folder / NAME
        new = path.with_name(f".{NAME}.{secrets.token_hex(4)}")
        try:
            with _told(path, "written"):
                with os.fdopen(os.open(new, _NEW, _OWN), "wb") as file:
                    file.write(msgspec.json.format(msgspec.json.encode(records)))
                    file.flush()
                    os.fsync(file.fileno())
                new.replace(path)
        finally:
            with suppress(FileNotFoundError):
                new.unlink()
        self._seen = self._stamp()

    def _decoded(self, content: bytes) -> KeyRecords:
        """Raises ValueError."""
        self.is_old = msgspec.json.decode(content, type=_Kind).version == 1
        if self.is_old:
            return msgspec.json.decode(content, type=_OldRecords).now()
        return msgspec.json.decode(content, type=KeyRecords)

    def _stamp(self) -> tuple[int, ...] | None:
        """What changes whenever the file does."""
        assert self._folder is not None
        try:
            found = (self._folder / NAME).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


def _read_trusted(path: Path) -> bytes:
    """Return what is in the file. Raises PermissionError where others could have put keys of their own there."""
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        if os.geteuid() and found.st_uid not in (0, os.geteuid()):
            raise PermissionError(errno.EPERM, "it belongs to another user; make it yours, or move it away")
        if found.st_mode & _WRITE_OF_OTHERS:
            raise PermissionError(errno.EPERM, f"other users may write into it; `chmod 600 {path}`")
        return file.read()


@contextmanager
def _told(path: Path, what: str) -> Iterator[None]:
    """Failures of the file as one sentence."""
    try:
        yield
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise KeysUnavailable(f"The keys in {path} cannot be {what}: {reason}") from error
