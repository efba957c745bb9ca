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
    room = _max_new_tokens(prompt_ids, params, spec, model)
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


def embedding_params(params: SamplingParams, model: LoadedModel) -> SamplingParams:
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


def _max_new_tokens(prompt_ids: Sequence[int], params: SamplingParams, spec: ModelSpec, model: LoadedModel) -> int:
    """Tokens that can be generated after the prompt, and after the negative one; at least 1."""
    tokens, param = len(prompt_ids), "prompt"
    if len(params.negative_prompt_ids) > tokens:
        tokens, param = len(params.negative_prompt_ids), "negative_prompt"
    limit, why = min(
        (model.max_model_len - 1, f"with the answer's first token it may have {model.max_model_len}"),
        (spec.max_input_len or model.max_model_len, f"prompts may have {spec.max_input_len}"),
        (model.kv_tokens - 1, f"the KV pages of a worker hold {model.kv_tokens}"),
    )
    if tokens > limit:
        asked = {} if params.max_tokens is None else {"max_tokens": params.max_tokens}
        raise ContextLengthExceeded(
            f"the {param.replace('_', ' ')} has {tokens} tokens; {why}",
            param=param,
            prompt_tokens=tokens,
            limit=limit,
            max_model_len=model.max_model_len,
            **asked,
        )
    return min(model.max_model_len, model.kv_tokens) - tokens
