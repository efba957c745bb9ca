"""What is to be fetched of a model on the hub: which of its files, how large they are, and what is there already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from engine.errors import UnsafeWeights, UnsupportedModel
from engine.models.hub_cache import part_bytes, repo_folder

if TYPE_CHECKING:
    from huggingface_hub import HfApi

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


def plan_of(api: HfApi, repo_id: str, revision: str | None) -> Plan:
    """What the hub says of a revision; raises whatever the library raises, and what `choose_files` does."""
    info = api.model_info(repo_id, revision=revision, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    small, weights = choose_files(sizes, repo_id)
    return Plan(repo_id=repo_id, commit=str(info.sha), small=small, weights=weights)


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
                f"{repo_id} has only pickles ({pickles[0]}), which can run code when read; choose one with safetensors",
                file=pickles[0],
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
    """Of what is to be fetched, what the cache has: whole files, and the beginnings of weights."""
    whole = present(plan)
    sizes = {**plan.small, **plan.weights}
    parts = sum(part_bytes(plan.repo_id, plan.commit, name) for name in plan.weights if name not in whole)
    return parts + sum(sizes[name] for name in whole)


def kept(plan: Plan) -> str:
    """ "3.1 of 9.4 GiB are kept, ..." """
    there, total = kept_bytes(plan), plan.total_bytes
    unit, name = (_GIB, "GiB") if total >= _GIB else (_MIB, "MiB")
    return f"{there / unit:.1f} of {total / unit:.1f} {name} are kept, and the next download goes on from there"
