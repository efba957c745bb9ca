"""Admission: is this request one that the loaded model can answer, and what do its open settings come to? Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from engine.backends.base import LoadedModel
from engine.backends.parameters import refuse_lacking
from engine.config import ModelSpec, SamplingParams
from engine.errors import ContextLengthExceeded, InvalidRequest


def resolve_params(
    prompt_ids: Sequence[int], params: SamplingParams, spec: ModelSpec, model: LoadedModel, *, seed: int
) -> SamplingParams:
    """`params` with max_tokens and seed set: max_tokens at most the room after the prompt, `seed` where none is given.

    Raises ContextLengthExceeded where the prompt leaves no room for one token or is longer than the spec allows, and
    InvalidRequest for an empty prompt, a token that the model does not have, or a parameter that its backend lacks.
    """
    params.validate()
    refuse_lacking(params, model.backend)
    _check_tokens(prompt_ids, params, model.vocab_size)
    room = _room(max(len(prompt_ids), len(params.negative_prompt_ids)), spec, model)
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    return msgspec.structs.replace(
        params,
        max_tokens=max_tokens,
        min_tokens=min(params.min_tokens, max_tokens),
        seed=seed if params.seed is None else params.seed,
    )


def resolve_timeout(timeout_s: float | None, default_s: float) -> float:
    """The request's own limit or the engine's, in seconds; 0 is none. Raises InvalidRequest."""
    if timeout_s is None:
        return default_s
    if not math.isfinite(timeout_s) or timeout_s < 0:
        raise InvalidRequest(
            f"timeout_s is {timeout_s:g}; it must be 0 (no limit) or more seconds", param="timeout_s", value=timeout_s
        )
    return timeout_s


def to_embed(params: SamplingParams, model: LoadedModel) -> SamplingParams:
    """`params` of a request for a prompt's vector; raises InvalidRequest where the model's backend makes none."""
    if not model.hidden_size:
        raise InvalidRequest(
            f"embeddings are not supported by the {model.backend} backend: it gives tokens, and no hidden states",
            backend=model.backend,
        )
    return msgspec.structs.replace(params, max_tokens=0, min_tokens=0)


def end_tokens(params: SamplingParams, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """Every id that ends the answer: the model's own unless ignore_eos, and stop_token_ids.

    What is held to a grammar ends where that ends, with one of the model's own, and JSON nowhere else.
    """
    if params.grammar is not None and params.grammar.is_json:
        return tuple(eos_token_ids)
    own = () if params.ignore_eos and params.grammar is None else eos_token_ids
    return tuple(dict.fromkeys((*own, *params.stop_token_ids)))


def _check_tokens(prompt_ids: Sequence[int], params: SamplingParams, vocab_size: int) -> None:
    if not prompt_ids:
        raise InvalidRequest("the prompt is empty; it must have at least one token", param="prompt")
    for param, ids in (
        ("prompt", prompt_ids),
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
        ("dry_breaker_ids", params.dry_breaker_ids),
        ("negative_prompt_ids", params.negative_prompt_ids),
    ):
        worst = next((bound for bound in (min(ids), max(ids)) if not 0 <= bound < vocab_size), None) if ids else None
        if worst is not None:
            raise InvalidRequest(
                f"{param} has the token {worst}; the model's tokens are 0 to {vocab_size - 1}", param=param, value=worst
            )


def _room(prompt_tokens: int, spec: ModelSpec, model: LoadedModel) -> int:
    """Tokens that can be generated after the prompt; at least 1."""
    if spec.max_input_len is not None and prompt_tokens > spec.max_input_len:
        raise _too_long(prompt_tokens, spec.max_input_len, "prompts may have")
    if prompt_tokens + 1 > model.max_model_len:
        raise _too_long(prompt_tokens, model.max_model_len, "with the answer's first token it may have")
    if prompt_tokens + 1 > model.kv_tokens:
        raise _too_long(prompt_tokens, model.kv_tokens, "the KV pages of a worker hold")
    return min(model.max_model_len, model.kv_tokens) - prompt_tokens


def _too_long(prompt_tokens: int, limit: int, what: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"the prompt has {prompt_tokens} tokens; {what} {limit}",
        param="prompt",
        prompt_tokens=prompt_tokens,
        limit=limit,
    )
