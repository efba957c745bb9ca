"""Which compiler makes the native kernels, and that those of Zig's, for machines without another, are the same."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.backends.common import native_build
from engine.backends.common.gguf_codes import CODED_FORMATS
from engine.backends.common.native_build import CannotBuild, InstructionSet, build_library, cache_folder
from engine.backends.torch.native.layer import FusedLinear, NativeLinear, pack_codes, quantise_linear
from engine.backends.torch.native.library import NativeLibrary
from tests.docs.declared import declared
from tests.fakes.attending import Kernel, Shape
from tests.fakes.native_libraries import MACHINE_SETS, native_set
from tests.fakes.published_sources import ZIGLANG, source_folder
from tests.unit.test_native_gguf import random_codes


@pytest.fixture
def ziglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ziglang package, on a machine without another compiler, whose program writes down what it is given."""
    package = tmp_path / "site" / "ziglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('it is not imported')")
    program = package / "zig"
    lines = ("#!/bin/sh", f'echo "$* in $ZIG_GLOBAL_CACHE_DIR" >> {tmp_path}/given')
    program.write_text("\n".join((*lines, 'while [ "$1" != -o ]; do shift; done', 'echo kernels > "$2"')))
    program.chmod(0o755)
    monkeypatch.syspath_prepend(package.parent)
    without_compiler(tmp_path, monkeypatch)
    return program


def without_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for programs in a folder that has none."""
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)


def test_where_path_has_no_compiler_that_of_ziglang_compiles_and_links(ziglang: Path, tmp_path: Path) -> None:
    assert native_build.find_compiler() == str(ziglang)
    cache = tmp_path / "cache"
    made = build_library("avx2", cache)
    *compiled, linked = (tmp_path / "given").read_text().splitlines()
    assert len(compiled) == len(native_build.SOURCES)
    target = f"x86_64-linux-gnu.{native_build.ZIG_GLIBC}"
    assert all(each.startswith(f"c++ -target {target} -c ") and "-mavx2" in each for each in compiled)
    assert linked.startswith("ld.lld -shared ")
    assert all(Path(each.rpartition(" in ")[2]).is_relative_to(cache) for each in (*compiled, linked))
    assert {each.name for each in cache.iterdir()} == {made.name, "avx2.lock"}


def test_a_compiler_on_path_or_in_cxx_goes_before_that_of_ziglang(
    ziglang: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "c++"
    mine.write_text("#!/bin/sh\nexit 3\n")
    mine.chmod(0o755)
    assert native_build.find_compiler() == str(mine)
    monkeypatch.setenv("CXX", "none")
    assert native_build.find_compiler() == ""


def test_without_any_compiler_the_reason_says_what_brings_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "_zig", lambda: "")
    without_compiler(tmp_path, monkeypatch)
    with pytest.raises(CannotBuild, match=r"^no C\+\+ compiler is on PATH \(g\+\+.*\): `.*install .*` brings one$"):
        build_library("avx2", tmp_path / "cache")


@pytest.mark.long
@pytest.mark.skipif(shutil.which("nm") is None, reason="there is no nm")
@pytest.mark.parametrize("isa", MACHINE_SETS)
def test_kernels_need_no_library_but_that_of_c(isa: InstructionSet) -> None:
    library = build_library(isa, cache_folder())
    shown = subprocess.run(["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True)
    names = {line.split()[-1] for line in shown.stdout.splitlines() if line.split()[0] == "U"}
    others = {name for name in names if "@GLIBC_" not in name}
    assert {name.partition("@")[0] for name in others} <= {"__cxa_thread_atexit"}, others


# Of Zig's own.


@pytest.fixture(scope="module")
def zig(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder to import ziglang from."""
    source = source_folder(ZIGLANG)
    folder = tmp_path_factory.mktemp("site")
    (folder / "ziglang").symlink_to(source / "ziglang")
    (source / "ziglang" / "zig").chmod(0o755)
    return folder


def test_the_extra_brings_the_compiler_that_is_tested() -> None:
    assert [str(each) for each in declared("compiler")] == [ZIGLANG.requirement]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("isa", MACHINE_SETS[:1])
def test_kernels_of_ziglang_compute_the_same_bits(
    zig: Path, isa: InstructionSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = native_set(isa)
    monkeypatch.syspath_prepend(zig)
    without_compiler(tmp_path, monkeypatch)
    theirs = NativeLibrary(isa, build_library(isa, tmp_path / "cache"))
    found, wanted = computed(theirs), computed(ours)
    assert len(found) > 100
    assert [name for name in found if not torch.equal(found[name], wanted[name])] == []


def computed(library: NativeLibrary) -> dict[str, Tensor]:
    """Of each kernel, what it makes of a few and of many rows, as bytes."""
    made: dict[str, Tensor] = {}
    for dtype in (torch.bfloat16, torch.float32):
        weight, bias = random(144, 70, dtype=dtype), random(144, dtype=dtype)
        gated = NativeLinear.pack(library, weight, None, interleaved=True)
        layers = {
            "plain": NativeLinear.pack(library, weight, bias),
            "int8": quantise_linear(library, weight, bias, 8),
            "int4": quantise_linear(library, weight, bias, 4),
            "silu": FusedLinear(gated, norm=bias[:70], epsilon=1e-5, activation="silu"),
            "gelu": FusedLinear(gated, activation="gelu"),
            "gelu_tanh": FusedLinear(gated, activation="gelu_tanh"),
        }
        coded = [random_codes(name, 144, 512) for name in CODED_FORMATS]
        layers |= {codes.format: pack_codes(library, [raw], [codes], dtype, None) for raw, codes in coded}
        for name, layer in layers.items():
            inputs = layer.format.inputs
            made |= {f"{name} {dtype} {rows}": layer(random(rows, inputs, dtype=dtype)) for rows in (1, 3, 8, 40)}
        for bits in (16, 8, 4):
            kernel = Kernel(library, Shape(9, 3, 64, turned=64), dtype, bits)
            made[f"attention {dtype} {bits}"] = kernel.whole(kernel.sequence(200), [100, 1, 99])
    return {name: result.view(torch.uint8) for name, result in made.items()}


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)
