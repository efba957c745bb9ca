"""The dialect of KoboldAI and KoboldCpp, as SillyTavern and Kobold Lite ask it.

Its POST /api/v1/generate and GET /api/v1/model are text-generation-webui's too: what no other claims is in this one.
"""

from __future__ import annotations

from aiohttp import web

from console.api.context import ApiContext
from console.api.dialects.kobold.errors import format_error
from console.api.dialects.kobold.generate import GenerateEndpoints
from console.api.dialects.kobold.info import InfoEndpoints

__all__ = ["Kobold", "format_error"]


class Kobold:
    """All its endpoints."""

    def __init__(self, context: ApiContext) -> None:
        self._parts = (GenerateEndpoints(context), InfoEndpoints(context))

    def routes(self) -> list[web.RouteDef]:
        """Where they are found."""
        return [route for part in self._parts for route in part.routes()]
