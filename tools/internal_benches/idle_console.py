"""The console on a model, started and left alone: time to the first answer, and the CPU of its processes."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import msgspec
import psutil

from console.bench.progress import Show
from console.bench.text import table
from engine.errors import WorkerFailed
from engine.system.child_process import child_environment, python_command
from tools.internal_benches.console_latency import FIRST_FRAME, Goal, free_port
from tools.internal_benches.pty_child import PtyChild

SETTLE_S = 75.0
"""Until the graphs, which show a minute, have nothing left in them."""
_READY_S = 120.0
_POLL_S = 0.01
_CPU_CLOCK = 2
"""What the kernel adds to the complement of a process id to name the clock of its CPU time (clock_getcpuclockid)."""
_QUIT = b"\x11"


class IdleReport(msgspec.Struct, frozen=True, kw_only=True):
    """start_cpu_s: CPU of all processes until the first answer.  wakeups_per_s: voluntary switches, while idle."""

    seconds: float
    start_cpu_s: float
    wakeups_per_s: float
    goals: tuple[Goal, ...]


async def measure_idle(model: str, seconds: float, show: Show) -> IdleReport:
    """Start the console, ask for one token over HTTP, leave it alone, and measure it for `seconds`. Raises WorkerFailed
    where it does not become ready."""
    with tempfile.TemporaryDirectory(prefix="ericllm-bench-") as folder:
        port = free_port()
        homes = {f"XDG_{kind}_HOME": str(Path(folder) / kind.lower()) for kind in ("CONFIG", "DATA", "STATE")}
        terminal = PtyChild(
            python_command("-m", "console.cli.main", "--model", model, "--port", str(port)),
            columns=120,
            rows=40,
            env={**child_environment(), **homes, "TERM": "xterm-256color"},
        )
        try:
            show("starting the console")
            await terminal.shown_s(FIRST_FRAME)
            first_frame_s = time.monotonic() - terminal.started_s
            await _first_answer(f"http://127.0.0.1:{port}")
            first_answer_s = time.monotonic() - terminal.started_s
            processes = _processes(terminal)
            start_cpu_s = sum(map(_cpu_s, processes))
            show(f"leaving it alone for {SETTLE_S + seconds:.0f} s")
            await asyncio.sleep(SETTLE_S)
            processes = _processes(terminal)
            before = [(_cpu_s(each), _wakeups(each)) for each in processes]
            began_s = time.monotonic()
            await asyncio.sleep(seconds)
            elapsed_s = time.monotonic() - began_s
            cpu_s = [_cpu_s(each) - was_s for each, (was_s, _) in zip(processes, before, strict=True)]
            wakeups = sum(_wakeups(each) - was for each, (_, was) in zip(processes, before, strict=True))
            terminal.press(_QUIT)
            with contextlib.suppress(WorkerFailed):
                await terminal.ended_s(5.0)
        finally:
            terminal.close()
    return IdleReport(
        seconds=seconds,
        start_cpu_s=start_cpu_s,
        wakeups_per_s=wakeups / elapsed_s,
        goals=(
            Goal("first frame", 1e3 * first_frame_s, 1000, "ms"),
            Goal("first answer", 1e3 * first_answer_s, 4000, "ms"),
            Goal("CPU of the idle console", 100 * cpu_s[0] / elapsed_s, 1, "%"),
            Goal("CPU of it and its workers", 100 * sum(cpu_s) / elapsed_s, 1, "%"),
        ),
    )


def idle_text(report: IdleReport) -> str:
    """The report as text."""
    rows = [
        [goal.name, f"{goal.value:.2f} {goal.unit}", f"{goal.limit:g} {goal.unit}", "yes" if goal.is_reached else "NO"]
        for goal in report.goals
    ]
    return "\n".join(
        (
            f"{report.start_cpu_s:.2f} s of CPU until the first answer; {report.wakeups_per_s:.0f} wake-ups a second "
            f"in {report.seconds:g} idle seconds",
            "",
            table(["", "measured", "limit", "reached"], rows),
        )
    )


async def _first_answer(url: str) -> None:
    """Ask for a token as soon as a model is ready. Raises WorkerFailed where none comes."""
    until_s = time.monotonic() + _READY_S
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    async with aiohttp.ClientSession(url) as http:
        while time.monotonic() < until_s:
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get("/ready") as ready:
                    is_ready = ready.status == 200
                if is_ready:
                    async with http.post("/v1/chat/completions", json=body) as answer:
                        await answer.read()
                        if answer.status == 200:
                            return
            await asyncio.sleep(_POLL_S)
    raise WorkerFailed(f"the console gave no answer within {_READY_S:g} s")


def _processes(terminal: PtyChild) -> list[psutil.Process]:
    """The console's process, then those of its workers and templates."""
    console = psutil.Process(terminal.process.pid)
    return [console, *console.children(recursive=True)]


def _cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process, its ended threads included; exact on Linux, whose process clocks count nanoseconds."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return time.clock_gettime(~process.pid << 3 | _CPU_CLOCK)
    times = process.cpu_times()
    return float(times.user + times.system)


def _wakeups(process: psutil.Process) -> int:
    found = 0
    for thread in process.threads():
        with contextlib.suppress(OSError, StopIteration):
            status = Path(f"/proc/{process.pid}/task/{thread.id}/status").read_text().splitlines()
            found += int(next(line for line in status if line.startswith("voluntary_ctxt")).split()[1])
    return found
