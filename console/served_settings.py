"""ServedSettings: the settings of the HTTP side. Where it listens, whom it lets in, and what it puts up with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field, SecretStr

from console.addresses import checked_host
from console.setting_flags import Flag
from console.setting_values import Duration, Networks, Words
from engine.config import MAX_STOP_STRINGS, MAX_TIMEOUT_S

MAX_TOKENS = 10**9
_MAX_DEPTH = 150
"""What the parser of JSON itself puts up with, with room to spare."""


class ServedSettings(BaseModel):
    """Part of `console.settings.Settings`. Durations are seconds."""

    api: Annotated[bool, Flag("API"), Field(description="Serve HTTP from the start")] = True
    host: Annotated[
        str,
        Flag("API", "ADDRESS"),
        AfterValidator(checked_host),
        Field(min_length=1, description="Address to listen on; *: all, IPv6 too; unix:PATH: a socket in a folder"),
    ] = "127.0.0.1"
    port: Annotated[int, Flag("API", "PORT"), Field(ge=0, le=65535, description="Port to listen on; 0: any free")] = (
        8000
    )
    api_key: Annotated[
        SecretStr | None,
        Flag("API", "KEY", example="change-me"),
        Field(min_length=1, description="Key that clients must send as a Bearer token"),
    ] = None
    api_key_file: Annotated[
        Path | None,
        Flag("API", "FILE", example="~/.config/ericllm/api-key"),
        Field(description="File with that key as its first line: flags are seen by every user of the machine"),
    ] = None
    no_auth: Annotated[
        bool, Flag("API"), Field(description="Listen beyond this machine even where no key is needed to ask")
    ] = False
    admin_remote: Annotated[
        bool, Flag("API"), Field(description="Take admin requests, with a key, from other machines too")
    ] = False
    tls_cert: Annotated[
        Path | None,
        Flag("API", "FILE", example="~/tls/cert.pem"),
        Field(description="Certificate (PEM, with its chain) to serve HTTPS with; taken anew when it is renewed"),
    ] = None
    tls_key: Annotated[
        Path | None, Flag("API", "FILE", example="~/tls/key.pem"), Field(description="The certificate's key (PEM)")
    ] = None
    cors_origins: Annotated[
        Words,
        Flag("API", "ORIGIN,ORIGIN"),
        Field(description="Origins whose pages may ask, for example https://chat.example; *: all"),
    ] = ()
    allowed_hosts: Annotated[
        Words,
        Flag("API", "NAME,NAME"),
        Field(description="Names besides localhost that a server on loopback may be asked by; *: all"),
    ] = ()
    dialects_off: Annotated[
        Words,
        Flag("API", "NAME,NAME"),
        Field(description="Dialects that are not answered, for example tgi,kobold; the API screen can switch them too"),
    ] = ()
    trusted_proxies: Annotated[
        Networks,
        Flag("API", "ADDRESS,NET", example="127.0.0.1,10.0.0.0/8"),
        Field(description="Proxies whose X-Forwarded-For says who asks: for logs, limits and fairness"),
    ] = ()
    request_rate: Annotated[
        int,
        Flag("API", "N"),
        Field(ge=0, le=10**9, description="Requests a minute of one address beyond this machine; 0: any"),
    ] = 6000
    max_queue: Annotated[
        int, Flag("API", "N"), Field(ge=0, le=10**6, description="Requests that may wait; more are a 429")
    ] = 1024
    max_body_kib: Annotated[
        int, Flag("API", "KIB"), Field(ge=1, le=2**21, description="Longest request body, in KiB")
    ] = 8192
    max_header_bytes: Annotated[
        int, Flag("API", "BYTES"), Field(ge=256, le=2**20, description="Longest line of a request's head")
    ] = 8192
    max_json_depth: Annotated[
        int, Flag("API", "N"), Field(ge=4, le=_MAX_DEPTH, description="How deep a request body may nest")
    ] = 64
    max_schema_bytes: Annotated[
        int,
        Flag("API", "BYTES"),
        Field(ge=1, le=2**20, description="Longest JSON schema, regex or grammar that an answer is held to"),
    ] = 65_536
    max_choices: Annotated[
        int, Flag("API", "N"), Field(ge=1, le=2**16, description="Answers to one request: prompts times n")
    ] = 512
    max_output_len: Annotated[
        int | None,
        Flag("API", "TOKENS", example=4096),
        Field(
            ge=1, le=MAX_TOKENS, description="Longest answer that may be asked for; what the context holds if not given"
        ),
    ] = None
    max_stops: Annotated[
        int, Flag("API", "N"), Field(ge=0, le=MAX_STOP_STRINGS, description="Stop strings of a request")
    ] = MAX_STOP_STRINGS
    max_stop_length: Annotated[
        int, Flag("API", "N"), Field(ge=1, le=2**20, description="Characters of a stop string")
    ] = 1000
    idle_timeout: Annotated[
        Duration,
        Flag("API", "SECONDS"),
        Field(ge=0.1, le=MAX_TIMEOUT_S, description="A connection without a request for so long is closed"),
    ] = 75.0
    body_timeout: Annotated[
        Duration, Flag("API", "SECONDS"), Field(ge=0.1, le=MAX_TIMEOUT_S, description="Time a request's body may take")
    ] = 30.0
    write_timeout: Annotated[
        Duration,
        Flag("API", "SECONDS"),
        Field(ge=0.1, le=MAX_TIMEOUT_S, description="A client that reads nothing for so long is cut off"),
    ] = 60.0
    access_log: Annotated[
        str | None,
        Flag("API", "FILE", example="~/ericllm-access.jsonl"),
        Field(min_length=1, description="File for a line of JSON per request, without texts; -: stdout, if --headless"),
    ] = None
    otlp_traces_endpoint: Annotated[
        str | None,
        Flag("API", "URL", example="http://127.0.0.1:4318"),
        Field(min_length=1, description="Where OpenTelemetry traces of requests are sent, by OTLP over HTTP"),
    ] = None
