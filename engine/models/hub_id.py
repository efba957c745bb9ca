"""Names of models on the hub, and which of a repository's GGUF models each means."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

import msgspec

from engine.config import quote_value
from engine.errors import ModelLoadFailed, ModelNotFound
from engine.models.gguf.file import count_parts, first_part, is_gguf, is_text_model

DEFAULT_TAG = "Q4_K_M"
"""The quantisation that a repository's name alone means, as in llama.cpp and Ollama."""

_HUB_ID = re.compile(
    r"(?:(?:hf\.co|huggingface\.co)/)?(?P<repo>\w[\w.-]*/[\w.-]+)"
    r"(?::(?P<tag>\w[\w.-]*)|/(?P<file>[^.@:\\/][^@:\\]*\.(?i:gguf)))?"
    r"(?:@(?P<revision>[\w./-]+))?"
)
_QUANTISATION = r"(?:I?Q\d|TQ\d|B?F\d\d|FP\d|MXFP\d|NVFP\d)\w*"
_LABEL = re.compile(rf"(?:^|[-._/])((?:UD-|i1-)?{_QUANTISATION})(?=$|[-./])", re.IGNORECASE | re.ASCII)
_MAX_LISTED = 40
_GIB, _MIB = 2**30, 2**20


class HubId(msgspec.Struct, frozen=True, kw_only=True):
    """org/name, org/name:TAG or org/name/file.gguf, each with @revision after it. tag: a quantisation.

    revision: a branch, tag or commit; None for the main branch.
    """

    repo_id: str
    revision: str | None = None
    tag: str = ""
    file: str = ""

    @classmethod
    def parse(cls, name: str) -> HubId | None:
        """Return what `name` means on the hub, also after "hf.co/"; None where it has another form."""
        found = _HUB_ID.fullmatch(name)
        if found is None or not all(part and part[0] != "." for part in (found["file"] or "file").split("/")):
            return None
        return cls(repo_id=found["repo"], revision=found["revision"], tag=found["tag"] or "", file=found["file"] or "")

    @property
    def name(self) -> str:
        """As `parse` takes it."""
        within = f":{self.tag}" if self.tag else f"/{self.file}" if self.file else ""
        return self.repo_id + within + (f"@{self.revision}" if self.revision else "")

    @property
    def names_gguf(self) -> bool:
        """True if it can only mean a GGUF file."""
        return bool(self.tag or self.file)

    @property
    def may_be_gguf(self) -> bool:
        """True if, without the hub's word, a GGUF file of the repository can be what is meant: a repository of another
        name may be a model folder, too."""
        return self.names_gguf or "gguf" in self.repo_id.lower()


class GgufInRepo(msgspec.Struct, frozen=True, kw_only=True):
    """A GGUF model among a repository's files. name: of its first file.  files: sizes in bytes by name, of all parts
    that are there.  num_parts: that it should have."""

    name: str
    files: Mapping[str, int]
    num_parts: int

    @property
    def num_bytes(self) -> int:
        """Of all parts."""
        return sum(self.files.values())

    @property
    def label(self) -> str:
        """Its quantisation as its name has it, "" where it has none."""
        found = _LABEL.findall(str(PurePosixPath(self.name).with_suffix("")))
        return str(found[-1]) if found else ""

    def is_of(self, tag: str) -> bool:
        """Return whether its name has the tag, in any case; "Q4_K" is not in "Q4_K_M"."""
        before = r"(?:^|[-./]|_(?=I?Q\d|TQ\d|B?F\d\d))"
        name = str(PurePosixPath(self.name).with_suffix(""))
        return re.search(rf"{before}{re.escape(tag)}(?=$|[-./])", name, re.IGNORECASE) is not None


def gguf_models(sizes: Mapping[str, int]) -> list[GgufInRepo]:
    """The GGUF models of a repository whose files have these sizes in bytes, the smallest first. Projectors for images
    and importance matrices are left out."""
    found: dict[PurePosixPath, dict[str, int]] = {}
    for name in sorted(name for name in sizes if is_gguf(PurePosixPath(name))):
        first = first_part(PurePosixPath(name))
        if is_text_model(first):
            found.setdefault(first, {})[name] = sizes[name]
    models = [
        GgufInRepo(name=first.as_posix(), files=files, num_parts=count_parts(first)) for first, files in found.items()
    ]
    return sorted(models, key=lambda model: (model.num_bytes, model.name))


def choose_gguf(models: Sequence[GgufInRepo], wanted: HubId) -> GgufInRepo:
    """Return the model that a name means: the file, the one of the tag; without either the only one, or that of
    DEFAULT_TAG. Raises ModelNotFound with what there is, ModelLoadFailed where parts are missing."""
    repo_id = wanted.repo_id
    if not models:
        raise ModelNotFound(f"{repo_id} has no GGUF model", model=repo_id)
    if wanted.file:
        found = [model for model in models if wanted.file in model.files]
        lacking = f"no GGUF model {quote_value(wanted.file)}"
    elif wanted.tag or len(models) > 1:
        tag = wanted.tag or DEFAULT_TAG
        found = _of_tag(models, tag)
        lacking = f"no GGUF model of {quote_value(tag)}"
    else:
        found = list(models)
    if len(found) == 1:
        return _whole(found[0], repo_id)
    if found:
        names = ", ".join(quote_value(model.name) for model in found[:_MAX_LISTED])
        raise ModelNotFound(
            f"{repo_id} has {len(found)} GGUF models of {quote_value(tag)}: name one as {repo_id}/FILE ({names})",
            model=repo_id,
        )
    hint = "" if wanted.names_gguf else f": name another as {repo_id}:TAG or {repo_id}/FILE"
    raise ModelNotFound(f"{repo_id} has {lacking}{hint}; it has {_listed(models)}", model=repo_id)


def _of_tag(models: Sequence[GgufInRepo], tag: str) -> list[GgufInRepo]:
    """Those of a tag. One whose whole quantisation it is comes before one that has more, such as UD-Q4_K_M."""
    found = [model for model in models if model.is_of(tag)]
    exact = [model for model in found if model.label.casefold() == tag.casefold()]
    return exact or found


def _whole(model: GgufInRepo, repo_id: str) -> GgufInRepo:
    missing = model.num_parts - len(model.files)
    if missing > 0:
        raise ModelLoadFailed(
            f"{repo_id} lacks {missing} of {model.num_parts} parts of {quote_value(model.name)}", model=repo_id
        )
    return model


def _listed(models: Sequence[GgufInRepo]) -> str:
    """ "Q2_K (350 MiB), Q4_K_M (1.2 GiB)"; a model goes by its file where its quantisation does not name it alone."""
    labels = [model.label for model in models]
    names = [
        label if label and labels.count(label) == 1 else quote_value(model.name)
        for label, model in zip(labels, models, strict=True)
    ]
    shown = [f"{name} ({_size(model.num_bytes)})" for name, model in zip(names, models, strict=True)]
    more = len(shown) - _MAX_LISTED
    return ", ".join(shown[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.0f} MiB"
