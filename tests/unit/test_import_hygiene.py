"""Who imports what, seen from a fresh interpreter: the layers, and the heavy libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCREENS = ("textual", "rich")
WEB = ("aiohttp",)
TORCH = ("torch", "exllamav2", "exllamav3", "transformers")
NEEDS_MORE = ("engine.backends.paged_attention.flash",)
"""Modules that import what the tests need not have."""


def modules(folder: str) -> list[str]:
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if not name.endswith("__main__") and name not in NEEDS_MORE:
            found.append(name)
    return found


def loaded_after(names: list[str], forbidden: tuple[str, ...]) -> list[str]:
    code = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
    bad = [m for m in {forbidden!r} if m in sys.modules]
    if bad:
        print(name, "loads", *bad)
        break
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_the_engine_knows_no_screen_and_no_http() -> None:
    assert loaded_after(modules("engine"), (*SCREENS, *WEB, "console")) == []


def test_deciding_needs_no_torch() -> None:
    parts = ("torch", "exllamav2", "exllamav3", "paged_attention")
    heavy = tuple(f"engine.backends.{part}" for part in (*parts, "checkpoints", "exllama", "sampling", "triton_launch"))
    light = [name for name in modules("engine") if not name.startswith(heavy)]
    light += ["engine.backends.paged_attention.choose"]
    light += [f"engine.backends.{part}.doctor" for part in parts]
    light += ["engine.backends.exllama.package", "engine.backends.exllama.findings"]
    assert loaded_after(light, TORCH) == []


def test_neither_the_headless_path_nor_the_api_nor_a_console_on_another_instance_loads_textual_or_torch() -> None:
    """The last before there is a screen."""
    headless = ["console.runtime.headless", "console.runtime.runtime", "console.runtime.loading", "console.link.local"]
    elsewhere = [*modules("console/link"), "console.cli.attach", "console.cli.top"]
    names = [*headless, *modules("console/api"), *elsewhere, "console.link.readonly", "console.link.rpc"]
    assert loaded_after(names, (*SCREENS, *TORCH)) == []


def test_the_command_line_loads_nothing_heavy() -> None:
    assert loaded_after(["console.cli.main"], (*SCREENS, *WEB, *TORCH, "huggingface_hub", "tokenizers")) == []


def test_a_plain_run_loads_nothing_of_a_cluster() -> None:
    assert (
        loaded_after(["console.runtime.headless", "console.tui.terminal", "engine.engine"], ("ray", "engine.cluster"))
        == []
    )


def test_even_with_a_cluster_ray_stays_out_of_this_process() -> None:
    assert loaded_after(modules("engine/cluster"), ("ray", *TORCH)) == []


def test_the_screens_load_no_torch() -> None:
    assert loaded_after(modules("console/tui"), TORCH) == []
