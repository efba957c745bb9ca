"""Catalog: the models on this machine, as the console and the API list them."""

from __future__ import annotations

from pathlib import Path
from typing import TypeGuard

import msgspec

from engine.config import BackendKind

HUB_CACHE = "hub cache"
"""The origin of models that were downloaded from the hub."""


MAX_COUNT = 2**63 - 1
"""Of bytes and parameters: the largest that messages to other processes carry. A sparse file may have as many bytes."""


def is_count(value: object) -> TypeGuard[int]:
    """Return whether it is a whole number from 0 to MAX_COUNT."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One model folder. backend: what would compute it.  problem: why that cannot load it, "" when it can.

    quantisation: "" for plain weights, else e.g. "exl2 5.0 bpw". weights_bytes: of all safetensors files.
    chat_template: the form of its chat template ("ChatML", "own" for one of its own), "" where it has none.
    model_type: of its config, of the text part where that has several, "" where it names none.
    unfinished: the hub id whose download stopped half way, "" for any other; kept_bytes: what of it is there.
    Raises ValueError for a number that is no count, so that every number of an entry can be computed with.
    """

    name: str
    path: Path
    origin: str
    architecture: str
    quantisation: str
    dtype: str
    parameters: int
    weights_bytes: int
    context_tokens: int
    backend: BackendKind = "torch"
    problem: str = ""
    chat_template: str = ""
    model_type: str = ""
    unfinished: str = ""
    kept_bytes: int = 0

    def __post_init__(self) -> None:
        for count in (self.parameters, self.weights_bytes, self.context_tokens, self.kept_bytes):
            if not is_count(count):
                raise ValueError("a model has a number beyond all counts")

    @property
    def bits_per_weight(self) -> float | None:
        """Bits of the files for each parameter, with everything in them; None where the parameters are not known."""
        return 8 * self.weights_bytes / self.parameters if self.parameters and self.weights_bytes else None
