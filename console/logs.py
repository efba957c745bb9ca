"""Where log lines go: the engine's ring, which screens read, a file, and stderr where there is no screen."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path

from engine.log import LogRing, RingHandler

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_QUIET = ("asyncio", "aiohttp.access", "httpx", "huggingface_hub", "filelock", "urllib3")


@contextmanager
def logging_to(ring: LogRing, folder: Path | None, *, verbose: bool, stderr: bool) -> Iterator[None]:
    """Send this program's log to `ring`, to `folder`/ericllm.log where it can be written, and to stderr if asked."""
    handlers: list[logging.Handler] = [RingHandler(ring)]
    if folder is not None:
        handlers += _file_handler(folder)
    if stderr:
        handlers.append(logging.StreamHandler(sys.stderr))
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    for handler in handlers:
        handler.setFormatter(logging.Formatter(_FORMAT))
        root.addHandler(handler)
    try:
        yield
    finally:
        root.setLevel(before)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


def _file_handler(folder: Path) -> list[logging.Handler]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [RotatingFileHandler(folder / "ericllm.log", maxBytes=4 * 2**20, backupCount=2, encoding="utf-8")]
    except OSError:
        return []
