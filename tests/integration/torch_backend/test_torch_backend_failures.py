"""Dead ends and failures of the torch backend: each ends well, and for nobody but whom it concerns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.prompt_logprobs import ReadPromptStates
from engine.backends.torch.runner import ModelRunner
from engine.config import SamplingParams
from engine.errors import ContextLengthExceeded, InvalidRequest
from tests.integration.torch_backend.running import Run, alone, ask, load, prompt


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
    with pytest.raises(ContextLengthExceeded, match="65 tokens, more than the limit of 64") as refused:
        backend.submit(ask("a", prompt(0, 65)))
    assert refused.value.details["prompt_tokens"] == 65
    with pytest.raises(ContextLengthExceeded, match="512 tokens, more than the limit of 511"):
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


class Moody(ModelRunner):
    """A runner that fails at a prompt that begins with BREAKS, and computes NaN for one that begins with SPOILS."""

    BREAKS, SPOILS = 318, 319

    def forward(
        self, chunks: Sequence[ChunkInput], tell: ReadPromptStates | None = None, drawn: torch.Tensor | None = None
    ) -> torch.Tensor:
        first = [chunk.token_ids[0] if chunk.start == 0 else None for chunk in chunks if chunk.sample]
        if self.BREAKS in first:
            raise RuntimeError("a kernel failed")
        logits = super().forward(chunks, tell, drawn)
        for index, token_id in enumerate(first):
            if token_id == self.SPOILS:
                logits[index] = torch.nan
        return logits


def narrow(room: int) -> type[ModelRunner]:
    """A runner with memory for `room` tokens a step, after the first step, which is the warm-up."""

    class Narrow(ModelRunner):
        warm = False

        def forward(
            self, chunks: Sequence[ChunkInput], tell: ReadPromptStates | None = None, drawn: torch.Tensor | None = None
        ) -> torch.Tensor:
            if self.warm and sum(len(chunk.token_ids) for chunk in chunks) > room:
                raise torch.OutOfMemoryError("out of memory")
            self.warm = True
            return super().forward(chunks, tell, drawn)

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

        def forward(
            self, chunks: Sequence[ChunkInput], tell: ReadPromptStates | None = None, drawn: torch.Tensor | None = None
        ) -> torch.Tensor:
            if self.warm and len(chunks) > room:
                raise torch.OutOfMemoryError("out of memory")
            self.warm = True
            return super().forward(chunks, tell, drawn)

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
    assert run.backend.stats().oom_steps > 0
    assert run.finish == {"a": "error"}
    assert "out of memory" in run.message["a"]
