"""A shell line that sends a request to the served model, for the clipboard. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable

from console.link.api import DialectReading
from console.settings.addresses import unix_path
from engine.text.printable import printable, printable_json

KEY_VARIABLE = "ERICLLM_API_KEY"


def curl_line(base: str, model: str, *, dialects: Iterable[DialectReading], with_key: bool) -> str:
    """Return one line for a shell: the example of the first dialect that is on, "" where none is.

    base: as "http://127.0.0.1:8000", or "unix:PATH".  with_key: send a key, which the line names by a variable.
    """
    asked = next((dialect for dialect in dialects if dialect.on and dialect.example_path), None)
    if asked is None:
        return ""
    path, body = printable(asked.example_path), asked.example_body
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
