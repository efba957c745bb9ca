"""Requests that the torch backend does not take."""

from __future__ import annotations

from engine.backends.base import BackendRequest
from engine.errors import InvalidRequest


def refuse_unknown_tokens(request: BackendRequest, vocab: int) -> None:
    """Raise InvalidRequest where a token id lies outside the vocabulary, as it would fail the step of everybody."""
    for param, token_ids in (
        ("prompt", request.prompt_ids),
        ("generated", request.generated),
        ("logit_bias", request.params.logit_bias),
        ("banned_next", request.banned_next),
    ):
        wrong = next((token_id for token_id in token_ids if not 0 <= token_id < vocab), None)
        if wrong is not None:
            raise InvalidRequest(f"{param} names token {wrong}; the model has {vocab}", param=param, value=wrong)
    if not request.prompt_ids:
        raise InvalidRequest("the prompt is empty; it takes one token at least", param="prompt")
