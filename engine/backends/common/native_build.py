"""The compiled kernels on disk: made once for each instruction set and source, kept in the user's cache folder.

A wheel may bring them (`hatch_build.py`): then no compiler is needed. A kept library ends in a digest of all before it,
so one that was cut short or damaged is never loaded but compiled again. The digest keeps no other user from putting a
library there: the mode and owner of file and folder do.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Literal

import platformdirs

from engine.system.child_process import child_environment, python_command, tied_command
from engine.system.files import claim_folder, distrust
from engine.system.install_command import install_extra

InstructionSet = Literal["amx-bf16", "avx512-bf16", "avx512", "avx2"]

Watch = Callable[[int, int], None]
"""Called several times a second during a build, with the number of files made and of all. What it raises ends the
build, compilers included."""

_FOLDER = Path(__file__).parents[1] / "torch" / "native"
SHIPPED = _FOLDER / "shipped"
"""Where a wheel has libraries that were compiled for it."""

SOURCES = tuple(
    _FOLDER / name
    for name in (
        "attention.cpp",
        "gguf.cpp",
        "quantised.cpp",
        "linear.cpp",
        "float32.cpp",
        "gguf_pack.cpp",
        "quantise.cpp",
        "best_tokens.cpp",
        "blocks.cpp",
        "threads.cpp",
    )
)
"""Those that take longest first, so that no compiler is waited for alone."""

HEADERS = tuple(
    _FOLDER / f"{name}.h"
    for name in (
        "common",
        "threads",
        "vector",
        "functions",
        "linear",
        "packing",
        "bfloat16",
        "floating",
        "tiles",
        "amx",
        "integers",
        "integer_tiles",
        "quantised",
        "codes",
        "gguf",
        "attention",
        "attention_amx",
        "attention_tile",
        "attention_call",
        "attention_plan",
        "attention_heads",
        "attention_pages",
        "attention_codes",
    )
)
COMPILERS = ("g++", "clang++", "c++")
ZIG_GLIBC = "2.28"
"""The C library that Zig compiles for, the oldest that torch's own wheels run with."""

MAX_BUILD_S = 300.0
"""How long a build may take, and how long another process's build is waited for. One takes 55 s of one 2.5 GHz core."""

_POLL_S = 0.05

_LEVELS = 2
"""Folders of ours above the one of the libraries: see `cache_folder`."""

_MAX_KEPT = 3
"""Libraries for one instruction set: several versions may be in use."""

_LIBRARY_MODE = 0o755
"""Whatever the mask of modes: one that a group may write to would not be trusted."""

SWITCH = "ERICLLM_NATIVE"
"""The environment variable that keeps the kernels off with "0"."""

_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16")

ISA_FLAGS: Mapping[InstructionSet, tuple[str, ...]] = {
    "amx-bf16": (*_AVX512_BF16, "-DERICLLM_AMX", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    "avx512-bf16": _AVX512_BF16,
    "avx512": _AVX512,
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
}

_TRIED_FIRST = frozenset({"amx-bf16"})
"""Sets of instructions that a CPU may have and a hypervisor or a system still refuse: a library for them is tried in a
process of its own before it is kept."""

_ZIG_CACHES = ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fno-exceptions", "-fno-math-errno", "-ffp-contract=off")
_LINK_FLAGS = ("-Wl,--as-needed", "-static-libgcc", "-pthread")
_DIGEST_BYTES = hashlib.sha256().digest_size


class CannotBuild(Exception):
    """Why there is no library, as a clause."""


def cache_folder() -> Path:
    """Where libraries are kept: by the C library that they were linked to, as machines may share a home."""
    return platformdirs.user_cache_path("ericllm") / "native" / "".join(platform.libc_ver())


def library_key(isa: InstructionSet) -> str:
    """Changes whenever the library would compute or be called otherwise."""
    texts = [path.read_text(encoding="utf-8") for path in (*HEADERS, *SOURCES)]
    facts = (texts, _FLAGS, _LINK_FLAGS, ISA_FLAGS[isa])
    return f"{isa}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"


def cached_library(isa: InstructionSet, folder: Path) -> Path | None:
    """Return the library in `folder`, if a whole one is there that only we and root could have written."""
    path = _path(isa, folder)
    return None if why_untrusted(path, _LEVELS + 1) else _whole(path)


def why_untrusted(path: Path, levels: int = _LEVELS) -> str:
    """Return why a folder of libraries (or, with another number of folders above it, a library) may be another
    user's work, as a clause; "" where it is not, or nothing is there."""
    try:
        return next(filter(None, map(distrust, (path, *path.parents[:levels]))), "")
    except FileNotFoundError:
        return ""
    except OSError as error:
        return str(error)


def folder_problem(path: Path) -> str:
    """Return why no library can be kept in a folder, which need not be there yet, as a clause; "" where one can."""
    there = next(each for each in (path, *path.parents) if os.path.lexists(each))
    if not there.is_dir():
        return f"{there} is not a folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} cannot be written"
    return why_untrusted(path)


def shipped_library(isa: InstructionSet, folder: Path) -> Path | None:
    """Return the library that came with the program, if a whole one did: it is trusted as the program is."""
    return _whole(_path(isa, folder))


def _whole(path: Path) -> Path | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    whole = hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]
    return path if whole else None


