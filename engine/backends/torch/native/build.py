"""The compiled kernels on disk: made once for each instruction set and source, kept in the user's cache folder.

A wheel may bring them (`hatch_build.py`): then they are copied from there, and no compiler is needed.
A kept library ends in a digest of all before it, so one that was cut short or damaged is never loaded but made anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import platformdirs

InstructionSet = Literal["amx-bf16", "avx512-bf16", "avx512", "avx2"]

_FOLDER = Path(__file__).parent
SHIPPED = _FOLDER / "shipped"
"""Where a wheel has libraries that were compiled for it."""

SOURCES = tuple(
    _FOLDER / name
    for name in ("linear.cpp", "float32.cpp", "quantised.cpp", "quantise.cpp", "attention.cpp", "blocks.cpp")
)
HEADERS = tuple(
    _FOLDER / f"{name}.h"
    for name in (
        "common",
        "vector",
        "functions",
        "linear",
        "packing",
        "bfloat16",
        "floating",
        "amx",
        "quantised",
        "codes",
        "attention",
        "attention_tile",
        "attention_call",
        "attention_plan",
        "attention_heads",
        "attention_pages",
        "attention_codes",
    )
)
COMPILERS = ("g++", "clang++", "c++")
TIMEOUT_S = 180.0

SWITCH = "ERICLLM_NATIVE"
"""The environment variable that keeps the kernels off with "0"."""

_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16")

ISA_FLAGS: Mapping[InstructionSet, tuple[str, ...]] = {
    "amx-bf16": (*_AVX512_BF16, "-DERICLLM_AMX", "-mamx-tile", "-mamx-bf16"),
    "avx512-bf16": _AVX512_BF16,
    "avx512": _AVX512,
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
}

_TRIED_FIRST = frozenset({"amx-bf16"})
"""Sets of instructions that a CPU may have and a hypervisor or a system still refuse: a library for them is tried in a
process of its own before it is kept."""

_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fno-math-errno", "-ffp-contract=off")
_LINK_FLAGS = ("-Wl,--as-needed", "-static-libgcc")
_DIGEST_BYTES = hashlib.sha256().digest_size


class CannotBuild(Exception):
    """Why there is no library, as a clause."""


def cache_folder() -> Path:
    """Where libraries are kept."""
    return platformdirs.user_cache_path("ericllm") / "native"


def library_key(isa: InstructionSet) -> str:
    """Changes whenever the library would compute or be called otherwise."""
    texts = [path.read_text(encoding="utf-8") for path in (*HEADERS, *SOURCES)]
    facts = (texts, _FLAGS, _LINK_FLAGS, ISA_FLAGS[isa])
    return f"{isa}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"


def kept_library(isa: InstructionSet, folder: Path) -> Path | None:
    """The library in `folder`, if a whole one is there."""
    path = _path(isa, folder)
    try:
        content = path.read_bytes()
    except OSError:
        return None
    whole = hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]
    return path if whole else None


def build_library(isa: InstructionSet, folder: Path, shipped: Path = SHIPPED) -> Path:
    """The library in `folder`; unless it is there, a copy of the one in `shipped`, else compiled. Of several processes
    at once, one makes it and the others wait. Raises CannotBuild."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (folder / f"{isa}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel lets go of it when its holder dies
            return kept_library(isa, folder) or _make(isa, folder, kept_library(isa, shipped))
    except OSError as error:
        raise CannotBuild(f"{folder} cannot be written: {error}") from error


def ship_libraries(folder: Path) -> list[Path]:
    """Compile the kernels for every instruction set into `folder`, untried: this machine may have none of them.
    Raises CannotBuild."""
    folder.mkdir(parents=True, exist_ok=True)
    for isa in ISA_FLAGS:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            _keep(_compile(isa, Path(scratch)), _path(isa, folder))
    return [_path(isa, folder) for isa in ISA_FLAGS]


def find_compiler() -> str:
    """The C++ compiler that would be used, "" where none is on PATH."""
    return next((found for name in COMPILERS if (found := shutil.which(name))), "")


def _make(isa: InstructionSet, folder: Path, shipped: Path | None) -> Path:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        if shipped is None:
            made = _compile(isa, Path(scratch))
        else:
            made = Path(scratch, "library.so")
            made.write_bytes(shipped.read_bytes()[:-_DIGEST_BYTES])
        if isa in _TRIED_FIRST:
            _try(made, isa)
        _keep(made, _path(isa, folder))
    return _path(isa, folder)


def _compile(isa: InstructionSet, scratch: Path) -> Path:
    compiler = find_compiler()
    if not compiler:
        raise CannotBuild(f"no C++ compiler is on PATH ({', '.join(COMPILERS)})")
    made = scratch / "library.so"
    objects = [scratch / f"{source.stem}.o" for source in SOURCES]
    commands = (
        [compiler, "-c", *_FLAGS, *ISA_FLAGS[isa], "-o", str(each), str(source)]
        for each, source in zip(objects, SOURCES, strict=True)
    )
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(_run, commands))
    _run([compiler, "-shared", *_LINK_FLAGS, "-o", str(made), *map(str, objects)])
    return made


def _keep(made: Path, path: Path) -> None:
    """Put a digest at the end of `made`, and it in its place at once."""
    content = made.read_bytes()
    with made.open("ab") as file:
        file.write(hashlib.sha256(content).digest())
    made.replace(path)


def trial_command(library: Path, isa: InstructionSet) -> list[str]:
    """What tries a library, in a process of its own."""
    return [sys.executable, "-m", "engine.backends.torch.native.trial", str(library), isa]


def _try(library: Path, isa: InstructionSet) -> None:
    try:
        _run(trial_command(library, isa))
    except CannotBuild as error:
        raise CannotBuild(f"kernels for {isa} do not work on this machine: {error}") from error


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"{command[0]} failed: {error}") from error
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-200:])
        raise CannotBuild(f"{command[0]} ended with {done.returncode}: {said}")


def _path(isa: InstructionSet, folder: Path) -> Path:
    return folder / f"{library_key(isa)}.so"
