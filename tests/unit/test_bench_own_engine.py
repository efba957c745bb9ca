"""The engine that a bench opens for itself says where the native kernels did not compute."""

from __future__ import annotations

import pytest

from console.bench.own_engine import kernels_note
from engine.backends.common.native_kernels import instruction_set_here
from tests.fakes.scenes import ready_status


@pytest.mark.parametrize(
    ("native", "note"),
    [
        (True, ""),
        (None, ""),
        (False, "The native kernels were not used: no C++ compiler is on PATH."),
    ],
)
def test_where_the_native_kernels_could_not_be_used_a_note_says_why(native: bool | None, note: str) -> None:
    status = ready_status(native=native, attention_reason="no C++ compiler is on PATH")
    assert kernels_note(status.model) == note


@pytest.mark.parametrize(("bound", "isa"), [("", "avx512"), ("avx2", "avx2"), ("default", None)])
def test_those_are_compiled_that_torchs_bound_leaves(
    monkeypatch: pytest.MonkeyPatch, bound: str, isa: str | None
) -> None:
    flags = frozenset({"avx2", "fma", "avx512_vnni", "avx512vl", "avx512bw"})
    monkeypatch.setattr("engine.backends.common.native_kernels.cpu_flags", lambda: flags)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("ERICLLM_NATIVE", raising=False)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", bound)
    assert instruction_set_here() == isa
