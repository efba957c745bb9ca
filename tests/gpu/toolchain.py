"""What the library's build needs from the environment, found where machines keep it."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

_CUDA_HOMES = ("/usr/local/cuda", "/opt/cuda")


def build_environment(environ: Mapping[str, str], folder: Path, packages: Iterable[Path]) -> dict[str, str]:
    """Variables to add to `environ` for a build of the library's kernels.

    A fresh TORCH_EXTENSIONS_DIR in `folder`, because a build that was killed leaves a lock which hangs the next one;
    CUDA_HOME where nvcc lies; CUDA_INC_PATH for headers that CUDA_HOME lacks and torch's nvidia packages in the
    site folders `packages` bring. What `environ` says already is kept.
    """
    found = {"TORCH_EXTENSIONS_DIR": str(folder / "extensions")}
    site = [folder for folder in packages if folder.is_dir()]
    home = _cuda_home(environ, site)
    if home is not None:
        found["CUDA_HOME"] = str(home)
        if not (home / "include" / "cusparse.h").exists():
            headers = _first(where for folder in site for where in sorted(folder.glob("nvidia/cu*/include")))
            if headers is not None:
                found["CUDA_INC_PATH"] = str(headers)
    return {name: value for name, value in found.items() if not environ.get(name)}


def package_folders() -> list[Path]:
    """Site folders in which torch's nvidia packages may lie."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(place).parent for place in (spec.submodule_search_locations or ())] if spec else []


def _cuda_home(environ: Mapping[str, str], packages: list[Path]) -> Path | None:
    if environ.get("CUDA_HOME"):
        return Path(environ["CUDA_HOME"])
    on_path = shutil.which("nvcc", path=environ.get("PATH", os.defpath))
    if on_path is not None:
        return Path(on_path).resolve().parent.parent
    homes = [Path(home) for home in _CUDA_HOMES]
    homes += [where for folder in packages for where in sorted(folder.glob("nvidia/cu*"))]
    return _first(home for home in homes if (home / "bin" / "nvcc").exists())


def _first(paths: Iterable[Path]) -> Path | None:
    return next(iter(paths), None)
