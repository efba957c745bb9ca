"""Models whose layers are computed by the Triton kernels, as on CUDA: interpreted on a CPU, over pages as they lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.backends.base import LoadProgress
from engine.backends.common.model_config import ModelConfig
from engine.backends.torch import runner as runner_module
from engine.backends.torch.cuda.layer_ops import LayerOps
from engine.backends.torch.model.mlp import MixtureMlp
from engine.backends.torch.runner import ModelRunner
from engine.backends.torch.weights import model_loader
from engine.config import SamplingParams
from tests.fakes import queued
from tests.fakes.ahead import Asked, answers, load
from tests.fakes.oracle import Driver, load_runner
from tests.fakes.recording import FakeRecorder
from tests.fakes.recording import use as use_recorder
from tests.fakes.tiny_models import MIXTURES, make_tiny_model

pytestmark = pytest.mark.long
pytest.importorskip("triton")

PROMPTS = [[7 * at % 300 + 3 for at in range(length)] for length in (11, 3, 18)]


def use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have models loaded from here on compute with the kernels."""

    def ops(
        config: ModelConfig, dtype: torch.dtype, devices: list[torch.device], report: Callable[[LoadProgress], None]
    ) -> dict[torch.device, LayerOps]:
        return {device: LayerOps(device) for device in devices}

    monkeypatch.setattr(model_loader, "_layer_ops", ops)


def logits(runner: ModelRunner) -> Tensor:
    """Of prompts in chunks, then of decodes of all at once."""
    driver = Driver(runner)
    sequences = [driver.add(prompt) for prompt in PROMPTS]
    found = [driver.feed((sequences[0], 7)), driver.feed(*((each, None) for each in sequences))]
    for token in (5, 9):
        for each in sequences:
            each.tokens.append(token)
        found.append(driver.feed(*((each, None) for each in sequences)))
    return torch.cat(found)


def assert_near(found: Tensor, expected: Tensor) -> None:
    """They differ by no more than what float16 rounds in a few layers."""
    assert float((found - expected).abs().max()) <= 0.01 * float(expected.abs().max())


@pytest.mark.parametrize("architecture", MIXTURES)
def test_a_mixture_has_the_logits_of_its_experts_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    folder = make_tiny_model(tmp_path, architecture, with_tokenizer=False)
    queued.over_pages(monkeypatch)
    expected = logits(load_runner(folder, dtype="float16"))
    use_kernels(monkeypatch)
    runner = load_runner(folder, dtype="float16")
    assert runner._decoder is not None
    for stage in runner._decoder.stages:
        for block in stage.blocks:
            assert isinstance(block.mlp, MixtureMlp) and block.mlp.grouped is not None
    assert_near(logits(runner), expected)


class Landing:
    """A device that is never behind."""

    def fetch(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def mark(self) -> Callable[[], None]:
        return lambda: None


def test_a_mixture_is_recorded_and_launched_ahead_with_the_same_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(tmp_path, "MixtralForCausalLM", num_hidden_layers=1, with_tokenizer=False)
    queued.over_pages(monkeypatch)
    use_kernels(monkeypatch)
    greedy, seeded = SamplingParams(temperature=0, max_tokens=5), SamplingParams(seed=4, top_p=0.8, max_tokens=5)
    asked = {"a": Asked(1, greedy), "b": Asked(2, seeded, 20), "c": Asked(3, greedy, 30, after=("a", 2))}
    expected = answers(load(folder), asked)
    recorder = use_recorder(monkeypatch, FakeRecorder())
    monkeypatch.setattr(runner_module, "readback_for", lambda device: Landing())
    backend = load(folder)
    assert backend._runner is not None and backend._runner.readback is not None
    found = answers(backend, asked)
    assert {name: [event.token_id for event in each] for name, each in found.items()} == {
        name: [event.token_id for event in each] for name, each in expected.items()
    }
    assert recorder.recorded == 4 and recorder.replayed >= 4
