"""What is told of prompts, with real (tiny) models: the same as transformers tells, however the prompt is computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModel

from engine.backends.base import BackendRequest, TokenEvent, TokenLogprob
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.prompt_logprobs import ReadPromptStates
from engine.backends.torch.runner import ModelRunner
from engine.config import ModelSpec, SamplingParams
from tests.fakes.oracle import reference_logits
from tests.fakes.tiny_models import ARCHITECTURES, make_tiny_model

PAGE_TOKENS = 8
PROMPT = [7 * position % 300 + 3 for position in range(45)]
TOP = 4

Told = tuple[TokenLogprob | None, ...]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"))


def load(
    path: Path,
    *,
    kv_tokens: int = 2048,
    step_tokens: int = 64,
    ngram_draft: bool = False,
    runner_type: type[ModelRunner] = ModelRunner,
) -> TorchBackend:
    backend = TorchBackend(runner_type)
    backend.load(
        ModelSpec(path=path, name="tiny", dtype="float32", kv_cache_tokens=kv_tokens, ngram_draft=ngram_draft),
        max_prompts=8,
        step_tokens=step_tokens,
        page_tokens=PAGE_TOKENS,
        report=lambda progress: None,
        cancelled=lambda: False,
    )
    return backend


def scored(name: str, prompt: Sequence[int] = PROMPT, *, tokens: int = 1, top: int = TOP) -> BackendRequest:
    params = SamplingParams(temperature=0, seed=0, max_tokens=tokens, prompt_logprobs=top)
    return BackendRequest(id=name, prompt_ids=list(prompt), params=params)


def embedded(name: str, prompt: Sequence[int] = PROMPT) -> BackendRequest:
    params = SamplingParams(seed=0, max_tokens=0)
    return BackendRequest(id=name, prompt_ids=list(prompt), params=params, embed=True)


def run(backend: TorchBackend, *requests: BackendRequest) -> dict[str, list[TokenEvent]]:
    """Every event of each request, which ends at its max_tokens."""
    wanted = {request.id: request.params.max_tokens for request in requests}
    events: dict[str, list[TokenEvent]] = {request.id: [] for request in requests}
    for request in requests:
        backend.submit(request)
    while backend.has_work():
        for event in backend.step():
            events[event.request_id].append(event)
            if len(events[event.request_id]) == wanted[event.request_id]:
                backend.cancel(event.request_id)
        backend.check()
    return events


def told_by(events: Sequence[TokenEvent]) -> Told:
    """What was told of a prompt, with the first event and no other."""
    assert not any(event.prompt_logprobs for event in events[1:])
    return events[0].prompt_logprobs


def assert_as_transformers(folder: Path, told: Told, prompt: Sequence[int] = PROMPT) -> None:
    logs = reference_logits(folder, prompt).log_softmax(dim=-1)
    assert told[0] is None
    assert len(told) == len(prompt)
    for position, record in enumerate(told[1:], 1):
        assert record is not None
        expected = logs[position - 1]
        assert record.token_id == prompt[position]
        assert record.logprob == pytest.approx(float(expected[prompt[position]]), abs=2e-4)
        assert record.rank == 1 + int((expected > expected[prompt[position]]).sum())
        best = expected.topk(TOP)
        assert [token_id for token_id, _ in record.top] == best.indices.tolist()
        assert [logprob for _, logprob in record.top] == pytest.approx(best.values.tolist(), abs=2e-4)


def pooled(folder: Path, prompt: Sequence[int] = PROMPT) -> Tensor:
    """transformers' last hidden states, their mean over the prompt, at length 1."""
    reference = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        states = reference(torch.tensor([list(prompt)])).last_hidden_state[0]
    return torch.nn.functional.normalize(states.mean(dim=0), dim=0)


def vector_of(events: Sequence[TokenEvent]) -> Tensor:
    (event,) = events
    assert (event.finish, event.token_id) == ("stop", None)
    return torch.frombuffer(bytearray(event.vector), dtype=torch.float32)


# --- log-probabilities ----------------------------------------------------------------------------------------------


def test_a_prompts_logprobs_are_those_of_transformers_over_the_borders_of_chunks(model: Path) -> None:
    events = run(load(model, step_tokens=16), scored("a"), scored("b", PROMPT[:1]), scored("c", PROMPT[5:30]))
    assert_as_transformers(model, told_by(events["a"]))
    assert told_by(events["b"]) == (None,)
    assert_as_transformers(model, told_by(events["c"]), PROMPT[5:30])


def test_logprobs_of_a_prompt_that_is_cached_are_computed_all_the_same(llama: Path) -> None:
    backend = load(llama)
    run(backend, scored("first"))
    plain = BackendRequest(id="plain", prompt_ids=PROMPT, params=SamplingParams(seed=0, max_tokens=1))
    assert run(backend, plain)["plain"][0].cached_tokens == 40
    (event,) = run(backend, scored("again"))["again"]
    assert event.cached_tokens == 0
    assert_as_transformers(llama, event.prompt_logprobs)


