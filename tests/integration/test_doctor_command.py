"""`ericllm doctor` as a shell runs it, and probes of libraries that crash, print or hang."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from console.runtime.runtime import Runtime
from console.settings.schema import Settings
from console.settings.sources import Sources
from engine.backends.common.native_build import SOURCES
from engine.backends.common.native_kernels import instruction_set_here
from engine.backends.exllamav2.doctor import Exllama
from engine.doctor.facts import Package
from engine.doctor.gather import gather
from engine.doctor.inspection import ProbeFailed
from engine.doctor.probe import ask

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def doctor(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The command on a machine that shows no GPU, whatever the one below has."""
    return subprocess.run(
        [sys.executable, "-m", "console", "doctor", *argv],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "ERICLLM_CONFIG": "", "HF_HUB_OFFLINE": "1", **env},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=280,
        check=False,
    )


def library(folder: Path, name: str, code: str) -> Path:
    """A package called `name` that does `code` when it is imported; gives the folder to put on the path."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)
    return folder


def looked_at(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, timeout_s: float = 60.0) -> Package:
    """What the probe says of the library `name` in `folder`."""
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return ask(Package, "package", name, timeout_s=timeout_s)


def test_torch_can_run_here_and_the_demo_be_loaded() -> None:
    result = doctor("--backend", "torch")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.endswith("The torch backend can run here.\n")
    assert "the torch backend can load it" in result.stdout
    assert result.stderr == ""
    assert "\x1b" not in result.stdout


def test_a_package_that_another_distribution_has_too_is_named(tmp_path: Path) -> None:
    info = tmp_path / "stranger-0.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 0.9\n")
    (info / "RECORD").write_text("console/__init__.py,,\n")
    result = doctor("--backend", "torch", "--json", PYTHONPATH=str(tmp_path))
    finding = next(each for each in json.loads(result.stdout)["findings"] if each["name"] == "packages")
    assert finding["state"] == "broken"
    assert "the package console of stranger;" in finding["value"]


@pytest.mark.skipif(instruction_set_here() is None, reason="the kernels do not run here")
def test_kernels_are_compiled_ahead_when_asked_for(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho kernels > "$2"\n')
    compiler.chmod(0o755)
    env = {"XDG_CACHE_HOME": str(tmp_path), "ATEN_CPU_CAPABILITY": "avx2"}  # kernels for AMX would be tried first
    compiled = doctor("--backend", "torch", "--compile", CXX=str(compiler), **env)
    files = len(SOURCES) + 1
    assert f"{files} of {files} files" in compiled.stderr
    (library,) = tmp_path.rglob("*.so")
    assert compiled.stderr.endswith(f"are in {library}\n")
    assert "kernels for bfloat16, compiled on this machine" in " ".join(compiled.stdout.split())
    again = doctor("--backend", "torch", "--compile", CXX="none", **env)
    assert again.stderr == compiled.stderr.splitlines(keepends=True)[-1]


@pytest.mark.skipif(instruction_set_here() is None, reason="the kernels do not run here")
def test_kernels_that_cannot_be_compiled_ahead_are_one_sentence(tmp_path: Path) -> None:
    failed = doctor("--compile", XDG_CACHE_HOME=str(tmp_path), CXX="none")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.endswith("cannot be compiled: CXX names none, which is not on PATH\n")
    assert failed.stderr.count("\n") == 1


def test_exllamav2_cannot_run_without_a_gpu_and_one_sentence_says_so() -> None:
    result = doctor("--backend", "exllamav2")
    assert result.returncode == 1
    assert "The exllamav2 backend cannot run here: it computes on NVIDIA GPUs" in " ".join(result.stdout.split())
    assert "Traceback" not in result.stderr


def test_the_report_is_json_when_asked_for() -> None:
    result = doctor("--json", "--max_prompts=4")
    report = json.loads(result.stdout)
    assert report["can_run"] is True
    assert {"Machine", "torch", "Backends", "Model"} <= {finding["area"] for finding in report["findings"]}


def test_a_model_that_cannot_be_loaded_is_refused_in_the_words_of_the_load() -> None:
    result = doctor("--model", "/no/such/folder")
    assert result.returncode == 1
    assert "there is no folder /no/such/folder" in result.stdout


def test_a_flag_that_does_not_exist_is_one_line_and_exit_code_2() -> None:
    result = doctor("--bakend", "torch")
    assert (result.returncode, result.stdout) == (2, "")
    assert "did you mean --backend?" in result.stderr


def test_a_flash_attn_made_for_another_torch_is_reported_broken_and_nothing_dies(tmp_path: Path) -> None:
    code = "print('a line on stdout')\nraise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c104')\n"
    result = doctor("--json", PYTHONPATH=str(library(tmp_path, "flash_attn", code)))
    assert result.returncode == 0
    flash = next(each for each in json.loads(result.stdout)["findings"] if each["name"] == "flash-attn")
    assert flash["state"] == "broken"
    assert "undefined symbol: _ZN3c104" in flash["value"]
    assert "pip uninstall flash-attn" in flash["advice"]


def test_what_a_library_prints_does_not_reach_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os\nprint('hello')\nos.write(1, b'natively')\n__version__ = '1.2'\n"
    found = looked_at(monkeypatch, library(tmp_path, "chatty", code), "chatty")
    assert found == Package(installed=True, version="1.2")


def test_a_library_that_kills_its_process_is_named_with_the_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"
    with pytest.raises(ProbeFailed, match="SIGSEGV"):
        looked_at(monkeypatch, library(tmp_path, "deadly", code), "deadly")


def test_a_library_that_leaves_without_a_word_gives_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProbeFailed, match="no answer"):
        looked_at(monkeypatch, library(tmp_path, "silent", "import os\nos._exit(0)\n"), "silent")


def test_a_library_that_hangs_is_reported_after_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProbeFailed, match=r"longer than 0\.2 s"):
        looked_at(monkeypatch, library(tmp_path, "stuck", "while True: pass\n"), "stuck", timeout_s=0.2)


def exllamav2(folder: Path, kernels: str = "") -> Path:
    """An exllamav2 0.3.2 that ends its process where importing it would compile: where no kernels are."""
    library(folder, "exllamav2", "" if kernels else "import os\nos.abort()\n")
    (folder / "exllamav2" / "ext.py").write_text("sources_ = ['a.cpp', 'b.cu']\n")
    (folder / "exllamav2" / "generator.py").write_text("")
    (folder / "exllamav2-0.3.2.dist-info").mkdir()
    (folder / "exllamav2-0.3.2.dist-info" / "METADATA").write_text("Name: exllamav2\nVersion: 0.3.2\n")
    if kernels:
        (folder / "exllamav2_ext.py").write_text(kernels)
    return folder


def exllamav2_looked_at(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Exllama:
    """What the probe says of it, with its cache in a folder of its own."""
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    return ask(Exllama, "exllamav2", timeout_s=60.0)


def test_exllamav2_without_kernels_is_never_imported_and_says_where_they_would_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = exllamav2_looked_at(monkeypatch, exllamav2(tmp_path))
    assert (found.kernels, found.error, found.kernels_error) == ("", "", "")
    assert found.kept_at.startswith(str(tmp_path / "cache"))
    assert found.kept_at.endswith("/exllamav2_ext/exllamav2_ext.so")


def test_exllamav2_with_prebuilt_kernels_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = exllamav2_looked_at(monkeypatch, exllamav2(tmp_path, kernels="made = True\n"))
    assert (found.kernels, found.error, found.kernels_error) == ("prebuilt", "", "")


def test_prebuilt_kernels_of_another_torch_are_reported_with_the_symbol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = "raise ImportError('undefined symbol: _ZN2at4_ops')\n"
    found = exllamav2_looked_at(monkeypatch, exllamav2(tmp_path, kernels))
    assert found.kernels_error == "undefined symbol: _ZN2at4_ops"


def test_kept_kernels_that_are_no_shared_object_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_at = Path(exllamav2_looked_at(monkeypatch, exllamav2(tmp_path)).kept_at)
    kept_at.parent.mkdir(parents=True)
    kept_at.write_bytes(b"half a file")
    found = exllamav2_looked_at(monkeypatch, tmp_path)
    assert found.kernels == "kept"
    assert "exllamav2_ext.so" in found.kernels_error


async def test_a_look_that_is_given_up_tells_its_probes_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looking, released = threading.Event(), threading.Event()
    asked: list[Callable[[], bool]] = []

    def looks(settings: Settings, sources: Sources, *, cancelled: Callable[[], bool]) -> None:
        asked.append(cancelled)
        looking.set()
        released.wait()

    monkeypatch.setattr("console.runtime.runtime.diagnose", looks)
    task = asyncio.create_task(Runtime(Settings()).diagnose())
    assert await asyncio.to_thread(looking.wait, 60)
    assert not asked[0]()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asked[0]()
    released.set()


def test_gathering_with_no_patience_still_gives_every_fact() -> None:
    facts = gather(timeout_s=0.0)
    assert "longer than 0 s" in facts.torch.error
    assert facts.cpu.ram_total_bytes > 0


def test_cancelling_ends_the_probes_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it this would take as long as the timeout, and the test as long as its own."""
    monkeypatch.setenv("PYTHONPATH", str(library(tmp_path, "stuck", "while True: pass\n")))
    asking = partial(ask, Package, "package", "stuck", timeout_s=3600.0)
    with pytest.raises(ProbeFailed):
        asking(cancelled=lambda: True)
