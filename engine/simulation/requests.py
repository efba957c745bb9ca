"""The engine's own requests, made of what simulated clients ask."""

from __future__ import annotations

from array import array

from engine.config import SamplingParams
from engine.requests.request import Request
from engine.requests.stream import RequestStream
from engine.scheduling.queue import ModelQueue
from engine.simulation.demand import Ask

_OWN_TOKENS = 0x8000_0000
"""Tokens from here on are of one prompt alone, those below of a group."""


def request_of(ask: Ask, number: int, model_queue: ModelQueue, timeout_s: float, now: float) -> Request:
    """Request `number`, admitted at `now`. Its tokens say nothing but with which other prompts it begins alike."""
    shared = array("I", [ask.group]) * ask.shared_tokens if ask.group >= 0 else array("I")
    prompt_ids = shared + array("I", [_OWN_TOKENS + number]) * (ask.prompt_tokens - len(shared))
    params = SamplingParams(max_tokens=ask.output_tokens, ignore_eos=True, seed=0)
    name = str(number)
    return Request(
        id=name,
        source="simulation",
        priority=0,
        order=number,
        prompt_ids=prompt_ids,
        params=params,
        asked=params,
        end_token_ids=(),
        timeout_s=timeout_s,
        created=now,
        stream=RequestStream(name, len(prompt_ids), _nothing),
        model_queue=model_queue,
        client=ask.client,
        created_at=0.0,
    )


def _nothing() -> None:
    """What cancelling such a request's stream does: nobody reads it."""
