"""Importing the library: the build of its kernels watched, its side effects undone, each failure one sentence."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import sysconfig
import threading
import types
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from engine.backends.base import LoadProgress
from engine.backends.exllama import package as packages
from engine.backends.exllama.package import (
    KernelBuild,
    build_variables,
    environment,
    explain_import,
    missing_headers,
)
from engine.backends.exllamav2 import library
from engine.backends.exllamav2.library import PACKAGE, count_sources
from engine.config import ModelSpec
from engine.errors import BackendUnavailable, LoadCancelled, UnsupportedModel
from tests.fakes.exllamav2_wheel import wheel_folder
from tests.fakes.model_folders import write_model

SOURCES = 3

EXT = f"sources_ = {[f'{number}.cu' for number in range(SOURCES)]}\n"

LIBRARY = """
import os, torch, exllamav2.ext
os.environ["CUDA_MODULE_LOADING"] = "LAZY"
torch.set_num_threads(1)
class ExLlamaV2: pass
ExLlamaV2Config = ExLlamaV2Cache = ExLlamaV2Cache_Q8 = ExLlamaV2Cache_Q6 = ExLlamaV2Cache_Q4 = ExLlamaV2
ExLlamaV2Cache_TP = ExLlamaV2Tokenizer = ExLlamaV2Lora = ExLlamaV2
"""

GENERATOR = """
class ExLlamaV2DynamicGenerator: pass
class ExLlamaV2DynamicJob: pass
class ExLlamaV2Sampler:
    class Settings: pass
"""

DYNAMIC = "def _tensor_hash_checksum(tensor, prev_hash): pass\n"


def none(progress: LoadProgress) -> None:
    """A report that nobody hears."""


class Package:
    """A package by the library's name whose ext.py says what its import does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "site"
        self.cache = folder / "cache"
        files = {
            "__init__": LIBRARY,
            "generator/__init__": GENERATOR,
            "generator/dynamic": DYNAMIC,
        }
        for name, text in files.items():
            path = self.folder / "exllamav2" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.version(f"{PACKAGE.version}+cu128.torch2.9.0")
        self.ext("")

    def ext(self, text: str) -> None:
        """What the import does."""
        (self.folder / "exllamav2" / "ext.py").write_text(EXT + text)

    def version(self, version: str) -> None:
        """What is installed."""
        info = self.folder / "exllamav2-0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: exllamav2\nVersion: {version}\n")

    @property
    def workspace(self) -> Path:
        """Where kernels are compiled."""
        (workspace,) = self.cache.glob("*/exllamav2_ext")
        return workspace


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    package = Package(tmp_path)
    monkeypatch.syspath_prepend(str(package.folder))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(packages.platformdirs, "user_cache_path", lambda name: package.cache.parent)
    monkeypatch.setattr(packages, "POLL_S", 0.01)
    package.cache = tmp_path / "kernels"
    yield package
    packages.forget_failed_build(PACKAGE)


# --- what an import leaves behind -------------------------------------------------------------------------------------


