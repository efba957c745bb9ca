"""The context length that a model is loaded with, whichever backend computes it."""

from __future__ import annotations

from engine.errors import InvalidRequest


def context_length(asked: int | None, usual: int, longest: int) -> int:
    """Tokens: as asked for, else the usual. Raises InvalidRequest for what is more than the longest, or nothing."""
    length = usual if asked is None else asked
    if not 1 <= length <= longest:
        raise InvalidRequest(
            f"max_model_len is {length}; this model takes from 1 to {longest} tokens "
            "(alpha_value and compress_pos_emb stretch it)",
            param="max_model_len",
            value=length,
            limit=longest,
        )
    return length
