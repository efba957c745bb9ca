"""ApiSettings: where the HTTP server listens and what it puts up with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """How to serve HTTP.

    port: 0 takes any free one.  api_key: valid besides the keys that were made; without any everybody is let in.
    state_dir: the folder of keys.json, which has the keys that were made; None keeps them in memory.
    max_body_bytes: longest request body.  max_choices: answers one HTTP request may ask for (prompts times n).
    ping_s: seconds without a chunk after which a stream sends a comment, so that proxies keep it open.
    write_timeout_s: a client that reads nothing for so long is cut off.
    stall_s: a worker that is silent for so long, at work or idle, makes /health fail.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    state_dir: Path | None = None
    max_body_bytes: int = 8 * 2**20
    max_choices: int = 512
    ping_s: float = 15.0
    write_timeout_s: float = 60.0
    stall_s: float = 60.0
