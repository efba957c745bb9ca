"""The dialect of text-generation-webui before it spoke OpenAI's: its blocking API, and its websocket on the same port.

Its POST /api/v1/generate is KoboldAI's too; a body with a field that only this one has is in this one.
"""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from console.api.context import ApiContext
from console.api.dialects.textgen.errors import format_error
from console.api.dialects.textgen.generate import GenerateEndpoints, StreamEndpoint
from console.api.dialects.textgen.info import InfoEndpoints
from console.api.requests.text_frontends import LiveGenerations

__all__ = ["Textgen", "claims", "format_error"]

_OWN = frozenset(
    {
        "add_bos_token",
        "do_sample",
        "encoder_repetition_penalty",
        "max_new_tokens",
        "no_repeat_ngram_size",
        "num_beams",
        "penalty_alpha",
        "preset",
        "repetition_penalty",
        "stopping_strings",
        "truncation_length",
        "typical_p",
    }
)


def claims(body: Mapping[str, object]) -> bool:
    """Whether a body is in this dialect."""
    return not _OWN.isdisjoint(body)


class Textgen:
    """All its endpoints."""

    def __init__(self, context: ApiContext) -> None:
        running = LiveGenerations(context)
        self._parts = (GenerateEndpoints(running), StreamEndpoint(context, running), InfoEndpoints(context))

    def routes(self) -> list[web.RouteDef]:
        """Where they are found."""
        return [route for part in self._parts for route in part.routes()]
