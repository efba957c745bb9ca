"""Our own kernels give what torch gives, whatever the threads and the batch, and are compiled once for everybody."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.backends.torch.linear import LinearFactory, PackedLinear, PlainLinear, kind_of
from engine.backends.torch.native import build, kernels, trial
from engine.backends.torch.native.build import (
    SWITCH,
    CannotBuild,
    InstructionSet,
    build_library,
    cache_folder,
    find_compiler,
    kept_library,
)
from engine.backends.torch.native.kernels import Kernels, native_isa, native_library
from engine.backends.torch.native.layer import NativeLinear
from engine.backends.torch.native.library import NativeLibrary
from tests.fakes.native_libraries import LIBRARIES, native

CPU = torch.device("cpu")
ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 25, 31, 48, 64, 70, 200, 401)
SHAPES = ((64, 64), (48, 96), (1, 1), (17, 33), (100, 71), (35, 1024), (576, 130), (80, 2050))


needs_compiler = pytest.mark.skipif(not find_compiler(), reason="there is no C++ compiler")


@pytest.fixture(scope="module", params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> NativeLibrary:
    return native(request.param)


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_the_product_is_that_of_float32_rounded_once(
    library: NativeLibrary, outputs: int, inputs: int, bias: bool
) -> None:
    weight, biases = random(outputs, inputs), random(outputs, seed=2) if bias else None
    layer = NativeLinear.pack(library, weight, biases)
    for rows in ROWS:
        x = random(rows, inputs, seed=rows)
        exact = x.double() @ weight.double().T + (0 if biases is None else biases.double())
        torch.testing.assert_close(layer(x).double(), exact, atol=1e-4 * inputs**0.5, rtol=2**-8)


def test_neither_threads_nor_the_rest_of_the_batch_change_a_row(library: NativeLibrary) -> None:
    layer = NativeLinear.pack(library, random(200, 1024), random(200))
    x = random(70, 1024, seed=3)
    torch.set_num_threads(1)
    expected = layer(x)
    for threads in (2, 3, 4):
        torch.set_num_threads(threads)
        assert torch.equal(layer(x), expected)
    for rows in range(1, 70):
        assert torch.equal(layer(x[:rows]), expected[:rows])


def test_rows_with_gaps_between_them_and_columns_apart_are_read_as_they_lie(library: NativeLibrary) -> None:
    layer = NativeLinear.pack(library, random(40, 66), None)
    x = random(9, 66)
    wide = random(9, 200)
    wide[:, 3:69] = x
    assert torch.equal(layer(wide[:, 3:69]), layer(x))
    assert torch.equal(layer(x.T.contiguous().T), layer(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["one after the other", "in turns"])
def test_a_weight_is_packed_alike_whole_and_in_parts_on_any_number_of_threads(
    library: NativeLibrary, dtype: torch.dtype, interleaved: bool
) -> None:
    wide = random(150, 200).to(dtype)
    weight = wide[:, 3:74]
    expected = library.pack(weight.contiguous(), interleaved=interleaved)
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        for sizes in ((150,), (75, 75), (1, 100, 49), (16, 0, 134)):
            packed = library.pack(weight.split(sizes), interleaved=interleaved)
            assert torch.equal(packed, expected)
    assert torch.equal(library.pack(weight.T.contiguous().T, interleaved=interleaved), expected)


def test_a_weight_is_packed_where_it_is_told_to_lie(library: NativeLibrary) -> None:
    rooms: list[Tensor] = []

    def room(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        rooms.append(torch.full(shape, torch.nan, dtype=dtype))
        return rooms[-1]

    packed = library.pack(random(40, 33), room=room)
    assert packed is rooms[0]
    assert torch.equal(packed, library.pack(random(40, 33)))


def test_infinities_stay_in_their_row_and_beyond_the_last_input_nothing_is_read(library: NativeLibrary) -> None:
    layer = NativeLinear.pack(library, random(20, 33), None)
    x = torch.full((6, 40), float("nan")).bfloat16()
    x[:, :33] = random(6, 33)
    expected = layer(x[:, :33].contiguous())
    assert torch.equal(layer(x[:, :33]), expected)
    x[2, 0] = float("inf")
    changed = layer(x[:, :33])
    assert not changed[2].isfinite().any()
    kept = [0, 1, 3, 4, 5]
    assert torch.equal(changed[kept], expected[kept])


def test_a_row_of_the_wrong_length_or_dtype_is_refused(library: NativeLibrary) -> None:
    layer = NativeLinear.pack(library, random(16, 32), None)
    for x in (random(1, 31), torch.zeros(1, 32)):
        with pytest.raises(ValueError, match="32 inputs of bfloat16"):
            layer(x)


def test_the_factory_takes_the_native_kernel_for_bfloat16(library: NativeLibrary) -> None:
    layer = LinearFactory(CPU, torch.bfloat16, library).make(random(48, 64), None)
    assert kind_of(layer) == f"native {library.isa}"


def test_a_native_product_that_differs_turns_the_kernels_off_with_one_warning(
    library: NativeLibrary, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    factory = LinearFactory(CPU, torch.bfloat16, library)
    monkeypatch.setattr(NativeLinear, "__call__", lambda self, x: torch.zeros(x.shape[0], self.form.outputs).bfloat16())
    layers = [factory.make(random(48, 64), None) for _ in range(3)]
    assert all(isinstance(layer, PackedLinear | PlainLinear) for layer in layers)
    assert [record.getMessage() for record in caplog.records if "is off" in record.message] == [
        f"the native {library.isa} kernel is off, as it multiplies by 48 x 64 weights unlike torch"
    ]


def test_two_processes_at_once_compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, folder = tmp_path / "g++", tmp_path / "kept"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho $$ > "$2"\necho "$2" >> "$MADE"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("MADE", str(tmp_path / "made"))
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        made = list(pool.map(_build_and_stat, [folder, folder]))
    assert made[0] == made[1]
    assert sorted(path.suffix for path in folder.iterdir()) == [".lock", ".so"]
    assert len((tmp_path / "made").read_text().splitlines()) == len(build.SOURCES) + 1


def _build_and_stat(folder: Path) -> tuple[str, int, int]:
    path = build_library("avx2", folder)
    return path.name, path.stat().st_ino, path.stat().st_mtime_ns


def test_a_damaged_library_is_not_loaded_but_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _compile_to(monkeypatch, b"the library")
    path = build_library("avx2", tmp_path)
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole[:20], b"x" + whole[1:]):
        path.write_bytes(damaged)
        assert kept_library("avx2", tmp_path) is None
        assert build_library("avx2", tmp_path).read_bytes() == whole
    assert kept_library("avx2", tmp_path) == path


def test_a_change_of_the_source_makes_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _compile_to(monkeypatch, b"the library")
    before = build_library("avx2", tmp_path)
    source = tmp_path / "changed.h"
    source.write_text(build.HEADERS[0].read_text() + "\n")
    monkeypatch.setattr(build, "HEADERS", (source, *build.HEADERS[1:]))
    assert kept_library("avx2", tmp_path) is None
    assert build_library("avx2", tmp_path) != before


def test_a_failing_compiler_is_named_with_its_first_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'linear.cpp:1: error: no such instruction' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotBuild, match=r"g\+\+ ended with 3: .*no such instruction"):
        build_library("avx2", tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_without_a_compiler_there_is_no_library_and_it_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _in_a_new_process(tmp_path, monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    for _ in range(3):
        assert native_library(torch.bfloat16, CPU, lambda: False) is None
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1
    assert "no C++ compiler is on PATH (g++, clang++, c++)" in said[0]


def test_a_library_that_came_with_the_wheel_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped, cache = tmp_path / "shipped", tmp_path / "cache"
    _compile_to(monkeypatch, b"the library")
    (made,) = [each for each in build.ship_libraries(shipped) if each.name.startswith("avx2")]
    monkeypatch.setattr(build, "find_compiler", lambda: "")
    copied = build_library("avx2", cache, shipped)
    assert copied.parent == cache
    assert copied.read_bytes() == made.read_bytes()

    made.write_bytes(made.read_bytes()[:-1])
    copied.unlink()
    with pytest.raises(CannotBuild, match=r"no C\+\+ compiler is on PATH"):
        build_library("avx2", cache, shipped)


def test_a_load_does_not_wait_longer_than_it_may_for_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "cache_folder", lambda: tmp_path)
    done = multiprocessing.get_context("fork").Event()

    def slowly(isa: InstructionSet, folder: Path) -> Path:
        done.wait()
        raise CannotBuild("it was stopped")

    monkeypatch.setattr(kernels, "build_library", slowly)
    compiling = Kernels("avx2")
    assert compiling.wait(lambda: True) is None
    assert compiling.wait(lambda: False, timeout_s=0.0) is None
    done.set()
    assert compiling.wait(lambda: False) is None


@needs_compiler
def test_a_library_that_was_compiled_before_is_ready_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    build_library("avx2", cache_folder())

    def unwanted(isa: InstructionSet, folder: Path) -> Path:
        raise AssertionError("compiled again")

    monkeypatch.setattr(kernels, "build_library", unwanted)
    ready = Kernels("avx2").wait(lambda: False, timeout_s=0.0)
    assert ready is not None
    assert ready.isa == "avx2"


def test_other_dtypes_and_devices_stay_with_torch() -> None:
    assert native_library(torch.float16, CPU, lambda: False) is None
    assert native_library(torch.bfloat16, torch.device("cuda", 0), lambda: False) is None


@pytest.mark.parametrize(
    ("vnni", "bf16", "tiles", "isa"),
    [
        (True, True, True, "amx-bf16"),
        (True, True, False, "avx512-bf16"),
        (True, False, False, "avx512"),
        (False, False, False, "avx2"),
    ],
)
def test_the_widest_kernels_are_used_that_the_cpu_can_run(
    monkeypatch: pytest.MonkeyPatch, vnni: bool, bf16: bool, tiles: bool, isa: InstructionSet
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: vnni)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    assert native_isa() == isa


def test_the_switch_keeps_the_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    assert native_isa() is None


def _compile_to(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: "g++")
    monkeypatch.setattr(build, "_run", lambda command: Path(command[command.index("-o") + 1]).write_bytes(content))


def _in_a_new_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing had been compiled or loaded yet, on a CPU with AVX2."""
    monkeypatch.setattr(kernels, "_kernels", kernels.cache(Kernels))
    monkeypatch.setattr(kernels, "native_isa", lambda: "avx2")
    monkeypatch.setattr(kernels, "cache_folder", lambda: folder)


