"""The torch backend's loads, knobs, gauges and end."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.backends.base import BackendRequest, PrefixChanges
from engine.backends.common.page_keys import page_keys
from engine.backends.torch.backend import TorchBackend
from engine.config import ModelSpec, SamplingParams
from engine.errors import LoadCancelled
from tests.integration.torch_backend.running import TOKENS, Run, alone, ask, load, load_spec, prompt


def test_max_prompts_limits_how_many_run_and_can_change_at_any_time(llama: Path) -> None:
    backend = load(llama, max_prompts=2)
    run = Run(backend, *(ask(str(salt), prompt(salt)) for salt in range(5)))
    run.step()
    assert (backend.stats().decoding, backend.stats().waiting) == (2, 3)
    backend.set_max_prompts(4)
    run.step()
    assert (backend.stats().decoding, backend.stats().waiting) == (4, 1)
    backend.set_max_prompts(1)
    run.step()
    assert (backend.stats().decoding, backend.stats().waiting) == (4, 1)
    assert all(len(tokens) == TOKENS for tokens in run.to_end().values())


def test_stats_tell_how_far_every_request_is(llama: Path) -> None:
    backend = load(llama, step_tokens=32, max_prompts=1)
    run = Run(backend, ask("a", prompt(0, 50)), ask("b", prompt(1)))
    run.step()
    stats = backend.stats()
    assert (stats.prefilling, stats.decoding, stats.waiting, stats.steps) == (1, 0, 1, 1)
    assert [(s.request_id, s.computed_tokens, s.known_tokens) for s in stats.sequences] == [("a", 32, 50), ("b", 0, 20)]
    assert stats.pages_total - stats.pages_free == 7
    assert stats.prompt_tokens_computed == 32
    run.step()
    assert backend.stats().decoding == 1


def test_cancelling_frees_pages_in_every_state(llama: Path) -> None:
    backend = load(llama, step_tokens=16, max_prompts=2)
    run = Run(backend, ask("decodes", prompt(0, 4)), ask("prefills", prompt(1, 60)), ask("waits", prompt(2)))
    run.step()
    for name in ("waits", "prefills", "decodes", "decodes", "unknown"):
        backend.cancel(name)
        backend.check()
    assert not backend.has_work()
    assert backend.step() == []
    assert backend.stats().pages_free == backend.stats().pages_total


def test_min_tokens_holds_end_tokens_back(llama: Path) -> None:
    first = alone(llama, ask("free", prompt(0)))[0]
    params = SamplingParams(temperature=0, min_tokens=1)
    backend = load(llama)
    run = Run(backend)
    run.add(BackendRequest(id="held", prompt_ids=prompt(0), params=params, end_token_ids=(first, 99_999)))
    assert run.to_end()["held"][0] != first


def test_a_load_reports_its_phases_in_order_and_what_it_loaded(llama: Path) -> None:
    phases: list[str] = []
    backend = TorchBackend()
    spec = ModelSpec(path=llama, name="tiny", dtype="float32")
    loaded = load_spec(backend, spec, report=lambda progress: phases.append(progress.phase))
    assert list(dict.fromkeys(phases)) == ["inspect", "weights", "kv_cache", "warm_up"]
    assert loaded.kv_tokens == 4 * 512
    assert (loaded.backend, loaded.vocab_size, loaded.max_model_len, loaded.page_tokens) == ("torch", 320, 512, 8)
    assert loaded.kv_bytes == backend.stats().kv_bytes > 0
    assert loaded.weights_bytes == backend.stats().weights_bytes > 0


@pytest.mark.parametrize("phase", ["weights", "kv_cache", "warm_up"])
def test_a_load_can_be_cancelled_in_every_phase_and_leaves_nothing(llama: Path, phase: str) -> None:
    seen: list[str] = []
    backend = TorchBackend()
    with pytest.raises(LoadCancelled):
        load_spec(
            backend,
            ModelSpec(path=llama, name="tiny", dtype="float32"),
            report=lambda progress: seen.append(progress.phase),
            cancelled=lambda: phase in seen,
        )
    assert backend.stats().weights_bytes == 0
    with pytest.raises(RuntimeError, match="no model"):
        backend.submit(ask("a", prompt(0)))


def test_unloading_forgets_everything_and_can_be_done_twice(llama: Path) -> None:
    backend = load(llama)
    backend.submit(ask("a", prompt(0)))
    backend.unload()
    backend.unload()
    assert not backend.has_work()
    assert backend.step() == []
    assert backend.stats().pages_total == 0
    backend.check()


def test_computed_pages_are_reported_by_the_keys_that_their_prompt_has(llama: Path) -> None:
    backend = TorchBackend()
    load_spec(backend, ModelSpec(path=llama, name="tiny", dtype="float32", prefix_salt=b"salt"), page_tokens=8)
    assert backend.prefix_changes() == PrefixChanges()
    Run(backend, ask("a", prompt(0, 20)), limit=2).to_end()
    assert backend.prefix_changes() == PrefixChanges(added=tuple(page_keys(b"salt", prompt(0, 20), 8)))
    backend.unload()
    assert backend.prefix_changes() == PrefixChanges()
