"""Workers in real child processes: what they say, how they end, and that none is left."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from engine.errors import WorkerFailed
from engine.worker_process.fork_server import ForkServer
from engine.worker_process.hosts import ProcessHost, WorkerExit
from engine.worker_process.protocol import CancelLoad, Hello, LogLine, StepBatch
from tests.fakes.backend import PATIENCE_S, expected_text
from tests.fakes.backend_factories import RAM_FILE_BYTES
from tests.fakes.engines import until
from tests.fakes.model import write_fake_model
from tests.fakes.worker import Probe, load_command, submit_command

StartWorker = Callable[..., Awaitable[Probe]]
ROOT = Path(__file__).resolve().parents[2]
PROMPT_IDS = list(b"hello")


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return write_fake_model(tmp_path / "fake")


@pytest.fixture
async def start_worker(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> AsyncIterator[StartWorker]:
    """Starts child processes around fake backends; afterwards none of them may be left, not even as a zombie. Its
    parameter is whether they are forked."""
    started: list[Probe] = []
    forks = ForkServer() if getattr(request, "param", False) else None

    async def start(factory: str = "make", log_path: Path | None = None) -> Probe:
        monkeypatch.setenv("ERICLLM_BACKEND_FACTORY", f"tests.fakes.backend_factories:{factory}")
        probe = Probe(ProcessHost(f"w{len(started)}", log_path=log_path, forks=forks))
        started.append(probe)
        return await probe.start()

    yield start
    for probe in started:
        await probe.host.stop(PATIENCE_S)
        assert len(probe.exits) == 1
        assert not psutil.pid_exists(probe.host.pid)
    if forks is not None:
        server_pid = forks.pid
        await forks.close()
        assert not psutil.pid_exists(server_pid)


either_way = pytest.mark.parametrize("start_worker", [False, True], ids=["spawned", "forked"], indirect=True)


def wait_until_gone(pid: int) -> None:
    """Wait for the end of a process that need not be our child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ready, _, _ = select.select([descriptor], [], [], PATIENCE_S)
        assert ready, f"process {pid} is still there"
    finally:
        os.close(descriptor)


@either_way
async def test_a_worker_process_answers_and_leaves_with_code_zero(start_worker, model_folder):
    probe = await start_worker()
    assert probe.events[0].pid == probe.host.pid != os.getpid()
    await probe.load(model_folder)
    probe.send(submit_command("r", max_tokens=6))
    text, last = await probe.answer("r")
    assert (text, last.finish) == (expected_text(PROMPT_IDS, 6), "length")
    await probe.host.stop(PATIENCE_S)
    assert probe.exits == [WorkerExit(code=0)]


@either_way
async def test_two_workers_at_once_keep_their_answers_apart(start_worker, model_folder):
    probes = [await start_worker(), await start_worker()]
    await asyncio.gather(*(probe.load(model_folder) for probe in probes))
    for number, probe in enumerate(probes):
        probe.send(*(submit_command(f"r{index}", f"{number}/{index}", max_tokens=50) for index in range(4)))
    for number, probe in enumerate(probes):
        texts = dict.fromkeys((f"r{index}" for index in range(4)), "")
        async for output in probe.outputs(*texts):
            texts[output.request_id] += output.text
        assert list(texts.values()) == [expected_text(list(f"{number}/{i}".encode()), 50) for i in range(4)]


async def test_a_prompt_of_100k_tokens_passes_whole(start_worker, model_folder):
    prompt = "0123456789" * 10_000
    probe = await start_worker()
    await probe.load(model_folder)
    probe.send(submit_command("r", prompt, max_tokens=3))
    assert (await probe.answer("r"))[0] == expected_text(list(prompt.encode()), 3)


@either_way
async def test_native_output_goes_to_the_log_and_never_to_our_own_stdout(start_worker, model_folder, tmp_path, capfd):
    log_path = tmp_path / "logs" / "w0.log"
    probe = await start_worker("make_noisy", log_path)
    await probe.load(model_folder)
    await probe.host.stop(PATIENCE_S)
    assert capfd.readouterr() == ("", "")
    assert probe.exits[0].log_tail == "native out\nnative \ufffd err, unfinished"
    lines = [event.message for event in probe.events if isinstance(event, LogLine) and event.logger == "native"]
    assert lines == ["native out", "native \ufffd err, unfinished"]
    assert log_path.read_text() == "native out\nnative \ufffd err, unfinished"


