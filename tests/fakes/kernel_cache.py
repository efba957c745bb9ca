"""The kernels that this machine has compiled, for tests whose programs have a cache folder of their own: to compile
them takes longer than most tests."""

from __future__ import annotations

from pathlib import Path

from engine.backends.common.native_build import cache_folder


def share_kernels(cache: Path) -> None:
    """Let programs whose XDG_CACHE_HOME is to be `cache` find the kernels of this machine, and keep theirs there."""
    kept, link = cache_folder().parent, cache / "ericllm" / "native"
    kept.mkdir(mode=0o700, parents=True, exist_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(kept)
