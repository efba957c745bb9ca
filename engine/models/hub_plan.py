"""What is to be fetched of a model on the hub: which of its files, how large they are, and what is there already."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote

import msgspec

from engine.config import quoted
from engine.errors import ModelLoadFailed, UnsafeWeights, UnsupportedModel
from engine.models.hub_cache import is_commit, part_bytes, repo_folder
from engine.models.hub_client import HubClient

MAX_FILES = 2000
"""Of one model: the largest have some 200."""

_MAX_NAME = 160
"""Bytes of a file's name as part of another name: a file system takes 255."""

_WANTED = (".safetensors", ".json", ".jinja")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_GIB, _MIB = 2**30, 2**20


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to fetch: sizes in bytes by file name. small: to be there before any weights are."""

    repo_id: str
    commit: str
    small: Mapping[str, int]
    weights: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """Of all files, those in the cache included."""
        return sum(self.small.values()) + sum(self.weights.values())


def plan_of(hub: HubClient, repo_id: str, revision: str | None) -> Plan:
    """Return what to fetch of a revision.

    Raises what HubClient and `choose_files` do, and ModelLoadFailed for a list of files that cannot be that of a model.
    """
    listing = hub.listing(repo_id, revision)
    if revision is not None and is_commit(revision) and listing.sha != revision:
        raise ModelLoadFailed(
            f"the hub at {hub.endpoint} answers for commit {revision} of {repo_id} with {listing.sha}", model=repo_id
        )
    sizes = {file.rfilename: file.size or 0 for file in listing.siblings}
    small, weights = choose_files(sizes, repo_id)
    if len(small) + len(weights) > MAX_FILES:
        raise ModelLoadFailed(
            f"{repo_id} has {len(small) + len(weights):,} files to fetch, and a model may have {MAX_FILES:,}",
            model=repo_id,
        )
    for name in (*small, *weights):
        if not _is_usable(name):
            raise ModelLoadFailed(f"{repo_id} has a file of a name that is refused: {quoted(name)}", model=repo_id)
    return Plan(repo_id=repo_id, commit=listing.sha, small=small, weights=weights)


def choose_files(sizes: Mapping[str, int], repo_id: str) -> tuple[dict[str, int], dict[str, int]]:
    """(small files, weights) that a model needs of its repository's files, given and returned as sizes by name.

    Files in subfolders are left out (other formats, other precisions), chat templates excepted, and so are
    weights that are there twice as "consolidated". Raises UnsafeWeights or UnsupportedModel for no model.
    """
    top = {name: size for name, size in sizes.items() if "/" not in name}
    if "config.json" not in top:
        raise UnsupportedModel(f"{repo_id} is no model that can be loaded: it has no config.json")
    weights = {name: size for name, size in top.items() if name.endswith(".safetensors")}
    if not weights:
        if pickles := [name for name in top if name.endswith(_PICKLES)]:
            raise UnsafeWeights(
                f"{repo_id} has only pickles ({quoted(pickles[0])}), which can run code when read; choose one with"
                " safetensors",
                file=quoted(pickles[0]),
            )
        raise UnsupportedModel(f"{repo_id} has no safetensors weights")
    plain = {name: size for name, size in weights.items() if not name.startswith("consolidated")}
    small = {name: size for name, size in top.items() if name.endswith(_WANTED) and name not in weights}
    small |= {name: size for name, size in sizes.items() if name.startswith("additional_chat_templates/")}
    return small, plain or weights


def present(plan: Plan) -> set[str]:
    """Files that the cache has whole."""
    snapshot = repo_folder(plan.repo_id) / "snapshots" / plan.commit
    return {name for name in (*plan.small, *plan.weights) if (snapshot / name).is_file()}


def kept_bytes(plan: Plan) -> int:
    """Of what is to be fetched, what the cache has: whole files, and the beginnings of others."""
    whole = present(plan)
    sizes = {**plan.small, **plan.weights}
    parts = sum(part_bytes(plan.repo_id, plan.commit, name) for name in sizes if name not in whole)
    return parts + sum(sizes[name] for name in whole)


def kept(plan: Plan) -> str:
    """ "3.1 of 9.4 GiB are kept, ..." """
    there, total = kept_bytes(plan), plan.total_bytes
    unit, name = (_GIB, "GiB") if total >= _GIB else (_MIB, "MiB")
    return f"{there / unit:.1f} of {total / unit:.1f} {name} are kept, and the next download goes on from there"


def _is_usable(name: str) -> bool:
    """Return whether a name on the hub is one of a file within a folder, on any system, and nothing else."""
    return (
        name.isprintable()
        and "\\" not in name
        and all(part and not part.startswith(".") for part in name.split("/"))
        and len(quote(name, safe="")) <= _MAX_NAME
    )
