"""ApiSettings: where the HTTP server listens, whom it lets in and what it puts up with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from console.api.http.client_address import Network
from console.api.http.json_bounds import MAX_DEPTH


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """How to serve HTTP.

    port: 0 takes any free one.  api_key: valid besides the keys that were made; without any everybody is let in.
    no_auth: whether others may reach it where there is no key.  admin_remote: whether they may send admin requests.
    tls_cert, tls_key: PEM files; HTTPS where they are given.
    cors_origins: whose pages may ask.  allowed_hosts: names it goes by besides localhost.
    dialects_off: names of those that are not answered at first.
    trusted_proxies: addresses of proxies whose X-Forwarded-For says who asks.
    state_dir: the folder of keys.json, which has the keys that were made; None keeps them in memory.
    address_rate: requests a minute of one address beyond this machine; 0: any.
    max_header_bytes: longest line of a request's head.  max_body_bytes: longest request body.
    max_json_depth: how deep it may nest.  max_choices: answers one HTTP request may ask for (prompts times n).
    max_schema_bytes: of a JSON schema, a regular expression or a grammar that an answer is held to.
    max_output_tokens: of one answer; None: what the context holds.  max_stops, max_stop_length: strings that end an
    answer, and the characters of each.
    idle_timeout_s: a connection without a request for so long is closed, also one whose request does not get here.
    body_timeout_s: how long a body may take.  write_timeout_s: a client that reads nothing for so long is cut off.
    total_timeout_s: how long a request to a model may take with all that; None: any.
    ping_s: seconds without a chunk after which a stream sends a comment, so that proxies keep it open.
    stall_s: a worker that is silent for so long, at work or idle, makes /health fail.
    access_log: a file for a line of JSON per request, or "-" for stdout, which may be taken where owns_stdout; None is
    no log.  access_log_bytes: a file that grows longer is put aside.
    otlp_traces_endpoint: where OpenTelemetry traces are sent to, None for nowhere.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    no_auth: bool = False
    admin_remote: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    dialects_off: tuple[str, ...] = ()
    trusted_proxies: tuple[Network, ...] = ()
    state_dir: Path | None = None
    address_rate: int = 6000
    max_header_bytes: int = 8 * 2**10
    max_body_bytes: int = 8 * 2**20
    max_json_depth: int = MAX_DEPTH
    max_choices: int = 512
    max_schema_bytes: int = 65_536
    max_output_tokens: int | None = None
    max_stops: int = 16
    max_stop_length: int = 1000
    idle_timeout_s: float = 75.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    total_timeout_s: float | None = None
    ping_s: float = 15.0
    stall_s: float = 60.0
    access_log: str | None = None
    access_log_bytes: int = 64 * 2**20
    owns_stdout: bool = False
    otlp_traces_endpoint: str | None = None