@either_way
async def test_a_crash_is_told_once_with_the_name_of_its_signal_and_where_it_was(start_worker, model_folder):
    probe = await start_worker("make_crashing")
    await probe.load(model_folder)
    probe.send(submit_command("r", max_tokens=10))
    exit_reason = await probe.wait_for(WorkerExit)
    assert (exit_reason.code, exit_reason.signal) == (None, "SIGSEGV")
    assert "Segmentation fault" in exit_reason.log_tail
    outputs = [output for event in probe.events if isinstance(event, StepBatch) for output in event.outputs]
    assert "".join(output.text for output in outputs) == expected_text(PROMPT_IDS, 2)
    probe.send(submit_command("late"))


async def test_a_sigkill_is_told_by_name(start_worker, model_folder):
    probe = await start_worker()
    await probe.load(model_folder)
    probe.send(submit_command("r", max_tokens=10**6))
    await probe.wait_for(StepBatch)
    os.kill(probe.host.pid, signal.SIGKILL)
    assert (await probe.wait_for(WorkerExit)).signal == "SIGKILL"


async def test_ctrl_c_in_the_terminal_passes_a_worker_by_and_nice_counts_between_it_and_our_other_children(
    start_worker,
):
    pid = (await start_worker()).host.pid
    assert os.getpgid(pid) == pid, "a terminal sends SIGINT to a process group"
    assert os.getsid(pid) == os.getsid(0), "Linux shares the CPU out among sessions before it looks at nice"


async def start_stuck(start_worker, model_folder) -> Probe:
    """A worker that hangs in a native call."""
    probe = await start_worker("make_stuck")
    await probe.load(model_folder)
    probe.send(submit_command("r", max_tokens=10))
    assert (await probe.wait_for(LogLine)).message == "stuck"
    return probe


@either_way
async def test_a_worker_that_hangs_is_killed(start_worker, model_folder):
    probe = await start_stuck(start_worker, model_folder)
    await probe.host.stop(0.1)
    assert probe.exits == [WorkerExit(signal="SIGKILL", log_tail="stuck")]


@pytest.mark.slow
async def test_a_worker_that_hangs_leaves_by_itself_when_its_channel_ends(start_worker, model_folder):
    probe = await start_stuck(start_worker, model_folder)
    probe.host._channel.abort()
    assert (await probe.wait_for(WorkerExit)).code == 1


@either_way
async def test_stopping_twice_and_killing_after_the_end_change_nothing(start_worker):
    probe = await start_worker()
    await asyncio.gather(probe.host.stop(PATIENCE_S), probe.host.stop(PATIENCE_S))
    probe.host.kill()
    probe.send(CancelLoad())
    assert probe.exits == [WorkerExit(code=0)]


async def test_a_worker_that_cannot_import_its_backend_says_why_in_the_tail(monkeypatch):
    monkeypatch.setenv("ERICLLM_BACKEND_FACTORY", "tests.fakes.no_such_module:make")
    probe = Probe(ProcessHost("w0"))
    await probe.host.start(probe._on_event, probe._on_exit)
    exit_reason = await probe.wait_for(WorkerExit)
    assert exit_reason.code == 1
    assert "No module named 'tests.fakes.no_such_module'" in exit_reason.log_tail


