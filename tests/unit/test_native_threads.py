"""The threads of the native kernels: jobs whose tasks are claimed, however late a helper comes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.backends.common.native_build import find_compiler
from engine.system.child_process import ROOT

KERNELS = ROOT / "engine" / "backends" / "torch" / "native"
JOBS = ROOT / "tests" / "fakes" / "native_threads.cpp"

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64" or not find_compiler(),
    reason="the native kernels need Linux on x86-64, and a compiler",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("threads")


def compile_jobs(folder: Path, *flags: str) -> Path:
    made = folder / f"jobs{''.join(flags)}"
    if not made.exists():
        sources = [str(JOBS), str(KERNELS / "threads.cpp"), f"-I{KERNELS}"]
        command = [find_compiler(), "-std=c++17", "-O1", *flags, *sources, "-pthread", "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True)
    return made


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr


def test_tasks_of_several_callers_are_done_once_and_without_a_race(folder: Path) -> None:
    try:
        jobs = compile_jobs(folder, "-fsanitize=thread")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"the compiler has no ThreadSanitizer: {error.stderr[-200:]!r}")
    without_random_addresses = [setarch, "-R"] if (setarch := shutil.which("setarch")) else []
    run(*without_random_addresses, str(jobs), "several_callers")


def test_a_call_returns_while_a_helper_that_has_no_task_is_held_up(folder: Path) -> None:
    run(str(compile_jobs(folder)), "held_up")


def test_a_call_is_not_over_before_a_helper_has_done_its_task(folder: Path) -> None:
    run(str(compile_jobs(folder)), "slept")


def test_helpers_round_and_keep_denormals_as_their_caller_does(folder: Path) -> None:
    run(str(compile_jobs(folder)), "rounded")


def test_children_of_a_process_in_the_middle_of_a_call_have_threads_of_their_own(folder: Path) -> None:
    run(str(compile_jobs(folder)), "forked")


def test_a_thread_that_the_system_refused_is_asked_for_again_later(folder: Path) -> None:
    run(str(compile_jobs(folder, "-DREFUSES_THREADS", "-Wl,--wrap=pthread_create")), "refused")


UNLOAD = """
import _ctypes, ctypes, os, sys
from pathlib import Path

def helpers():
    tasks = Path("/proc/self/task").iterdir()
    return [task for task in tasks if (task / "comm").read_text().startswith("kernels-")]

library = ctypes.CDLL(sys.argv[1])
library.run_tasks(3, 100)
made = helpers()
assert len(made) == 2, made
for task in made:
    blocked = next(line for line in (task / "status").read_text().splitlines() if line.startswith("SigBlk"))
    assert int(blocked.split()[1], 16) >> 1 & 1, "SIGINT is for the threads of the program"
_ctypes.dlclose(library._handle)
assert not helpers(), "they outlive the code that they run"
child = os.fork()
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0, "what fork calls outlives its code"
"""


def test_helpers_take_no_signals_and_end_when_their_library_is_unloaded(folder: Path) -> None:
    source, library = folder / "unloaded.cpp", folder / "unloaded.so"
    source.write_text(
        '#include "threads.h"\n'
        'extern "C" void run_tasks(int threads, int count) {\n'
        "    ericllm::on_threads(threads, count, [](ericllm::Tasks& tasks) { while (tasks.next() >= 0) {} });\n"
        "}\n"
    )
    sources = [str(source), str(KERNELS / "threads.cpp"), f"-I{KERNELS}"]
    command = [find_compiler(), "-std=c++17", "-shared", "-fPIC", *sources, "-pthread", "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True)
    run(sys.executable, "-c", UNLOAD, str(library))
