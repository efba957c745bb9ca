"""Where huggingface_hub keeps what it downloaded: <cache>/models--org--name/{refs,snapshots/<commit>}.

The layout is documented at https://huggingface.co/docs/huggingface_hub/guides/manage-cache; reading it directly
spares the import.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import quote

from engine.errors import ModelLoadFailed, UnsupportedModel
from engine.models.files import open_file
from engine.models.headers import weight_files

DEFAULT_REVISION = "main"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*")
_MAX_REVISION = 200
"""Bytes: it becomes the name of a file."""


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


def snapshot_of(repo: Path, revision: str | None = None) -> Path | None:
    """The snapshot of a revision (branch, tag or commit) in a repository's cache folder, None where it has none.

    Without a revision: the one that "main" stands for, else the newest.
    """
    snapshots = repo / "snapshots"
    try:
        commit = _commit_of(repo, revision or DEFAULT_REVISION)
        if commit is not None and (snapshots / commit).is_dir():
            return snapshots / commit
        if revision is not None:
            return None
        return max((path for path in snapshots.iterdir() if path.is_dir()), key=_modified, default=None)
    except OSError:
        return None


def is_commit(revision: str) -> bool:
    """Return whether a revision is a full commit hash, which always means the same files."""
    return _COMMIT.fullmatch(revision) is not None


def is_revision(revision: str) -> bool:
    """Return whether a branch, tag or commit can be called so, and names a file within the cache's folder of them."""
    return _REVISION.fullmatch(revision) is not None and len(revision.encode()) <= _MAX_REVISION


def is_complete(snapshot: Path) -> bool:
    """Return whether a snapshot holds its config and all its weights (a download fetches these last)."""
    try:
        return (snapshot / "config.json").is_file() and bool(weight_files(snapshot))
    except (OSError, ModelLoadFailed):
        return False


def part_file(repo_id: str, commit: str, name: str) -> Path:
    """Where the beginning of a file is kept until the rest of it has come."""
    return repo_folder(repo_id) / "blobs" / f"{commit}.{quote(name, safe='')}.part"


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