async def test_a_worker_that_cannot_be_started_is_one_sentence(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    probe = Probe(ProcessHost("w0"))
    with pytest.raises(WorkerFailed, match=r"worker w0 could not be started: .*No such file"):
        await probe.start()
    await probe.host.stop(1.0)
    assert probe.exits == []


async def test_a_worker_starts_from_any_folder(start_worker, model_folder, tmp_path, monkeypatch):
    (tmp_path / "logging.py").write_text("raise SystemExit('the folder we are in is no place to import from')")
    monkeypatch.chdir(tmp_path)
    probe = await start_worker()
    await probe.load(model_folder)


async def test_the_thread_count_is_in_the_environment_before_the_backend_comes(start_worker, model_folder):
    probe = await start_worker("make_telling")
    await probe.load(model_folder)
    await probe.host.stop(PATIENCE_S)
    assert probe.exits[0].log_tail == f"OMP_NUM_THREADS={load_command(model_folder).threads}"


def in_thread(main: Callable[[], Awaitable[None]]) -> None:
    """Run `main` on a loop on a thread of its own, as the console runs its engine."""
    with ThreadPoolExecutor(1) as executor:
        executor.submit(asyncio.run, main()).result(PATIENCE_S)


def test_a_worker_is_driven_from_a_loop_on_another_thread(model_folder, monkeypatch):
    monkeypatch.setenv("ERICLLM_BACKEND_FACTORY", "tests.fakes.backend_factories:make")

    async def main() -> None:
        probe = await Probe(ProcessHost("w0")).start()
        await probe.load(model_folder)
        probe.send(submit_command("r", max_tokens=6))
        assert (await probe.answer("r"))[0] == expected_text(PROMPT_IDS, 6)
        await probe.host.stop(PATIENCE_S)
        assert probe.exits == [WorkerExit(code=0)]

    in_thread(main)


def test_a_worker_whose_loop_ended_without_a_stop_ends_too():
    pids: list[int] = []

    async def main() -> None:
        pids.append((await Probe(ProcessHost("w0")).start()).host.pid)

    in_thread(main)
    wait_until_gone(pids[0])


_PARENT = """
import asyncio, sys
from engine.worker_process.fork_server import ForkServer
from engine.worker_process.hosts import ProcessHost

async def main():
    forks = ForkServer() if "forked" in sys.argv else None
    host = ProcessHost("orphan", forks=forks)
    await host.start(lambda event: print(host.pid, forks.pid if forks else 0, flush=True), lambda reason: None)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["spawned", "forked"])
def test_no_worker_outlives_an_engine_that_was_killed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERICLLM_BACKEND_FACTORY", "tests.fakes.backend_factories:make")
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, how],
        stdout=subprocess.PIPE,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
        text=True,
    )
    try:
        worker_pid, server_pid = map(int, parent.stdout.readline().split())
        assert psutil.Process(worker_pid).ppid() == parent.pid
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    wait_until_gone(worker_pid)
    if how == "forked":
        wait_until_gone(server_pid)


@either_way
async def test_a_worker_without_death_signals_still_ends_with_its_channel(start_worker, model_folder):
    """The other way out for orphans: it needs no Linux, and the loop ends cleanly between two steps."""
    probe = await start_worker()
    await probe.load(model_folder)
    probe.send(submit_command("r", max_tokens=10**6))
    await probe.wait_for(StepBatch)
    probe.host._channel.abort()
    assert (await probe.wait_for(WorkerExit)).code == 0


@pytest.mark.parametrize("taken", ["folder", "file"])
async def test_a_log_that_cannot_be_written_keeps_no_worker_from_starting(tmp_path, taken):
    (tmp_path / "taken").touch()
    (tmp_path / "w0.log").mkdir()
    log_path = tmp_path / ("taken/w0.log" if taken == "folder" else "w0.log")
    probe = Probe(ProcessHost("w0", log_path=log_path))
    await probe.start()
    await probe.host.stop(PATIENCE_S)
    assert probe.exits == [WorkerExit(code=0)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="it takes a full disk")
async def test_a_full_disk_costs_the_log_and_not_the_worker(monkeypatch):
    monkeypatch.setenv("ERICLLM_BACKEND_FACTORY", "tests.fakes.no_such_module:make")
    probe = Probe(ProcessHost("w0", log_path=Path("/dev/full")))
    await probe.host.start(probe._on_event, probe._on_exit)
    assert "No module named" in (await probe.wait_for(WorkerExit)).log_tail


# The process that forks workers.


@pytest.fixture
async def forks(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ForkServer]:
    monkeypatch.setenv("ERICLLM_BACKEND_FACTORY", "tests.fakes.backend_factories:make")
    server = ForkServer()
    yield server
    await server.close()


async def answers(probe: Probe) -> bool:
    probe.send(submit_command("r", max_tokens=6))
    return (await probe.answer("r"))[0] == expected_text(PROMPT_IDS, 6)


async def test_a_worker_of_a_process_that_was_killed_goes_on_and_the_next_one_is_forked_by_another(
    forks: ForkServer, model_folder: Path
) -> None:
    first = await Probe(ProcessHost("w0", forks=forks)).start()
    await first.load(model_folder)
    killed = forks.pid
    os.kill(killed or 0, signal.SIGKILL)
    second = await Probe(ProcessHost("w1", forks=forks)).start()  # before its end is known
    assert forks.pid != killed
    assert await answers(first)
    await until(lambda: not psutil.pid_exists(killed or 0))
    third = await Probe(ProcessHost("w2", forks=forks)).start()
    for probe in (first, second, third):
        await probe.host.stop(PATIENCE_S)
        assert probe.exits == [WorkerExit(code=0)]


async def test_a_worker_starts_after_the_death_of_the_process_that_was_to_fork_it(forks: ForkServer) -> None:
    """It has its order, and has not read it."""
    forks.prepare()
    os.kill(forks.pid or 0, signal.SIGSTOP)
    probe = Probe(ProcessHost("w0", forks=forks))
    await probe.host.start(probe._on_event, probe._on_exit)
    os.kill(forks.pid or 0, signal.SIGKILL)
    await probe.wait_for(Hello)
    await probe.host.stop(PATIENCE_S)
    assert probe.exits == [WorkerExit(code=0)]


async def test_a_process_that_does_not_answer_is_replaced_and_costs_no_worker_and_no_kept_memory(
    forks: ForkServer, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ERICLLM_BACKEND_FACTORY", "tests.fakes.backend_factories:make_with_ram_file")
    first = await Probe(ProcessHost("w0", forks=forks)).start()
    await first.load(model_folder)
    await until(lambda: keepers(first.host.pid))
    kept, stopped = keepers(first.host.pid), forks.pid
    os.kill(stopped or 0, signal.SIGSTOP)
    monkeypatch.setattr("engine.worker_process.fork_server._ANSWER_S", 0.1)
    second = Probe(ProcessHost("w1", forks=forks))
    await second.host.start(second._on_event, second._on_exit)
    await until(lambda: forks.pid not in (None, stopped))
    monkeypatch.setattr("engine.worker_process.fork_server._ANSWER_S", 5.0)
    await second.wait_for(Hello)
    assert not psutil.pid_exists(stopped or 0)
    assert await answers(first)
    assert keepers(first.host.pid) == kept
    os.kill(first.host.pid or 0, signal.SIGSEGV)
    assert (await first.wait_for(WorkerExit)).signal == "SIGSEGV", "it is reaped by the engine"
    await second.host.stop(PATIENCE_S)
    assert second.exits == [WorkerExit(code=0)]


async def test_a_worker_is_lost_with_the_second_process_that_ends_without_forking_it(
    forks: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ERICLLM_BACKEND_FACTORY", "tests.fakes.crashing_import:make")
    probe = Probe(ProcessHost("w0", forks=forks))
    await probe.host.start(probe._on_event, probe._on_exit)
    exit_ = await probe.wait_for(WorkerExit)
    assert exit_.reason == "the process that forks workers exited with code 7: the import crashed"
    await until(lambda: forks.pid is None)


async def test_a_worker_is_lost_with_the_process_that_was_to_fork_it_where_no_other_one_starts(
    forks: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    forks.prepare()
    os.kill(forks.pid or 0, signal.SIGSTOP)
    probe = Probe(ProcessHost("w0", forks=forks))
    await probe.host.start(probe._on_event, probe._on_exit)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    os.kill(forks.pid or 0, signal.SIGKILL)
    exit_ = await probe.wait_for(WorkerExit)
    assert exit_.reason.startswith("the process that forks workers does not start: [Errno 2] No such file or directory")


async def test_a_worker_that_the_system_does_not_fork_is_lost_with_the_reason(
    forks: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ERICLLM_BACKEND_FACTORY", "tests.fakes.unforkable_import:make")
    probe = Probe(ProcessHost("w0", forks=forks))
    await probe.host.start(probe._on_event, probe._on_exit)
    exit_ = await probe.wait_for(WorkerExit)
    assert (exit_.code, exit_.reason) == (1, "it could not be forked: Resource temporarily unavailable")


async def test_threads_of_a_forked_worker_find_its_first_one(
    forks: ForkServer, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ERICLLM_BACKEND_FACTORY", "tests.fakes.backend_factories:make_that_signals_itself")
    probe = await Probe(ProcessHost("w0", forks=forks)).start()
    await probe.load(model_folder)
    await probe.host.stop(PATIENCE_S)
    assert probe.exits == [WorkerExit(code=0)]


async def test_an_import_that_hangs_ends_with_the_worker_that_waits_for_it(
    forks: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ERICLLM_BACKEND_FACTORY", "tests.fakes.hanging_import:make")
    probe = Probe(ProcessHost("w0", forks=forks))
    await probe.host.start(probe._on_event, probe._on_exit)
    await probe.host.stop(0.1)
    assert [each.signal for each in probe.exits] == ["SIGKILL"]
    monkeypatch.setenv("ERICLLM_BACKEND_FACTORY", "tests.fakes.backend_factories:make")
    again = await Probe(ProcessHost("w0", forks=forks)).start()
    await again.host.stop(PATIENCE_S)


async def test_an_import_that_hangs_ends_too_where_memory_is_to_be_kept_by_what_it_forks(
    forks: ForkServer, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ERICLLM_BACKEND_FACTORY", "tests.fakes.backend_factories:make_with_ram_file")
    first = await Probe(ProcessHost("w0", forks=forks)).start()
    os.kill(forks.pid or 0, signal.SIGKILL)
    await until(lambda: forks.pid is None)
    monkeypatch.setenv("ERICLLM_BACKEND_FACTORY", "tests.fakes.hanging_import:make")
    await first.load(model_folder)
    await until(lambda: forks.pid is not None)
    given_up, hanging = Probe(ProcessHost("w1", forks=forks)), forks.pid
    await given_up.host.start(given_up._on_event, given_up._on_exit)
    monkeypatch.setenv("ERICLLM_BACKEND_FACTORY", "tests.fakes.backend_factories:make_with_ram_file")
    await given_up.host.stop(0.1)
    await until(lambda: forks.pid not in (None, hanging))
    await until(lambda: keepers(first.host.pid))
    again = await Probe(ProcessHost("w1", forks=forks)).start()
    for probe in (again, first):
        await probe.host.stop(PATIENCE_S)


async def test_a_process_that_stands_still_ends_with_the_last_worker_that_waits_for_it(
    forks: ForkServer,
) -> None:
    probes = [await Probe(ProcessHost("w0", forks=forks)).start()]
    stopped = forks.pid
    os.kill(stopped or 0, signal.SIGSTOP)
    probes.append(Probe(ProcessHost("w0", forks=forks)))
    await probes[1].host.start(probes[1]._on_event, probes[1]._on_exit)
    for probe in probes:
        probe.host.kill()
        await probe.wait_for(WorkerExit)
        assert [each.signal for each in probe.exits] == ["SIGKILL"]
    again = await Probe(ProcessHost("w0", forks=forks)).start()
    assert forks.pid != stopped
    await again.host.stop(PATIENCE_S)


async def test_a_worker_that_is_killed_during_the_imports_takes_no_other_one_with_it(
    forks: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    monkeypatch.setenv("ERICLLM_TEST_FIFO", str(fifo))
    monkeypatch.setenv("ERICLLM_BACKEND_FACTORY", "tests.fakes.waiting_import:make")
    killed, other = (Probe(ProcessHost(name, forks=forks)) for name in ("w0", "w1"))
    for probe in (killed, other):
        await probe.host.start(probe._on_event, probe._on_exit)
    server_pid = forks.pid
    killed.host.kill()
    with await asyncio.to_thread(fifo.open, "wb"):
        pass
    await asyncio.gather(other.wait_for(Hello), killed.wait_for(WorkerExit))
    assert [each.signal for each in killed.exits] == ["SIGKILL"]
    assert forks.pid == server_pid
    monkeypatch.delenv("ERICLLM_TEST_FIFO")  # workers would wait as well
    await other.host.stop(PATIENCE_S)


async def test_where_an_import_leaves_a_thread_each_worker_imports_everything_itself(
    forks: ForkServer, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ERICLLM_BACKEND_FACTORY", "tests.fakes.threaded_import:make")
    probe = await Probe(ProcessHost("w0", forks=forks)).start()
    worker = psutil.Process(probe.host.pid)
    assert worker.ppid() == os.getpid()
    assert psutil.Process(forks.pid).num_threads() == 1, "the thread would not be in a worker"
    await probe.load(model_folder)
    probe.send(submit_command("r", max_tokens=6))
    assert (await probe.answer("r"))[0] == expected_text(PROMPT_IDS, 6)
    await probe.host.stop(PATIENCE_S)
    assert probe.exits == [WorkerExit(code=0)]


async def test_where_the_interpreter_starts_a_thread_by_itself_each_worker_is_another_interpreter(
    forks: ForkServer, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = "import threading\nthreading.Thread(target=threading.Event().wait, name='plugin', daemon=True).start()\n"
    (tmp_path / "sitecustomize.py").write_text(plugin)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    probe = await Probe(ProcessHost("w0", forks=forks)).start()
    assert psutil.Process(forks.pid).num_threads() > 1
    worker = psutil.Process(probe.host.pid)
    assert worker.ppid() == os.getpid()
    assert worker.num_threads() > 1
    assert "--forks" not in worker.cmdline()
    await probe.load(model_folder)
    probe.send(submit_command("r", max_tokens=6))
    assert (await probe.answer("r"))[0] == expected_text(PROMPT_IDS, 6)
    await probe.host.stop(PATIENCE_S)
    assert probe.exits == [WorkerExit(code=0)]


@either_way
async def test_what_a_worker_starts_has_no_part_in_its_channel(start_worker) -> None:
    folder = Path(f"/proc/{(await start_worker()).host.pid}")
    sockets = [each.name for each in (folder / "fd").iterdir() if str(each.readlink()).startswith("socket:")]
    assert len(sockets) == 1
    (flags,) = [line for line in (folder / "fdinfo" / sockets[0]).read_text().splitlines() if "flags" in line]
    assert int(flags.split()[1], 8) & os.O_CLOEXEC


async def test_a_process_whose_environment_is_outdated_is_replaced(
    forks: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = await Probe(ProcessHost("w0", forks=forks)).start()
    first = forks.pid
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    again = await Probe(ProcessHost("w0", forks=forks)).start()
    assert forks.pid != first
    assert psutil.Process(again.host.pid).environ()["GOMP_SPINCOUNT"] == "7"
    for each in (probe, again):
        await each.host.stop(PATIENCE_S)
        assert each.exits == [WorkerExit(code=0)]


def children() -> set[int]:
    """The processes below this one."""
    return {child.pid for child in psutil.Process().children()}


def keepers(but: int | None = None) -> list[int]:
    """The processes besides a worker that hold a RAM file of the fake backend's."""
    found = []
    for child in psutil.Process().children():
        links: list[str] = []
        with suppress(OSError):  # it ends, or is not reaped yet
            links = [str(each.readlink()) for each in Path(f"/proc/{child.pid}/fd").iterdir()]
        found += [child.pid] if child.pid != but and any("ericllm-test" in link for link in links) else []
    return found


async def test_the_ram_files_of_a_killed_worker_are_kept_and_those_of_a_crashed_or_stopped_one_are_not(
    forks: ForkServer, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ERICLLM_BACKEND_FACTORY", "tests.fakes.backend_factories:make_with_ram_file")

    async def start(before: int = 0) -> tuple[Probe, int]:
        probe = await Probe(ProcessHost("w0", forks=forks)).start()
        await probe.load(model_folder)
        await until(lambda: len(found := keepers(probe.host.pid)) == 1 and before not in found)
        (keeper,) = keepers(probe.host.pid)
        return probe, keeper

    killed, first = await start()
    os.kill(killed.host.pid or 0, signal.SIGKILL)
    await killed.wait_for(WorkerExit)
    assert keepers() == [first]
    assert forks.kept_bytes("w0") == RAM_FILE_BYTES
    crashed, second = await start(first)
    wait_until_gone(first)
    os.kill(crashed.host.pid or 0, signal.SIGSEGV)
    await crashed.wait_for(WorkerExit)
    wait_until_gone(second)
    stopped, third = await start()
    await stopped.host.stop(PATIENCE_S)
    wait_until_gone(third)
    assert not keepers()
    assert forks.kept_bytes("w0") == 0


async def test_a_worker_reports_what_it_found_in_ram_as_its_own(
    forks: ForkServer, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ERICLLM_BACKEND_FACTORY", "tests.fakes.backend_factories:make_with_ram_file")
    probe = await Probe(ProcessHost("w0", forks=forks)).start()
    await probe.load(model_folder)
    batch = await probe.wait_for(StepBatch)
    assert batch.rss_bytes > psutil.Process(probe.host.pid).memory_info().rss + RAM_FILE_BYTES // 2
    await probe.host.stop(PATIENCE_S)


async def test_a_worker_starts_after_the_end_of_what_has_let_go_of_the_files_of_the_one_before(
    forks: ForkServer, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ERICLLM_BACKEND_FACTORY", "tests.fakes.backend_factories:make_with_ram_file")
    others = children()
    probe = await Probe(ProcessHost("w0", forks=forks)).start()
    await probe.load(model_folder)
    await until(lambda: keepers(probe.host.pid))
    os.kill(probe.host.pid or 0, signal.SIGKILL)
    await probe.wait_for(WorkerExit)
    forks.release_memory("w0")
    again = await Probe(ProcessHost("w0", forks=forks)).start()
    assert children() - others == {forks.pid, again.host.pid}
    await again.host.stop(PATIENCE_S)


async def test_only_the_files_of_its_own_workers_are_kept(forks: ForkServer) -> None:
    """The process id of one that has just ended may be another's."""
    descriptor, others = os.memfd_create("ericllm-test"), children()
    try:
        forks.prepare()
        forks.keep_memory("w0", os.getpid())
        probe = await Probe(ProcessHost("w0", forks=forks)).start()
        assert children() - others == {forks.pid, probe.host.pid}
        await probe.host.stop(PATIENCE_S)
    finally:
        os.close(descriptor)


async def test_where_memory_runs_out_the_kernel_ends_a_keeper_first(
    forks: ForkServer, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ERICLLM_BACKEND_FACTORY", "tests.fakes.backend_factories:make_with_ram_file")
    probe = await Probe(ProcessHost("w0", forks=forks)).start()
    await probe.load(model_folder)
    await until(lambda: keepers(probe.host.pid))
    (keeper,) = keepers(probe.host.pid)
    assert await asyncio.to_thread(Path(f"/proc/{keeper}/oom_score_adj").read_text) == "1000\n"
    os.kill(keeper, signal.SIGKILL)
    probe.send(submit_command("r", max_tokens=6))
    assert (await probe.answer("r"))[0] == expected_text(PROMPT_IDS, 6), "the worker goes on"
    await probe.host.stop(PATIENCE_S)


@pytest.mark.slow
def test_imports_wake_no_gpu() -> None:
    """A context of CUDA does not survive a fork, and one that counted devices fails in it too."""
    program = """
import torch

def woken(*given):
    raise SystemExit("a GPU was looked for")

torch.cuda.is_available = torch.cuda.device_count = torch.cuda.init = torch.cuda._lazy_init = woken
torch._C._cuda_getDeviceCount = woken
from engine.worker_process.fork_server import preload
preload(None)
import sys
assert "engine.backends.torch.backend" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
async def test_imports_leave_no_thread_that_a_fork_would_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ERICLLM_BACKEND_FACTORY", raising=False)
    forks = ForkServer()
    probe = await Probe(ProcessHost("w0", forks=forks)).start()
    try:
        assert psutil.Process(forks.pid).num_threads() == 1
        libraries = {Path(each.path).name for each in psutil.Process(probe.host.pid).memory_maps()}
        assert "libtorch_cpu.so" in libraries, "it was imported before the fork"
    finally:
        await probe.host.stop(PATIENCE_S)
        await forks.close()
