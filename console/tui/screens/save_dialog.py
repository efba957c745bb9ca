"""Saving a file from a screen: the path is asked for first, with one in the data folder to begin with."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from textual.app import App

from console.tui.screens.dialogs import ConfirmScreen, LineScreen
from engine.system.files import replace_file
from engine.text.printable import printable


def save_file(
    app: App[Any],
    title: str,
    path: Path,
    content: Callable[[], bytes],
    *,
    saved: str = "Saved",
    others: Mapping[str, Callable[[], bytes]] = MappingProxyType({}),
) -> None:
    """Ask where to save, then save what `content` returns, which is called in a thread.

    path: what the box begins with. saved: first words of the message afterwards. others: contents of files of the same
    name, by suffix. A file that is there is replaced only after a question.
    """

    def contents(target: Path) -> dict[Path, Callable[[], bytes]]:
        return {target.with_suffix(suffix): each for suffix, each in others.items()} | {target: content}

    def ask(typed: str) -> None:
        app.push_screen(
            LineScreen(title, typed, accept="Save", placeholder="path of the file", explain=whole_path), chosen
        )

    def chosen(typed: str | None) -> None:
        if typed is None:
            return
        try:
            target = Path(typed).expanduser().absolute()
            found = [each for each in contents(target) if each.exists()]
            are_files = all(each.is_file() for each in found)
        except (OSError, ValueError, RuntimeError) as error:  # a name with a NUL, or the home of an unknown user
            complain(typed, error)
            return
        if not found:
            save(target)
        elif not are_files:
            app.notify(f"{typed} is not a file.", severity="error", markup=False)
            ask(typed)
        else:
            title_now = "This file exists. Replace it?" if len(found) == 1 else "These files exist. Replace them?"
            question = ConfirmScreen(title_now, "\n".join(map(str, found)), yes="Replace", no="Keep")
            app.push_screen(question, lambda sure: save(target) if sure else ask(typed))

    def save(target: Path) -> None:
        app.run_worker(write(target), group="save", exit_on_error=False)

    def replace(target: Path) -> None:
        for file, each in contents(target).items():
            replace_file(file, each())

    async def write(target: Path) -> None:
        try:
            await asyncio.to_thread(replace, target)
        except OSError as error:
            complain(str(target), error)
        else:
            also = "".join(f", {suffix}" for suffix in others)
            app.notify(f"{saved} to {target}{also}", markup=False, timeout=8)

    def complain(typed: str, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or error
        app.notify(f"Cannot save {typed}: {reason}", severity="error", markup=False, timeout=8)

    ask(str(path))


def whole_path(typed: str) -> str:
    """Return where a typed path leads, from the root on; "" for what is none."""
    try:
        return printable(str(Path(typed.strip()).expanduser().absolute())) if typed.strip() else ""
    except (OSError, ValueError, RuntimeError):
        return ""


def suggested_path(name: str) -> Path:
    """Return a path in the folder for exports, below the data folder, that no file has yet."""
    from console.settings.schema import data_dir  # not before the first frame

    wanted = data_dir() / "exports" / name
    numbered = (wanted.with_stem(f"{wanted.stem}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain((wanted,), numbered) if not path.exists())
