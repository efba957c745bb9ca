"""What the doctor says of exllamav3: whether it could compute EXL3 here, and what it lacks."""

from __future__ import annotations

import pytest

from engine.backends.exllamav3.doctor import Exllama3, lacks
from engine.doctor.examine import examine
from engine.doctor.facts import Facts, Gpu, Toolchain
from engine.system.install_command import install_extra
from tests.fakes.machines import GIB, H100_WITH_EVERYTHING, TURING, WITHOUT_GPU, changed

V100 = changed(
    H100_WITH_EVERYTHING,
    gpus=(Gpu(name="Tesla V100", capability=(7, 0), total_bytes=16 * GIB, free_bytes=15 * GIB),),
    torch={"architectures": ("sm_70", "sm_80")},
)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (H100_WITH_EVERYTHING, ""),
        (TURING, ""),
        (V100, "it needs a GPU of compute capability 7.5 or more, and Tesla V100 has 7.0"),
        (changed(TURING, exllama3=Exllama3()), "the package exllamav3 is not installed"),
        (
            changed(TURING, exllama3={"missing_modules": ("triton", "PIL")}),
            "exllamav3 imports triton and PIL, which is not installed",
        ),
        (
            changed(TURING, exllama3={"version": "1.4.2"}),
            "exllamav3 1.4.2 is installed, and the backend is written for 1.6.5",
        ),
        (changed(TURING, exllama3={"kernels": ""}), ""),
        (
            changed(TURING, exllama3={"kernels": ""}, toolchain=Toolchain(compiler="/usr/bin/c++", ninja="ninja")),
            "its kernels are not compiled, and compiling them lacks nvcc and Python.h",
        ),
    ],
)
def test_what_it_lacks_is_one_clause(facts: Facts, reason: str) -> None:
    assert lacks(facts) == reason
    assert examine(facts, "exllamav3").can_run == (not reason)


def test_a_gpu_without_it_gets_the_command_as_a_note() -> None:
    [finding] = [
        each for each in examine(changed(TURING, exllama3=Exllama3()), "torch").findings if each.area == "ExLlamaV3"
    ]
    assert finding.state == "note"
    assert install_extra("exl3") in finding.advice


def test_a_machine_without_a_gpu_gets_no_advice() -> None:
    [finding] = [each for each in examine(WITHOUT_GPU, "torch").findings if each.area == "ExLlamaV3"]
    assert (finding.state, finding.advice) == ("note", "")
    assert "computes on NVIDIA GPUs" in finding.value
