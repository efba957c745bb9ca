"""Biases of single tokens, as clients name them: by id, or as what must not come."""

from __future__ import annotations

import re
from collections.abc import Mapping

from console.api.served import ServedModel
from engine.errors import InvalidRequest

MAX_TOKENS_NAMED = 8192
"""In a field of a request: more than there are of digits, or with a line break. All that such a request passes looks
through them, in 8 ms altogether."""

BANNED = -100.0
"""The bias of a token that must not come."""

_TOKEN_ID = re.compile(r"0|-?[1-9][0-9]{0,18}")


def biases(by_text: Mapping[str, float], model: ServedModel) -> dict[int, float]:
    """`logit_bias` by token id. Only its usual spelling is an id: with others, one token could have two biases.

    Raises InvalidRequest.
    """
    if not all(_TOKEN_ID.fullmatch(key) for key in by_text):
        raise InvalidRequest("logit_bias should have token ids as its keys", param="logit_bias")
    by_id = {int(key): bias for key, bias in by_text.items()}
    model.check_token_ids(list(by_id), "logit_bias")
    return by_id


def bans(custom: object, model: ServedModel, *, end_tokens: bool) -> dict[int, float]:
    """Biases of the tokens that must not come: those of `custom_token_bans`, and the end tokens where it says so.

    Raises InvalidRequest.
    """
    ids = [*(model.tokenizer.eos_token_ids if end_tokens else ()), *_banned_ids(custom)]
    model.check_token_ids(ids, "custom_token_bans")
    return dict.fromkeys(ids, BANNED)


def _banned_ids(value: object) -> list[int]:
    tokens = value.count(",") + 1 if isinstance(value, str) else len(value) if isinstance(value, list) else 0
    if tokens > MAX_TOKENS_NAMED:
        raise InvalidRequest(
            f"custom_token_bans has {tokens} tokens; it may have {MAX_TOKENS_NAMED}", param="custom_token_bans"
        )
    items = [text.strip() for text in value.split(",") if text.strip()] if isinstance(value, str) else value or []
    if not isinstance(items, list) or not all(_TOKEN_ID.fullmatch(str(item)) for item in items):
        raise InvalidRequest(
            "custom_token_bans should be token ids: an array, or text with commas", param="custom_token_bans"
        )
    return [int(item) for item in items]
