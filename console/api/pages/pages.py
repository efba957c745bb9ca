"""GET /chat and /docs: pages for a browser. They hold nothing, so they need no key; the API that they ask does.

A page runs its own scripts and asks its own server, nothing else: no markup is made of text (Trusted Types), nothing is
fetched from elsewhere, and no other page may frame it.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from aiohttp import web

from console.api.http.errors import NotFound
from console.api.requests.schemas import describes

FOLDER = Path(__file__).parent
PAGES = ("chat", "docs")

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class _File:
    """One file as it is sent. tag: changes with what is in it."""

    raw: bytes
    content_type: str
    tag: str


class Pages:
    """The endpoints: each page, and the files that it is made of."""

    def __init__(self) -> None:
        self._files = {page: _read(FOLDER / page) for page in PAGES}

    def routes(self) -> list[web.RouteDef]:
        """Where they are found."""
        return [
            web.get("/chat", self._chat),
            web.get("/chat/{file}", self._chat_file),
            web.get("/docs", self._docs),
            web.get("/docs/{file}", self._docs_file),
        ]

    @describes("Chat page", answer="text/html", group="pages")
    async def _chat(self, request: web.Request) -> web.Response:
        return self._answer(request, "chat", "chat.html")

    @describes("File of a page", answer="text/plain", group="pages")
    async def _chat_file(self, request: web.Request) -> web.Response:
        return self._answer(request, "chat", request.match_info["file"])

    @describes("API reference as a page", answer="text/html", group="pages")
    async def _docs(self, request: web.Request) -> web.Response:
        return self._answer(request, "docs", "docs.html")

    @describes("File of a page", answer="text/plain", group="pages")
    async def _docs_file(self, request: web.Request) -> web.Response:
        return self._answer(request, "docs", request.match_info["file"])

    def _answer(self, request: web.Request, page: str, name: str) -> web.Response:
        file = self._files[page].get(name)
        if file is None:
            raise NotFound(f"Not found: {request.path}", path=request.path)
        if any(tag.value == file.tag for tag in request.if_none_match or ()):
            return web.Response(status=304, headers={**_HEADERS, "ETag": f'"{file.tag}"'})
        return web.Response(
            body=file.raw,
            content_type=file.content_type,
            charset="utf-8",
            headers={**_HEADERS, "ETag": f'"{file.tag}"'},
        )


def _read(folder: Path) -> dict[str, _File]:
    """The page's files, by name."""
    found = sorted(path for path in folder.iterdir() if path.suffix in _TYPES)
    return {path.name: _file(path) for path in found}


def _file(path: Path) -> _File:
    raw = path.read_bytes()
    return _File(raw, _TYPES[path.suffix], sha256(raw).hexdigest()[:16])
