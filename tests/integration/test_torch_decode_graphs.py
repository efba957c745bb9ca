"""Recorded decodes with real (tiny) models on a device that records: the answers are those that there are without."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.base import BackendRequest
from engine.backends.common.native_build import SWITCH
from engine.backends.paged_attention import gathered
from engine.backends.paged_attention.choose import Choice
from engine.backends.paged_attention.interface import PagedAttention
from engine.backends.torch import runner as runner_module
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.cuda import adapter_slots, decode_graphs
from engine.backends.torch.cuda.decode_graphs import recorded_sizes
from engine.backends.torch.cuda.step_transfer import BlockingUploader
from engine.backends.torch.runner import ModelRunner
from engine.config import AdapterSpec, DeviceShare, SamplingParams
from tests.fakes.adapters import ATTENTION, make_adapter
from tests.fakes.drafting import answers, eager, ids, load
from tests.fakes.recording import FakeRecorder, use
from tests.fakes.tiny_models import make_tiny_model

TOKENS = 60
ALL_SIZES = len(recorded_sizes(128)) + len(recorded_sizes(128)[::-2])
"""Recordings of a load: of each size, and of every second one with adapters."""
PROMPTS = {name: [3 + (7 * at + salt) % 211 for at in range(12 + 17 * salt)] for salt, name in enumerate("abcde")}
PARAMS = {
    name: SamplingParams(temperature=0) if name < "d" else SamplingParams(temperature=0.9, seed=4, logprobs=1)
    for name in PROMPTS
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie": True},
    "window": {"architecture": "MistralForCausalLM", "sliding_window": 12},
    "qwen2": {"architecture": "Qwen2ForCausalLM"},
    "qwen3": {"architecture": "Qwen3ForCausalLM"},
}


@pytest.fixture(autouse=True)
def _over_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every runner attends over pages as they lie, without the kernels of CPUs, as on CUDA."""

    def over_pages(runner: ModelRunner, page_tokens: int) -> tuple[Choice, PagedAttention | None]:
        return Choice("gathered", "the test wants it"), gathered.paged_attention

    monkeypatch.setattr(ModelRunner, "pick_attention", over_pages)
    monkeypatch.setenv(SWITCH, "0")


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_the_same_token_by_token(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model(tmp_path, with_tokenizer=False, **MODELS[name])
    expected = answers(load(folder), PROMPTS, PARAMS, TOKENS)
    recorder = use(monkeypatch, FakeRecorder())
    backend = load(folder)
    assert recorder.recorded == len(recorded_sizes(128))
    found = answers(backend, PROMPTS, PARAMS, TOKENS)
    assert ids(found) == ids(expected)
    assert recorder.replayed > TOKENS / 2
    for ours, theirs in zip(found["e"], expected["e"], strict=True):
        assert ours.logprob is not None and theirs.logprob is not None
        assert ours.logprob.logprob == pytest.approx(theirs.logprob.logprob, abs=1e-4)


def without_recording(backend: TorchBackend) -> list[list[int]]:
    """The lengths of the chunks of each step that is not replayed, from here on."""
    assert backend._runner is not None and backend._runner._planner is not None
    planner, found = backend._runner._planner, list[list[int]]()
    plan = planner.plan
    planner.plan = lambda chunks: found.append([len(each.token_ids) for each in chunks]) or plan(chunks)  # type: ignore[method-assign,func-returns-value]
    return found


def test_nothing_is_recorded_while_serving_and_steps_with_prompts_are_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(tmp_path, with_tokenizer=False)
    expected = answers(load(folder), PROMPTS, PARAMS, TOKENS)
    recorder = use(monkeypatch, FakeRecorder())
    backend = load(folder, kv_tokens=312)
    recorded, eager_steps = recorder.recorded, without_recording(backend)
    assert ids(answers(backend, PROMPTS, PARAMS, TOKENS)) == ids(expected)
    stats = backend.stats()
    assert stats.preemptions > 0
    assert (recorder.recorded, recorder.replayed, eager_steps) == (recorded, stats.steps, [])


def test_a_prompt_that_would_read_too_much_again_is_computed_without_a_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(tmp_path, with_tokenizer=False)
    expected = answers(load(folder), PROMPTS, PARAMS, TOKENS)
    use(monkeypatch, FakeRecorder())
    monkeypatch.setattr(decode_graphs, "MAX_REREAD_BYTES", 0)
    backend = load(folder)
    eager_steps = without_recording(backend)
    assert ids(answers(backend, PROMPTS, PARAMS, TOKENS)) == ids(expected)
    assert eager_steps == [[12, 29, 46, 41], [1, 1, 1, 22, 80]]


@pytest.mark.parametrize("lookup", [False, True], ids=["draft model", "n-grams"])
def test_steps_with_drafts_are_replayed(lookup: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model(tmp_path, with_tokenizer=False)
    prompts = {name: 3 * ids for name, ids in PROMPTS.items() if name < "d"}
    expected = answers(load(folder), prompts, PARAMS, TOKENS)
    recorder = use(monkeypatch, FakeRecorder())
    backend = eager(load(folder, draft_model=None if lookup else folder), lookup=lookup)
    recorded, eager_steps = recorder.recorded, without_recording(backend)
    assert ids(answers(backend, prompts, PARAMS, TOKENS)) == ids(expected)
    assert backend.stats().draft_accepted > 0
    assert (recorder.recorded, eager_steps) == (recorded, [])


def with_adapters(folder: Path, adapters: Mapping[str, AdapterSpec], asked: Sequence[str]) -> dict[str, list[int]]:
    """Greedy answers to a prompt for each of `asked`, "" without an adapter; all at once."""
    backend = load(folder)
    for each in adapters.values():
        backend.attach(each)
    return serve(backend, asked)


def serve(backend: TorchBackend, asked: Sequence[str]) -> dict[str, list[int]]:
    params = SamplingParams(temperature=0)
    found: dict[str, list[int]] = {}
    for number, adapter in enumerate(asked):
        prompt = [3 + (7 * at + number) % 211 for at in range(2 + number)]
        backend.submit(BackendRequest(id=f"{number} {adapter}", prompt_ids=prompt, params=params, adapter=adapter))
    while backend.has_work():
        for event in backend.step():
            if event.token_id is not None:
                found.setdefault(event.request_id, []).append(event.token_id)
                if len(found[event.request_id]) == 4:  # an output processor ends it
                    backend.cancel(event.request_id)
    return found


def test_steps_with_adapters_are_replayed_and_those_attached_later_need_no_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    folder = make_tiny_model(tmp_path / "model", with_tokenizer=False)
    settings: dict[str, dict[str, Any]] = {"a": {}, "b": {"rank": 9, "targets": ATTENTION}, "c": {"layers": [1]}}
    adapters = {
        key: AdapterSpec(name=key, path=make_adapter(tmp_path / key, folder, seed=ord(key), **each).folder)
        for key, each in settings.items()
    }
    asked = ["", "a", "b", "c", "a", ""]
    expected = with_adapters(folder, adapters, asked)
    recorder = use(monkeypatch, FakeRecorder(), adapters=True)
    backend = load(folder)
    for key in ("a", "b"):
        backend.attach(adapters[key])
    eager_steps = without_recording(backend)
    serve(backend, ["a", "b", ""])
    backend.attach(adapters["c"])
    assert serve(backend, asked) == expected
    assert (recorder.recorded, recorder.replayed, eager_steps) == (ALL_SIZES, backend.stats().steps, [])
    assert len(set(map(tuple, expected.values()))) > 3


def test_an_adapter_of_too_high_a_rank_is_computed_without_a_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    folder = make_tiny_model(tmp_path / "model", with_tokenizer=False)
    adapters = {"a": AdapterSpec(name="a", path=make_adapter(tmp_path / "a", folder).folder)}
    expected = with_adapters(folder, adapters, ["a", ""])
    recorder = use(monkeypatch, FakeRecorder(), adapters=True)
    backend = load(folder)
    monkeypatch.setattr(adapter_slots, "MAX_RECORDED_RANK", 4)
    backend.attach(adapters["a"])
    eager_steps = without_recording(backend)
    assert serve(backend, ["a", ""]) == expected
    assert recorder.replayed < len(eager_steps)


@pytest.mark.parametrize("lacks", ["Triton", "right results"])
def test_without_the_kernels_of_adapters_their_steps_are_not_recorded_and_others_are(
    lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if lacks == "Triton":
        monkeypatch.setattr(adapter_slots, "triton_problem", lambda: "Triton is not installed")
    else:
        pytest.importorskip("triton")
        monkeypatch.setattr(adapter_slots.SlotRows, "add_", lambda self, out, *_: out.fill_(1.0))
    folder = make_tiny_model(tmp_path / "model", with_tokenizer=False)
    adapters = {"a": AdapterSpec(name="a", path=make_adapter(tmp_path / "a", folder).folder)}
    expected = with_adapters(folder, adapters, ["a", ""])
    recorder = use(monkeypatch, FakeRecorder(), adapters=True)
    backend = load(folder)
    backend.attach(adapters["a"])
    eager_steps = without_recording(backend)
    assert serve(backend, [""]) and not eager_steps
    assert serve(backend, ["a", ""]) == expected
    assert recorder.recorded == len(recorded_sizes(128)) and eager_steps
    assert caplog.text.count("steps with LoRA adapters are not recorded: ") == 1


def test_a_draft_model_s_passes_are_recorded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model(tmp_path, with_tokenizer=False)
    expected = answers(load(folder), PROMPTS, PARAMS, TOKENS)
    recorder = use(monkeypatch, FakeRecorder())
    backend = eager(load(folder, draft_model=folder))
    assert recorder.recorded == 2 * len(recorded_sizes(128))
    assert ids(answers(backend, PROMPTS, PARAMS, TOKENS)) == ids(expected)
    assert recorder.replayed > 10
    assert backend.stats().draft_accepted > 0


@pytest.mark.parametrize("recordings", [0, 11])
def test_where_memory_ends_answers_go_on(recordings: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model(tmp_path, with_tokenizer=False)
    expected = answers(load(folder), PROMPTS, PARAMS, TOKENS)
    recorder = use(monkeypatch, FakeRecorder(fails_from=recordings))
    assert ids(answers(load(folder), PROMPTS, PARAMS, TOKENS)) == ids(expected)
    assert recorder.recorded == recordings


def test_experts_are_chosen_on_the_host_and_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = use(monkeypatch, FakeRecorder())
    backend = load(make_tiny_model(tmp_path, "Qwen2MoeForCausalLM", with_tokenizer=False))
    backend.submit(BackendRequest(id="a", prompt_ids=[3, 4, 5], params=SamplingParams(temperature=0, max_tokens=4)))
    assert [event.request_id for event in backend.step()] == ["a"]
    assert recorder.recorded == 0


def test_unloading_gives_the_recordings_and_their_memory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeRecorder())
    backend = load(make_tiny_model(tmp_path, with_tokenizer=False))
    assert backend._runner is not None and backend._runner._graphs is not None
    graphs = weakref.ref(backend._runner._graphs)
    backend.unload()
    gc.collect()
    assert graphs() is None


@pytest.mark.parametrize("over", ["pages", "gathered"])
def test_indices_that_are_sent_as_one_give_the_same_answers(
    over: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if over == "gathered":
        monkeypatch.undo()
    folder = make_tiny_model(tmp_path, "MistralForCausalLM", with_tokenizer=False, sliding_window=12)
    expected = answers(load(folder), PROMPTS, PARAMS, TOKENS)
    monkeypatch.setattr(runner_module, "uploader_for", BlockingUploader)
    assert ids(answers(load(folder), PROMPTS, PARAMS, TOKENS)) == ids(expected)


@pytest.mark.parametrize("layers", [(1, 2), (0, 3), (1, 1, 1)], ids=str)
def test_steps_of_a_split_model_are_recorded_on_each_device_and_replayed_one_after_the_other(
    layers: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(tmp_path, with_tokenizer=False, num_hidden_layers=3)
    expected = answers(load(folder), PROMPTS, PARAMS, TOKENS)
    recorder = use(monkeypatch, FakeRecorder())
    backend = load(folder, shares=split(*layers), kv_tokens=312)
    recorded, eager_steps = recorder.recorded, without_recording(backend)
    assert recorded == len(layers) * len(recorded_sizes(128))
    assert ids(answers(backend, PROMPTS, PARAMS, TOKENS)) == ids(expected)
    stats = backend.stats()
    assert stats.preemptions > 0
    assert (recorder.recorded, recorder.replayed, eager_steps) == (recorded, len(layers) * stats.steps, [])


def test_the_pages_that_a_split_model_s_padding_writes_are_those_of_the_row_that_it_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(tmp_path, with_tokenizer=False, num_hidden_layers=2)
    use(monkeypatch, FakeRecorder())
    pages = []
    for shares in ((), split(1, 1)):
        backend = load(folder, shares=shares)
        answers(backend, {name: PROMPTS[name] for name in "abc"}, PARAMS, 20)
        assert backend._runner is not None
        pages.append([backend._runner.kv.layers[layer].clone() for layer in range(2)])
    for whole, parted in zip(*pages, strict=True):
        assert torch.equal(whole, parted)


def test_a_model_whose_last_device_has_the_head_alone_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(tmp_path, with_tokenizer=False, num_hidden_layers=3)
    expected = answers(load(folder), PROMPTS, PARAMS, 8)
    recorder = use(monkeypatch, FakeRecorder())
    backend = load(folder, shares=split(3, 0))
    assert ids(answers(backend, PROMPTS, PARAMS, 8)) == ids(expected)
    assert recorder.recorded == 0


def test_adapters_of_a_split_model_are_in_the_slots_of_every_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    folder = make_tiny_model(tmp_path / "model", with_tokenizer=False, num_hidden_layers=2)
    adapters = {"a": AdapterSpec(name="a", path=make_adapter(tmp_path / "a", folder).folder)}
    expected = with_adapters(folder, adapters, ["a", ""])
    recorder = use(monkeypatch, FakeRecorder(), adapters=True)
    backend = load(folder, shares=split(1, 1))
    backend.attach(adapters["a"])
    eager_steps = without_recording(backend)
    assert serve(backend, ["a", ""]) == expected
    assert (recorder.recorded, eager_steps) == (2 * ALL_SIZES, [])


def split(*layers: int) -> tuple[DeviceShare, ...]:
    """Shares of simulated devices."""
    return tuple(
        DeviceShare(device=f"sim:{number}", layers=count, working_bytes=256 << 20)
        for number, count in enumerate(layers)
    )
