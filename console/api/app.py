"""The aiohttp application: every endpoint, and the middlewares before it, from the outside in."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from aiohttp import web

from console.api.admin.calls import AdminOperations, CallEndpoints
from console.api.admin.endpoints import Admin
from console.api.admin.events import Events
from console.api.context import ApiContext
from console.api.dialects.registry import DialectRegistry
from console.api.http.auth import Authenticator, auth_middleware
from console.api.http.client_address import client_address_middleware
from console.api.http.guard import cors_headers, guard_middleware
from console.api.http.limits import AddressLimiter, RequestPacer, pacing_middleware
from console.api.http.middleware import (
    counting_middleware,
    dialect_middleware,
    error_middleware,
    response_headers,
)
from console.api.http.observability import observability_middleware
from console.api.http.request_body import (
    BODY_BYTES,
    BODY_THREAD,
    body_middleware,
    response_timeout_middleware,
    with_expect_handler,
)
from console.api.openapi import OpenApi
from console.api.pages.pages import Pages
from console.api.requests.progress import add_progress_headers
from console.api.status_endpoints import Operations
from console.api.upstream import Upstream, upstream_middleware


def application(
    context: ApiContext,
    dialects: DialectRegistry,
    authenticator: Authenticator,
    *,
    on_loopback: Callable[[], bool],
    admin: AdminOperations | None = None,
) -> web.Application:
    """An application for one run of a server.

    on_loopback: whether it listens there alone.  admin: what operators may ask for; None for nothing.
    """
    settings, traffic = context.settings, context.traffic
    addresses = AddressLimiter(settings.address_rate, time.monotonic)
    app = web.Application(
        middlewares=[
            upstream_middleware,
            client_address_middleware(settings.trusted_proxies),
            observability_middleware(context.observers),
            counting_middleware(traffic, dialects),
            error_middleware,
            pacing_middleware(RequestPacer()),
            guard_middleware(addresses, settings.cors_origins, settings.allowed_hosts, on_loopback),
            auth_middleware(traffic, authenticator),
            body_middleware(settings, context.json_bounds),
            dialect_middleware(traffic, dialects),
            response_timeout_middleware(settings),
        ],
        client_max_size=settings.max_body_bytes,
    )
    app[BODY_THREAD] = context.body_thread
    app[BODY_BYTES] = Counter()
    endpoints = [Operations(context).routes(), dialects.routes(), Pages().routes(), OpenApi(dialects).routes()]
    endpoints.append(Upstream().routes())
    if admin is not None:
        for group in (Admin(context, admin), Events(context, admin), CallEndpoints(context, admin)):
            endpoints.append(group.routes())
    for routes in endpoints:
        app.add_routes(with_expect_handler(routes))
    app.on_response_prepare.append(
        response_headers(dialects, cors_headers(settings.cors_origins, dialects.cors_headers))
    )
    app.on_response_prepare.append(add_progress_headers)
    return app
