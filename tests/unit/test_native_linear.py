"""Our own kernels give what torch gives, whatever the threads and the batch, and are compiled once for everybody."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from engine.backends.base import LoadProgress
from engine.backends.common import native_build
from engine.backends.common.native_build import (
    SWITCH,
    CannotBuild,
    InstructionSet,
    build_library,
    cache_folder,
    cached_library,
    find_compiler,
)
from engine.backends.torch.model.linear import LinearFactory, PackedLinear, PlainLinear, linear_kind
from engine.backends.torch.native import library as kernels
from engine.backends.torch.native import trial
from engine.backends.torch.native.layer import NativeLinear
from engine.backends.torch.native.library import NativeLibrary, find_kernels, native_isa
from engine.errors import LoadCancelled, ModelLoadFailed
from tests.fakes.native_libraries import LIBRARIES, native

pytestmark = pytest.mark.long

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

    packed = library.pack(random(40, 33), allocate=room)
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
    assert linear_kind(layer) == f"native {library.isa}"


def test_a_native_product_that_differs_turns_the_kernels_off_with_one_warning(
    library: NativeLibrary, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    factory = LinearFactory(CPU, torch.bfloat16, library)
    monkeypatch.setattr(
        NativeLinear, "__call__", lambda self, x: torch.zeros(x.shape[0], self.format.outputs).bfloat16()
    )
    layers = [factory.make(random(48, 64), None) for _ in range(3)]
    assert all(isinstance(layer, PackedLinear | PlainLinear) for layer in layers)
    assert [record.getMessage() for record in caplog.records if "is off" in record.message] == [
        f"the native {library.isa} kernel is off, as its products with 48 x 64 weights differ from torch's"
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
    assert len((tmp_path / "made").read_text().splitlines()) == len(native_build.SOURCES) + 1


def _build_and_stat(folder: Path) -> tuple[str, int, int]:
    path = build_library("avx2", folder)
    return path.name, path.stat().st_ino, path.stat().st_mtime_ns


def test_a_damaged_library_is_not_loaded_but_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _compile_to(monkeypatch, b"the library")
    path = build_library("avx2", tmp_path)
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole[:20], b"x" + whole[1:]):
        path.write_bytes(damaged)
        assert cached_library("avx2", tmp_path) is None
        assert build_library("avx2", tmp_path).read_bytes() == whole
    assert cached_library("avx2", tmp_path) == path


def test_a_change_of_the_source_makes_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _compile_to(monkeypatch, b"the library")
    before = build_library("avx2", tmp_path)
    source = tmp_path / "changed.h"
    source.write_text(native_build.HEADERS[0].read_text() + "\n")
    monkeypatch.setattr(native_build, "HEADERS", (source, *native_build.HEADERS[1:]))
    assert cached_library("avx2", tmp_path) is None
    assert build_library("avx2", tmp_path) != before


def test_a_failing_compiler_is_named_with_its_first_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'linear.cpp:1: error: no such instruction' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotBuild, match=r"g\+\+ ended with 3: .*no such instruction"):
        build_library("avx2", tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_without_a_compiler_there_is_no_library_and_each_load_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _in_a_new_process(tmp_path, monkeypatch)
    monkeypatch.setattr(native_build, "_zig", lambda: "")
    monkeypatch.setenv("PATH", str(tmp_path))
    for loads in (1, 2):
        found = find_kernels(torch.bfloat16, CPU)
        assert found.library is None
        assert found.problem.startswith("the native kernels cannot be used: no C++ compiler is on PATH (g++,")
        said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(said) == loads
        assert "no C++ compiler is on PATH (g++, clang++, c++)" in said[-1]


def test_a_compiler_that_says_much_is_read_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _compiler(tmp_path, monkeypatch, "head -c 1000000 /dev/zero >&2; echo >&2; echo 'the error' >&2; exit 1").touch()
    with pytest.raises(CannotBuild, match="ended with 1: the error"):
        build_library("avx2", tmp_path / "cache")


def test_a_library_that_came_with_the_wheel_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped, cache = tmp_path / "shipped", tmp_path / "cache"
    _compile_to(monkeypatch, b"the library")
    (made,) = [each for each in native_build.ship_libraries(shipped) if each.name.startswith("avx2")]
    monkeypatch.setattr(native_build, "find_compiler", lambda: "")
    assert build_library("avx2", cache, shipped) == made
    assert not cache.exists()

    made.write_bytes(made.read_bytes()[:-1])
    with pytest.raises(CannotBuild, match=r"no C\+\+ compiler is on PATH"):
        build_library("avx2", cache, shipped)


@needs_compiler
def test_a_load_waits_for_the_compiler_and_shows_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = build_library("avx2", cache_folder())
    _in_a_new_process(tmp_path / "kept", monkeypatch)
    go_on = _compiler(tmp_path, monkeypatch, f'cp {library} "$made"')
    seen: list[LoadProgress] = []

    def report(progress: LoadProgress) -> None:
        seen.append(progress)
        if len(seen) == 3:
            go_on.touch()

    found = find_kernels(torch.bfloat16, CPU, report=report)
    assert found.library is not None
    assert {(each.phase, each.total, each.unit) for each in seen} == {
        ("kernels", len(native_build.SOURCES) + 1, "files")
    }
    assert [each.done for each in seen] == sorted(each.done for each in seen)
    assert (seen[0].done, seen[-1].done) == (0, len(native_build.SOURCES) + 1)


def test_a_compiler_that_hangs_is_ended_and_its_load_goes_on_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _in_a_new_process(tmp_path / "kept", monkeypatch)
    _compiler(tmp_path, monkeypatch, "")
    monkeypatch.setattr(native_build, "MAX_BUILD_S", 0.1)
    found = find_kernels(torch.bfloat16, CPU)
    assert (found.library, found.problem) == (
        None,
        "the native kernels cannot be used: the compiler took longer than 0 s",
    )
    assert "as they cannot be used: the compiler took longer" in caplog.text
    _wait_until_ended(tmp_path)
    assert [path.suffix for path in (tmp_path / "kept").iterdir()] == [".lock"]


def test_a_load_that_is_cancelled_ends_its_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _in_a_new_process(tmp_path / "kept", monkeypatch)
    _compiler(tmp_path, monkeypatch, "")
    seen: list[LoadProgress] = []
    with pytest.raises(LoadCancelled):
        find_kernels(torch.bfloat16, CPU, report=seen.append, cancelled=lambda: len(seen) > 3)
    _wait_until_ended(tmp_path)
    assert [path.suffix for path in (tmp_path / "kept").iterdir()] == [".lock"]


def test_who_waits_for_a_build_that_fails_does_not_build_and_the_next_load_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, made = tmp_path / "kept", tmp_path / "made"
    go_on = _compiler(tmp_path, monkeypatch, f"echo $$ >> {made}; echo 'error: no such machine' >&2; exit 1")
    _in_a_new_process(folder, monkeypatch)
    processes = multiprocessing.get_context("fork")
    compiling = processes.Event()

    def build_first() -> None:
        with pytest.raises(CannotBuild):
            build_library("avx2", folder, watch=lambda done, total: compiling.set())

    first = processes.Process(target=build_first)
    first.start()
    assert compiling.wait(60)
    with pytest.raises(CannotBuild, match=r"g\+\+ ended with 1: error: no such machine"):
        build_library("avx2", folder, watch=lambda done, total: go_on.touch())
    first.join()
    assert first.exitcode == 0
    tries = len(made.read_text().splitlines())
    assert tries <= len(native_build.SOURCES)
    with pytest.raises(CannotBuild, match="no such machine"):
        build_library("avx2", folder)
    assert len(made.read_text().splitlines()) > tries


def test_what_a_killed_build_left_is_cleared_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _compile_to(monkeypatch, b"the library")
    (tmp_path / "avx2.killed").mkdir()
    (tmp_path / "avx2.killed" / "attention.o").write_bytes(b"half of it")
    (tmp_path / "avx512.other").mkdir()
    build_library("avx2", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["avx512.other"]


def test_a_process_that_is_killed_takes_its_compilers_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _compiler(tmp_path, monkeypatch, "")
    building = multiprocessing.get_context("fork").Process(target=build_library, args=("avx2", tmp_path / "kept"))
    building.start()
    while len(_compilers(tmp_path)) < 2:
        assert building.is_alive()
    building.kill()
    building.join()
    _wait_until_ended(tmp_path)


def test_the_compiler_is_the_one_that_cxx_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "mine"
    compiler.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/first\nexit 3\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", f"{compiler} --for-tests")
    assert native_build.find_compiler() == str(compiler)
    with pytest.raises(CannotBuild, match="mine ended with 3"):
        build_library("avx2", tmp_path / "cache")
    assert (tmp_path / "first").read_text() == "--for-tests\n"


@pytest.mark.parametrize(("named", "said"), [("none", "none"), ("none -x", "none -x"), ("'no", "''\"'\"'no'")])
def test_a_compiler_that_is_named_and_not_there_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, said: str
) -> None:
    monkeypatch.setenv("CXX", named)
    with pytest.raises(CannotBuild, match=f"^CXX names {said}, which is not on PATH$"):
        build_library("avx2", tmp_path)


def test_libraries_of_former_versions_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _compile_to(monkeypatch, b"the library")
    for age in range(5):
        old = tmp_path / f"avx2-{age:016}.so"
        old.touch()
        os.utime(old, (10**9 - age, 10**9 - age))
    (tmp_path / "avx2-more-0000000000000000.so").touch()
    made = build_library("avx2", tmp_path)
    left = {path.name for path in tmp_path.glob("*.so")}
    assert left == {made.name, "avx2-0000000000000000.so", "avx2-0000000000000001.so", "avx2-more-0000000000000000.so"}


def test_machines_that_share_a_home_but_no_c_library_keep_kernels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = set()
    for version in ("2.36", "2.39"):
        monkeypatch.setattr("platform.libc_ver", lambda version=version: ("glibc", version))
        folders.add(cache_folder())
    assert len(folders) == 2


def test_a_full_disk_is_named_and_leaves_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _compile_to(monkeypatch, b"the library")

    def full(made: Path, path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(native_build, "_keep", full)
    with pytest.raises(CannotBuild, match="No space left on device"):
        build_library("avx2", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["avx2.lock"]


def test_a_file_system_without_locks_does_not_keep_the_kernels_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _compile_to(monkeypatch, b"the library")

    def lockless(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", lockless)
    assert build_library("avx2", tmp_path) == cached_library("avx2", tmp_path)


@needs_compiler
def test_a_library_that_was_compiled_before_is_ready_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    build_library("avx2", cache_folder())
    _in_a_new_process(cache_folder(), monkeypatch)

    def unwanted(*_: object, **named: object) -> Path:
        raise AssertionError("compiled again")

    monkeypatch.setattr(native_build, "_Build", unwanted)
    seen: list[LoadProgress] = []
    ready = find_kernels(torch.bfloat16, CPU, report=seen.append).library
    assert ready is not None
    assert ready.isa == "avx2"
    assert not seen


def test_a_worker_computes_with_the_kernels_only_if_its_siblings_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = find_kernels(torch.bfloat16, CPU, native=False)
    assert without.library is None
    assert without.problem == "the other workers of this model compute without the native kernels"
    _in_a_new_process(tmp_path, monkeypatch)
    monkeypatch.setattr(native_build, "_zig", lambda: "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ModelLoadFailed, match=r"compute with the native kernels, .* here: no C\+\+ compiler is on PATH"
    ):
        find_kernels(torch.bfloat16, CPU, native=True)


def test_other_dtypes_and_devices_stay_with_torch() -> None:
    assert find_kernels(torch.float16, CPU).library is None
    assert find_kernels(torch.bfloat16, torch.device("cuda", 0)).library is None


_AVX512 = {"avx2", "fma", "avx512bw", "avx512vl", "avx512_vnni"}
_AMX = {*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"}


@pytest.mark.parametrize(
    ("flags", "capability", "isa"),
    [
        (_AMX, "AVX512", "amx-bf16"),
        (_AMX - {"amx_int8"}, "AVX512", "avx512-bf16"),
        (_AMX - {"amx_tile"}, "AVX512", "avx512-bf16"),
        (_AVX512, "AVX512", "avx512"),
        (_AVX512 - {"avx512_vnni"}, "AVX512", "avx2"),
        (_AMX, "AVX2", "avx2"),
        (_AMX, "DEFAULT", None),
    ],
)
def test_the_widest_kernels_are_used_that_the_cpu_can_run(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], capability: str, isa: InstructionSet | None
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(kernels, "cpu_flags", lambda: flags)
    assert native_isa() == isa


def test_the_switch_keeps_the_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    assert native_isa() is None


def _compile_to(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    def run(build: object, commands: Sequence[list[str]], scratch: Path, done: int = 0) -> None:
        for command in commands:
            Path(command[command.index("-o") + 1]).write_bytes(content)

    monkeypatch.setattr(native_build, "find_compiler", lambda: "g++")
    monkeypatch.setattr(native_build._Build, "_run", run)


def _compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """Have the compiler be a script, which finds the name of its output in $made. It waits for the file that is
    returned, and for ever if `script` is empty."""
    go_on, compiler = folder / "go-on", folder / "g++"
    waiting = f"while [ ! -e {go_on} ]; do sleep 0.01; done" if script else "sleep 1000"
    compiler.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nmade=$2\n{waiting}\n{script}\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return go_on


def _compilers(folder: Path) -> list[psutil.Process]:
    """The running processes of the compiler in `folder`, and what they started."""
    return [
        process
        for process in psutil.process_iter(["environ"])
        if str(folder) in (process.info["environ"] or {}).get("TMPDIR", "") and process.status() != psutil.STATUS_ZOMBIE
    ]


def _wait_until_ended(folder: Path) -> None:
    """Wait for the compilers in `folder`: a process that was killed is gone once the system gets to it."""
    while _compilers(folder):
        pass


def _in_a_new_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing had been compiled or loaded yet, on a CPU with AVX2."""
    monkeypatch.setattr(kernels, "_open_library", cache(NativeLibrary))
    monkeypatch.setattr(kernels, "native_isa", lambda: "avx2")
    monkeypatch.setattr(kernels, "cache_folder", lambda: folder)


