"""What aiohttp serves: every endpoint, and what happens to a request on its way there, from the outside in."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from aiohttp import web

from console.api.admin import Admin
from console.api.authorizing import Door, authorizing
from console.api.calls import Calls
from console.api.client_address import resolving
from console.api.context import ApiContext
from console.api.dialects import Dialects
from console.api.events import Events
from console.api.guarding import guarding, sharing
from console.api.limits import Addresses
from console.api.middleware import counting, errors, signing, speaking
from console.api.observing import observing
from console.api.openapi import OpenApi
from console.api.operations import Operations
from console.api.pages.pages import Pages
from console.api.received import BODY_BYTES, BODY_THREAD
from console.api.receiving import ending, receivable, receiving
from console.api.turns import Turns, taking_turns
from console.link import EngineLink


def application(
    context: ApiContext,
    dialects: Dialects,
    door: Door,
    *,
    on_loopback: Callable[[], bool],
    link: Callable[[], EngineLink] | None = None,
) -> web.Application:
    """An application for one run of a server.

    on_loopback: whether it listens there alone.  link: what a console elsewhere is shown; None where there is none.
    """
    settings, traffic = context.settings, context.traffic
    addresses = Addresses(settings.address_rate, time.monotonic)
    app = web.Application(
        middlewares=[
            resolving(settings.trusted_proxies),
            observing(context.watchers),
            counting(traffic, dialects),
            errors,
            taking_turns(Turns()),
            guarding(addresses, settings.cors_origins, settings.allowed_hosts, on_loopback),
            authorizing(traffic, door),
            receiving(settings, context.json_bounds),
            speaking(traffic, dialects),
            ending(settings),
        ],
        client_max_size=settings.max_body_bytes,
    )
    app[BODY_THREAD] = context.body_thread
    app[BODY_BYTES] = Counter()
    endpoints = [Operations(context).routes(), dialects.routes(), Pages().routes(), OpenApi(dialects).routes()]
    if context.operator is not None:
        endpoints.append(Admin(context, context.operator).routes())
        if link is not None:
            endpoints.append(Events(context, link).routes())
            endpoints.append(Calls(context, link, context.operator.admit).routes())
    for routes in endpoints:
        app.add_routes(receivable(routes))
    app.on_response_prepare.append(signing(sharing(settings.cors_origins)))
    return app
