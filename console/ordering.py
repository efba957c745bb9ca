"""Which bindings order something of the engine: where a console takes no orders, the footer leaves them out."""

from __future__ import annotations

from collections.abc import Mapping

from textual.binding import ActiveBinding

ORDERS = frozenset(
    {
        "adapters.detach",
        "advice.take",
        "api.address",
        "api.dialect",
        "api.key.make",
        "api.key.revoke",
        "api.toggle",
        "bench.cancel",
        "bench.forget",
        "bench.new",
        "chat.again",
        "chat.continue",
        "idle.longer",
        "idle.shorter",
        "insight.measure",
        "insight.reset",
        "models.beside",
        "models.cancel",
        "models.fetch",
        "models.forget",
        "models.load",
        "models.unload",
        "prompts.fewer",
        "prompts.more",
        "request.cancel",
        "request.cancel.this",
        "requests.cancel_queued",
        "settings.edit",
        "settings.reset",
        "tune.find",
        "tune.undo",
        "tune.use",
        "worker.drain",
        "worker.restart",
        "workers.fewer",
        "workers.more",
    }
)
"""By their ids."""


def without_orders(bindings: Mapping[str, ActiveBinding]) -> dict[str, ActiveBinding]:
    """The bindings of a screen, those that order something switched off."""
    return {
        key: active._replace(enabled=active.enabled and active.binding.id not in ORDERS)
        for key, active in bindings.items()
    }
