"""What models there are on this machine, as the console and the API list them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.config import BackendKind

HUB_CACHE = "hub cache"
"""The origin of models that were downloaded from the hub."""


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One model folder. backend: what would compute it.  problem: why that cannot load it, "" when it can.

    quantisation: "" for plain weights, else e.g. "exl2 5.0 bpw". weights_bytes: of all safetensors files.
    chat_template: the form of its chat template ("ChatML", "own" for one of its own), "" where it has none.
    unfinished: the hub id whose download stopped half way, "" for any other; kept_bytes: what of it is there.
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
    unfinished: str = ""
    kept_bytes: int = 0

    @property
    def bits_per_weight(self) -> float | None:
        """What the files keep for each parameter, all told; None where the parameters are not known."""
        return 8 * self.weights_bytes / self.parameters if self.parameters and self.weights_bytes else None
