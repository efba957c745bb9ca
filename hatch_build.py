"""Puts the compiled kernels into a wheel, so that who installs it needs no C++ compiler: `make wheel`.

The build is asked for it through hatch's HATCH_BUILD_HOOK_ENABLE_CUSTOM; without, the wheel is for any machine, and
the kernels are compiled where it runs. A machine without a compiler builds it too: with that of the extra "compiler".
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_BUILD = Path("engine", "backends", "common", "native_build.py")
_COMPILERS = ("g++", "clang++", "c++")


class KernelsHook(BuildHookInterface[Any]):
    """Compiles the kernels for every instruction set, and names the libc that the wheel needs then."""

    def dependencies(self) -> list[str]:
        """Return what the build needs besides: a compiler, where there is none."""
        if os.environ.get("CXX") or any(map(shutil.which, _COMPILERS)):
            return []
        return list(self.metadata.core.optional_dependencies["compiler"])

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before the wheel is packed. Raises RuntimeError on what is not Linux on x86-64 with glibc."""
        if sys.platform != "linux" or platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
            raise RuntimeError("kernels are compiled into a wheel on Linux, x86-64 and glibc only")
        build = _module(Path(self.root).resolve())
        self._scratch = Path(self.directory) / "kernels"
        for library in build.ship_libraries(self._scratch):
            inside = build.SHIPPED.relative_to(Path(self.root).resolve()) / library.name
            build_data["force_include"][str(library)] = str(inside)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{build.linked_glibc().replace('.', '_')}_x86_64"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called once the wheel is there."""
        shutil.rmtree(self._scratch)


def _module(root: Path) -> Any:
    """That file alone, with what it needs of the program: the package around it needs what a build does not have."""
    sys.path.insert(0, str(root))
    spec = importlib.util.spec_from_file_location("native_build", root / _BUILD)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
