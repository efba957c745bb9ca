"""Where huggingface_hub keeps what it downloaded: <cache>/models--org--name/{refs,snapshots/<commit>}.

The layout is documented at https://huggingface.co/docs/huggingface_hub/guides/manage-cache; reading it directly
spares the import.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from urllib.parse import quote, unquote

from engine.errors import ModelLoadFailed, ModelNotFound, UnsupportedModel
from engine.models.files import is_file, is_folder, open_file
from engine.models.gguf.file import (
    MAX_SPLITS,
    count_parts,
    first_part,
    gguf_files,
    is_gguf,
    is_text_model,
    split_names,
)
from engine.models.headers import weight_files
from engine.models.hub_id import HubId, choose_gguf, gguf_models

DEFAULT_REVISION = "main"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*")
_MAX_REVISION = 200
"""Bytes: it becomes the name of a file."""

_MAX_NAME = 160
"""Bytes of a file's name as part of another name: a file system takes 255."""

_PART = ".part"
_LEVELS = 2
"""Of folders in a repository that GGUF files are looked for in."""


def hub_cache_folder() -> Path:
    """The cache's folder, as HF_HUB_CACHE, HF_HOME and XDG_CACHE_HOME say now."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def repo_folder(repo_id: str) -> Path:
    """The cache's folder of one model."""
    return hub_cache_folder() / f"models--{repo_id.replace('/', '--')}"


def repo_of(folder: Path) -> str | None:
    """The hub id whose cache `folder` is, None for any other folder."""
    kind, _, rest = folder.name.partition("--")
    return rest.replace("--", "/", 1) if kind == "models" and rest else None


def place_in_cache(path: Path) -> tuple[str, str, Path] | None:
    """The hub id, the commit, and the path within it, of a snapshot in a hub cache or what lies in one; None for any
    other path."""
    for snapshot in (path, *path.parents):
        if snapshot.parent.name == "snapshots" and (repo_id := repo_of(snapshot.parent.parent)) is not None:
            return repo_id, snapshot.name, path.relative_to(snapshot)
    return None


def snapshot_of(repo: Path, revision: str | None = None) -> Path | None:
    """The snapshot of a revision (branch, tag or commit) in a repository's cache folder, None where it has none.

    Without a revision: the one that "main" stands for, else the newest.
    """
    return next(iter(_snapshots(repo, revision)), None)


def _snapshots(repo: Path, revision: str | None) -> list[Path]:
    """That of a revision; without one, all."""
    if revision is None:
        return snapshots_of(repo)
    commit = _commit_of(repo, revision)
    return [repo / "snapshots" / commit] if commit is not None and is_folder(repo / "snapshots" / commit) else []


def snapshots_of(repo: Path) -> list[Path]:
    """All snapshots in a repository's cache folder: the one that "main" stands for, then the newest first. Each has
    what was downloaded of its commit, such as one GGUF file."""
    try:
        found = sorted((each for each in (repo / "snapshots").iterdir() if each.is_dir()), key=_modified, reverse=True)
    except OSError:
        return []
    main = _commit_of(repo, DEFAULT_REVISION)
    return sorted(found, key=lambda snapshot: snapshot.name != main)


def cached_gguf_files(repo: Path, revision: str | None = None) -> dict[str, Path]:
    """The GGUF models in a repository's cache folder, of one revision or of all, by their names in the repository: of a
    split one the first part, of unfinished downloads where they will be."""
    found: dict[str, Path] = {}
    for snapshot in _snapshots(repo, revision):
        for file in _gguf_below(snapshot, _LEVELS):
            name = file.relative_to(snapshot).as_posix()
            if name not in found or (is_complete(file) and not is_complete(found[name])):
                found[name] = file
    if revision is None:
        found = dict(_unfinished_gguf(repo)) | found
    return found


def cached_model(wanted: HubId) -> Path | None:
    """The snapshot, or the GGUF file in one, that a name means of what is in the hub cache; None where that has no
    whole model of it."""
    repo = repo_folder(wanted.repo_id)
    if not wanted.names_gguf:
        snapshots = _snapshots(repo, wanted.revision)
        folder = next((snapshot for snapshot in snapshots if is_file(snapshot / "config.json")), None)
        if folder is not None:
            return folder if is_complete(folder) else None
    files = {name: file for name, file in cached_gguf_files(repo, wanted.revision).items() if is_complete(file)}
    sizes = {part.as_posix(): 0 for name in files for part in split_names(PurePosixPath(name))}
    try:
        return files[choose_gguf(gguf_models(sizes), wanted).name]
    except (ModelNotFound, ModelLoadFailed):
        return None


