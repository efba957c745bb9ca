"""A worker process: `python -m engine.worker_process --id w0 --fd N --parent PID`, started by ProcessHost alone; with
--forks in place of --id, the process that forks workers, started by ForkServer alone.

For tests, the environment variable ERICLLM_BACKEND_FACTORY="module:function" names a Callable[[ModelSpec], Backend]
to use in place of the real backends.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import socket
import sys
import time
from typing import cast

from engine.system.child_process import die_with_parent, ignore_stop_signals, name_process
from engine.system.tasks import reduce_gc_pauses
from engine.worker_process.channel import WorkerChannel
from engine.worker_process.factory import BackendFactory, create_backend
from engine.worker_process.fork_server import fork_workers, preload, start_again_bare
from engine.worker_process.loading import process_threads
from engine.worker_process.logs import forwarded_logs
from engine.worker_process.loop import WorkerLoop
from engine.worker_process.protocol import Load

ORPHAN_GRACE_S = 2.0


def main() -> int:
    """Run one worker until Shutdown or the end of the engine; return the exit status."""
    parser = argparse.ArgumentParser(prog="engine.worker_process")
    parser.add_argument("--id")
    parser.add_argument("--forks", action="store_true")
    parser.add_argument("--bare", action="store_true", help="with --forks: import nothing first")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args()
    ignore_stop_signals()
    if not die_with_parent(options.parent):
        return 1
    sock = socket.socket(fileno=options.fd)
    sock.set_inheritable(False)
    if options.forks:
        name_process("ericllm-forks")
        factory = _factory_name()
        if not options.bare and not preload(factory[0] if factory is not None else None):
            start_again_bare(sock)
        forked = fork_workers(sock, options.parent)
        if forked is None:
            return 0
        sock = forked
    name_process("ericllm-worker")
    channel = WorkerChannel(sock, on_eof=_leave_anyway)
    logging.captureWarnings(True)
    logging.getLogger("engine").setLevel(logging.INFO)
    reduce_gc_pauses()
    with forwarded_logs(channel):
        return 0 if WorkerLoop(channel, _factory(), before_load=_limit_threads).run() else 1


def _leave_anyway() -> None:
    """The engine is gone: give the loop a moment to end by itself, then end even in the middle of a native call."""
    time.sleep(ORPHAN_GRACE_S)
    os._exit(1)


def _limit_threads(load: Load) -> None:
    """For libraries that read the environment when they are first imported."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = str(process_threads(load.threads, load.spec))


def _factory_name() -> tuple[str, str] | None:
    """Return module and function of a test's factory."""
    module, _, function = os.environ.get("ERICLLM_BACKEND_FACTORY", "").partition(":")
    return (module, function) if module else None


def _factory() -> BackendFactory:
    name = _factory_name()
    if name is None:
        return create_backend
    module, function = name
    return cast(BackendFactory, getattr(importlib.import_module(module), function))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # nothing is left to do, and taking torch apart would take half a second
