"""Keys and values of 8 and 4 bits: what rounding costs, what it takes of memory, and what does not depend on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.common.kv_format import HeadFormat
from engine.backends.torch.kv.codec import HeadCodec
from engine.backends.torch.runner import ModelRunner
from engine.config import CacheBits, DeviceShare
from engine.errors import InvalidRequest
from tests.fakes.oracle import NUM_PAGES, PAGE_TOKENS, Driver, Running, load_runner
from tests.fakes.tiny_models import make_tiny_model

CPU = torch.device("cpu")
BITS: tuple[CacheBits, ...] = (8, 4)
LOGIT_ERROR: dict[CacheBits, float] = {8: 0.03, 4: 0.4}
"""How far logits may be from those of plain pages: root mean square, relative to that of the logits."""

ONE_STEP: dict[CacheBits, float] = {8: 0.01, 4: 0.12}
"""What single elements that fall to the other side of a rounding step may do to logits, relative in the same way."""

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32},
    "heads of no power of two": {"architecture": "Qwen3ForCausalLM"},
    "windows": {
        "architecture": "Qwen2ForCausalLM",
        "use_sliding_window": True,
        "sliding_window": 10,
        "max_window_layers": 1,
    },
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), with_tokenizer=False, **MODELS[request.param])


@pytest.fixture(scope="module", params=BITS)
def bits(request: pytest.FixtureRequest) -> CacheBits:
    found: CacheBits = request.param
    return found


@pytest.fixture(scope="module")
def runner(folder: Path, bits: CacheBits) -> ModelRunner:
    return load_runner(folder, cache_bits=bits)


def coded(heads: Tensor, bits: CacheBits) -> tuple[Tensor, Tensor]:
    """The bytes of `heads`, and what they come back as."""
    codec = HeadCodec(HeadFormat(heads.shape[-1], bits, heads.itemsize), [CPU])
    packed = codec.encode(heads)
    return packed, codec.rotate(codec.decode(packed, torch.empty_like(heads)))


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(13 * position + 7 * salt) % 300 + 3 for position in range(length)]


def fed(runner: ModelRunner, tokens: list[int]) -> Running:
    """The reference: a whole prompt, alone."""
    driver = Driver(runner)
    sequence = driver.add(tokens)
    driver.feed((sequence, None))
    return sequence


# --- codes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "worst"), [(8, 0.007), (4, 0.09)])
@pytest.mark.parametrize("size", [16, 24, 64, 80, 96, 128])
def test_a_head_comes_back_within_the_error_of_its_bits(bits: CacheBits, worst: float, size: int) -> None:
    heads = torch.randn(50, 4, size, generator=torch.Generator().manual_seed(0))
    packed, found = coded(heads, bits)
    assert packed.shape == (50, 4, HeadFormat(size, bits, 4).head_bytes)
    assert error(found, heads) < worst
    assert float((found - heads).abs().max()) < 6 * worst


def test_channels_much_larger_than_the_rest_do_not_drown_it() -> None:
    heads = torch.randn(50, 4, 128, generator=torch.Generator().manual_seed(0))
    large = heads.clone()
    large[..., [3, 70]] += 50.0
    _, found = coded(large, 4)
    rest = [channel for channel in range(128) if channel not in (3, 70)]
    lost_unturned = 1.0  # in 4 bits, a step of 50 / 8 leaves nothing of what is around 1
    assert error(found[..., rest], large[..., rest]) < 0.6 * lost_unturned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extremes_come_back_as_numbers(bits: CacheBits, dtype: torch.dtype) -> None:
    heads = torch.zeros(4, 1, 64, dtype=dtype)
    heads[1] = 1e-7
    heads[2, 0, 5] = -6e4
    heads[3] = torch.linspace(-1, 1, 64)
    _, found = coded(heads, bits)
    assert torch.equal(found[0], heads[0])
    assert found.isfinite().all()
    assert error(found[2:].float(), heads[2:].float()) < {8: 0.01, 4: 0.1}[bits]


def test_what_is_no_number_is_lost_to_its_own_head_alone(bits: CacheBits) -> None:
    heads = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(0))
    heads[1, 0, 7] = torch.nan
    _, found = coded(heads, bits)
    assert not found[1, 0].isfinite().any()
    assert found[[0, 2]].isfinite().all() and found[1, 1].isfinite().all()


# --- models ---------------------------------------------------------------------------------------------------------


def test_logits_are_those_of_plain_pages_within_the_error_of_the_bits(
    folder: Path, runner: ModelRunner, bits: CacheBits
) -> None:
    plain = load_runner(folder)
    for length in (1, 9, 41, 100):
        found, expected = (fed(each, prompt(length)).logits[-1] for each in (runner, plain))
        assert error(found, expected) < LOGIT_ERROR[bits]
    assert fed(runner, prompt(41)).logits[-1].ne(fed(plain, prompt(41)).logits[-1]).any()


def test_chunks_neighbours_prefixes_and_preemption_change_logits_by_no_more_than_a_step_of_rounding(
    runner: ModelRunner, bits: CacheBits
) -> None:
    expected = fed(runner, prompt(61)).logits[-1]
    driver = Driver(runner)
    chunked, prefixed, preempted = (driver.add(prompt(61)) for _ in range(3))
    others = [driver.add(prompt(9, salt)) for salt in (1, 2)]
    for length in (17, 1, 30, 13):
        driver.feed((chunked, length), *((other, 1) for other in others))
    shared = 40 // PAGE_TOKENS
    prefixed.pages[:shared], prefixed.computed = chunked.pages[:shared], shared * PAGE_TOKENS
    driver.feed((prefixed, None), (others[0], 2))
    driver.feed((preempted, 60))
    driver.feed((preempted, None))
    for sequence in (chunked, prefixed, preempted):
        assert error(sequence.logits[-1], expected) < ONE_STEP[bits]


def test_a_model_over_several_devices_gives_the_logits_of_the_whole(folder: Path, runner: ModelRunner) -> None:
    shares = tuple(DeviceShare(device=f"sim:{n}", layers=1, working_bytes=64 << 20) for n in range(2))
    parted = load_runner(folder, cache_bits=runner._heads.bits, shares=shares, device="auto")
    assert torch.equal(fed(parted, prompt(41)).logits[-1], fed(runner, prompt(41)).logits[-1])
    assert sum(share.kv_bytes for share in parted.shares) == parted.kv_bytes == runner.kv_bytes


def test_half_precision_is_close_to_float32(tmp_path: Path, bits: CacheBits) -> None:
    folder = make_tiny_model(tmp_path, dtype="bfloat16", hidden_size=128, with_tokenizer=False)
    half, whole = (load_runner(folder, cache_bits=bits, dtype=dtype) for dtype in ("bfloat16", "float32"))
    assert error(fed(half, prompt(41)).logits[-1], fed(whole, prompt(41)).logits[-1]) < LOGIT_ERROR[bits] + 0.03


# --- memory and refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "factor"), [(8, 1.93), (4, 3.55)])
@pytest.mark.parametrize("size", [64, 128])
def test_the_same_memory_holds_about_two_and_three_and_a_half_times_the_tokens(
    bits: CacheBits, factor: float, size: int
) -> None:
    plain = HeadFormat(size, 16, 2).head_bytes
    assert factor <= plain / HeadFormat(size, bits, 2).head_bytes <= 16 / bits
    assert HeadFormat(size, bits, 4).head_bytes == HeadFormat(size, bits, 2).head_bytes


def test_pages_of_codes_are_accounted_by_the_byte(tmp_path: Path, bits: CacheBits) -> None:
    runner = load_runner(make_tiny_model(tmp_path, head_dim=64, with_tokenizer=False), cache_bits=bits)
    head_bytes = {8: 64 + 2, 4: 32 + 4}[bits]
    assert runner.kv_bytes_per_token() == 2 * 2 * 2 * head_bytes
    assert runner.kv_bytes == NUM_PAGES * PAGE_TOKENS * runner.kv_bytes_per_token()
    assert runner.attention is not None and runner.attention.name == "gathered"


def test_six_bits_are_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cache_bits is 6; the torch backend keeps keys and values in 16, 8 or 4"):
        load_runner(make_tiny_model(tmp_path, with_tokenizer=False), cache_bits=6)


def test_heads_that_codes_do_not_fill_are_refused(tmp_path: Path, bits: CacheBits) -> None:
    folder = make_tiny_model(tmp_path, head_dim=12, with_tokenizer=False)
    with pytest.raises(InvalidRequest, match=f"cache_bits is {bits}; heads of 12 elements, no multiple of 8"):
        load_runner(folder, cache_bits=bits)
