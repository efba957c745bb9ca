"""Child processes: how a Python program of ours is started, and which of our environment any program is given.

Every program that this one starts goes through here: none imports code from the folder that it is started in, and none
is given a secret that it does not need. What runs as the same user may read our files; it is not handed our keys.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import engine

ROOT = Path(engine.__file__).resolve().parent.parent
"""Folder that our packages are imported from. A child that reads no relative path is started in it."""

_PROXIES = frozenset({"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"})
HUB_SECRETS = frozenset({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT"}) | _PROXIES
"""Variables for a process that fetches from the hub."""

_STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})
"""A terminal and a service manager send these to every process of a program at once."""

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15

_SECRET_NAME = re.compile(
    r"(?:PASSWORD|PASSWD|PASSPHRASE|_PASS|_PWD|_AUTH|KEY|TOKEN|SECRET|CREDENTIALS?)$"
    r"|^OTEL_EXPORTER_OTLP_.*HEADERS$",
    re.IGNORECASE,
)
"""ERICLLM_API_KEY, HF_TOKEN, HUGGING_FACE_HUB_TOKEN, RAY_AUTH_TOKEN, AWS_SECRET_ACCESS_KEY, ... by the last word."""

_SECRET_VALUE = re.compile(r"://[^/\s@]*:[^/\s@]+@")
"""An address with a password in it, as of a proxy or a database."""


def python_command(*arguments: str) -> list[str]:
    """Return the command that runs this interpreter with `arguments`, importing nothing from the current folder."""
    return [sys.executable, "-P", *arguments]


_TIED = """
import os, signal, subprocess, sys, threading

def end_with_parent():
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)

try:
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
except OSError as error:
    sys.exit(f"error: {error}")
threading.Thread(target=end_with_parent, daemon=True).start()
status = child.wait()
sys.exit(status if status >= 0 else 128 - status)
"""


def tied_command(command: Sequence[str]) -> list[str]:
    """Return what runs `command` until the pipe ends that it is given as stdin: when the parent closes that, or dies.
    It and what it started are killed then. Start it in a session of its own; its status is the command's, and
    128 and the number of the signal that ended that."""
    return [sys.executable, "-P", "-S", "-c", _TIED, *command]


@contextmanager
def block_stop_signals() -> Iterator[None]:
    """Start a child within that calls `ignore_stop_signals`: none ends it before it does."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_stop_signals() -> None:
    """Leave it to the parent, which has been sent them as well, when this process is to end."""
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)


def name_process(name: str) -> None:
    """Give this process a name of up to 15 characters, which ps and top show (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def die_with_parent(parent_pid: int) -> bool:
    """Have the kernel kill this process when the thread that started it ends (Linux); False where its parent is dead
    already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent_pid


def child_environment(keep: Collection[str] = ()) -> dict[str, str]:
    """Return our environment without its secrets but those of the names in `keep`, our packages importable."""
    env = {name: value for name, value in os.environ.items() if name in keep or not is_secret(name, value)}
    inherited = [entry for entry in env.pop("PYTHONPATH", "").split(os.pathsep) if entry]  # "" is the current folder
    paths = [*([] if _is_installed() else [str(ROOT)]), *map(os.path.abspath, inherited)]
    return {**env, "PYTHONPATH": os.pathsep.join(paths)} if paths else env


def is_secret(name: str, value: str) -> bool:
    """Return whether an environment variable is, or holds, what only the process that uses it may know."""
    return _SECRET_NAME.search(name) is not None or _SECRET_VALUE.search(value) is not None


def _is_installed() -> bool:
    """Return whether every interpreter of this environment finds our packages by itself."""
    return str(ROOT) == sysconfig.get_path("purelib")
