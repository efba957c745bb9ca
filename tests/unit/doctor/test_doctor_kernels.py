"""What the doctor says of exllamav2 and its kernels: prebuilt, kept, to be compiled, and what compiling lacks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.backends.exllamav2.doctor import Exllama, wheel_for
from engine.doctor.examine import has_kernels
from engine.doctor.facts import Toolchain
from engine.doctor.install import version_numbers
from tests.fakes.examined import exllama, found, names
from tests.fakes.machines import H100, H100_TO_COMPILE, H100_WITH_EVERYTHING, KEPT, changed


def test_kernels_that_can_be_compiled_are_no_obstacle_and_the_three_ways_are_named() -> None:
    report = exllama(H100_TO_COMPILE)
    assert report.can_run
    assert found(report, "kernels").state == "note"
    prebuilt = found(report, "1 prebuilt")
    assert prebuilt.value == "exllamav2-0.3.2+cu128.torch2.9.0-cp311-cp311-linux_x86_64.whl"
    assert f"releases/download/v0.3.2/{prebuilt.value}`" in prebuilt.advice
    assert found(report, "2 compiled").value == "g++ 12.2.0 and nvcc 12.8 are here"
    assert f"`scp HOST:{KEPT} /venv/lib/python3.11/site-packages/`" in found(report, "3 kept").advice


@pytest.mark.parametrize(
    ("lost", "row", "advice"),
    [
        ({"nvcc": "", "nvcc_version": ""}, "nvcc", "`sudo apt install cuda-toolkit-12-8`"),
        ({"nvcc_error": "cannot execute"}, "nvcc", "`sudo apt install cuda-toolkit-12-8`"),
        ({"nvcc_version": "13.0"}, "nvcc", "`sudo apt install cuda-toolkit-12-8`"),
        ({"compiler": "", "compiler_version": ""}, "C++ compiler", "`sudo apt install g++`"),
        ({"ninja": ""}, "ninja", "`pip install ninja`"),
        ({"ninja": "", "ninja_off_path": "/venv/bin/ninja"}, "ninja", "`export PATH=/venv/bin:$PATH`"),
        ({"python_headers": False}, "Python.h", "`sudo apt install python3.11-dev`"),
        ({"missing_headers": ("curand.h",)}, "CUDA headers", "`sudo apt install cuda-toolkit-12-8`"),
        (
            {"missing_headers": ("cublas_v2.h", "curand.h"), "other_toolkit": "/usr/local/cuda-12.8"},
            "CUDA headers",
            "`export CUDA_HOME=/usr/local/cuda-12.8`",
        ),
    ],
)
def test_each_tool_that_compiling_lacks_is_named_with_its_command(lost: dict[str, Any], row: str, advice: str) -> None:
    report = exllama(changed(H100_TO_COMPILE, toolchain=lost))
    assert not report.can_run
    assert found(report, row).state in ("missing", "broken")
    assert advice in found(report, row).advice
    assert "compiling them lacks" in report.verdict


def test_an_nvcc_of_another_major_than_torchs_cuda_is_told_apart_from_one_of_another_minor() -> None:
    other = exllama(changed(H100_TO_COMPILE, toolchain={"nvcc_version": "13.0"}))
    assert "torch is built for CUDA 12.8" in found(other, "nvcc").value
    assert exllama(changed(H100_TO_COMPILE, toolchain={"nvcc_version": "12.4"})).can_run


def test_prebuilt_kernels_need_no_tools() -> None:
    report = exllama(changed(H100_WITH_EVERYTHING, toolchain=Toolchain()))
    assert report.can_run
    assert "nvcc" not in names(report)


def test_kernels_made_for_another_torch_are_broken_and_stop_the_backend() -> None:
    report = exllama(changed(H100_WITH_EVERYTHING, exllama={"kernels_error": "undefined symbol: _ZN2at"}))
    assert not report.can_run
    assert found(report, "kernels").state == "broken"
    assert "--no-deps exllamav2==0.3.2" in found(report, "kernels").advice


def test_kept_kernels_serve_with_the_tools_and_can_be_freed_of_them() -> None:
    kept = changed(H100_TO_COMPILE, exllama={"kernels": "kept"})
    assert exllama(kept).can_run
    assert KEPT in found(exllama(kept), "kernels").value
    without_tools = exllama(changed(kept, toolchain=Toolchain()))
    assert not without_tools.can_run
    assert f"`cp {KEPT} /venv/lib/python3.11/site-packages/`" in found(without_tools, "kernels").advice


@pytest.mark.parametrize(
    ("package", "words"),
    [
        (Exllama(), "`pip install exllamav2==0.3.2`"),
        (Exllama(installed=True, version="0.3.1", kernels="prebuilt"), "exllamav2==0.3.2"),
        (Exllama(installed=True, version="0.3.2", missing_modules=("tokenizers", "PIL")), "tokenizers pillow"),
        (Exllama(installed=True, version="0.3.2", kernels="prebuilt", error="no tokenizer"), "--force-reinstall"),
    ],
)
def test_each_way_to_be_without_the_package_has_its_command(package: Exllama, words: str) -> None:
    report = exllama(changed(H100_WITH_EVERYTHING, exllama=package))
    assert not report.can_run
    assert words in found(report, "exllamav2").advice


def test_a_machine_that_knows_no_package_manager_gets_a_command_all_the_same() -> None:
    report = exllama(changed(H100_TO_COMPILE, package_manager="", toolchain=Toolchain()))
    assert "`conda install" in found(report, "nvcc").advice
    assert "`conda install" in found(report, "C++ compiler").advice


@pytest.mark.parametrize(
    ("python", "machine", "torch", "cuda", "wheel"),
    [
        ((3, 11), "x86_64", "2.9.1+cu128", "12.8", "exllamav2-0.3.2+cu128.torch2.9.0-cp311-cp311-linux_x86_64.whl"),
        ((3, 13), "x86_64", "2.7.0+cu128", "12.8", "exllamav2-0.3.2+cu128.torch2.7.0-cp313-cp313-linux_x86_64.whl"),
        ((3, 12), "x86_64", "2.6.0+cu124", "12.4", "exllamav2-0.3.2+cu124.torch2.6.0-cp312-cp312-linux_x86_64.whl"),
        ((3, 11), "x86_64", "2.11.0+cu130", "13.0", ""),
        ((3, 11), "x86_64", "2.9.1+cu130", "13.0", ""),
        ((3, 14), "x86_64", "2.9.1+cu128", "12.8", ""),
        ((3, 11), "aarch64", "2.9.1+cu128", "12.8", ""),
        ((3, 11), "x86_64", "2.9.1+cpu", "", ""),
    ],
)
def test_the_wheel_is_named_as_the_releases_name_it(
    python: tuple[int, int], machine: str, torch: str, cuda: str, wheel: str
) -> None:
    assert wheel_for(python, machine, torch, cuda) == wheel


def test_versions_are_read_up_to_what_is_no_number() -> None:
    assert version_numbers("2.9.1+cu128") == (2, 9, 1)
    assert version_numbers("2.8.0.post2") == (2, 8, 0)
    assert version_numbers("") == ()


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((9, 0), ("sm_80", "sm_90"), True),
        ((8, 9), ("sm_80",), True),
        ((8, 0), ("sm_86",), False),
        ((12, 0), ("sm_90",), False),
        ((12, 0), ("sm_90", "compute_90"), True),
        ((9, 0), ("sm_90a",), True),
        ((10, 0), ("sm_90a",), False),
        ((9, 0), (), True),
        (None, ("sm_90",), True),
    ],
)
def test_kernels_run_on_newer_minors_and_ptx_on_all_newer_cards(
    capability: tuple[int, int] | None, architectures: tuple[str, ...], runs: bool
) -> None:
    assert has_kernels(msgspec.structs.replace(H100, capability=capability), architectures) is runs
