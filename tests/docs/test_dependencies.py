"""pyproject.toml declares what the program imports."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from engine.backends.exllama.package import LibraryPackage
from engine.backends.exllamav2 import library as exllamav2
from engine.backends.exllamav3 import library as exllamav3
from tests.docs.declared import ROOT, declared, imports_of, installed_with

pytestmark = pytest.mark.long

OURS = {"console", "engine", "ericllm_main"}
WITHOUT = {
    "ray": ("ray", {"engine/cluster"}),
    "ziglang": ("compiler", {"engine/backends/common/native_build.py"}),  # its program
    "opentelemetry": ("otel", {"console/api/http/tracing.py"}),
    "pip": ("", {"engine/system/install_command.py"}),  # whether it is there
    "triton": (
        "",
        {
            "engine/backends/common/gguf_codes.py",  # whether it is there
            "engine/backends/triton_launch.py",
            "engine/backends/paged_attention/triton_kernels.py",
            "engine/backends/paged_attention/triton_varlen_kernels.py",
            "engine/backends/torch/cuda/coded_kernels.py",
            "engine/backends/torch/cuda/layer_kernels.py",
            "engine/backends/torch/cuda/lora_kernels.py",
            "engine/backends/torch/cuda/moe_kernels.py",
        },
    ),
    "flash_attn": ("", {"engine/backends/paged_attention/flash.py", "engine/backends/exllamav2/attention.py"}),
}
"""What the program runs without: its extra ("" where torch for GPUs brings it, or whoever wants it), and where it is
imported."""


@functools.cache
def sources() -> Mapping[str, set[str]]:
    """What each module imports of others' packages."""
    files = [file for folder in ("engine", "console") for file in sorted((ROOT / folder).rglob("*.py"))]
    return {str(file.relative_to(ROOT)): imports_of(file) - sys.stdlib_module_names - OURS for file in files}


def test_every_import_is_of_a_package_that_an_installation_brings() -> None:
    brought = installed_with(declared())
    distributions = packages_distributions()
    missing = {
        f"{file} imports {package}"
        for file, packages in sources().items()
        for package in packages - set(WITHOUT)
        if not {canonicalize_name(name) for name in distributions.get(package, ())} & brought
    }
    assert not missing, "declare it in pyproject.toml"


def test_what_an_extra_brings_is_imported_only_where_the_program_can_do_without() -> None:
    for package, (extra, places) in WITHOUT.items():
        importers = {file for file, packages in sources().items() if package in packages}
        allowed = {file for file in importers if any(Path(file).is_relative_to(place) for place in places)}
        assert importers and importers == allowed, package
        if extra:
            names = {canonicalize_name(requirement.name) for requirement in declared(extra)}
            assert any(name.startswith(package) for name in names), f"the extra {extra} lacks {package}"


@pytest.mark.parametrize(("package", "extra"), [(exllamav2.PACKAGE, "cuda"), (exllamav3.PACKAGE, "exl3")])
def test_an_extra_brings_the_release_that_a_backend_is_written_for(package: LibraryPackage, extra: str) -> None:
    [requirement] = [each for each in declared(extra) if each.name == package.name]
    assert str(requirement.specifier) == f"=={package.version}"


def test_imports_are_found_wherever_they_stand(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    lazily = "def f():\n    from c.d import e\n    importlib.import_module('g.h')\n    find_spec('i')\n"
    file.write_text(f"import a.b\n{lazily}from . import j\n")
    assert imports_of(file) == {"a", "c", "g", "i"}


def test_what_a_dependency_needs_for_an_extra_comes_only_with_that_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = {"one": ("two", 'three; extra == "more"', 'four; python_version < "3"'), "two": (), "three": (), "four": ()}
    for name, requires in needs.items():
        info = tmp_path / f"{name}-1.dist-info"
        info.mkdir()
        required = "".join(f"Requires-Dist: {each}\n" for each in requires)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n{required}")
    monkeypatch.syspath_prepend(tmp_path)
    assert installed_with([Requirement("one")]) == {"one", "two"}
    assert installed_with([Requirement("one[more]>=1")]) == {"one", "two", "three"}
