"""What the doctor reads from the machine: drivers, GPUs, compilers and headers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from engine.doctor.gather import compiler_version, find_nvcc, has_card, missing_headers, other_toolkit, read_gpus
from tests.fakes.machines import H100, RTX_2080_TI


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
