"""Models that attend natively compute what transformers computes, and what they compute over gathered pages."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.torch.native import attention_check
from engine.backends.torch.native.library import find_kernels
from engine.backends.torch.runner import ModelRunner
from engine.config import CacheBits
from engine.errors import InvalidRequest
from tests.fakes.oracle import (
    NUM_PAGES,
    Driver,
    ignore_progress,
    load_runner,
    reference_greedy,
    reference_logits,
)
from tests.fakes.tiny_models import make_tiny_model

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen2 with windows in some layers": {
        "architecture": "Qwen2ForCausalLM",
        "use_sliding_window": True,
        "sliding_window": 10,
        "max_window_layers": 1,
    },
    "qwen3, whose heads are normed": {"architecture": "Qwen3ForCausalLM", "head_dim": 32},
    "mistral with a window": {"architecture": "MistralForCausalLM", "sliding_window": 12},
}
PROMPT = [7 * position % 300 + 3 for position in range(45)]
STEPS = 16


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    if find_kernels(torch.float32, torch.device("cpu")).library is None:
        pytest.skip("the native kernels do not run here")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def native_runner(folder: Path, **spec: Any) -> ModelRunner:
    """With pages of a size that the kernel takes."""
    runner = load_runner(folder, **spec)
    runner.allocate_kv(NUM_PAGES, 16, report=ignore_progress)
    return runner


def choice(runner: ModelRunner) -> str:
    assert runner.attention is not None
    return runner.attention.name


@pytest.mark.parametrize("name", MODELS)
def test_native_attention_computes_what_transformers_computes(name: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, **MODELS[name])
    runner = native_runner(folder)
    assert choice(runner) == "native"
    driver = Driver(runner)
    expected = reference_logits(folder, PROMPT)
    probe, beside = driver.add(PROMPT), driver.add(PROMPT[::-1])
    driver.feed((probe, 17), (beside, 3))
    torch.testing.assert_close(driver.feed((beside, 1), (probe, None))[1], expected[-1], atol=2e-4, rtol=1e-4)
    running = driver.add(PROMPT)
    driver.greedy([running, beside], STEPS)
    assert running.tokens == reference_greedy(folder, PROMPT, STEPS)


BITS: dict[CacheBits, float] = {8: 0.01, 4: 0.12}
"""What single elements that fall to the other side of a rounding step may do to logits: root mean square, relative to
that of the logits."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", MODELS)
def test_over_codes_it_computes_what_is_computed_over_gathered_ones(
    name: str, bits: CacheBits, dtype: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path, **MODELS[name])
    found, expected = (
        over_codes(native_runner(folder, cache_bits=bits, dtype=dtype, attention=attention))
        for attention in ("auto", "gathered")
    )
    rounding = {"float32": 0.0, "bfloat16": 0.03}[dtype]
    assert (found - expected).norm() / expected.norm() < BITS[bits] + rounding


def over_codes(runner: ModelRunner) -> torch.Tensor:
    """Logits of the end of a prompt that came in chunks beside another one, and of an answer to it."""
    driver = Driver(runner)
    probe, beside = driver.add(PROMPT), driver.add(PROMPT[::-1])
    driver.feed((probe, 17), (beside, 3))
    rows = [driver.feed((beside, 1), (probe, None))[1]]
    for token in (5, 6, 7):
        probe.tokens.append(token)
        rows.append(driver.feed((probe, None), (beside, 1))[0])
    return torch.stack(rows)


def test_a_page_or_a_head_that_does_not_fit_is_gathered_and_the_reason_told(tmp_path: Path) -> None:
    runner = load_runner(make_tiny_model(tmp_path))
    assert runner.attention is not None
    assert runner.attention.name == "gathered"
    assert "pages of a multiple of 16 tokens, not 8" in runner.attention.reason
    runner = native_runner(make_tiny_model(tmp_path / "other", head_dim=24))
    assert runner.attention is not None
    assert (runner.attention.name, "multiple of 16, not 24" in runner.attention.reason) == ("gathered", True)


def test_native_attention_that_cannot_be_is_refused_with_the_reason(tmp_path: Path) -> None:
    words = "--attention native is not available: .*bfloat16 or float32, not float16"
    with pytest.raises(InvalidRequest, match=words):
        load_runner(make_tiny_model(tmp_path), attention="native", dtype="float16")


def test_gathered_pages_can_be_asked_for(tmp_path: Path) -> None:
    assert choice(native_runner(make_tiny_model(tmp_path), attention="gathered")) == "gathered"


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_kernel_that_gives_something_else_is_passed_over_with_a_warning(
    bits: CacheBits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = attention_check._plain_attention
    monkeypatch.setattr(attention_check, "_plain_attention", lambda *args: plain(*args) + 0.5)
    with caplog.at_level(logging.WARNING):
        assert choice(native_runner(make_tiny_model(tmp_path), cache_bits=bits)) == "gathered"
    assert "attention stays on torch's kernels: results of the native kernel are off by 0." in caplog.text
