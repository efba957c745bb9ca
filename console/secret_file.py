"""Secrets in files: how one is read, and who else could read it."""

from __future__ import annotations

from pathlib import Path

from engine.errors import InvalidRequest
from engine.files import is_readable_by_others
from engine.models.files import home_expanded

MAX_BYTES = 4096
"""Longest first line that is read: a key has about 40 characters, a token of an identity provider some 2,000."""


def read_secret(file: Path, flag: str) -> str:
    """Return the first line of a file without the spaces around it. Read once, as it may be a pipe.

    flag: what named the file, for the sentence. Raises InvalidRequest where there is no key to be had from it.
    """
    param = flag.lstrip("-").replace("-", "_")
    try:
        with home_expanded(file).open("rb") as stream:
            line = stream.read(MAX_BYTES + 1).partition(b"\n")[0]
        secret = line.decode().strip()
    except OSError as error:
        raise InvalidRequest(f"{flag} {file} cannot be read: {error.strerror or error}", param=param) from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{flag} {file} holds no key: its first line is no text", param=param) from None
    if len(line) > MAX_BYTES:
        raise InvalidRequest(
            f"{flag} {file} holds no key: its first line has more than {MAX_BYTES:,} bytes", param=param
        )
    if not secret:
        raise InvalidRequest(f"{flag} {file} holds no key: its first line is empty", param=param)
    if not secret.isprintable():
        raise InvalidRequest(f"{flag} {file} holds no key: its first line has control characters", param=param)
    return secret


def exposed(file: Path) -> str:
    """Return a sentence where other users of this machine may read a file with a key; "" where they may not."""
    file = home_expanded(file)
    if not is_readable_by_others(file):
        return ""
    return f"{file} holds a key, and other users of this machine may read it: `chmod 600 {file}`"
