"""Starting a worker as a child process, and never losing it: it is reaped whenever it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Collection

from engine.backends.common.native_kernels import kernels_available
from engine.system.child_process import block_stop_signals, child_environment, python_command

SPIN_TURNS, SPIN_TURNS_BETWEEN_OPERATIONS = 3000, 10000
"""How long torch's threads spin at a barrier before they sleep: with our kernels, which have threads of their own, and
without, where what one thread does between two of torch's operations must not let the other fall asleep."""


def spawn(worker_id: str, sock: socket.socket, output_fd: int) -> subprocess.Popen[bytes]:
    """Start `python -m engine.worker_process` on its end of the channel; raises OSError.

    A fresh interpreter (nothing is forked into it but the socket), in a process group of its own so that a Ctrl-C in
    the terminal passes it by. Not in a session of its own: Linux may share out the CPU by sessions first (autogroup),
    and what was started with `nice` in our session would get as much of it as the worker. Call it on a thread that
    lives as long as the worker may: on Linux the kernel kills the child when the thread that started it ends, which is
    how no worker outlives a killed engine.
    """
    with block_stop_signals():
        return subprocess.Popen(
            [
                *python_command("-m", "engine.worker_process"),
                *("--id", worker_id, "--fd", str(sock.fileno()), "--parent", str(os.getpid())),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output_fd,
            stderr=output_fd,
            pass_fds=(sock.fileno(),),
            process_group=0,
            env=worker_environment(),
        )


def worker_environment(keep: Collection[str] = ()) -> dict[str, str]:
    """Return `child_environment` with output unbuffered and crashes traced into the log.

    CUDA_DEVICE_ORDER: so that cuda:N is the driver's device N, which placement speaks of.  GOMP_SPINCOUNT: as long as a
    quiet machine needs and no longer: a thread that spins takes the core from the one it waits for as soon as anything
    else runs. Measured in docs/performance.md.
    """
    turns = SPIN_TURNS if kernels_available() else SPIN_TURNS_BETWEEN_OPERATIONS
    env = {"GOMP_SPINCOUNT": str(turns), **child_environment(keep)}
    return {**env, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def reap(process: subprocess.Popen[bytes], on_exit: Callable[[int], None]) -> None:
    """Wait for the end on a thread of its own (works under any asyncio loop, on any thread); gives the return code."""

    def wait() -> None:
        on_exit(process.wait())

    threading.Thread(target=wait, name=f"reap-{process.pid}", daemon=True).start()


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