def build_library(
    isa: InstructionSet, folder: Path, shipped: Path = SHIPPED, watch: Watch = lambda done, total: None
) -> Path:
    """The library in `folder`; unless it is there, the one in `shipped`, else one that is compiled. Of several
    processes at once, one makes it and the others wait; they take its failure for theirs. Raises CannotBuild, and
    whatever `watch` raises."""
    from_wheel = shipped_library(isa, shipped)
    found = cached_library(isa, folder) or (None if isa in _TRIED_FIRST else from_wheel)
    if found is not None:
        return found
    build = _Build(isa, folder, watch)
    try:
        claim_folder(folder, _LEVELS)
        with build.locked() as lock:
            return cached_library(isa, folder) or build.make(from_wheel, lock)
    except OSError as error:
        if from_wheel is None:
            raise CannotBuild(f"{folder} cannot be used: {error}") from error
    build.try_out(from_wheel)  # each time, as that it works cannot be kept
    return from_wheel


def ship_libraries(folder: Path) -> list[Path]:
    """Compile the kernels for every instruction set into `folder`, untried: this machine may have none of them.
    Raises CannotBuild."""
    folder.mkdir(parents=True, exist_ok=True)
    for isa in ISA_FLAGS:
        build = _Build(isa, folder)
        with build.scratch() as scratch:
            _keep(build.compile(scratch), _path(isa, folder))
    return [_path(isa, folder) for isa in ISA_FLAGS]


def find_compiler() -> str:
    """Return the C++ compiler that would be used: the one that CXX names if it names any, else the first on PATH, else
    that of the ziglang package; "" where there is none."""
    if named := _named_compiler():
        return shutil.which(named[0]) or ""
    return next(filter(None, map(shutil.which, COMPILERS)), "") or _zig()


def linked_glibc() -> str:
    """Return the version of glibc that a library needs which is compiled here."""
    return ZIG_GLIBC if find_compiler() == _zig() else platform.libc_ver()[1]


def _zig() -> str:
    """Return the program of the ziglang package, which brings clang, a linker and their headers; "" where it is not
    installed."""
    spec = importlib.util.find_spec("ziglang")
    folders = () if spec is None else spec.submodule_search_locations or ()
    return next(filter(None, (shutil.which("zig", path=folder) for folder in folders)), "")


def _named_compiler() -> list[str]:
    """Return the command in CXX, with its arguments."""
    named = os.environ.get("CXX", "")
    try:
        return shlex.split(named)
    except ValueError:
        return [named]


def _build_commands() -> tuple[list[str], list[str]]:
    """Return the commands that compile a source and that link a library, without what they read and write. Raises
    CannotBuild."""
    compiler, named = find_compiler(), _named_compiler()
    if compiler and compiler == _zig() and not named:
        # Without a target it compiles for this very CPU; as the linker of C++ it would first compile a library of C++.
        compile_command = [compiler, "c++", "-target", f"x86_64-linux-gnu.{ZIG_GLIBC}"]
        return compile_command, [compiler, "ld.lld", "-shared", "--strip-all"]
    if compiler:
        return [compiler, *named[1:]], [compiler, *named[1:], "-shared", *_LINK_FLAGS]
    if named:
        raise CannotBuild(f"CXX names {shlex.join(named)}, which is not on PATH")
    raise CannotBuild(f"no C++ compiler is on PATH ({', '.join(COMPILERS)}): `{install_extra('compiler')}` brings one")


