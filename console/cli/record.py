"""`ericllm record FILE [URL]`: record what the console shows of an instance."""

from __future__ import annotations

import argparse
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from console import text
from console.cli.remote_args import add_key, add_url, key_of, number, remote_links, tls_of
from console.link.recording.recorder import INTERVAL_S, Recorder
from console.link.remote.http import OutOfReach
from console.link.remote.link import RemoteLink
from console.link.rpc import as_link
from console.runtime.output import say
from engine.errors import EngineError

FAILURE = 1
_LOOK_S = 0.1


def record(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Record an instance until ctrl+c; 1 with one sentence where it or the file cannot be used."""
    parser.description = (
        "Record what the console shows of an instance, until Ctrl+C. An existing recording is continued."
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="recording file")
    add_url(parser)
    add_key(parser)
    parser.add_argument(
        "--interval",
        metavar="SECONDS",
        type=number(0.1, 3600),
        default=INTERVAL_S,
        help="time between snapshots (default 1)",
    )
    parser.add_argument("--seconds", metavar="N", type=number(0.1, 10**7), default=None, help="stop after this time")
    given = parser.parse_args(argv)
    asked = threading.Event()
    endings = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(ending, lambda *_: asked.set()) for ending in endings]
    try:
        _record(given, asked)
    except EngineError as error:
        say(error.message)
        return FAILURE
    finally:
        for ending, handler in zip(endings, before, strict=True):
            signal.signal(ending, handler)
    return 0


def _record(given: argparse.Namespace, asked: threading.Event) -> None:
    with remote_links([given.url], key_of(given), max(0.1, min(10.0, 1 / given.interval)), tls_of(given)) as (link,):
        _await_first(link, asked)
        say(f"recording {link.standing().name} into {given.file}; ctrl+c ends it")
        ends = None if given.seconds is None else time.monotonic() + given.seconds
        with Recorder(as_link(link), given.file, given.interval) as recorder:
            while not asked.wait(_LOOK_S) and not recorder.problem and (ends is None or time.monotonic() < ends):
                pass
    if recorder.problem:
        raise EngineError(recorder.problem)
    say(f"{given.file} has {text.size(given.file.stat().st_size)}")


def _await_first(link: RemoteLink, asked: threading.Event) -> None:
    """The first frame; raises the reason why there is none."""
    while (standing := link.standing()).reach == "connecting" and not asked.wait(_LOOK_S):
        pass
    if standing.stale and not asked.is_set():
        raise OutOfReach(standing.reason)
