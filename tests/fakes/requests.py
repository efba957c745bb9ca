"""Admitted requests without an engine around them."""

from __future__ import annotations

from itertools import count
from typing import Any

from engine.config import SamplingParams
from engine.requests.request import Request
from engine.requests.stream import RequestStream

_orders = count()


def make_request(prompt: list[int] | None = None, *, max_tokens: int | None = None, **fields: Any) -> Request:
    """A request; its prompt, if none is given, is one that no other has."""
    order = next(_orders)
    params = SamplingParams(max_tokens=max_tokens)
    return Request(
        **{
            "id": f"r{order}",
            "source": "test",
            "priority": 0,
            "order": order,
            "prompt_ids": prompt or [order],
            "params": params,
            "requested_params": params,
            "model_queue": None,
            "end_token_ids": (),
            "timeout_s": 0.0,
            "created": 0.0,
            "stream": RequestStream(f"r{order}", 1, lambda: None),
            **fields,
        }
    )
