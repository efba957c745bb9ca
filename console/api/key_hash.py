"""How keys are kept: as scrypt of what they consist of, so that a file that was read by others is of no use to them.

scrypt is slow and takes memory on purpose. So each kept key has a tag, a few bits of a digest that is keyed with the
file's secret: what is given is put through scrypt only where its tag is a kept one's, which that of a wrong key is once
in four thousand million times.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import NamedTuple

_COST, _BLOCK, _PARALLEL = 2**14, 8, 1
"""16 MiB and some 50 ms (RFC 7914). The keys are random: it is not their guessing that has to be made dear."""

_MAX_MEMORY = 2**26
_HASH_BYTES = 32
_SALT_BYTES = 16
_TAG_DIGITS = 8


class Hashed(NamedTuple):
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


def hashed(secret: str, key: str) -> Hashed:
    """What to keep of a new key. Blocking, as all that puts something through scrypt."""
    return _hashed(digest(secret, key), secrets.token_bytes(_SALT_BYTES))


def rehashed(secret: str, digested: bytes) -> Hashed:
    """The same of a key of which the digest alone is known. It gives the same each time."""
    return _hashed(digested, hmac.digest(bytes.fromhex(secret), b"salt" + digested, "sha256")[:_SALT_BYTES])


def matches(kept: Hashed, digested: bytes) -> bool:
    """Whether that is the key with that digest, in the same time whatever the answer."""
    return hmac.compare_digest(_scrypt(digested, bytes.fromhex(kept.salt)), kept.hash)


def _hashed(digested: bytes, salt: bytes) -> Hashed:
    return Hashed(tag(digested), salt.hex(), _scrypt(digested, salt))


def _scrypt(password: bytes, salt: bytes) -> str:
    return hashlib.scrypt(
        password, salt=salt, n=_COST, r=_BLOCK, p=_PARALLEL, maxmem=_MAX_MEMORY, dklen=_HASH_BYTES
    ).hex()
