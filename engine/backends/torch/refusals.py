"""Requests that the torch backend does not take."""

from __future__ import annotations

from engine.backends.base import BackendRequest
from engine.errors import ContextLengthExceeded, InvalidRequest


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


def refuse_hopeless(prompt_tokens: int, *, max_model_len: int, max_input_len: int, pool_tokens: int) -> None:
    """Raise ContextLengthExceeded where a prompt of so many tokens can never be computed."""
    limit, why = min(
        (max_model_len - 1, f"the context is {max_model_len} tokens, the answer's first included"),
        (max_input_len, f"max_input_len is {max_input_len}"),
        (pool_tokens, f"the KV pages hold {pool_tokens} tokens"),
    )
    if prompt_tokens > limit:
        raise ContextLengthExceeded(
            f"the prompt has {prompt_tokens} tokens, more than the {limit} that can be taken: {why}",
            prompt_tokens=prompt_tokens,
            limit=limit,
            max_model_len=max_model_len,
            pool_tokens=pool_tokens,
        )