class _Build:
    """One attempt to have the library for `isa` in `folder`, which ends MAX_BUILD_S from now at the latest."""

    def __init__(self, isa: InstructionSet, folder: Path, watch: Watch = lambda done, total: None) -> None:
        self._isa, self._folder, self._watch = isa, folder, watch
        self._until = time.monotonic() + MAX_BUILD_S
        self._waited = self._is_locked = False

    @contextmanager
    def locked(self) -> Iterator[IO[bytes]]:
        """Be the only process that builds for `isa` in the folder; the lock file has why the last build failed. The
        system drops the lock of a process that dies. On a file system without locks, all are let in."""
        with (self._folder / f"{self._isa}.lock").open("a+b", buffering=0) as lock:
            while not self._is_locked:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._is_locked = True
                except BlockingIOError:
                    self._waited = True
                    self._look(self._made_by_another())
                except OSError:
                    break
            yield lock

    def _made_by_another(self) -> int:
        try:
            return sum(1 for _ in self._folder.glob(f"{self._isa}.*/*.o"))
        except OSError:  # it ends, and clears its folder away
            return 0

    def make(self, shipped: Path | None, lock: IO[bytes]) -> Path:
        """Put the library in its place: a copy of the `shipped` one if there is one, else what the compiler makes."""
        lock.seek(0)
        if self._waited and (problem := lock.read()):
            raise CannotBuild(problem.decode())
        lock.truncate(0)
        if self._is_locked:
            for stale in self._folder.glob(f"{self._isa}.*/"):  # of a process that was killed
                shutil.rmtree(stale, ignore_errors=True)
        try:
            with self.scratch() as scratch:
                if shipped is None:
                    made = self.compile(scratch)
                else:
                    made = scratch / "library.so"
                    made.write_bytes(shipped.read_bytes()[:-_DIGEST_BYTES])
                if self._isa in _TRIED_FIRST:
                    self.try_out(made)
                _keep(made, _path(self._isa, self._folder))
            self._remove_old()
        except CannotBuild as error:
            with suppress(OSError):
                lock.write(str(error).encode())
            raise
        return _path(self._isa, self._folder)

    def _remove_old(self) -> None:
        """Of the libraries for `isa`, which other versions of the sources made too, leave the newest few."""
        found = [each for each in self._folder.glob("*.so") if each.name.rpartition("-")[0] == self._isa]
        for old in sorted(found, key=lambda each: each.stat().st_mtime, reverse=True)[_MAX_KEPT:]:
            old.unlink(missing_ok=True)

    def try_out(self, made: Path) -> None:
        """Have a process of its own multiply by it."""
        try:
            self._run([trial_command(made.absolute(), self._isa)], made.parent, len(SOURCES))
        except CannotBuild as error:
            raise CannotBuild(f"kernels for {self._isa} do not work on this machine: {error}") from error

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder for what is made on the way."""
        with tempfile.TemporaryDirectory(prefix=f"{self._isa}.", dir=self._folder, ignore_cleanup_errors=True) as name:
            yield Path(name).absolute()

    def compile(self, scratch: Path) -> Path:
        """Compile the library into `scratch`."""
        compile_command, link_command = _build_commands()
        made = scratch / "library.so"
        objects = [scratch / f"{source.stem}.o" for source in SOURCES]
        self._run(
            [
                [*compile_command, "-c", *_FLAGS, *ISA_FLAGS[self._isa], "-o", str(each), str(source)]
                for each, source in zip(objects, SOURCES, strict=True)
            ],
            scratch,
        )
        self._run([[*link_command, "-o", str(made), *map(str, objects)]], scratch, len(objects))
        return made

    def _run(self, commands: Sequence[list[str]], scratch: Path, done: int = 0) -> None:
        """Run all commands, as many at once as there are cores. None of them is left running."""
        waiting, running = deque(commands), list[_Command]()
        try:
            while waiting or running:
                while waiting and len(running) < (os.cpu_count() or 1):
                    running.append(_Command(waiting.popleft(), scratch))
                for command in [command for command in running if command.has_ended()]:
                    running.remove(command)
                    command.check()
                    done += 1
                self._look(done)
        finally:
            for command in running:
                command.kill()

    def _look(self, done: int) -> None:
        """Report, and wait a moment."""
        self._watch(done, len(SOURCES) + 1)
        if time.monotonic() > self._until:
            who = "the compiler" if self._is_locked or not self._waited else "the compiler of another process"
            raise CannotBuild(f"{who} took longer than {MAX_BUILD_S:.0f} s")
        time.sleep(_POLL_S)


class _Command:
    """A running program, which ends with this process. What it says is kept in memory: a full disk must not hide why it
    failed."""

    def __init__(self, command: list[str], scratch: Path) -> None:
        self._name, self._output = command[0], b""
        try:
            self._process = subprocess.Popen(
                tied_command(command),
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                cwd=scratch,
                env={**child_environment(), "TMPDIR": str(scratch), **dict.fromkeys(_ZIG_CACHES, str(scratch / "zig"))},
            )
        except OSError as error:
            raise CannotBuild(f"{self._name} cannot be run: {error}") from error
        assert self._process.stdin is not None and self._process.stderr is not None
        self._alive, self._errors = self._process.stdin, self._process.stderr
        os.set_blocking(self._errors.fileno(), False)

    def has_ended(self) -> bool:
        """True if it has ended, well or not. Read often enough, it never blocks on its error output."""
        ended = self._process.poll() is not None
        while chunk := self._errors.read(1 << 16):
            self._output += chunk
        return ended

    def check(self) -> None:
        """Raise CannotBuild, with its first error, unless it ended well."""
        self._close()
        if status := self._process.returncode:
            output = self._output.decode(errors="replace")
            first = next((line for line in output.splitlines() if "error" in line), output.strip()[-200:])
            raise CannotBuild(f"{self._name} ended with {128 - status if status > 128 else status}: {first[:400]}")

    def kill(self) -> None:
        """End it and what it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._close()

    def _close(self) -> None:
        self._alive.close()
        self._errors.close()


def _keep(made: Path, path: Path) -> None:
    """Put a digest at the end of `made`, and it in its place at once."""
    content = made.read_bytes()
    with made.open("ab") as file:
        file.write(hashlib.sha256(content).digest())
    made.chmod(_LIBRARY_MODE)
    made.replace(path)


def trial_command(library: Path, isa: InstructionSet) -> list[str]:
    """Return the command that tries a library in a process of its own."""
    return python_command("-m", "engine.backends.torch.native.trial", str(library), isa)


def _path(isa: InstructionSet, folder: Path) -> Path:
    return folder / f"{library_key(isa)}.so"
