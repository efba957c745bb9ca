"""What every endpoint works with."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from console.api.generation import Generation
from console.api.settings import ApiSettings
from engine.config import SamplingParams
from engine.engine import Engine
from engine.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ApiContext:
    """The engine, the settings, and the generations under way, which a stopping server cancels."""

    engine: Engine
    settings: ApiSettings
    running: set[Generation] = field(default_factory=set)

    def check_choices(self, prompts: int, n: int) -> None:
        """Raise InvalidRequest where this many prompts with `n` answers each are too many; before they are read."""
        wanted = prompts * n
        if wanted > self.settings.max_choices:
            raise InvalidRequest(
                f"This asks for {wanted} answers (prompts times n); the limit is {self.settings.max_choices}",
                param="n" if n > 1 else "prompt",
            )

    @contextmanager
    def generate(
        self, request_id: str, prompts: Sequence[list[int]], params: SamplingParams, n: int = 1
    ) -> Iterator[Generation]:
        """A generation under way; it is cancelled on leaving where it has not ended."""
        with Generation(self.engine, request_id, prompts, params, n) as generation:
            self.running.add(generation)
            try:
                yield generation
            finally:
                self.running.discard(generation)


def new_id(prefix: str) -> str:
    """A fresh id, as "chatcmpl-2f…"."""
    return f"{prefix}-{uuid.uuid4().hex}"
