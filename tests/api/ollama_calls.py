"""What tests ask in Ollama's dialect."""

from __future__ import annotations

from typing import Any

from tests.api.harness import Served

HELLO = [{"role": "user", "content": "hello"}]


async def generate(api: Served, **body: Any) -> dict[str, Any]:
    """The whole answer of /api/generate."""
    return await api.post("/api/generate", **{"prompt": "hello", "stream": False, **body})


async def chat(api: Served, **body: Any) -> dict[str, Any]:
    """The whole answer of /api/chat."""
    return await api.post("/api/chat", **{"messages": HELLO, "stream": False, **body})


async def refusal(api: Served, path: str, status: int = 400, **body: Any) -> str:
    """The sentence of a request that must be refused."""
    async with api.http.post(path, json=body) as response:
        answer = await response.json()
        assert response.status == status, answer
        assert set(answer) == {"error"}
        return str(answer["error"])