def test_what_was_told_before_a_preemption_is_told_once(llama: Path) -> None:
    prompts = {str(salt): [(17 * place + 31 * salt) % 300 + 3 for place in range(30)] for salt in range(3)}
    backend = load(llama, kv_tokens=13 * PAGE_TOKENS, step_tokens=16)
    events = run(backend, *(scored(name, prompt, tokens=32) for name, prompt in prompts.items()))
    assert backend.stats().preemptions > 0
    for name, prompt in prompts.items():
        assert_as_transformers(llama, told_by(events[name]), prompt)


def test_a_prompt_that_is_preempted_half_computed_goes_on_telling_where_it_was(llama: Path) -> None:
    backend = load(llama, step_tokens=16)
    backend.submit(scored("a"))
    backend.step()
    assert backend._scheduler is not None
    (sequence,) = backend._scheduler.running
    assert sequence.states_read == 16
    backend._scheduler._preempt(sequence)
    events = []
    while not events:
        events += backend.step()
        backend.check()
    assert sequence.states_read == len(PROMPT) - 1
    assert_as_transformers(llama, events[0].prompt_logprobs)


def test_a_step_that_is_done_again_tells_once(llama: Path) -> None:
    class Forgetful(ModelRunner):
        """Runs out of memory at the end of its third step, when all was told."""

        steps = 0

        def forward(
            self, chunks: Sequence[ChunkInput], tell: ReadPromptStates | None = None, drawn: Tensor | None = None
        ) -> Tensor:
            logits = super().forward(chunks, tell, drawn)
            self.steps += 1
            if self.steps == 3:
                raise torch.OutOfMemoryError("out of memory")
            return logits

    events = run(load(llama, step_tokens=16, runner_type=Forgetful), scored("a"), embedded("b"))
    assert_as_transformers(llama, told_by(events["a"]))
    torch.testing.assert_close(vector_of(events["b"]), pooled(llama), atol=1e-5, rtol=1e-4)


def test_a_prompt_without_finite_probabilities_fails_alone(llama: Path) -> None:
    class Spoiling(ModelRunner):
        """Tells of NaN where a chunk has the token 318."""

        def forward(
            self, chunks: Sequence[ChunkInput], tell: ReadPromptStates | None = None, drawn: Tensor | None = None
        ) -> Tensor:
            def spoilt(index: int, states: object) -> None:
                assert tell is not None
                if 318 in chunks[index].token_ids:
                    states.rows[:] = torch.nan  # type: ignore[attr-defined]
                tell(index, states)  # type: ignore[arg-type]

            return super().forward(chunks, spoilt)

    bad = [318, *PROMPT[1:]]
    events = run(load(llama, runner_type=Spoiling), scored("a", bad), embedded("b", bad), scored("c"))
    assert [(event.finish, "finite" in event.message) for name in "ab" for event in events[name]] == [
        ("error", True)
    ] * 2
    assert_as_transformers(llama, told_by(events["c"]))


def test_no_tokens_asked_for_ends_with_the_prompt(llama: Path) -> None:
    backend = load(llama, step_tokens=16)
    plain = BackendRequest(id="plain", prompt_ids=PROMPT, params=SamplingParams(seed=0, max_tokens=0))
    events = run(backend, scored("scored", tokens=0), plain)
    for name in ("scored", "plain"):
        assert [(event.token_id, event.finish) for event in events[name]] == [(None, "length")]
    assert_as_transformers(llama, told_by(events["scored"]))
    assert backend.stats().pages_free == backend.stats().pages_total


def test_nothing_is_guessed_for_who_wants_no_answer(llama: Path) -> None:
    again = [5, 6, 7, 8] * 4 + [5]  # the last token is a step's only one, and what follows it is easily guessed
    backend = load(llama, step_tokens=16, ngram_draft=True)
    events = run(backend, scored("scored", again, tokens=0), embedded("embedded", again))
    assert_as_transformers(llama, told_by(events["scored"]), again)
    torch.testing.assert_close(vector_of(events["embedded"]), pooled(llama, again), atol=1e-5, rtol=1e-4)
    assert backend.stats().draft_tokens == 0


# --- vectors --------------------------------------------------------------------------------------------------------


def test_a_vector_is_the_mean_of_transformers_last_hidden_states(model: Path) -> None:
    backend = load(model, step_tokens=16)
    for _ in range(2):  # the second time the prompt is cached
        events = run(backend, embedded("a"), embedded("b", PROMPT[:1]), embedded("c", PROMPT[3:20]))
        for name, prompt in (("a", PROMPT), ("b", PROMPT[:1]), ("c", PROMPT[3:20])):
            torch.testing.assert_close(vector_of(events[name]), pooled(model, prompt), atol=1e-5, rtol=1e-4)
    assert backend.stats().pages_free == backend.stats().pages_total


def test_a_vector_leaves_its_pages_to_be_found_by_answers(llama: Path) -> None:
    backend = load(llama)
    run(backend, embedded("a"))
    plain = BackendRequest(id="plain", prompt_ids=PROMPT, params=SamplingParams(seed=0, max_tokens=1))
    assert run(backend, plain)["plain"][0].cached_tokens == 40
