"""A line that asks the served model from a shell, to be copied. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping

from console.settings.addresses import unix_path
from engine.text.printable import printable_json

KEY_VARIABLE = "ERICLLM_API_KEY"
_QUESTION = "Hello"
_BODIES: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "openai": ("/v1/chat/completions", {"messages": [{"role": "user", "content": _QUESTION}]}),
    "generate": ("/generate", {"prompt": _QUESTION}),
    "anthropic": ("/v1/messages", {"max_tokens": 256, "messages": [{"role": "user", "content": _QUESTION}]}),
    "ollama": ("/api/chat", {"messages": [{"role": "user", "content": _QUESTION}]}),
    "tgi": ("/generate", {"inputs": _QUESTION}),
    "textgen": ("/api/v1/generate", {"prompt": _QUESTION, "max_new_tokens": 200}),
    "kobold": ("/api/v1/generate", {"prompt": _QUESTION}),
}
"""For each dialect, the best first: where one asks in it, and what besides the model's name."""


def curl_line(base: str, model: str, *, dialects: Collection[str], with_key: bool) -> str:
    """One line for a shell, "" where no dialect is on. base: as "http://127.0.0.1:8000", or "unix:PATH"; the key is a
    variable."""
    found = next((body for dialect, body in _BODIES.items() if dialect in dialects), None)
    if found is None:
        return ""
    path, body = found
    named = {"model": model, **body} if model else body
    key = [f'-H "Authorization: Bearer ${KEY_VARIABLE}"'] if with_key else []
    return " ".join(
        [
            "curl",
            *(["--unix-socket", shlex.quote(file)] if (file := unix_path(base)) else []),
            shlex.quote(("http://localhost" if file else base) + path),
            *key,
            '-H "Content-Type: application/json"',
            "-d",
            shlex.quote(printable_json(json.dumps(named, ensure_ascii=False))),
        ]
    )
