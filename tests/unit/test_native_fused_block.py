"""Blocks fused into native products compute what their parts compute, whatever adapters other rows have."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.common.native_build import SWITCH
from engine.backends.torch.model.decoder import FusedBlock, Residual
from engine.backends.torch.model.linear import LinearFactory
from engine.backends.torch.model.lora import AdaptedRows, LoraAdapter, LowRank, add_adapters
from engine.backends.torch.model.mlp import GatedMlp
from engine.backends.torch.model.norms import RmsNorm, identity
from engine.backends.torch.native import fusing
from engine.backends.torch.native.layer import FusedLinear, NativeLinear
from engine.backends.torch.native.library import find_kernels
from engine.backends.torch.weights import decoder_loader
from tests.fakes.families import make_family
from tests.fakes.native_libraries import native
from tests.fakes.oracle import Driver, load_runner
from tests.fakes.tiny_models import make_tiny_model

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
MODELS = ("llama", "qwen2", "gemma2", "gemma3", "olmo2", "granite")
"""Plain, with biases, normed after products too, by head, nowhere before them, and with scales of its own."""
TIED = ("gemma3", "granite")
"""Their heads are embeddings, too small to be packed."""


def make_model(folder: Path, name: str) -> Path:
    match name:
        case "llama":
            return make_tiny_model(folder)
        case "qwen2":
            return make_tiny_model(folder, "Qwen2ForCausalLM")
        case _:
            return make_family(folder, name)


@pytest.fixture(autouse=True)
def _native() -> Iterator[None]:
    if find_kernels(torch.float32, CPU).library is None:
        pytest.skip("the native kernels do not run here")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def fused_parts(folder: Path, **spec: Any) -> tuple[bool, bool]:
    """Whether a model's blocks are fused, and its head."""
    decoder = load_runner(folder, **spec)._decoder
    assert decoder is not None
    return all(block.fused for stage in decoder.stages for block in stage.blocks), decoder.fused_head is not None


def answers(folder: Path, **spec: Any) -> tuple[list[int], Tensor]:
    """Greedy tokens after a prompt, and the logits they were taken from."""
    driver = Driver(load_runner(folder, **spec))
    sequence = driver.add([7 * position % 300 + 3 for position in range(21)])
    driver.greedy([sequence], 12)
    return sequence.tokens, torch.stack(sequence.logits)


@pytest.mark.parametrize("model", MODELS)
def test_a_fused_model_answers_as_torch_does(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path, model)
    assert fused_parts(folder) == (True, model not in TIED)
    tokens, logits = answers(folder)
    monkeypatch.setenv(SWITCH, "0")
    assert fused_parts(folder) == (False, False)
    expected_tokens, expected = answers(folder)
    assert tokens == expected_tokens
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)


def test_in_bfloat16_the_fused_model_is_as_near_to_float32_as_its_parts_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(tmp_path, dtype="bfloat16")
    _, exact = answers(folder)
    _, logits = answers(folder, dtype="bfloat16")
    monkeypatch.setattr(decoder_loader, "fuse_decoder", lambda decoder: decoder)
    _, apart = answers(folder, dtype="bfloat16")
    assert not torch.equal(logits[0], apart[0])
    assert (logits[0] - exact[0]).abs().max() <= 1.5 * (apart[0] - exact[0]).abs().max()


def test_parallel_blocks_and_other_norms_stay_as_they_are(tmp_path: Path) -> None:
    assert fused_parts(make_family(tmp_path, "stablelm")) == (False, False)


def test_a_form_that_differs_leaves_the_parts_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_tiny_model(tmp_path)
    monkeypatch.setattr(fusing, "close_enough", lambda *given: False)
    with caplog.at_level(logging.WARNING):
        assert fused_parts(folder) == (False, False)
    assert [record.getMessage() for record in caplog.records if "are not fused" in record.message] == [
        "norms, gates and sums are not fused into native products, as a normed one with 128 x 64 weights differs"
    ]


WIDTH, INNER, HEADS = 48, 40, 96


def make_block(alpha: float) -> FusedBlock:
    factory = LinearFactory(CPU, torch.float32, native("avx2"))
    generator = torch.Generator().manual_seed(1)

    def linear(outputs: int, inputs: int, interleave: bool = False) -> NativeLinear:
        made = factory.make(torch.randn(outputs, inputs, generator=generator) / inputs**0.5, interleave=interleave)
        assert isinstance(made, NativeLinear)
        return made

    norm = RmsNorm(torch.rand(WIDTH, generator=generator) + 0.5, 1e-6)
    mlp = GatedMlp(linear(2 * INNER, WIDTH, interleave=True), linear(WIDTH, INNER))
    o = linear(WIDTH, WIDTH)
    assert isinstance(mlp.gate_up, NativeLinear)
    assert isinstance(mlp.down, NativeLinear)
    return FusedBlock(
        input_norm=norm,
        qkv=FusedLinear(linear(HEADS, WIDTH), norm=norm.weight, epsilon=norm.eps),
        o=Residual(o, identity, alpha, "o", FusedLinear(o, alpha=alpha)),
        mlp_norm=norm,
        mlp=mlp,
        gated=FusedLinear(mlp.gate_up, norm=norm.weight, epsilon=norm.eps, activation="silu"),
        down=Residual(mlp.down, identity, alpha, "down", FusedLinear(mlp.down, alpha=alpha)),
    )


def adapter() -> LoraAdapter:
    generator = torch.Generator().manual_seed(2)
    shapes = {"qkv": (WIDTH, HEADS), "o": (WIDTH, WIDTH), "gate_up": (WIDTH, 2 * INNER), "down": (INNER, WIDTH)}
    layer: Any = {
        place: LowRank(torch.randn(3, inputs, generator=generator) / 7, torch.randn(3, outputs, generator=generator))
        for place, (inputs, outputs) in shapes.items()
    }
    return LoraAdapter(name="a", key="a", layers=(layer,), size_bytes=0)


@pytest.mark.parametrize("alpha", [1.0, 0.25])
@pytest.mark.parametrize("rows", [slice(2, 5), torch.tensor([0, 3, 6])], ids=["adjacent", "scattered"])
def test_adapters_change_their_rows_alone(alpha: float, rows: slice | Tensor) -> None:
    block, adapted = make_block(alpha), (AdaptedRows(adapter(), rows),)
    hidden, attended = torch.randn(7, WIDTH), torch.randn(7, WIDTH)
    others = torch.ones(7, dtype=torch.bool)
    others[rows] = False

    qkv = block.into_attention(hidden, 0, adapted)
    assert torch.equal(qkv[others], block.into_attention(hidden, 0, ())[others])
    normed = block.input_norm(hidden)
    expected = add_adapters(block.qkv(hidden), normed, 0, "qkv", adapted)
    torch.testing.assert_close(qkv, expected)

    out = block.out_of_attention(attended, hidden.clone(), 0, adapted)
    assert torch.equal(out[others], block.out_of_attention(attended, hidden.clone(), 0, ())[others])
    between = hidden + alpha * add_adapters(block.o.linear(attended), attended, 0, "o", adapted)
    plain = between + alpha * block.mlp(block.mlp_norm(between), 0, adapted)
    torch.testing.assert_close(out, plain, atol=1e-5, rtol=1e-5)
