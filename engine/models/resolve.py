"""From what a person calls a model to its folder: the demo, a folder, a name found, or a hub id to download."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.backends.base import LoadProgress
from engine.config import quote_value
from engine.errors import ModelLoadFailed, ModelNotFound
from engine.models.discover import DEMO, demo_path, find_models
from engine.models.files import home_expanded, is_file, is_folder
from engine.models.hub_cache import is_commit, is_complete, repo_folder, snapshot_of

_HUB_ID = re.compile(r"(?P<repo>\w[\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_PATH_STARTS = ("/", "./", "../", "~")
_LISTED = 8


def resolve(
    name: str,
    folders: Sequence[Path],
    *,
    report: Callable[[LoadProgress], None] = lambda progress: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Path:
    """The folder of the model called `name`, downloaded where it must be (this blocks).

    name: "demo"; a folder (also ~/...); a name as `discover` lists it; a hub id org/name[@revision].
    A hub id that is in the hub cache is taken from there; a branch or tag after @ asks the hub for its newest state.
    report: bytes over all files, phase "download".  Both callbacks are called in the calling thread.
    Raises ModelNotFound with what there is, LoadCancelled, or ModelLoadFailed where a download cannot be done.
    """
    path = resolve_local(name, folders)
    if path is not None:
        return path
    if not is_hub_id(name):
        raise _not_found(name, folders)
    from engine.models.hub_download import download

    repo_id, revision = _split(name)
    return download(repo_id, revision, report=report, cancelled=cancelled)


def resolve_local(name: str, folders: Sequence[Path]) -> Path | None:
    """The folder of the model called `name` where it is on this machine already, else None.

    Raises ModelLoadFailed where the demo model is missing from the installation.
    """
    if name == DEMO:
        return _demo()
    path = home_expanded(name)
    if is_folder(path) and (name.startswith(_PATH_STARTS) or is_file(path / "config.json")):
        return path
    for model in find_models(folders):
        if model.name == name and (not model.downloaded or is_complete(model.path)):
            return model.path
    return _find_cached(name)


def is_hub_id(name: str) -> bool:
    """Return whether `name` has the form of a hub id, org/name or org/name@revision, and is not a folder here."""
    return _HUB_ID.fullmatch(name) is not None and not is_folder(Path(name))


def _demo() -> Path:
    path = demo_path()
    if path is None:
        raise ModelLoadFailed("the demo model is missing from this installation; name another model")
    return path


def _split(hub_id: str) -> tuple[str, str | None]:
    match = _HUB_ID.fullmatch(hub_id)
    assert match is not None
    return match["repo"], match["revision"]


def _find_cached(name: str) -> Path | None:
    """The hub cache's snapshot for org/name@commit: the one thing there that no listed name means."""
    if _HUB_ID.fullmatch(name) is None:
        return None
    repo_id, revision = _split(name)
    if revision is None or not is_commit(revision):
        return None
    snapshot = snapshot_of(repo_folder(repo_id), revision)
    return snapshot if snapshot is not None and is_complete(snapshot) else None


def _not_found(name: str, folders: Sequence[Path]) -> ModelNotFound:
    if name.startswith(_PATH_STARTS):
        return ModelNotFound(f"there is no folder {name}", model=name)
    if "/" in name and is_folder(Path(name)):
        return ModelNotFound(f"{name} has no config.json, so it is not a Hugging Face model folder", model=name)
    available = [model.name for model in find_models(folders)]
    close = difflib.get_close_matches(name, available, n=3)
    listed = ", ".join(available[:_LISTED]) + (" ..." if len(available) > _LISTED else "")
    searched = ", ".join(map(str, folders)) or "no folders"
    hint = f"did you mean {' or '.join(close)}?" if close else f"available: {listed or 'none'}"
    return ModelNotFound(
        f"no model is called {quote_value(name)}; {hint} (searched: {searched} and the hub cache)",
        model=name,
        available=", ".join(available),
    )