def is_commit(revision: str) -> bool:
    """Return whether a revision is a full commit hash, which always means the same files."""
    return _COMMIT.fullmatch(revision) is not None


def is_revision(revision: str) -> bool:
    """Return whether a branch, tag or commit can be called so, and names a file within the cache's folder of them."""
    return _REVISION.fullmatch(revision) is not None and len(revision.encode()) <= _MAX_REVISION


def is_complete(snapshot: Path) -> bool:
    """Return whether a snapshot holds its config and all its weights (a download fetches these last), or a GGUF file in
    one is there with all its parts."""
    try:
        if is_gguf(snapshot):
            return all(is_file(part) for part in split_names(snapshot))
        return (snapshot / "config.json").is_file() and bool(weight_files(snapshot))
    except (OSError, ModelLoadFailed):
        return False


def part_file(repo_id: str, commit: str, name: str) -> Path:
    """Where the beginning of a file is kept until the rest of it has come."""
    return _part_in(repo_folder(repo_id), commit, name)


def _part_in(repo: Path, commit: str, name: str) -> Path:
    return repo / "blobs" / f"{commit}.{quote(name, safe='')}{_PART}"


def is_usable_name(name: str) -> bool:
    """Return whether a name on the hub is one of a file within a folder, on any system, and nothing else."""
    return (
        name.isprintable()
        and "\\" not in name
        and all(part and not part.startswith(".") for part in name.split("/"))
        and len(quote(name, safe="")) <= _MAX_NAME
    )


def part_bytes(repo_id: str, commit: str, name: str) -> int:
    """How much of it has come."""
    try:
        return part_file(repo_id, commit, name).stat().st_size
    except OSError:
        return 0


def kept_bytes(repo: Path) -> int:
    """Return the bytes in a repository's cache folder: of whole files and of parts."""
    try:
        return sum(file.stat().st_size for file in (repo / "blobs").iterdir())
    except OSError:
        return 0


def gguf_kept_bytes(file: Path) -> int:
    """Return the bytes of a GGUF file in a snapshot that are there: of its parts, and of what has come of others."""
    place = place_in_cache(file)
    if place is None or count_parts(file) > MAX_SPLITS:
        return 0
    _, commit, within = place
    repo = file.parents[len(within.parts) + 1]
    saved = 0
    for part in split_names(file):
        name = within.with_name(part.name).as_posix()
        with suppress(OSError):
            saved += (part if is_file(part) else _part_in(repo, commit, name)).stat().st_size
    return saved


def _gguf_below(folder: Path, levels: int) -> Iterator[Path]:
    """The GGUF models in a folder and those in it. A folder that cannot be read, or is a link, is left out."""
    yield from gguf_files(folder)
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for name in names if levels else ():
        if not name.startswith("."):
            yield from _gguf_below(folder / name, levels - 1)


def _unfinished_gguf(repo: Path) -> Iterator[tuple[str, Path]]:
    """The GGUF models of which a download has left the beginning, by name, and where each will be."""
    try:
        with os.scandir(repo / "blobs") as entries:
            parts = sorted(entry.name for entry in entries if entry.name.endswith(_PART))
    except OSError:
        return
    for part in parts:
        commit, _, quoted = part.removesuffix(_PART).partition(".")
        name = unquote(quoted)
        if is_commit(commit) and is_usable_name(name) and is_text_model(PurePosixPath(name)):
            first = first_part(PurePosixPath(name))
            yield first.as_posix(), repo / "snapshots" / commit / first


def _commit_of(repo: Path, revision: str) -> str | None:
    if is_commit(revision):
        return revision
    if not is_revision(revision):
        return None
    try:
        with open_file(repo / "refs" / revision, repo) as file:
            commit = file.read(_MAX_REVISION).decode("ascii", "replace").strip()
    except (FileNotFoundError, UnsupportedModel):
        return None
    return commit if is_commit(commit) else None


def _modified(path: Path) -> float:
    return path.stat().st_mtime
