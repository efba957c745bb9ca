"""keys.json: hashes of the API keys, in a folder that several programs may share, readable by its owner only."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from console.link.api import KeyLimits, Scope
from engine.errors import EngineError
from engine.system.files import make_private_folder, replace_file

# Keys are stored as scrypt hashes, so that a stolen file is of no use.
#
# scrypt is slow and takes memory on purpose. So each stored key has a tag, a few bits of an HMAC with the file's
# secret: only a presented key with the tag of a stored one is put through scrypt; a wrong key has one in 1 of 4 billion
# cases.

_COST, _BLOCK, _PARALLEL = 2**14, 8, 1
"""16 MiB and about 50 ms (RFC 7914). Keys are random, so the cost need not stop guessing."""

_MAX_MEMORY = 2**26
_HASH_BYTES = 32
_SALT_BYTES = 16
_TAG_DIGITS = 8


class KeyHash(NamedTuple):
    """Hash of a key, all in hex. tag: see above; salt: its own; hash: scrypt of its digest."""

    tag: str
    salt: str
    hash: str


def digest(secret: str, key: str) -> bytes:
    """Return the HMAC-SHA-256 of a key. secret: in hex."""
    return hmac.digest(bytes.fromhex(secret), key.encode(errors="surrogateescape"), "sha256")


def tag(key_digest: bytes) -> str:
    """Return the part of a digest by which a stored key is found."""
    return key_digest.hex()[:_TAG_DIGITS]


def hash_key(secret: str, key: str) -> KeyHash:
    """Return the hash to store of a new key. Blocking: scrypt is slow."""
    return _hash_with_salt(digest(secret, key), secrets.token_bytes(_SALT_BYTES))


def hash_digest(secret: str, key_digest: bytes) -> KeyHash:
    """Return the hash of a key of which only the digest is known: the same each time."""
    return _hash_with_salt(key_digest, hmac.digest(bytes.fromhex(secret), b"salt" + key_digest, "sha256")[:_SALT_BYTES])


def matches(stored: KeyHash, key_digest: bytes) -> bool:
    """Return whether the key has that digest, in constant time. Blocking: scrypt is slow."""
    return hmac.compare_digest(_scrypt(key_digest, bytes.fromhex(stored.salt)), stored.hash)


def _hash_with_salt(key_digest: bytes, salt: bytes) -> KeyHash:
    return KeyHash(tag(key_digest), salt.hex(), _scrypt(key_digest, salt))


def _scrypt(password: bytes, salt: bytes) -> str:
    return hashlib.scrypt(
        password, salt=salt, n=_COST, r=_BLOCK, p=_PARALLEL, maxmem=_MAX_MEMORY, dklen=_HASH_BYTES
    ).hex()


log = logging.getLogger("api")

NAME = "keys.json"
_LOCK = "keys.lock"
_OWN = 0o600
_WRITE_OF_OTHERS = 0o022


class KeysUnavailable(EngineError):
    """keys.json cannot be read or written."""

    code = "keys_unavailable"
    http_status = 500


class KeyUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Usage of a key. last_at: unix time, None for never."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    last_at: float | None = None

    def plus(self, more: KeyUsage) -> KeyUsage:
        """Return the sum of both."""
        return KeyUsage(
            requests=self.requests + more.requests,
            prompt_tokens=self.prompt_tokens + more.prompt_tokens,
            output_tokens=self.output_tokens + more.output_tokens,
            last_at=max(filter(None, (self.last_at, more.last_at)), default=None),
        )

    def minus(self, earlier: KeyUsage | None) -> KeyUsage:
        """Return the usage since `earlier`."""
        if earlier is None:
            return self
        return KeyUsage(
            requests=self.requests - earlier.requests,
            prompt_tokens=self.prompt_tokens - earlier.prompt_tokens,
            output_tokens=self.output_tokens - earlier.output_tokens,
            last_at=None if self.last_at == earlier.last_at else self.last_at,
        )


class StoredKey(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a key. tag, salt, hash: as in KeyHash."""

    name: str
    scopes: tuple[Scope, ...]
    tag: str
    salt: str
    hash: str
    limits: KeyLimits = KeyLimits()
    made_at: float | None = None
    use: KeyUsage = KeyUsage()

    @property
    def key_hash(self) -> KeyHash:
        """The hash that a presented key is compared with."""
        return KeyHash(self.tag, self.salt, self.hash)


