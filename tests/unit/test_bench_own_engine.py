"""The engine that a bench opens for itself has the native kernels before its model is loaded, or says that not."""

from __future__ import annotations

from pathlib import Path

import pytest

from console.bench import own_engine
from console.bench.own_engine import compile_kernels
from engine.backends.torch.native import build
from engine.backends.torch.native.available import instruction_set_here
from engine.backends.torch.native.build import kept_library


@pytest.fixture(autouse=True)
def nothing_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_engine, "instruction_set_here", lambda: "avx2")
    monkeypatch.setattr(own_engine, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(build, "SHIPPED", tmp_path / "none")


async def test_the_kernels_are_compiled_once_with_a_line_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: "g++")
    monkeypatch.setattr(build, "_run", lambda command: Path(command[command.index("-o") + 1]).write_bytes(b"code"))
    said: list[str] = []
    for _ in range(2):
        assert await compile_kernels(said.append) == ""
    assert kept_library("avx2", tmp_path) is not None
    assert said == ["compiling the native kernels, which is done once"]


async def test_where_they_cannot_be_compiled_a_note_says_whose_kernels_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    note = await compile_kernels(lambda text: None)
    assert note.startswith("What the native kernels would compute was computed by torch's: no C++ compiler is on PATH")


@pytest.mark.parametrize(("bound", "isa"), [("", "avx512"), ("avx2", "avx2"), ("default", None)])
def test_those_are_compiled_that_torchs_bound_leaves(
    monkeypatch: pytest.MonkeyPatch, bound: str, isa: str | None
) -> None:
    flags = frozenset({"avx2", "fma", "avx512_vnni", "avx512vl", "avx512bw"})
    monkeypatch.setattr("engine.backends.torch.native.available.cpu_flags", lambda: flags)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("ERICLLM_NATIVE", raising=False)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", bound)
    assert instruction_set_here() == isa