def test_a_library_whose_products_are_torchs_passes_its_trial(library: NativeLibrary) -> None:
    assert trial.products_match(library)


@needs_compiler
def test_a_library_that_ends_its_trial_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "_TRIED_FIRST", frozenset({"avx2"}))
    monkeypatch.setattr(native_build, "SOURCES", native_build.SOURCES[-1:])
    monkeypatch.setattr(native_build, "trial_command", lambda library, isa: ["/bin/sh", "-c", "kill -ILL $$"])
    with pytest.raises(CannotBuild, match="kernels for avx2 do not work on this machine: /bin/sh ended with -4"):
        build_library("avx2", tmp_path)
    assert cached_library("avx2", tmp_path) is None


@needs_compiler
def test_a_shipped_library_is_tried_on_the_machine_that_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _compile_to(monkeypatch, b"for tiles")
    native_build.ship_libraries(tmp_path / "shipped")
    tried: list[str] = []
    monkeypatch.setattr(native_build._Build, "try_out", lambda native_build, made: tried.append(made.name))
    for _ in range(2):
        kept = build_library("amx-bf16", tmp_path / "cache", tmp_path / "shipped")
        assert kept.parent == tmp_path / "cache"
        assert tried == ["library.so"]


@needs_compiler
def test_a_shipped_library_is_used_where_nothing_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _compile_to(monkeypatch, b"for tiles")
    native_build.ship_libraries(tmp_path / "shipped")
    tried: list[str] = []
    monkeypatch.setattr(native_build._Build, "try_out", lambda native_build, made: tried.append(made.name))
    (tmp_path / "file").touch()
    found = build_library("amx-bf16", tmp_path / "file" / "cache", tmp_path / "shipped")
    assert found.parent == tmp_path / "shipped"
    assert tried == [found.name]


def test_the_trial_is_a_process_that_ends_well(library: NativeLibrary) -> None:
    isa = library.isa if library.isa != "amx-bf16" else "avx2"  # tiles in memory were tried when they were made
    assert trial.main([str(build_library(isa, cache_folder())), isa]) == 0
