"""From what a person calls a model to its folder: the demo, a folder, a name found, or a hub id to download."""

from __future__ import annotations

import difflib
import fcntl
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import platformdirs

from engine.backends.base import LoadProgress
from engine.config import quote_value
from engine.errors import ModelLoadFailed, ModelNotFound
from engine.models.discover import DEMO, demo_path, find_models
from engine.models.files import home_expanded, is_file, is_folder
from engine.models.hub_cache import is_commit, is_complete, repo_folder, snapshot_of

# What is left of models whose making was ended half-way: gigabytes that nothing uses.


@contextmanager
def exclusive_making(root: Path) -> Iterator[None]:
    """Around the making of a model in a folder of `root`: folders there that were never finished are removed first,
    unless a process makes a model there now. Raises OSError where `root` cannot be written."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as lock:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while another holds it shared
            _remove_unfinished(root)
        fcntl.flock(lock, fcntl.LOCK_SH)  # the kernel lets go of it when its holder dies
        yield


def _remove_unfinished(root: Path) -> None:
    for folder in root.iterdir():
        if folder.is_dir() and not (folder / "config.json").is_file():  # config.json is written last
            shutil.rmtree(folder, ignore_errors=True)


_HUB_ID = re.compile(r"(?P<repo>\w[\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_PATH_STARTS = ("/", "./", "../", "~")
_LISTED = 8
_SYNTHETIC = "synthetic:"


def resolve(
    name: str,
    folders: Sequence[Path],
    *,
    report: Callable[[LoadProgress], None] = lambda progress: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Path:
    """The folder of the model called `name`, downloaded where it must be (this blocks).

    name: "demo"; a folder (also ~/...); a name as `discover` lists it; a hub id org/name[@revision]; "synthetic:SHAPE",
    which is made where it is not there (engine.models.synthetic).
    A hub id that is in the hub cache is taken from there; a branch or tag after @ asks the hub for its newest state.
    report: bytes over all files, phase "download", or of all weights, phase "make".  Both callbacks are called in the
    calling thread.
    Raises ModelNotFound with what there is, LoadCancelled, or ModelLoadFailed where a download cannot be done.
    """
    path = resolve_local(name, folders)
    if path is not None:
        return path
    if is_synthetic(name):
        return _made(name, report, cancelled)
    if not is_hub_id(name):
        raise _not_found(name, folders)
    from engine.models.hub_download import download

    repo_id, revision = _split(name)
    return download(repo_id, revision, report=report, cancelled=cancelled)


def resolve_local(name: str, folders: Sequence[Path]) -> Path | None:
    """The folder of the model called `name` where it is on this machine already, else None.

    Raises ModelLoadFailed where the demo model is missing from the installation, InvalidRequest for a synthetic shape
    that there is not.
    """
    if name == DEMO:
        return _demo()
    if is_synthetic(name):
        folder = _synthetic_folder(name)
        return folder if (folder / "config.json").is_file() else None
    path = home_expanded(name)
    if is_folder(path) and (name.startswith(_PATH_STARTS) or is_file(path / "config.json")):
        return path
    for model in find_models(folders):
        if model.name == name and (not model.downloaded or is_complete(model.path)):
            return model.path
    return _cached(name)


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form of a hub id, org/name or org/name@revision, and is no folder here."""
    return _HUB_ID.fullmatch(name) is not None and not is_folder(Path(name))


def is_synthetic(name: str) -> bool:
    """Whether `name` asks for a model of a known shape with random weights: synthetic:SHAPE."""
    return name.startswith(_SYNTHETIC)


@contextmanager
def sketched(name: str) -> Iterator[Path]:
    """A folder that tells of a synthetic model what the made one would, its weights a hole in a file; removed
    afterwards. Raises InvalidRequest where there is no such shape, ModelLoadFailed where the disk refuses."""
    from engine.models.synthetic import sketch_synthetic

    with TemporaryDirectory(prefix="ericllm-sketch-") as folder:
        try:
            path = sketch_synthetic(name.removeprefix(_SYNTHETIC), Path(folder))
        except OSError as error:
            raise ModelLoadFailed(
                f"{name} cannot be sketched in {folder}: {error.strerror or error}", model=name
            ) from error
        yield path


def _synthetic_folder(name: str) -> Path:
    """Where a synthetic model is kept. Raises InvalidRequest where there is no such shape."""
    from engine.models.synthetic import synthetic_config  # it imports torch

    shape = name.removeprefix(_SYNTHETIC)
    synthetic_config(shape)
    return Path(platformdirs.user_cache_dir("ericllm")) / "synthetic" / shape


def _made(name: str, report: Callable[[LoadProgress], None], cancelled: Callable[[], bool]) -> Path:
    from engine.models.synthetic import make_synthetic

    folder = _synthetic_folder(name)
    try:
        with exclusive_making(folder.parent):
            return make_synthetic(name.removeprefix(_SYNTHETIC), folder, report=report, cancelled=cancelled)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise ModelLoadFailed(f"{name} cannot be made in {folder}: {error.strerror or error}", model=name) from error


def _demo() -> Path:
    path = demo_path()
    if path is None:
        raise ModelLoadFailed("the demo model is missing from this installation; name another model")
    return path


def _split(hub_id: str) -> tuple[str, str | None]:
    match = _HUB_ID.fullmatch(hub_id)
    assert match is not None
    return match["repo"], match["revision"]


def _cached(name: str) -> Path | None:
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
        return ModelNotFound(f"{name} has no config.json, so it is no Hugging Face model folder", model=name)
    available = [model.name for model in find_models(folders)]
    close = difflib.get_close_matches(name, available, n=3)
    listed = ", ".join(available[:_LISTED]) + (" ..." if len(available) > _LISTED else "")
    searched = ", ".join(map(str, folders)) or "no folders"
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are: {listed or 'none'}"
    return ModelNotFound(
        f"no model is called {quote_value(name)}; {hint} (searched: {searched} and the hub cache)",
        model=name,
        available=", ".join(available),
    )
