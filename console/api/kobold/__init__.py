"""The dialect of KoboldAI and KoboldCpp, as SillyTavern and Kobold Lite ask it.

Its POST /api/v1/generate and GET /api/v1/model are text-generation-webui's too: what no other claims is in this one.
"""

from __future__ import annotations

from aiohttp import web

from console.api.context import ApiContext
from console.api.kobold.errors import tells
from console.api.kobold.generating import Generating
from console.api.kobold.telling import Telling

__all__ = ["Kobold", "tells"]


class Kobold:
    """All its endpoints."""

    def __init__(self, context: ApiContext) -> None:
        self._parts = (Generating(context), Telling(context))

    def routes(self) -> list[web.RouteDef]:
        """Where they are found."""
        return [route for part in self._parts for route in part.routes()]
