"""Compiled code is run only where nobody else on the machine could have put it, and compiled without our secrets."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import pytest
import torch

from engine.backends.common import native_build, native_kernels
from engine.backends.common.native_build import (
    CannotBuild,
    build_library,
    cache_folder,
    cached_library,
    folder_problem,
    library_key,
)
from engine.backends.exllama.package import KernelBuild
from engine.backends.paged_attention import probe
from engine.backends.paged_attention.choose import AttentionFacts
from engine.backends.paged_attention.interface import implementation
from tests.fakes.native_libraries import SETS
from tests.fakes.owners import belongs_to_another

pytestmark = pytest.mark.long

SECRET = "s3cret-that-no-compiler-needs"
MADE = b"what our compiler made"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """As `build.cache_folder` has it: a folder of ours in two folders of ours."""
    folder = tmp_path / "ericllm" / "native" / "glibc"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes down its environment and current folder, and makes a library of `MADE`."""
    said = tmp_path / "said"
    program = tmp_path / "bin" / "g++"
    program.parent.mkdir()
    program.write_text(
        f"#!/bin/sh\nenv >> {said}\npwd >> {said}\n"
        f'while [ "$1" != -o ]; do shift; done\nprintf "{MADE.decode()}" > $2\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return said


def forge(folder: Path) -> Path:
    """Put a library where the one for AVX2 is looked for, whole as far as its digest tells."""
    content = b"somebody else's code"
    forged = folder / f"{library_key('avx2')}.so"
    forged.write_bytes(content + hashlib.sha256(content).digest())
    forged.chmod(0o755)
    return forged


def test_a_folder_where_nothing_can_be_kept_is_known_before_anything_is_compiled(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert folder_problem(cache / "not" / "yet") == ""
    (cache / "file").touch()
    assert folder_problem(cache / "file" / "native") == f"{cache}/file is not a folder"
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != cache)  # root may write everywhere
    assert folder_problem(cache / "native") == f"{cache} cannot be written"
    monkeypatch.undo()
    cache.chmod(0o777)
    assert str(cache) in folder_problem(cache)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
@pytest.mark.parametrize("above", [0, 1, 2])
def test_a_library_in_a_folder_that_others_may_write_to_is_not_loaded(cache: Path, mode: int, above: int) -> None:
    forge(cache)
    assert cached_library("avx2", cache) is not None
    (cache, *cache.parents)[above].chmod(mode)
    assert cached_library("avx2", cache) is None


def test_a_library_that_others_may_write_to_or_that_is_anothers_is_not_loaded(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forged = forge(cache)
    forged.chmod(0o775)
    assert cached_library("avx2", cache) is None
    forged.chmod(0o755)
    belongs_to_another(forged, monkeypatch)
    assert cached_library("avx2", cache) is None


def test_what_lies_in_a_folder_that_others_could_write_to_is_thrown_away_and_compiled(
    cache: Path, compiler: Path
) -> None:
    forge(cache)
    mine = cache.parents[2] / "mine"
    mine.write_text("keep this")
    (cache / "avx2.lock").symlink_to(mine)
    cache.chmod(0o777)
    made = build_library("avx2", cache)
    assert made.read_bytes().startswith(MADE)
    assert stat.S_IMODE(cache.stat().st_mode) & 0o022 == 0
    assert cached_library("avx2", cache) == made
    assert mine.read_text() == "keep this"


@pytest.mark.parametrize("above", [0, 1])
def test_a_folder_of_ours_that_another_users_link_leads_to_is_not_taken(
    cache: Path, compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, above: int
) -> None:
    cloned = tmp_path / "a-model-of-somebody"
    cloned.mkdir(mode=0o755)
    link = (cache, cache.parent)[above]
    cache.rmdir()
    if above:
        link.rmdir()
        (cloned / cache.name).mkdir(mode=0o755)
    link.symlink_to(cloned)
    forge(cache)
    assert cached_library("avx2", cache) is not None  # a link of one's own
    belongs_to_another(link, monkeypatch)
    assert cached_library("avx2", cache) is None
    with pytest.raises(CannotBuild, match="belongs to another user"):
        build_library("avx2", cache)


def test_what_a_link_of_ones_own_leads_to_is_never_removed(cache: Path, compiler: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis").write_text("keep this")
    (tmp_path / "work").chmod(0o770)
    cache.rmdir()
    cache.symlink_to(tmp_path / "work")
    with pytest.raises(CannotBuild, match=f"other users may write into {cache}"):
        build_library("avx2", cache)
    assert (tmp_path / "work" / "thesis").exists()


def test_a_folder_of_another_user_is_refused_by_name(
    cache: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forge(cache)
    cache.chmod(0o777)
    belongs_to_another(cache, monkeypatch)
    monkeypatch.setattr(Path, "chmod", lambda path, mode: None)  # root could
    with pytest.raises(CannotBuild, match=f"{cache} cannot be used: .*glibc belongs to another user"):
        build_library("avx2", cache)
    monkeypatch.setattr(native_kernels, "cache_folder", lambda: cache)
    monkeypatch.setattr(native_kernels, "find_compiler", lambda: "")
    assert "avx2" not in native_kernels.read_native().compiled


def test_a_loose_mask_of_modes_makes_no_library_that_is_not_trusted(tmp_path: Path, compiler: Path) -> None:
    before = os.umask(0)
    try:
        folder = tmp_path / "cache" / "ericllm" / "native" / "glibc"
        made = build_library("avx2", folder)
    finally:
        os.umask(before)
    assert cached_library("avx2", folder) == made


def test_compilers_are_given_no_secrets_and_a_folder_of_ours(
    cache: Path, compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ERICLLM_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.chdir(tmp_path)
    build_library("avx2", cache)
    said = compiler.read_text()
    assert "PATH=" in said and SECRET not in said
    assert str(tmp_path) not in said.splitlines()


@pytest.fixture
def evil_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, full of modules that write down that they ran; returns what they write."""
    ran = tmp_path / "ran"
    folder = tmp_path / "model"
    (folder / "engine").mkdir(parents=True)
    for name in ("engine/__init__.py", "ctypes.py", "torch.py", "flash_attn.py", "msgspec.py"):
        (folder / name).write_text(f"open({str(ran)!r}, 'a').write('{name} ')\n")
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return ran


@pytest.mark.skipif(not SETS, reason="there is no C++ compiler, or no AVX2")
def test_the_trial_of_a_library_runs_no_code_of_the_current_folder(evil_folder: Path) -> None:
    library = build_library(SETS[0], cache_folder())
    native_build._Build(SETS[0], library.parent).try_out(library)
    assert not evil_folder.exists(), evil_folder.read_text()


def test_looking_for_flash_attention_runs_no_code_of_the_current_folder(
    evil_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_installed", lambda distribution: (2, 7))
    version, problem = probe.find_flash_attn()
    assert not evil_folder.exists(), evil_folder.read_text()
    assert (version is None) == ("flash" in problem)


def test_kernels_of_exllama_are_not_taken_from_a_folder_that_others_may_write_to(cache: Path) -> None:
    build = KernelBuild(cache, 1, "kernels_ext")
    build.workspace.mkdir()
    planted = build.workspace / "exllamav2_ext.so"
    planted.touch()
    cache.chmod(0o777)

    def wait() -> None:
        raise AssertionError("nobody else builds")

    with build.locked(wait):
        assert not planted.exists()
        assert stat.S_IMODE(build.workspace.stat().st_mode) & 0o077 == 0
    planted.touch()
    with build.locked(wait):
        assert planted.exists()


def test_what_triton_compiled_is_not_taken_from_a_folder_that_others_may_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs = pytest.importorskip("triton").knobs
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    folder = tmp_path / "ericllm" / "triton"
    folder.mkdir(parents=True)
    planted = folder / "cuda_utils.so"
    planted.touch()
    folder.chmod(0o777)
    implementation("triton")
    assert not planted.exists()
    assert Path(knobs.cache.dir) == folder and stat.S_IMODE(folder.stat().st_mode) & 0o022 == 0
    monkeypatch.delenv("TRITON_CACHE_DIR")
    belongs_to_another(folder, monkeypatch)
    said = probe.failure("triton", AttentionFacts(capability=(8, 6), torch=(2, 13)), torch.device("cpu"))
    assert f"{folder} belongs to another user" in said