def test_threads_and_environment_are_as_before(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    package.ext("import os\nos.environ['TORCH_CUDA_ARCH_LIST'] = '8.6'\nseen = dict(os.environ)\n")
    threads, before = torch.get_num_threads(), dict(os.environ)
    torch.set_num_threads(3)
    try:
        library.import_library(none)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    assert dict(os.environ) == before
    seen = sys.modules["exllamav2.ext"].seen
    assert {"EXLLAMA_NO_FLASH_ATTN", "EXLLAMA_NO_XFORMERS", "EXLLAMA_NO_SDPA"} <= seen.keys()
    assert seen["TORCH_EXTENSIONS_DIR"] == str(package.workspace.parent)


def test_a_second_load_imports_nothing_again(package: Package) -> None:
    library.import_library(none)
    package.ext("raise RuntimeError\n")
    assert library.import_library(none).attention == ""


def test_a_model_that_cannot_be_loaded_costs_no_compilation(package: Package, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", architectures=["NewForCausalLM"])
    with pytest.raises(UnsupportedModel, match="NewForCausalLM"):
        library.import_library(none, spec=ModelSpec(path=folder, name="new"))
    assert "exllamav2" not in sys.modules


# --- the build --------------------------------------------------------------------------------------------------------

BUILD = """
import os, pathlib, threading
workspace = pathlib.Path(os.environ["TORCH_EXTENSIONS_DIR"]) / "exllamav2_ext"
(workspace / "build.ninja").write_text("")
import exllamav2_test_hooks as hooks
for number in range(3):
    hooks.reported.acquire()
    (workspace / f"{number}.o").write_text("")
"""


def test_compiling_is_reported_in_files_on_the_calling_thread(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = types.ModuleType("exllamav2_test_hooks")
    hooks.reported = threading.Semaphore(0)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "exllamav2_test_hooks", hooks)
    monkeypatch.setattr(packages, "watched", partial(packages.watched, poll_s=0.01))
    package.ext(BUILD)
    seen: list[LoadProgress] = []
    threads = set()

    def report(progress: LoadProgress) -> None:
        if not seen or progress.done > seen[-1].done:
            hooks.reported.release()
        seen.append(progress)
        threads.add(threading.current_thread())

    library.import_library(report)
    assert sorted({each.done for each in seen}) == [0, 1, 2, 3]
    assert {(each.phase, each.total, each.unit) for each in seen} == {("kernels", SOURCES, "files")}
    assert threads == {threading.current_thread()}


def test_kernels_that_are_there_are_no_phase_of_the_load(package: Package) -> None:
    seen: list[LoadProgress] = []
    library.import_library(seen.append)
    assert seen == []


def test_a_lock_that_a_killed_build_left_is_cleared(package: Package) -> None:
    package.ext(
        "import os, pathlib\n"
        "assert not (pathlib.Path(os.environ['TORCH_EXTENSIONS_DIR']) / 'exllamav2_ext' / 'lock').exists()\n"
    )
    build = PACKAGE.planned_build()
    build.workspace.mkdir(parents=True)
    (build.workspace / "lock").touch()
    library.import_library(none)


def test_another_worker_s_build_is_waited_for_and_its_lock_left_alone(tmp_path: Path) -> None:
    build = KernelBuild(tmp_path, SOURCES, PACKAGE.extension)
    build.workspace.mkdir(parents=True)
    (build.workspace / "lock").touch()
    other = (tmp_path / "owner").open("w")
    fcntl.flock(other, fcntl.LOCK_EX)
    waited = []

    def wait() -> None:
        waited.append((build.workspace / "lock").exists())
        if len(waited) == 2:
            other.close()

    with build.locked(wait):
        assert waited == [True, True]
        assert not (build.workspace / "lock").exists()


def test_a_wait_for_another_worker_s_build_can_be_cancelled(package: Package) -> None:
    build = PACKAGE.planned_build()
    build.workspace.mkdir(parents=True)
    with (build.folder / "owner").open("w") as other, pytest.raises(LoadCancelled):
        fcntl.flock(other, fcntl.LOCK_EX)
        library.import_library(none, cancelled=lambda: True)


COMPILER = """
import os, pathlib, subprocess, sys
workspace = pathlib.Path(os.environ["TORCH_EXTENSIONS_DIR"]) / "exllamav2_ext"
(workspace / "build.ninja").write_text("")
with open(os.environ["NEVER_ENDS"]) as never_ends:
    done = subprocess.run([sys.executable, "-c", "input()"], cwd=workspace, stdin=never_ends)
raise RuntimeError(f"Error building extension 'exllamav2_ext': {done.returncode}")
"""


def test_cancelling_ends_the_compilers_and_nothing_else(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "watched", partial(packages.watched, poll_s=0.01))
    package.ext(COMPILER)
    fifo = package.folder / "fifo"
    os.mkfifo(fifo)
    keep_open = os.open(fifo, os.O_RDWR)
    monkeypatch.setenv("NEVER_ENDS", str(fifo))
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with pytest.raises(LoadCancelled):
            library.import_library(none, cancelled=lambda: _compiler_runs(package))
        assert bystander.poll() is None
    finally:
        os.close(keep_open)
        bystander.communicate(b"\n")
    assert "exllamav2" not in sys.modules


def _compiler_runs(package: Package) -> bool:
    """Cancelled from when the compiler is there on, and still so once it is gone."""
    marker = package.folder / "cancelled"
    for child in psutil.Process().children():
        try:
            if Path(child.cwd()) == package.workspace:
                marker.touch()
        except psutil.Error:
            continue
    return marker.exists()


def test_a_failed_build_can_be_tried_again_in_the_same_process(package: Package) -> None:
    package.ext("raise RuntimeError(\"Error building extension 'exllamav2_ext'\")\n")
    with pytest.raises(BackendUnavailable):
        library.import_library(none)
    from torch.utils import cpp_extension

    cpp_extension.JIT_EXTENSION_VERSIONER.bump_version_if_changed(
        "exllamav2_ext", [], [], "", False, False, True, False
    )
    packages.forget_failed_build(PACKAGE)
    assert cpp_extension.JIT_EXTENSION_VERSIONER.get_version("exllamav2_ext") is None
    assert not any(name.startswith("exllamav2") for name in sys.modules)


def test_the_real_library_s_files_are_counted() -> None:
    package = wheel_folder() / "exllamav2"
    count = count_sources(package / "ext.py")
    assert count == 47
    assert count <= sum(1 for each in (package / "exllamav2_ext").rglob("*") if each.suffix in (".cu", ".cpp"))


def test_every_combination_of_versions_has_a_folder_of_its_own(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = set()
    for cards in ("8.0", "8.6;9.0"):
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", cards)
        folders.add(PACKAGE.planned_build().folder.name)
    assert {name.rpartition("-")[2] for name in folders} == {"8.0", "8.6_9.0"}
    assert all(name.startswith(f"exllamav2{PACKAGE.version}-torch{torch.__version__}-cuda") for name in folders)


# --- headers and memory -----------------------------------------------------------------------------------------------


def write_headers(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


ALL_HEADERS = ("cublas_v2.h", "cublasLt.h", "cusparse.h", "cusolverDn.h", "curand_kernel.h")


def test_a_complete_toolkit_needs_no_other_headers(tmp_path: Path) -> None:
    write_headers(tmp_path / "cuda" / "include", *ALL_HEADERS)
    write_headers(tmp_path / "site" / "nvidia" / "cu13" / "include", *ALL_HEADERS)
    assert missing_headers(tmp_path / "cuda", [tmp_path / "site"]) == []


def test_headers_that_the_toolkit_lacks_come_from_torch_s_packages(tmp_path: Path) -> None:
    write_headers(tmp_path / "cuda" / "include", "cublas_v2.h")
    whole = write_headers(tmp_path / "site" / "nvidia" / "cu13" / "include", *ALL_HEADERS)
    build = KernelBuild(tmp_path / "build", SOURCES, PACKAGE.extension)
    variables = build_variables(build, cuda_home=tmp_path / "cuda", packages=[tmp_path / "site"], free_bytes=10**10)
    assert variables["CUDA_INC_PATH"] == str(whole)
    assert "CPATH" not in variables


def test_headers_in_several_packages_go_into_the_compilers_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPATH", "/mine")
    blas = write_headers(tmp_path / "nvidia" / "cublas" / "include", "cublas_v2.h", "cublasLt.h")
    rand = write_headers(tmp_path / "nvidia" / "curand" / "include", "curand_kernel.h")
    build = KernelBuild(tmp_path / "build", SOURCES, PACKAGE.extension)
    variables = build_variables(build, cuda_home=None, packages=[tmp_path], free_bytes=10**10)
    assert (variables["CPATH"] or "").split(os.pathsep) == [str(blas), str(rand), "/mine"]


def test_no_more_compilers_run_than_the_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.delenv("MAX_JOBS", raising=False)
    build = KernelBuild(tmp_path, SOURCES, PACKAGE.extension)
    assert build_variables(build, cuda_home=None, packages=[], free_bytes=11 * 10**9)["MAX_JOBS"] == "4"
    assert build_variables(build, cuda_home=None, packages=[], free_bytes=0)["MAX_JOBS"] == "1"
    monkeypatch.setenv("MAX_JOBS", "9")
    assert "MAX_JOBS" not in build_variables(build, cuda_home=None, packages=[], free_bytes=0)


def test_ninja_is_found_where_the_environment_is_not_activated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    variables = build_variables(
        KernelBuild(tmp_path, SOURCES, PACKAGE.extension), cuda_home=None, packages=[], free_bytes=0
    )
    assert variables["PATH"] == f"/usr/bin{os.pathsep}{sysconfig.get_path('scripts')}"


def test_the_environment_is_put_back_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "before")
    monkeypatch.delenv("NEW", raising=False)
    with pytest.raises(ZeroDivisionError), environment(KEPT=None, NEW="1"):
        assert "KEPT" not in os.environ and os.environ["NEW"] == "1"
        raise ZeroDivisionError
    assert os.environ["KEPT"] == "before"
    assert "NEW" not in os.environ


# --- failures ---------------------------------------------------------------------------------------------------------


def test_no_gpu_is_said_before_anything_is_compiled(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailable, match=r"NVIDIA GPUs, and torch \S+ sees none"):
        library.import_library(none)
    assert "exllamav2" not in sys.modules


def test_a_package_that_is_not_there_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "PACKAGE", replace(PACKAGE, name="exllamav2_that_is_not_there"))
    with pytest.raises(BackendUnavailable, match=f"`pip install exllamav2_that_is_not_there=={PACKAGE.version}`"):
        library.import_library(none)


def test_another_release_is_refused(package: Package) -> None:
    package.version("0.2.8")
    with pytest.raises(BackendUnavailable, match=r"exllamav2 0\.2\.8 is installed"):
        library.import_library(none)


MISMATCH = """
The detected CUDA version (12.4) mismatches the version that was used to compile
PyTorch (13.0). Please make sure to use the same CUDA versions."""

NINJA = """Error building extension 'exllamav2_ext': [1/47] nvcc -c q_gemm.cu
FAILED: q_gemm.cuda.o
/usr/include/cublas.h:3:10: fatal error: cusparse.h: No such file or directory
ninja: build stopped: subcommand failed."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'PIL'", name="PIL.Image"), "`pip install pillow`"),
        (ModuleNotFoundError("No module named 'regex'", name="regex"), "`pip install regex`"),
        (ImportError("exllamav2_ext.so: undefined symbol: _ZN3c10"), "built for another torch than 2.9"),
        (NameError("name 'exllamav2_ext' is not defined"), "built for another torch than 2.9"),
        (OSError("CUDA_HOME environment variable is not set."), "nvcc is missing: install the CUDA 12.8 toolkit"),
        (RuntimeError("Ninja is required to load C++ extensions"), "`pip install ninja`"),
        (RuntimeError(MISMATCH), "nvcc is of CUDA 12.4 and torch of CUDA 13.0"),
        (RuntimeError(NINJA), "could not be compiled: /usr/include/cublas.h:3:10: fatal error: cusparse.h"),
        (RuntimeError("Error building extension 'exllamav2_ext': /bin/sh: 1: c++: not found"), "c++: not found"),
        (KeyError("odd"), "could not be imported: KeyError: 'odd'"),
    ],
)
def test_each_failure_is_one_sentence_that_says_what_to_do(error: Exception, said: str) -> None:
    explained = explain_import(PACKAGE, error, torch_version="2.9", cuda_version="12.8")
    assert said in explained.message
    assert "\n" not in explained.message


def test_the_swallowed_reason_of_broken_kernels_is_found(package: Package) -> None:
    package.ext("raise NameError(\"name 'exllamav2_ext' is not defined\")\n")
    (package.folder / "exllamav2_ext.py").write_text(
        "raise ImportError('libcudart.so.12: cannot open shared object')\n"
    )
    with pytest.raises(BackendUnavailable, match=r"libcudart\.so\.12"):
        library.import_library(none)
