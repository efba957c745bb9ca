"""The model on a node: at the same path as on the engine's machine, in the installation, or fetched from the hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from engine.backends.base import LoadProgress
from engine.cluster.messages import ModelPlace
from engine.config import ModelSpec
from engine.errors import ModelLoadFailed
from engine.models.discover import DEMO, SMOLLM2_FILE, SMOLLM2_INSTALL, demo_path, smollm2_path
from engine.models.gguf.file import is_gguf, split_files
from engine.models.hub_cache import is_commit, is_complete, place_in_cache, repo_folder
from engine.models.hub_id import HubId


def place_of(spec: ModelSpec) -> ModelPlace:
    """Return the files that a node must have to load `spec`, as this machine has them. Raises ModelLoadFailed."""
    others = [spec.draft_model, spec.lora]
    return ModelPlace(
        path=str(spec.path.absolute()),
        name=spec.name,
        sizes=_sizes(spec.path),
        others=tuple(str(folder.absolute()) for folder in others if folder is not None),
    )


def path_on_node(model: ModelPlace) -> Path:
    """Where this node has the model, or will have it once it is fetched."""
    path = Path(model.path)
    if model.name == DEMO:
        return demo_path() or path
    if path.name == SMOLLM2_FILE and not path.exists():
        return smollm2_path() or path
    if not path.exists() and (place := place_in_cache(path)) is not None:
        repo_id, commit, within = place
        return repo_folder(repo_id) / "snapshots" / commit / within
    return path


def lacks(model: ModelPlace) -> bool:
    """Return whether the model must be fetched from the hub first."""
    path = path_on_node(model)
    return _hub_id(path) is not None and not is_complete(path)


def fetch(model: ModelPlace, *, report: Callable[[LoadProgress], None], cancelled: Callable[[], bool]) -> None:
    """Fetch the very commit that the engine has. Raises ModelLoadFailed and its children."""
    wanted = _hub_id(path_on_node(model))
    if wanted is not None:
        from engine.models.hub_download import download

        download(wanted, report=report, cancelled=cancelled)


def require(model: ModelPlace, node: str) -> None:
    """Raise ModelLoadFailed, naming `node` and what it lacks, unless it has the model that the engine has."""
    path = path_on_node(model)
    for folder in (path, *map(Path, model.others)):
        if not folder.exists():
            found = f"file {folder}: copy it there"
            if not is_gguf(folder):
                found = f"folder {folder}: copy it there, or load the model by its hub id"
            if folder.name == SMOLLM2_FILE:
                found += f", or `{SMOLLM2_INSTALL}`"
            raise ModelLoadFailed(
                f"{node} has no {found}",
                node=node,
                path=str(folder),
            )
    difference = _difference(model.sizes, _sizes(path))
    if difference:
        raise ModelLoadFailed(
            f"{path} on {node} differs from the model on this machine: {difference}", node=node, path=str(path)
        )


def _hub_id(path: Path) -> HubId | None:
    """The hub id to ask for, of a snapshot or a GGUF file in a hub cache: its very commit; None for any other."""
    repo_id, commit, within = place_in_cache(path) or ("", "", path)
    if not is_commit(commit) or (within.parts and not is_gguf(within)):
        return None
    return HubId(repo_id=repo_id, revision=commit, file=within.as_posix() if within.parts else "")


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of the files that decide what a model answers, by name."""
    try:
        if is_gguf(folder):
            files = split_files(folder)
        else:
            files = [*folder.glob("*.safetensors"), folder / "config.json", folder / "tokenizer.json"]
        return {file.name: file.stat().st_size for file in sorted(files) if file.is_file()}
    except OSError as error:
        raise ModelLoadFailed(f"{folder} cannot be read: {error}", path=str(folder)) from error


def _difference(ours: Mapping[str, int], theirs: Mapping[str, int]) -> str:
    for name in sorted({*ours, *theirs}):
        here, there = ours.get(name), theirs.get(name)
        if here != there:
            return f"{name} is {_shown(there)} there and {_shown(here)} here"
    return ""


def _shown(size: int | None) -> str:
    return "missing" if size is None else f"{size} bytes"
