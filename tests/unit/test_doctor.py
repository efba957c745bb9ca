"""What the doctor makes of every kind of machine: findings, advice and the verdict, from facts alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from console.doctor import as_json, as_text
from engine.doctor.examine import examine
from engine.doctor.facts import Attention, Cpu, Driver, Exllama, Facts, Gpu, Native, Package, Toolchain, Torch
from engine.doctor.gpus import has_card, read_gpus
from engine.doctor.machine import has_kernels
from engine.doctor.native import native_attention_problem
from engine.doctor.report import Finding, Report
from engine.doctor.toolchain import compiler_version, find_nvcc, missing_headers, other_toolkit
from engine.doctor.wheels import numbers, wheel_for
from tests.fakes.machines import (
    CPU_TORCH_ON_A_GPU_MACHINE,
    GIB,
    H100,
    H100_TO_COMPILE,
    H100_WITH_EVERYTHING,
    KEPT,
    RTX_2080_TI,
    TOOLS,
    TURING,
    WITHOUT_GPU,
    changed,
)

AVX512_BF16 = {"avx2", "fma", "avx512_bf16", "avx512_vnni", "avx512vl", "avx512bw"}
LINEAR = "linear layers"


def found(report: Report, name: str) -> Finding:
    return next(finding for finding in report.findings if finding.name == name)


def names(report: Report) -> list[str]:
    return [finding.name for finding in report.findings]


def exllama(facts: Facts) -> Report:
    return examine(facts, "exllamav2")


# -- whole machines -----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("backend", ["torch", "exllamav2"])
def test_an_h100_with_everything_has_nothing_to_mend(backend: Any) -> None:
    report = examine(H100_WITH_EVERYTHING, backend)
    assert report.can_run
    assert {finding.state for finding in report.findings} == {"ok"}
    assert not [finding.advice for finding in report.findings if finding.advice]
    assert found(report, "GPU0").value == "NVIDIA H100 80GB HBM3, capability 9.0, 79.0 of 80.0 GiB free"
    assert found(report, "kernels").value == "prebuilt, and fit for this torch"


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
    report = exllama(changed(TURING, flash_attn=Package(installed=True, version="2.8.3")))
    assert found(report, "flash-attn").state == "note"
    assert "compute capability 8.0" in found(report, "flash-attn").value


def test_a_broken_flash_attn_is_named_with_its_symbol_and_stops_nothing() -> None:
    flash = Package(installed=True, version="2.8.3", error="undefined symbol: _ZNK3c106SymInt6sym_neERKS0_")
    report = exllama(changed(H100_WITH_EVERYTHING, flash_attn=flash))
    assert report.can_run
    assert found(report, "flash-attn").state == "broken"
    assert "undefined symbol" in found(report, "flash-attn").value
    assert "`pip uninstall flash-attn`" in found(report, "flash-attn").advice


# -- torch and the driver -----------------------------------------------------------------------------------------


def test_a_driver_too_old_for_torchs_cuda_is_told_which_driver_or_which_torch() -> None:
    old = Driver(state="ok", version="550.54.15", cuda="12.4", card=True)
    torch = Torch(installed=True, version="2.11.0+cu130", cuda="13.0", gpu_error="The NVIDIA driver is too old")
    report = exllama(changed(H100_TO_COMPILE, driver=old, torch=torch))
    assert "driver 550.54.15 runs CUDA 12.4 at most" in report.verdict
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
    refused = Attention(error="--attention flash cannot be honoured: flash-attn is not installed")
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
            {*AVX512_BF16, "amx_tile", "amx_bf16"},
            {"kept": ("amx-bf16",)},
            "ok",
            "native amx-bf16 kernels for bfloat16, compiled",
        ),
        ({"sse4_2"}, {}, "ok", "torch's own kernels: ours need AVX2 on x86-64 Linux"),
        (AVX512_BF16, {"kept": ("avx512-bf16",)}, "ok", "native avx512-bf16 kernels for bfloat16, compiled"),
        (
            AVX512_BF16,
            {"kept": ("avx2",), "compiler": "/usr/bin/g++"},
            "ok",
            "native avx512-bf16 kernels for bfloat16, which the first load compiles with /usr/bin/g++",
        ),
        ({"avx2", "fma"}, {}, "note", "torch's own kernels: there is no C++ compiler to make ours with"),
        ({"avx2", "fma"}, {"off": True}, "note", "torch's own kernels: ERICLLM_NATIVE keeps ours off"),
    ],
)
def test_it_says_which_kernels_multiply_by_the_weights(
    flags: set[str], native: dict[str, Any], state: str, value: str
) -> None:
    finding = found(examine(changed(WITHOUT_GPU, cpu={"flags": frozenset(flags)}, native=native), "torch"), LINEAR)
    assert (finding.state, finding.value) == (state, value)
    assert bool(finding.advice) == (state == "note")


# -- the library and its kernels ----------------------------------------------------------------------------------


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
        (Exllama(), "`pip install 'ericllm[cuda]'`"),
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
    assert numbers("2.9.1+cu128") == (2, 9, 1)
    assert numbers("2.8.0.post2") == (2, 8, 0)
    assert numbers("") == ()


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


# -- what is read from the machine --------------------------------------------------------------------------------


class FakeNvml:
    """NVML with two cards, or with an error at its start."""

    NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIB_RM_VERSION_MISMATCH = 12, 9, 18

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__(f"error {value}")
            self.value = value

    def __init__(self, failure: int = 0) -> None:
        self._failure = failure
        self._cards = (H100, RTX_2080_TI)

    def nvmlInit(self) -> None:
        if self._failure:
            raise self.NVMLError(self._failure)

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.65.06"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13020

    def nvmlDeviceGetCount(self) -> int:
        return len(self._cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self._cards[handle].name

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=self._cards[handle].total_bytes, free=self._cards[handle].free_bytes)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        if handle == 1:
            raise self.NVMLError(3)
        return (9, 0)


def test_nvml_gives_the_driver_and_the_gpus_in_cudas_order() -> None:
    driver, gpus = read_gpus(FakeNvml(), {"CUDA_VISIBLE_DEVICES": "1,0"})
    assert (driver.state, driver.version, driver.cuda, driver.hidden) == ("ok", "580.65.06", "13.2", 0)
    assert gpus == (msgspec.structs.replace(RTX_2080_TI, capability=None), H100)


def test_gpus_that_are_all_hidden_are_counted() -> None:
    driver, gpus = read_gpus(FakeNvml(), {"CUDA_VISIBLE_DEVICES": ""})
    assert (driver.hidden, gpus) == (2, ())


@pytest.mark.parametrize(("code", "state"), [(12, "absent"), (9, "not loaded"), (18, "mismatched"), (999, "failing")])
def test_nvmls_ways_to_fail_are_told_apart(code: int, state: str) -> None:
    driver, gpus = read_gpus(FakeNvml(code), {})
    assert (driver.state, gpus) == (state, ())


def test_an_nvidia_card_is_seen_on_the_bus_without_a_driver(tmp_path: Path) -> None:
    assert not has_card(tmp_path / "nowhere")
    for name, vendor, kind in (("a", "0x8086", "0x030000"), ("b", "0x10de", "0x040300")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    assert not has_card(tmp_path)
    (tmp_path / "b" / "class").write_text("0x030200\n")
    assert has_card(tmp_path)


def test_compilers_say_who_they_are() -> None:
    assert compiler_version("c++ (Debian 12.2.0-14+deb12u1) 12.2.0\nCopyright ...") == "g++ 12.2.0"
    assert compiler_version("Ubuntu clang version 18.1.3 (1ubuntu1)\n").startswith("clang++ 18.1.3")
    assert compiler_version("") == ""


def test_nvcc_is_looked_for_where_torch_looks(tmp_path: Path) -> None:
    for home in ("first", "second"):
        nvcc = tmp_path / home / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text("#!/bin/sh\n")
        nvcc.chmod(0o755)
    path = str(tmp_path / "second" / "bin")
    assert find_nvcc({"PATH": path}) == f"{path}/nvcc"
    assert find_nvcc({"PATH": path, "CUDA_HOME": str(tmp_path / "first")}) == str(tmp_path / "first" / "bin" / "nvcc")
    assert find_nvcc({"PATH": path, "CUDA_HOME": str(tmp_path / "none")}) == ""


def test_headers_are_found_in_the_toolkit_and_in_what_the_environment_names(tmp_path: Path) -> None:
    include = tmp_path / "cuda-12.8" / "include"
    include.mkdir(parents=True)
    lacking = missing_headers("/opt/none/bin/nvcc", {})
    for header in ("cuda_runtime.h", "cublas_v2.h", "cublasLt.h", "cusparse.h", "cusolverDn.h", "curand.h"):
        (include / header).touch()
    assert missing_headers(str(tmp_path / "cuda-12.8" / "bin" / "nvcc"), {}) == ()
    assert missing_headers("/opt/none/bin/nvcc", {"CPATH": f"/nowhere:{include}"}) == ()
    assert other_toolkit(("curand.h",), tmp_path) == str(tmp_path / "cuda-12.8")
    assert other_toolkit(("nothing.h",), tmp_path) == ""
    assert set(lacking) <= {path.name for path in include.iterdir()}


# -- how it is shown ----------------------------------------------------------------------------------------------


def test_the_table_is_aligned_and_breaks_no_command() -> None:
    text = as_text(exllama(changed(H100_TO_COMPILE, toolchain=Toolchain())), width=80)
    lines = text.splitlines()
    values = {line[27] for line in lines if line.startswith("  ") and not line.startswith(" " * 27)}
    assert values and " " not in values
    for finding in exllama(changed(H100_TO_COMPILE, toolchain=Toolchain())).findings:
        for command in finding.advice.split("`")[1::2]:
            assert command in text
    assert all(len(line) <= 80 for line in lines if "`" not in line and "/" not in line and ".whl" not in line)
    assert "\N{NO-BREAK SPACE}" not in text


def test_no_area_stands_in_two_places() -> None:
    areas = [finding.area for finding in exllama(H100_TO_COMPILE).findings]
    starts = [area for before, area in zip(["", *areas], areas, strict=False) if area != before]
    assert len(starts) == len(set(starts))


def test_every_thing_that_is_missing_or_broken_comes_with_a_command_or_stands_on_others_that_do() -> None:
    """`kernels`, `in use` and the backends sum up rows that have their own advice."""
    machines = (
        CPU_TORCH_ON_A_GPU_MACHINE,
        changed(H100_TO_COMPILE, toolchain=Toolchain()),
        changed(TURING, triton=Package(), exllama=Exllama()),
        changed(WITHOUT_GPU, driver={"card": True}, torch=Torch()),
        changed(H100_TO_COMPILE, toolchain=msgspec.structs.replace(TOOLS, nvcc_version="11.8")),
    )
    for facts in machines:
        report = exllama(facts)
        bare = {f.name for f in report.findings if f.state in ("missing", "broken") and "`" not in f.advice}
        assert bare <= {"kernels", "in use", "exllamav2"}
        assert "`" in found(report, "exllamav2").advice or found(report, "exllamav2").state == "ok"


def test_the_report_as_json_carries_the_verdict() -> None:
    value = msgspec.json.decode(as_json(exllama(WITHOUT_GPU)))
    assert value["can_run"] is False
    assert value["backend"] == "exllamav2"
    assert value["verdict"].startswith("The exllamav2 backend cannot run here")
    assert {"area", "name", "state", "value", "advice"} == set(value["findings"][0])


@pytest.mark.parametrize(
    ("machine", "flags", "native", "words"),
    [
        ("x86_64", {"avx2", "fma"}, Native(compiler="/usr/bin/g++"), ""),
        ("x86_64", {"avx2", "fma"}, Native(kept=("avx2",)), ""),
        ("x86_64", {"avx2", "fma"}, Native(), "there is no C++ compiler"),
        ("x86_64", {"avx2", "fma"}, Native(compiler="/usr/bin/g++", off=True), "ERICLLM_NATIVE keeps"),
        ("aarch64", {"avx2", "fma"}, Native(compiler="/usr/bin/g++"), "need AVX2 on x86-64 Linux"),
    ],
)
def test_native_attention_is_told_with_what_it_lacks(machine: str, flags: set[str], native: Native, words: str) -> None:
    problem = native_attention_problem(machine, Cpu(flags=frozenset(flags)), native)
    assert words in problem if words else problem == ""
