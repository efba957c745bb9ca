"""How many KV pages a load allocates."""

from __future__ import annotations

from typing import Any

import pytest

from engine.backends.common.kv_format import TYPICAL_TOKENS, kv_pages
from engine.errors import InsufficientMemory

GIB = 2**30


def pages(**changes: Any) -> int:
    settings: dict[str, Any] = {
        "asked_tokens": None,
        "max_prompts": 4,
        "max_model_len": 1024,
        "page_tokens": 16,
        "bytes_per_token": 1000,
        "free_bytes": GIB,
        "share": 0.25,
    }
    return kv_pages(**(settings | changes))


def test_what_is_asked_for_is_taken_rounded_up_to_pages() -> None:
    assert pages(asked_tokens=100) == 7
    assert pages(asked_tokens=10**9) == 62_500_000  # whether it fits is the allocation's to say


def test_each_request_gets_a_whole_short_context() -> None:
    assert pages(max_prompts=4, max_model_len=1024) == 4 * 1024 // 16


def test_each_request_gets_a_typical_share_of_a_long_context() -> None:
    assert pages(max_prompts=8, max_model_len=8192) == 8 * TYPICAL_TOKENS // 16


def test_one_request_of_the_whole_context_always_fits() -> None:
    assert pages(max_prompts=1, max_model_len=100_000) == 100_000 // 16


def test_a_gpu_is_filled_up_to_what_all_requests_can_have() -> None:
    assert pages(max_prompts=8, max_model_len=8192, fills_device=True) == 8 * 8192 // 16
    assert pages(max_prompts=64, max_model_len=8192, fills_device=True) == GIB // 4 // (1000 * 16)


def test_no_more_than_the_share_of_free_memory_is_taken() -> None:
    assert pages(max_prompts=10_000, max_model_len=8192) == GIB // 4 // (1000 * 16)


def test_too_little_memory_for_one_request_is_refused_with_numbers() -> None:
    with pytest.raises(InsufficientMemory, match="one request of 2048 tokens need 7 MiB free") as refused:
        pages(max_model_len=8192, free_bytes=2**20)
    needed = 2048 * 1000 * 4
    assert refused.value.details == {"needed_bytes": needed, "free_bytes": 2**20, "short_bytes": needed - 2**20}
