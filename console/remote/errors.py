"""What only a console on a distant engine can run into."""

from __future__ import annotations

from engine.errors import EngineError


class OutOfReach(EngineError):
    """The instance does not answer; details: url."""

    code = "out_of_reach"
    http_status = 503


class NotAllowed(EngineError):
    """The instance wants a key, or the key may not do that; details: status."""

    code = "not_allowed"
    http_status = 403
