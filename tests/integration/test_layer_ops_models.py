"""Models whose layers are computed by the Triton kernels, as on CUDA: interpreted on a CPU, over pages as they lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.backends.base import LoadProgress
from engine.backends.common.model_config import ModelConfig
from engine.backends.paged_attention import gathered
from engine.backends.torch import runner as runner_module
from engine.backends.torch.cuda.layer_ops import LayerOps
from engine.backends.torch.model import linear
from engine.backends.torch.model.mlp import MixtureMlp
from engine.backends.torch.model.norms import RmsNorm
from engine.backends.torch.runner import ModelRunner
from engine.backends.torch.weights import model_loader
from engine.config import AdapterSpec, SamplingParams
from tests.fakes import queued
from tests.fakes.adapters import make_adapter
from tests.fakes.ahead import Asked, answers, load, same
from tests.fakes.families import FAMILIES, make_family
from tests.fakes.oracle import Driver, load_runner
from tests.fakes.recording import FakeRecorder
from tests.fakes.recording import use as use_recorder
from tests.fakes.tiny_models import MIXTURES, make_tiny_model

pytestmark = pytest.mark.long
pytest.importorskip("triton")

PROMPTS = [[7 * at % 300 + 3 for at in range(length)] for length in (11, 3, 18)]


@pytest.fixture(autouse=True)
def _plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight is packed on CUDA; on CPUs with AVX512-FP16 or AMX, float16 ones would be."""
    monkeypatch.setattr(linear, "packing_pays", lambda weight: False)


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


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_plain_model_has_the_logits_of_separate_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, layers: int
) -> None:
    folder = make_tiny_model(tmp_path, architecture, num_hidden_layers=layers, with_tokenizer=False)
    queued.over_pages(monkeypatch)
    expected = logits(load_runner(folder, dtype="float16"))
    use_kernels(monkeypatch)
    runner = load_runner(folder, dtype="float16")
    assert runner._decoder is not None
    assert all(block.chains for stage in runner._decoder.stages for block in stage.blocks)
    assert_near(logits(runner), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_takes_the_kernels_that_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    folder = make_family(tmp_path, family)
    queued.over_pages(monkeypatch)
    expected = logits(load_runner(folder, dtype="float16"))
    use_kernels(monkeypatch)
    runner = load_runner(folder, dtype="float16")
    assert runner._decoder is not None
    chains = {block.chains for stage in runner._decoder.stages for block in stage.blocks}
    assert chains == {family.startswith(("phi", "smollm3"))}  # the others norm or scale what they add, or centre it
    assert_near(logits(runner), expected)


def test_adapters_and_prompt_states_pass_through_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model(tmp_path / "model", with_tokenizer=False)
    adapter = make_adapter(tmp_path / "adapter", folder).folder
    asked = {
        "told": Asked(1, SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=3), 20),
        "plain": Asked(2, SamplingParams(temperature=0, max_tokens=4)),
    }
    queued.over_pages(monkeypatch)
    expected, expected_logits = answers(load(folder), asked), adapted_logits(folder, adapter)
    use_kernels(monkeypatch)
    same(answers(load(folder), asked), expected)
    assert_near(adapted_logits(folder, adapter), expected_logits)


def adapted_logits(folder: Path, adapter: Path) -> Tensor:
    """Of one sequence with an adapter and one without, in one step."""
    runner = load_runner(folder, dtype="float16")
    runner.adapters.attach(AdapterSpec(name="a", path=adapter))
    driver = Driver(runner)
    return driver.feed((driver.add(PROMPTS[0], adapter="a"), None), (driver.add(PROMPTS[2]), None))


class Launches(TorchDispatchMode):
    """Names what launches a kernel on a GPU: operations of torch, Triton kernels, and attention."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from engine.backends.torch.cuda import layer_kernels  # needs Triton

        super().__init__()
        self.names: list[str] = []
        kernel = type(layer_kernels.gate_kernel)
        run = kernel.run
        monkeypatch.setattr(
            kernel,
            "run",
            lambda each, *arguments, **named: self._counted(each.__name__, run)(each, *arguments, **named),
        )
        monkeypatch.setattr(gathered, "paged_attention", self._counted("attend", gathered.paged_attention))
        self._inside = False

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.names.append(name)
            self._inside = True
            try:
                return function(*arguments, **named)
            finally:
                self._inside = False

        return call

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        views = function.is_view or function.overloadpacket.__name__ in (
            "empty",
            "empty_like",
            "detach",
            "_unsafe_view",
        )
        if not self._inside and not views:
            self.names.append(function.overloadpacket.__name__)
        return function(*arguments, **(named or {}))


def launches(folder: Path) -> Counter[str]:
    """The launches of a decode."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RmsNorm, "__call__", lambda norm, x: torch.rms_norm(x, norm.weight.shape, norm.weight, norm.eps))
        counted = Launches(patch)
        queued.over_pages(patch)
        runner = load_runner(folder, dtype="float16")
        driver = Driver(runner)
        sequence = driver.add(PROMPTS[0])
        driver.feed((sequence, None))
        sequence.tokens.append(5)
        counted.names.clear()
        with counted:
            driver.feed((sequence, None))
    return Counter(counted.names)


def test_a_layer_launches_nine_kernels_in_place_of_fifteen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two, three = (make_tiny_model(tmp_path / str(n), num_hidden_layers=n, with_tokenizer=False) for n in (2, 3))
    separate = launches(three) - launches(two)
    use_kernels(monkeypatch)
    fused = launches(three) - launches(two)
    assert separate.total() == 15
    of_ours = {"add_norm_kernel": 2, "rotate_and_write_kernel": 1, "gate_kernel": 1}
    assert fused == Counter({"linear": 4, "attend": 1}) + Counter(of_ours)


def test_all_experts_of_a_layer_are_five_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two, three = (
        make_tiny_model(tmp_path / str(n), "MixtralForCausalLM", num_hidden_layers=n, with_tokenizer=False)
        for n in (2, 3)
    )
    use_kernels(monkeypatch)
    names = ("route_kernel", "order_kernel", "gate_up_kernel", "down_kernel", "mix_kernel")
    of_others = {"linear": 3, "add_norm_kernel": 2, "rotate_and_write_kernel": 1, "attend": 1}
    assert launches(three) - launches(two) == Counter(names) + Counter(of_others)


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
    assert recorder.recorded >= 4 and recorder.replayed >= 4
