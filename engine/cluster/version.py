"""What must be the same on every node: the package's version, and the messages it speaks."""

from __future__ import annotations

import hashlib
import platform
from importlib import metadata
from pathlib import Path

from engine import config, errors, snapshot
from engine.backends import base
from engine.cluster import messages
from engine.worker import protocol


def own_version() -> str:
    """For instance "0.1.0 (messages 3f2a91c0), Python 3.11": equal on machines that understand each other."""
    digest = hashlib.blake2b(digest_size=4)
    for module in (base, config, errors, messages, protocol, snapshot):
        digest.update(Path(str(module.__file__)).read_bytes())
    python = ".".join(platform.python_version_tuple()[:2])
    return f"{_package_version()} (messages {digest.hexdigest()}), Python {python}"


def _package_version() -> str:
    try:
        return metadata.version("ericllm")
    except metadata.PackageNotFoundError:
        return "not installed"
