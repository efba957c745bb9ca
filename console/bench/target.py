"""The target of a bench: an interface that takes a request and yields its tokens as they arrive."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import ClassVar, Protocol, runtime_checkable

import msgspec

from console.bench.result import Setting, TargetInfo
from console.bench.workload import Item, Material
from engine.errors import EngineError
from engine.snapshot import Totals


class TargetFailed(EngineError):
    """The target did not answer, or answered with an error."""

    code: ClassVar[str] = "target_failed"
    http_status: ClassVar[int] = 502


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that arrived together. tokens: new ones, as far as this chunk shows.  gaps_s: seconds between tokens where
    the target measured them, one for each that has one before it.

    output_tokens, prompt_tokens, cached_tokens: of the whole request so far, as reported; None where not.
    last: nothing follows; set where an answer does not end with its connection.
    """

    tokens: int = 0
    gaps_s: Sequence[float] = ()
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    last: bool = False


class Target(Protocol):
    """Something that answers requests: what it is, how it runs, what prompts for it are made of, and its answers."""

    @property
    def info(self) -> TargetInfo:
        """Identity of the target."""

    @property
    def settings(self) -> Mapping[str, Setting]:
        """How it runs: knobs, and settings that are not at their defaults; nothing where that is not known."""

    @property
    def material(self) -> Material:
        """Material of its prompts."""

    @property
    def max_model_len(self) -> int | None:
        """Tokens of prompt and answer together, None where it is not known."""

    def send(self, item: Item) -> AsyncGenerator[Chunk, None]:
        """Send a greedy request for exactly `item.output_tokens` tokens, where that can be forced; raises TargetFailed.

        Closing the iterator ends the request: nothing more is computed for it.
        """


@runtime_checkable
class EngineHere(Protocol):
    """A target that is an engine of ours in this process, whose settings can be changed between measurements."""

    def totals(self) -> Totals:
        """Counters since the engine started."""

    @property
    def knobs(self) -> tuple[int, int]:
        """Workers, and requests at once of each."""

    async def set_knobs(self, *, workers: int, max_prompts: int) -> None:
        """Set the knobs, and wait until it is so. Raises EngineError."""

    async def set_draft_tokens(self, tokens: int) -> None:
        """Reload the model with n-gram speculation of max `tokens` draft tokens; 0 is without.

        Raises EngineError where it cannot.
        """

    async def load_s(self) -> float:
        """Reload the model and return the seconds it took. Raises EngineError."""

    def weight_files(self) -> list[str]:
        """The files that a load reads."""
