"""What the doctor makes of every kind of machine: findings, advice and the verdict, from facts alone."""

from __future__ import annotations

from typing import Any

import pytest

from engine.backends.common.native_kernels import Native, native_problem
from engine.backends.paged_attention.doctor import Attention
from engine.doctor.examine import examine
from engine.doctor.facts import Driver, Gpu, Package, Torch
from tests.fakes.examined import exllama, found, names
from tests.fakes.machines import (
    CPU_TORCH_ON_A_GPU_MACHINE,
    GIB,
    H100_TO_COMPILE,
    H100_WITH_EVERYTHING,
    TURING,
    WITHOUT_GPU,
    changed,
)

AVX512_BF16 = {"avx2", "fma", "avx512_bf16", "avx512_vnni", "avx512vl", "avx512bw"}
LINEAR = "linear layers"


def test_a_machine_without_gpu_runs_torch_and_asks_for_nothing() -> None:
    report = examine(WITHOUT_GPU, "torch")
    assert report.can_run
    assert report.verdict == "The torch backend can run here."
    assert {finding.state for finding in report.findings} == {"ok", "note"}
    assert "no NVIDIA card" in found(report, "NVIDIA driver").value
    assert "nvcc" not in names(report)


def test_a_machine_without_gpu_cannot_run_exllamav2_and_says_so() -> None:
    report = exllama(WITHOUT_GPU)
    assert not report.can_run
    assert report.verdict == "The exllamav2 backend cannot run here: it computes on NVIDIA GPUs, and none was found."


@pytest.mark.parametrize("backend", ["torch", "exllamav2", "exllamav3"])
def test_an_h100_with_everything_has_nothing_to_mend(backend: Any) -> None:
    report = examine(H100_WITH_EVERYTHING, backend)
    assert report.can_run
    assert {finding.state for finding in report.findings} == {"ok"}
    assert not [finding.advice for finding in report.findings if finding.advice]
    assert found(report, "GPU0").value == "NVIDIA H100 80GB HBM3, capability 9.0, 79.0 of 80.0 GiB free"
    assert found(report, "kernels").value == "prebuilt for this torch"


def test_a_gpu_with_a_torch_for_cpus_is_told_which_torch_to_install() -> None:
    report = exllama(CPU_TORCH_ON_A_GPU_MACHINE)
    assert not report.can_run
    assert "build for CPUs" in report.verdict
    assert "--index-url https://download.pytorch.org/whl/cu128" in found(report, "torch").advice
    assert examine(CPU_TORCH_ON_A_GPU_MACHINE, "torch").can_run


def test_turing_without_flash_attn_runs_and_says_which_attention_and_why() -> None:
    report = exllama(TURING)
    assert report.can_run
    assert found(report, "flash-attn").state == "note"
    assert found(report, "in use").value == "gathered: flash-attn is not installed; Triton supports 8.0 and newer"


def test_flash_attn_on_turing_is_named_unfit_and_not_wrong() -> None:
    report = exllama(changed(TURING, attention={"flash_attn": Package(installed=True, version="2.8.3")}))
    assert found(report, "flash-attn").state == "note"
    assert "compute capability 8.0" in found(report, "flash-attn").value


def test_a_broken_flash_attn_is_named_with_its_symbol_and_stops_nothing() -> None:
    flash = Package(installed=True, version="2.8.3", error="undefined symbol: _ZNK3c106SymInt6sym_neERKS0_")
    report = exllama(changed(H100_WITH_EVERYTHING, attention={"flash_attn": flash}))
    assert report.can_run
    assert found(report, "flash-attn").state == "broken"
    assert "undefined symbol" in found(report, "flash-attn").value
    assert "`pip uninstall flash-attn`" in found(report, "flash-attn").advice


def test_a_driver_too_old_for_torchs_cuda_is_told_which_driver_or_which_torch() -> None:
    old = Driver(state="ok", version="550.54.15", cuda="12.4", card=True)
    torch = Torch(installed=True, version="2.11.0+cu130", cuda="13.0", gpu_error="The NVIDIA driver is too old")
    report = exllama(changed(H100_TO_COMPILE, driver=old, torch=torch))
    assert "driver 550.54.15 runs max CUDA 12.4" in report.verdict
    advice = found(report, "GPUs").advice
    assert "580 or later" in advice and "cuda-drivers" in advice and "torch==2.9.*" in advice


def test_a_newer_minor_cuda_of_the_same_major_is_not_called_too_old() -> None:
    driver = Driver(state="ok", version="535.54.03", cuda="12.2", card=True)
    assert exllama(changed(H100_WITH_EVERYTHING, driver=driver)).can_run


def test_a_torch_that_sees_no_gpu_is_quoted() -> None:
    torch = Torch(installed=True, version="2.9.1+cu128", cuda="12.8", gpu_error="CUDA unknown error")
    report = exllama(changed(H100_WITH_EVERYTHING, torch=torch))
    assert not report.can_run
    assert "CUDA unknown error" in found(report, "GPUs").value


def test_a_torch_without_kernels_for_the_card_is_named() -> None:
    blackwell = Gpu(name="RTX 5090", capability=(12, 0), total_bytes=32 * GIB, free_bytes=31 * GIB)
    report = exllama(changed(H100_WITH_EVERYTHING, gpus=(blackwell,)))
    assert "torch has no kernels for RTX 5090" in report.verdict
    assert found(report, "GPUs").state == "broken"


