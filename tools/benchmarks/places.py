"""Models, venvs and converted models that are made once, below one cache folder."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tools.benchmarks.engines import OURS, Row
from tools.synthetic_gguf import write_synthetic_gguf
from tools.synthetic_models import make_synthetic

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = Path(__file__).with_name("peers")
NOTHING: Mapping[str, str] = MappingProxyType({})
_READS_GGUF = ("llamacpp", "xllamacpp", "ik_llamacpp")

Say = Callable[[str], None]


def _silent(_: str) -> None:
    pass


class NotPrepared(Exception):
    """An engine cannot be installed or its model cannot be made; the last that was said about it."""


@dataclass(frozen=True)
class Places:
    """The cache folder and what lies where in it."""

    cache: Path

    def log(self, shape: str, key: str) -> Path:
        """Where a row's engine says what it says."""
        path = self.cache / "logs" / f"{shape}-{key}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def python(self, row: Row, say: Say = _silent) -> Path:
        """The interpreter of a row's engine; its venv is made first if need be. Raises NotPrepared."""
        if row.venv == OURS:
            return Path(sys.executable)
        requirements, build = (REQUIREMENTS / f"{row.venv}{ending}" for ending in (".txt", ".sh"))
        steps = [file for file in (requirements, build) if file.is_file()]
        mark = hashlib.sha256(b"".join(file.read_bytes() for file in steps)).hexdigest()[:12]
        folder = self.cache / "venvs" / f"{row.venv}-{mark}"
        python = folder / "bin" / "python"
        if not (folder / "installed").is_file():
            say(f"installing {row.venv} into {folder}")
            venv.create(folder, with_pip=True)
            command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-deps"]
            self._run([*command, "--requirement", str(requirements)], self.log("install", row.venv))
            if build in steps:
                path = {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"}
                self._run(["sh", str(build)], self.log("build", row.venv), path, folder)
            (folder / "installed").touch()
        return python

    def model(self, shape: str, row: Row, say: Say = _silent) -> Path:
        """The folder or the file that a row's engine loads. Raises NotPrepared."""
        if row.venv in _READS_GGUF:
            file = self.cache / "converted" / f"{shape}-{row.convert}.gguf"
            if not file.is_file():
                say(f"making {file.name}")
                file.parent.mkdir(parents=True, exist_ok=True)
                write_synthetic_gguf(shape, row.convert.upper(), file)
            return file
        plain = make_synthetic(shape, self.cache / "models" / shape)
        if not row.convert:
            return plain
        folder = self.cache / "converted" / f"{shape}-{row.venv}-{row.convert}"
        if not folder.is_dir():
            say(f"making {folder.name}")
            command = [str(self.python(row)), "-m", "tools.benchmarks.convert", row.venv, "--model", str(plain)]
            self._run([*command, "--to", str(folder), "--weights", row.convert], self.log(shape, f"{row.key}-convert"))
        return folder

    def _run(self, command: Sequence[str], log: Path, more: Mapping[str, str] = NOTHING, folder: Path = ROOT) -> None:
        with log.open("wb") as output:
            done = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, cwd=folder, env=environment(dict(more)), check=False
            )
        if done.returncode:
            raise NotPrepared(last_words(log))


def environment(more: dict[str, str]) -> dict[str, str]:
    """Return the environment of a runner: this package, no model hub, and no bound on threads but the given one."""
    bounds = ("OMP_", "KMP_", "MKL_", "GOMP_")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(bounds)}
    return {**inherited, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **more}


def last_words(log: Path) -> str:
    """The last line that says what went wrong, else the last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    wrong = [line for line in lines if "error" in line.lower()]
    return (wrong or lines or ["it said nothing"])[-1][:300]
