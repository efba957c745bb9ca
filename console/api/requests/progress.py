"""Progress of an answer until its first token, its model's load included: headers, and comments in an event stream."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
from aiohttp import web

from console.api.http.connections import EXPECTED_WAIT, QUEUE_POSITION, QUEUE_WAIT, UNLOADS
from console.api.requests.generation import Generation
from engine.engine import Engine, PromptProgress
from engine.snapshot import RequestRow


class Progress(Protocol):
    """Something that an answer waits for."""

    def headers(self) -> Mapping[str, str]:
        """Return headers for an answer that begins now."""

    def comment(self) -> str | None:
        """Return a line about it, None once there is nothing more to wait for."""


_PROGRESS = web.RequestKey("progress", Progress)


def follow(request: web.Request, progress: Progress) -> None:
    """Have the answer to a request show this progress from now on."""
    request[_PROGRESS] = progress


def progress_of(request: web.Request) -> Progress | None:
    """Return the progress that the answer shows, if any."""
    return request.get(_PROGRESS)


async def add_progress_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the headers of its progress to an answer that is about to begin."""
    if (progress := progress_of(request)) is not None:
        response.headers.update(progress.headers())


class GenerationProgress:
    """Progress of a generation: that of its first answer."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def headers(self) -> Mapping[str, str]:
        """Return the place in the queue and the expected wait, or, once all has ended, how long it waited; and what
        left memory for its model."""
        unloads = _unloads_header(self._generation.unloads)
        if waited := [row.queued_s for row in self._generation.work.rows]:
            return {**unloads, QUEUE_WAIT: f"{max(waited):.3f}"}
        row = self._generation.first_row
        if row is None or row.queue_position is None:
            return unloads
        headers = {**unloads, QUEUE_POSITION: str(row.queue_position)}
        return headers if row.expected_wait_s is None else {**headers, EXPECTED_WAIT: whole_seconds(row)}

    def comment(self) -> str | None:
        """Return the place in the queue, then how far the prompt is."""
        row = self._generation.first_row
        if row is None or row.state not in ("queued", "prefill"):
            return None
        if row.state == "prefill":
            return f"prompt processed={row.computed_tokens} total={row.prompt_tokens}"
        position = "" if row.queue_position is None else f" position={row.queue_position}"
        wait = "" if row.expected_wait_s is None else f" expected_wait_s={whole_seconds(row)}"
        return f"queued{position}{wait}"


def _unloads_header(names: Sequence[str]) -> Mapping[str, str]:
    """Return the header with models that leave memory, or have left it, for the one of a request."""
    return {UNLOADS: json.dumps(names)} if names else {}


def whole_seconds(row: RequestRow) -> str:
    """Return the expected wait in whole seconds, rounded up."""
    return str(math.ceil(row.expected_wait_s or 0.0))


class ModelProgress:
    """Progress of the load of a model. name: as the request has it."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name

    def headers(self) -> Mapping[str, str]:
        """Return what is unloaded for it, and the seconds that it may still take, where that is foreseen."""
        plan, wait = self._engine.load_plan(self._name), self._expected_wait_s()
        unloads = _unloads_header(() if plan is None else plan.unloads)
        return unloads if wait is None else {**unloads, EXPECTED_WAIT: str(wait)}

    def comment(self) -> str:
        """Return what is loaded, what is unloaded for it, and how long it may take."""
        plan, wait = self._engine.load_plan(self._name), self._expected_wait_s()
        unloads = "" if plan is None or plan.loading or not plan.unloads else f" unloads={json.dumps(plan.unloads)}"
        return f"loading model={json.dumps(self._name)}{unloads}{'' if wait is None else f' expected_wait_s={wait}'}"

    def _expected_wait_s(self) -> int | None:
        plan = self._engine.load_plan(self._name)
        remaining_s = None if plan is None else plan.remaining_s(time.time())
        return None if remaining_s is None else math.ceil(remaining_s)


class PromptProgressField(msgspec.Struct, frozen=True):
    """llama.cpp's report of a prompt while it is computed. processed: tokens of it so far, with the `cache` ones that
    were in the prefix cache.  time_ms: since a worker took it."""

    total: int
    cache: int
    processed: int
    time_ms: int


def prompt_progress_field(progress: PromptProgress) -> PromptProgressField:
    """Return the report in llama.cpp's words."""
    return PromptProgressField(
        total=progress.total_tokens,
        cache=progress.cached_tokens,
        processed=progress.computed_tokens,
        time_ms=round(progress.elapsed_s * 1000),
    )
