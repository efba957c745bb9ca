"""What the settings say to the API server."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from console.api.settings import ApiSettings
from console.secret_file import read_secret
from console.settings import Settings


def api_settings(settings: Settings, state_dir: Path | None) -> ApiSettings:
    """The HTTP side's part of the settings. state_dir: where keys are kept, None for nowhere.

    Reads --api-key-file; raises InvalidRequest where it holds no key.
    The engine ends an answer in time; who sends or takes it slowly gets the time for that besides.
    """
    slack_s = settings.idle_timeout + settings.body_timeout + settings.write_timeout
    return ApiSettings(
        host=settings.host,
        port=settings.port,
        api_key=_api_key(settings),
        no_auth=settings.no_auth,
        admin_remote=settings.admin_remote,
        tls_cert=settings.tls_cert,
        tls_key=settings.tls_key,
        cors_origins=settings.cors_origins,
        allowed_hosts=settings.allowed_hosts,
        dialects_off=settings.dialects_off,
        trusted_proxies=tuple(map(ipaddress.ip_network, settings.trusted_proxies)),
        state_dir=state_dir,
        address_rate=settings.request_rate,
        max_header_bytes=settings.max_header_bytes,
        max_body_bytes=settings.max_body_kib * 2**10,
        max_json_depth=settings.max_json_depth,
        max_schema_bytes=settings.max_schema_bytes,
        max_choices=settings.max_choices,
        max_output_tokens=settings.max_output_len,
        max_stops=settings.max_stops,
        max_stop_length=settings.max_stop_length,
        idle_timeout_s=settings.idle_timeout,
        body_timeout_s=settings.body_timeout,
        write_timeout_s=settings.write_timeout,
        total_timeout_s=settings.timeout + slack_s if settings.timeout else None,
        access_log=settings.access_log,
        owns_stdout=settings.headless,
        otlp_traces_endpoint=settings.otlp_traces_endpoint,
    )


def _api_key(settings: Settings) -> str | None:
    if settings.api_key is not None:
        return settings.api_key.get_secret_value()
    return None if settings.api_key_file is None else read_secret(settings.api_key_file, "--api-key-file")