class KeyRecords(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the file. secret: key of the digests, in hex."""

    secret: str
    keys: tuple[StoredKey, ...] = ()
    version: Literal[2] = 2

    def __post_init__(self) -> None:
        for text in (self.secret, *(part for stored in self.keys for part in stored.key_hash)):
            bytes.fromhex(text)


class _OldKey(msgspec.Struct, frozen=True, kw_only=True):
    """Record of version 1, without scrypt. digest: HMAC-SHA-256 of the key with the file's secret, in hex."""

    name: str
    scopes: tuple[Scope, ...]
    digest: str
    made_at: float | None = None
    use: KeyUsage = KeyUsage()

    def upgrade(self, secret: str) -> StoredKey:
        """Return the record in the current version."""
        hashed = hash_digest(secret, bytes.fromhex(self.digest))
        return StoredKey(name=self.name, scopes=self.scopes, made_at=self.made_at, use=self.use, **hashed._asdict())


class _OldRecords(msgspec.Struct, frozen=True, kw_only=True):
    secret: str
    keys: tuple[_OldKey, ...] = ()

    def upgrade(self) -> KeyRecords:
        """Return the records in the current version. Blocking: scrypt is slow."""
        return KeyRecords(secret=self.secret, keys=tuple(key.upgrade(self.secret) for key in self.keys))


class _VersionOnly(msgspec.Struct, frozen=True):
    version: int = 1


class KeyFile:
    """keys.json in `folder`; None for no file. Blocking, except for a stat: it is a few hundred bytes.

    is_old: True if the last read file has an earlier version, which is slow to read.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._read_stamp: tuple[int, ...] | None = None
        self.is_old = False

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the file against other programs. Raises KeysUnavailable where the folder cannot be written."""
        if self._folder is None:
            yield
            return
        with _file_errors(self._folder / NAME, "written"):
            make_private_folder(self._folder)
            lock = os.open(self._folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, _OWN)
        try:
            with _file_errors(self._folder / NAME, "written"):
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def read(self) -> KeyRecords | None:
        """Return the contents, None where there is no file. Raises KeysUnavailable where it cannot be read."""
        if self._folder is None:
            return None
        path = self._folder / NAME
        with _file_errors(path, "read"):
            self._read_stamp = self._stamp()
            try:
                return self._decode(_read_trusted(path))
            except FileNotFoundError:
                return None

    def read_if_changed(self) -> KeyRecords | None:
        """Return the contents if they have changed since the last read; None if not, or if unreadable, which is
        logged."""
        if self._folder is None or self._stamp() == self._read_stamp:
            return None
        try:
            return self.read()
        except KeysUnavailable as error:
            log.error("%s; the keys loaded before stay valid", error.message)
            return None

    def write(self, records: KeyRecords) -> None:
        """Replace the file atomically. Raises KeysUnavailable."""
        if self._folder is None:
            return
        path = self._folder / NAME
        with _file_errors(path, "written"):
            replace_file(path, msgspec.json.format(msgspec.json.encode(records)))
        self._read_stamp = self._stamp()

    def _decode(self, content: bytes) -> KeyRecords:
        """Decode any version. Raises ValueError."""
        self.is_old = msgspec.json.decode(content, type=_VersionOnly).version == 1
        if self.is_old:
            return msgspec.json.decode(content, type=_OldRecords).upgrade()
        return msgspec.json.decode(content, type=KeyRecords)

    def _stamp(self) -> tuple[int, ...] | None:
        """Return a value that changes whenever the file does."""
        assert self._folder is not None
        try:
            found = (self._folder / NAME).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


def _read_trusted(path: Path) -> bytes:
    """Return the contents. Raises PermissionError where other users could have added keys of their own."""
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        if os.geteuid() and found.st_uid not in (0, os.geteuid()):
            raise PermissionError(errno.EPERM, "it belongs to another user; take ownership, or move it")
        if found.st_mode & _WRITE_OF_OTHERS:
            raise PermissionError(errno.EPERM, f"other users can write to it; `chmod 600 {path}`")
        return file.read()


@contextmanager
def _file_errors(path: Path, action: str) -> Iterator[None]:
    """Turn errors of the file into KeysUnavailable. action: "read" or "written"."""
    try:
        yield
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise KeysUnavailable(f"The keys in {path} cannot be {action}: {reason}") from error
