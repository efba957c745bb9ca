"""`link.models`: loads with settings of their own, what they would take, what was used last, and downloads."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from engine.backends.base import LoadProgress
from engine.estimate import Estimate


class LoadSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one load sets of its own, by the names of the settings; None leaves it as the program has it.

    max_model_len: the context in tokens.
    """

    num_workers: int | None = None
    max_prompts: int | None = None
    max_model_len: int | None = None
    cache_bits: Literal[16, 8, 6, 4] | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] | None = None
    weights: Literal["auto", "int8", "int4"] | None = None

    def given(self) -> dict[str, object]:
        """Those that are set, by their names."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


NOTHING = LoadSettings()
"""A load that leaves everything as the program has it."""


class Fetching(msgspec.Struct, frozen=True, kw_only=True):
    """A download under way. progress: bytes over all files, those that were there already counted as done; total is 0
    while the hub is asked what there is."""

    model: str
    progress: LoadProgress


class ModelsLink(Protocol):
    """What the models screen asks for beyond EngineLink. A model goes by its folder, a found name, a hub id or "demo".

    Coroutines raise EngineError.
    """

    def defaults(self) -> LoadSettings:
        """What a load takes for what its own settings leave open: the knobs as they are now, and the program's
        settings. max_model_len is None where that is the model's own context. At once."""

    def fetching(self) -> Fetching | None:
        """The download under way, None where there is none. At once."""

    async def load(self, model: str, changes: LoadSettings = NOTHING, *, beside: bool = False) -> None:
        """Load a model with `changes`; returns when it is ready, and remembers what it was loaded with."""

    async def download(self, model: str) -> None:
        """Fetch a hub id (org/name[@revision]) into the hub cache and load nothing; what is there is not fetched again.

        EngineLink.cancel_load stops it, and what has come stays for the next time.
        """

    async def estimate(self, model: str, changes: LoadSettings = NOTHING) -> Estimate:
        """What loading it with `changes` would take of each device now."""

    async def remembered(self, model: str) -> LoadSettings:
        """What it was last loaded with; nothing where it never was."""

    async def forget(self, model: str) -> None:
        """Remember nothing of a model any more."""
