"""What models there are on this machine, as the console and the API list them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.config import BackendKind


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One model folder. backend: what would compute it.  problem: why that cannot load it, "" when it can.

    quantisation: "" for plain weights, else e.g. "exl2 5.0 bpw". weights_bytes: of all safetensors files.
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