@pytest.mark.parametrize(
    ("driver", "state", "words"),
    [
        (Driver(state="absent", card=True), "missing", "`sudo apt install cuda-drivers`"),
        (Driver(state="absent", card=True, container=True), "missing", "`docker run --gpus all ...`"),
        (Driver(state="not loaded", card=True), "broken", "`sudo modprobe nvidia`"),
        (Driver(state="mismatched", card=True), "broken", "`sudo reboot`"),
        (Driver(state="failing", card=True, detail="Unknown Error"), "broken", "`sudo dmesg | grep -i nvrm`"),
        (Driver(state="ok", version="580.1", cuda="13.0", hidden=2), "note", "`unset CUDA_VISIBLE_DEVICES`"),
    ],
)
def test_each_way_to_be_without_driver_has_its_own_command(driver: Driver, state: str, words: str) -> None:
    finding = found(examine(changed(WITHOUT_GPU, driver=driver), "torch"), "NVIDIA driver")
    assert finding.state == state
    assert words in finding.advice


def test_without_torch_no_backend_can_run() -> None:
    for torch in (Torch(), Torch(installed=True, version="2.9.1", error="libcudart.so.12: cannot open")):
        report = examine(changed(WITHOUT_GPU, torch=torch), "torch")
        assert not report.can_run
        assert all(report.lacks.values())
        assert "pip install" in found(report, "torch").advice


def test_an_attention_that_cannot_be_had_stops_the_backend_that_was_to_use_it() -> None:
    refused = Attention(error="--attention flash is not available: flash-attn is not installed")
    report = exllama(changed(TURING, attention=refused))
    assert not report.can_run
    assert "--attention flash" in report.verdict


def test_a_processor_without_avx2_is_told_that_it_is_slow() -> None:
    report = examine(changed(WITHOUT_GPU, cpu={"flags": frozenset({"sse4_2"})}), "torch")
    assert found(report, "Instructions").state == "note"
    assert "AVX2" in found(report, "Instructions").advice


@pytest.mark.parametrize(
    ("flags", "native", "state", "value"),
    [
        (
            {*AVX512_BF16, "amx_tile", "amx_bf16", "amx_int8"},
            {"compiled": ("amx-bf16",)},
            "ok",
            "native amx-bf16 kernels for bfloat16, compiled on this machine",
        ),
        ({"sse4_2"}, {}, "ok", "torch's kernels: the native ones need AVX2 on x86-64 Linux"),
        (
            AVX512_BF16,
            {"compiled": ("avx512-bf16",), "shipped": ("avx512-bf16",)},
            "ok",
            "native avx512-bf16 kernels for bfloat16, compiled on this machine",
        ),
        (
            AVX512_BF16,
            {"compiled": ("avx2",), "shipped": ("avx512-bf16",)},
            "ok",
            "native avx512-bf16 kernels for bfloat16, from the installed wheel",
        ),
        (
            AVX512_BF16,
            {"compiled": ("avx2",), "compiler": "/usr/bin/g++"},
            "ok",
            "native avx512-bf16 kernels for bfloat16, which the first load compiles with /usr/bin/g++",
        ),
        (
            AVX512_BF16 - {"avx512_bf16"},
            {"compiled": ("avx512",)},
            "ok",
            "native avx512 kernels for bfloat16, compiled on this machine",
        ),
        ({"avx2", "fma"}, {}, "note", "torch's kernels: there is no C++ compiler"),
        (
            {"avx2", "fma"},
            {"compiler": "/usr/bin/g++", "folder_problem": "/cache cannot be written"},
            "note",
            "torch's kernels: the native ones cannot be saved, as /cache cannot be written",
        ),
        ({"avx2", "fma"}, {"off": True}, "note", "torch's kernels: ERICLLM_NATIVE disables the native ones"),
    ],
)
def test_it_says_which_kernels_multiply_by_the_weights(
    flags: set[str], native: dict[str, Any], state: str, value: str
) -> None:
    finding = found(examine(changed(WITHOUT_GPU, cpu={"flags": frozenset(flags)}, native=native), "torch"), LINEAR)
    assert (finding.state, finding.value) == (state, value)
    assert bool(finding.advice) == (state == "note")


@pytest.mark.parametrize(
    ("machine", "flags", "native", "words"),
    [
        ("x86_64", {"avx2", "fma"}, Native(compiler="/usr/bin/g++"), ""),
        ("x86_64", {"avx2", "fma"}, Native(compiled=("avx2",)), ""),
        ("x86_64", {"avx2", "fma"}, Native(), "no C++ compiler"),
        (
            "x86_64",
            {"avx2", "fma"},
            Native(compiler="/usr/bin/g++", folder_problem="/c is not a folder"),
            "/c is not a folder",
        ),
        ("x86_64", {"avx2", "fma"}, Native(compiler="/usr/bin/g++", off=True), "ERICLLM_NATIVE disables"),
        ("aarch64", {"avx2", "fma"}, Native(compiler="/usr/bin/g++"), "need AVX2 on x86-64 Linux"),
    ],
)
def test_native_attention_names_what_it_lacks(machine: str, flags: set[str], native: Native, words: str) -> None:
    problem = native_problem(machine, flags, native)
    assert words in problem if words else problem == ""
