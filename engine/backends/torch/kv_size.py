"""How many KV pages to allocate: those that placement or a person asked for; else what is free decides."""

from __future__ import annotations

from engine.errors import InsufficientMemory

TYPICAL_TOKENS = 2048
"""Tokens of KV that one running request gets on average where nobody says otherwise."""

CPU_SHARE = 0.25
"""Of the free RAM: the rest is for other programs, other workers and the working memory of a step."""

CUDA_SHARE = 0.8
"""Of what the weights left free on the device: the rest is head-room for activations, logits and sampling."""

_MIB = 2**20


def kv_pages(
    *,
    asked_tokens: int | None,
    max_prompts: int,
    max_model_len: int,
    page_tokens: int,
    bytes_per_token: int,
    free_bytes: int,
    share: float,
) -> int:
    """Pages that hold `asked_tokens`, as they are; or, where nothing is asked, pages for `max_prompts` requests of up
    to TYPICAL_TOKENS and for one of max_model_len at least, as far as `share` of `free_bytes` goes.

    Raises InsufficientMemory where that share holds less than one request of TYPICAL_TOKENS (or max_model_len).
    """
    if asked_tokens is not None:
        return max(1, -(-asked_tokens // page_tokens))
    typical = min(max_model_len, TYPICAL_TOKENS)
    least_pages = -(-typical // page_tokens)
    wanted_pages = max(max_prompts * least_pages, -(-max_model_len // page_tokens))
    page_bytes = bytes_per_token * page_tokens
    possible_pages = int(free_bytes * share) // page_bytes
    if possible_pages < least_pages:
        needed_bytes = int(least_pages * page_bytes / share)
        raise InsufficientMemory(
            f"the KV pages of one request of {typical} tokens need {needed_bytes // _MIB} MiB free (of which they "
            f"take {share:.0%}), and {free_bytes // _MIB} MiB are",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
            short_bytes=needed_bytes - free_bytes,
        )
    return min(wanted_pages, possible_pages)
