"""The torch backend with real (tiny) models: the same request gives the same tokens however it is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from engine.backends.base import BackendRequest, LoadedModel, LoadProgress, PrefixChanges, TokenEvent
from engine.backends.prefix import page_keys
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.batch import ChunkInput
from engine.backends.torch.prompts import Tell
from engine.backends.torch.runner import ModelRunner
from engine.config import CacheBits, ModelSpec, SamplingParams
from engine.errors import ContextLengthExceeded, InvalidRequest, LoadCancelled
from tests.fakes.tiny_models import ARCHITECTURES, make_tiny_model

TOKENS = 24
GREEDY = SamplingParams(temperature=0)
SEEDED = SamplingParams(seed=11, temperature=1.2, top_p=0.95, frequency_penalty=0.3, repetition_penalty=1.1)
PARAMS = pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), request.param, with_tokenizer=False)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), with_tokenizer=False)


def load(
    path: Path,
    *,
    kv_tokens: int = 2048,
    max_prompts: int = 8,
    step_tokens: int = 256,
    page_tokens: int = 8,
    max_input_len: int | None = None,
    cache_bits: CacheBits = 16,
    runner_type: type[ModelRunner] = ModelRunner,
) -> TorchBackend:
    backend = TorchBackend(runner_type)
    spec = ModelSpec(
        path=path,
        name="tiny",
        dtype="float32",
        kv_cache_tokens=kv_tokens,
        max_input_len=max_input_len,
        cache_bits=cache_bits,
    )
    load_spec(backend, spec, max_prompts=max_prompts, step_tokens=step_tokens, page_tokens=page_tokens)
    return backend


def load_spec(
    backend: TorchBackend,
    spec: ModelSpec,
    *,
    max_prompts: int = 4,
    step_tokens: int = 64,
    page_tokens: int = 8,
    report: Callable[[LoadProgress], None] = lambda progress: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> LoadedModel:
    return backend.load(
        spec,
        max_prompts=max_prompts,
        step_tokens=step_tokens,
        page_tokens=page_tokens,
        report=report,
        cancelled=cancelled,
    )


def prompt(salt: int, length: int = 20) -> list[int]:
    return [(17 * position + 31 * salt) % 300 + 3 for position in range(length)]


def ask(name: str, tokens: list[int], params: SamplingParams = GREEDY, generated: Sequence[int] = ()) -> BackendRequest:
    return BackendRequest(id=name, prompt_ids=tokens, params=params, generated=list(generated))


class Run:
    """Drives a backend as the worker loop does: keeps tokens, ends requests at `limit`, checks after every step."""

    def __init__(self, backend: TorchBackend, *requests: BackendRequest, limit: int = TOKENS) -> None:
        self.backend = backend
        self.limit = limit
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, str] = {}
        self.message: dict[str, str] = {}
        self.cached: dict[str, int] = {}
        for request in requests:
            self.add(request)

    def add(self, request: BackendRequest) -> None:
        self.backend.submit(request)
        self.tokens[request.id] = list(request.generated)

    def step(self) -> Sequence[TokenEvent]:
        events = self.backend.step()
        self.backend.check()
        for event in events:
            assert event.request_id not in self.finish
            if event.token_id is not None:
                self.tokens[event.request_id].append(event.token_id)
            if event.cached_tokens is not None:
                assert event.request_id not in self.cached
                self.cached[event.request_id] = event.cached_tokens
            if event.finish is not None:
                self.finish[event.request_id], self.message[event.request_id] = event.finish, event.message
            elif len(self.tokens[event.request_id]) == self.limit:
                self.backend.cancel(event.request_id)
        return events

    def to_end(self) -> dict[str, list[int]]:
        for _ in range(5000):
            if not self.backend.has_work():
                assert self.backend.stats().pages_free == self.backend.stats().pages_total
                return self.tokens
            self.step()
        raise AssertionError("the backend did not come to an end")


def alone(path: Path, request: BackendRequest) -> list[int]:
    return Run(load(path), request).to_end()[request.id]


# --- one request, one answer ----------------------------------------------------------------------------------------


@PARAMS
def test_a_batch_gives_each_request_what_it_gets_alone(model: Path, params: SamplingParams) -> None:
    requests = [ask(str(salt), prompt(salt, 5 + 7 * salt), params) for salt in range(5)]
    together = Run(load(model), *requests).to_end()
    assert together == {request.id: alone(model, request) for request in requests}


@PARAMS
def test_a_prompt_in_chunks_gives_what_it_gives_whole(model: Path, params: SamplingParams) -> None:
    requests = [ask(str(salt), prompt(salt, 50 + salt), params) for salt in range(3)]
    chunked = Run(load(model, step_tokens=16), *requests).to_end()
    assert chunked == {request.id: alone(model, request) for request in requests}


@PARAMS
def test_a_prefix_hit_gives_what_a_computed_prompt_gives(model: Path, params: SamplingParams) -> None:
    backend = load(model)
    first = Run(backend, ask("first", prompt(1, 45), params))
    expected = first.to_end()["first"]
    again = Run(backend, ask("again", prompt(1, 45), params))
    assert again.to_end()["again"] == expected
    assert first.cached == {"first": 0}
    assert again.cached == {"again": 40}
    longer = ask("longer", [*prompt(1, 45), *expected, 9], params)
    assert Run(backend, longer).to_end()["longer"] == alone(model, longer)


@PARAMS
def test_preempted_requests_give_what_they_give_undisturbed(model: Path, params: SamplingParams) -> None:
    requests = [ask(str(salt), prompt(salt, 20), params) for salt in range(4)]
    backend = load(model, kv_tokens=112)
    crowded = Run(backend, *requests).to_end()
    assert backend.stats().preemptions > 0
    assert crowded == {request.id: alone(model, request) for request in requests}


@PARAMS
@pytest.mark.parametrize("had", [1, 11])
def test_a_request_resumed_elsewhere_goes_on_as_if_nothing_had_happened(
    model: Path, params: SamplingParams, had: int
) -> None:
    whole = alone(model, ask("whole", prompt(3), params))
    resumed = Run(load(model), ask("resumed", prompt(3), params, generated=whole[:had])).to_end()
    assert resumed["resumed"] == whole


def test_requests_that_come_and_go_do_not_disturb_one_that_stays(llama: Path) -> None:
    stays = ask("stays", prompt(0), SEEDED)
    expected = alone(llama, stays)
    run = Run(load(llama, kv_tokens=256, step_tokens=16), stays)
    for number in range(8):
        run.add(ask(f"passing-{number}", prompt(number, 9 + 5 * number), SEEDED))
        run.step()
        run.step()
        run.backend.cancel(f"passing-{number}")
    assert run.to_end()["stays"] == expected


def test_different_knobs_side_by_side_do_not_mix(llama: Path) -> None:
    knobs = [
        GREEDY,
        SEEDED,
        SamplingParams(seed=1, top_k=5, logprobs=3),
        SamplingParams(seed=2, min_p=0.1, min_tokens=10),
        SamplingParams(temperature=0, logit_bias={7: 100.0}),
    ]
    requests = [ask(str(number), prompt(number), params) for number, params in enumerate(knobs)]
    together = Run(load(llama), *requests).to_end()
    assert together == {request.id: alone(llama, request) for request in requests}
    assert together["4"] == [7] * TOKENS


# --- dead ends ------------------------------------------------------------------------------------------------------


def test_the_only_request_that_runs_out_of_pages_ends_with_length(llama: Path) -> None:
    run = Run(load(llama, kv_tokens=32), ask("a", prompt(0, 20)), limit=1000)
    tokens = run.to_end()["a"]
    assert run.finish == {"a": "length"}
    assert len(tokens) == 32 - 20 + 1


def test_a_request_at_the_contexts_end_ends_with_length(llama: Path) -> None:
    run = Run(load(llama, kv_tokens=1024), ask("a", prompt(0, 500)), limit=1000)
    assert len(run.to_end()["a"]) == 512 - 500
    assert run.finish == {"a": "length"}


def test_a_prompt_that_can_never_fit_is_refused_with_numbers(llama: Path) -> None:
    backend = load(llama, kv_tokens=64)
    with pytest.raises(ContextLengthExceeded, match="65 tokens, more than the 64") as refused:
        backend.submit(ask("a", prompt(0, 65)))
    assert refused.value.details["prompt_tokens"] == 65
    with pytest.raises(ContextLengthExceeded, match="512 tokens, more than the 511"):
        load(llama).submit(ask("b", prompt(0, 512)))
    with pytest.raises(ContextLengthExceeded, match="max_input_len is 30"):
        load(llama, max_input_len=30).submit(ask("c", prompt(0, 31)))
    assert not backend.has_work()


def test_tokens_outside_the_vocabulary_are_refused_by_name(llama: Path) -> None:
    backend = load(llama)
    for request, param in (
        (ask("a", [5, 320]), "prompt"),
        (ask("b", [5], generated=[-1]), "generated"),
        (ask("c", [5], SamplingParams(logit_bias={400: 1.0})), "logit_bias"),
        (ask("d", []), "prompt"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            backend.submit(request)
        assert refused.value.details["param"] == param
    assert not backend.has_work()


def test_an_id_cannot_be_taken_twice(llama: Path) -> None:
    backend = load(llama)
    backend.submit(ask("a", prompt(0)))
    with pytest.raises(InvalidRequest, match="id a"):
        backend.submit(ask("a", prompt(1)))


# --- failures -------------------------------------------------------------------------------------------------------


class Moody(ModelRunner):
    """A runner that fails at a prompt that begins with BREAKS, and computes NaN for one that begins with SPOILS."""

    BREAKS, SPOILS = 318, 319

    def forward(self, chunks: Sequence[ChunkInput], tell: Tell | None = None) -> torch.Tensor:
        first = [chunk.token_ids[0] if chunk.start == 0 else None for chunk in chunks if chunk.sample]
        if self.BREAKS in first:
            raise RuntimeError("a kernel failed")
        logits = super().forward(chunks, tell)
        for index, token_id in enumerate(first):
            if token_id == self.SPOILS:
                logits[index] = torch.nan
        return logits


def narrow(room: int) -> type[ModelRunner]:
    """A runner with memory for `room` tokens a step, after the first step, which is the warm-up."""

    class Narrow(ModelRunner):
        warm = False

        def forward(self, chunks: Sequence[ChunkInput], tell: Tell | None = None) -> torch.Tensor:
            if self.warm and sum(len(chunk.token_ids) for chunk in chunks) > room:
                raise torch.OutOfMemoryError("out of memory")
            self.warm = True
            return super().forward(chunks, tell)

    return Narrow


def test_a_step_that_fails_ends_its_requests_with_the_reason_and_the_next_work(llama: Path) -> None:
    backend = load(llama, runner_type=Moody)
    run = Run(backend, ask("a", [Moody.BREAKS, 5, 6]), ask("b", prompt(1)))
    run.step()
    assert run.finish == {"a": "error", "b": "error"}
    assert "RuntimeError: a kernel failed" in run.message["a"]
    assert backend.stats().pages_free == backend.stats().pages_total
    after = ask("after", prompt(1))
    assert Run(backend, after).to_end()["after"] == alone(llama, after)


def test_a_request_without_finite_probabilities_fails_alone(llama: Path) -> None:
    other = ask("b", prompt(1))
    run = Run(load(llama, runner_type=Moody), ask("a", [Moody.SPOILS, *prompt(0)]), other)
    assert run.to_end()["b"] == alone(llama, other)
    assert run.finish == {"a": "error"}
    assert "finite" in run.message["a"]


def test_a_step_that_runs_out_of_memory_is_made_smaller_and_done_again(llama: Path) -> None:
    requests = [ask(str(salt), prompt(salt, 60)) for salt in range(4)]
    backend = load(llama, runner_type=narrow(40))
    run = Run(backend, *requests)
    assert run.to_end() == {request.id: alone(llama, request) for request in requests}
    assert not run.finish


def crowded(room: int) -> type[ModelRunner]:
    """A runner with memory for `room` sequences a step, after the first step, which is the warm-up."""

    class Crowded(ModelRunner):
        warm = False

        def forward(self, chunks: Sequence[ChunkInput], tell: Tell | None = None) -> torch.Tensor:
            if self.warm and len(chunks) > room:
                raise torch.OutOfMemoryError("out of memory")
            self.warm = True
            return super().forward(chunks, tell)

    return Crowded


def test_how_many_requests_memory_allows_is_found_kept_and_told(llama: Path) -> None:
    requests = [ask(str(salt), prompt(salt)) for salt in range(8)]
    backend = load(llama, runner_type=crowded(3))
    run = Run(backend, *requests)
    assert run.to_end() == {request.id: alone(llama, request) for request in requests}
    assert not run.finish
    assert backend.stats().prompts_limit == 3
    preemptions = backend.stats().preemptions
    Run(backend, *(ask(f"later {salt}", prompt(salt)) for salt in range(8))).to_end()
    assert (backend.stats().prompts_limit, backend.stats().preemptions) == (3, preemptions)
    backend.set_max_prompts(2)
    assert backend.stats().prompts_limit == 0


def test_a_request_that_no_step_has_memory_for_fails_with_the_reason(llama: Path) -> None:
    run = Run(load(llama, runner_type=narrow(0)), ask("a", prompt(0)))
    run.to_end()
    assert run.finish == {"a": "error"}
    assert "not enough memory" in run.message["a"]


# --- life -----------------------------------------------------------------------------------------------------------


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