def test_a_library_whose_products_are_torchs_passes_its_trial(library: NativeLibrary) -> None:
    assert trial.multiplies(library)


@needs_compiler
def test_a_library_that_ends_its_trial_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_TRIED_FIRST", frozenset({"avx2"}))
    monkeypatch.setattr(build, "SOURCES", (build.SOURCES[0],))
    monkeypatch.setattr(build, "trial_command", lambda library, isa: ["/bin/sh", "-c", "kill -ILL $$"])
    with pytest.raises(CannotBuild, match="kernels for avx2 do not work on this machine: /bin/sh ended with -4"):
        build_library("avx2", tmp_path)
    assert kept_library("avx2", tmp_path) is None


@needs_compiler
def test_a_shipped_library_is_tried_on_the_machine_that_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _compile_to(monkeypatch, b"for tiles")
    build.ship_libraries(tmp_path / "shipped")
    tried: list[str] = []
    monkeypatch.setattr(build, "_try", lambda made, isa: tried.append(isa))
    build_library("amx-bf16", tmp_path / "cache", tmp_path / "shipped")
    assert tried == ["amx-bf16"]


def test_the_trial_is_a_process_that_ends_well(library: NativeLibrary) -> None:
    isa = library.isa if library.isa != "amx-bf16" else "avx2"  # tiles in memory were tried when they were made
    assert trial.main([str(build_library(isa, cache_folder())), isa]) == 0
