"""Steps planned ahead that fail, at their launch or when they are read: who must end does, and nobody else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.backends.base import TokenEvent
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.backend import TorchBackend
from engine.backends.torch.prompt_logprobs import ReadPromptStates
from engine.config import SamplingParams
from engine.errors import WorkerFailed
from tests.fakes import queued
from tests.fakes.ahead import Asked, answers, load, plainly, same
from tests.fakes.tiny_models import make_tiny_model

ASKED = {"a": Asked(1), "b": Asked(2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("ahead"), with_tokenizer=False)


class Failing:
    """A backend that plans ahead. fails: raised by launches from here on, first to last, None for one that works.
    spoils: the launch whose first row has no probabilities."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails: list[Exception | None] = []
        self.spoils = -1
        runner, self.queue = queued.use(monkeypatch)
        failing = self

        class Runner(runner):  # type: ignore[valid-type, misc]
            def forward(
                self, chunks: Sequence[ChunkInput], tell: ReadPromptStates | None = None, drawn: Tensor | None = None
            ) -> Tensor:
                error = failing.fails.pop(0) if failing.fails else None
                if error is not None:
                    raise error
                logits = super().forward(chunks, tell, drawn)
                failing.spoils -= 1
                if failing.spoils == 0:
                    logits[0] = torch.nan
                return logits  # type: ignore[no-any-return]

        self.backend = load(folder, Runner)
        queued.guard(self.backend, Runner)

    def started(self, *names: str) -> TorchBackend:
        """With these asked, and two of their tokens answered."""
        for name in names:
            self.backend.submit(ASKED[name].request(name))
        assert tokens(self.backend.step()) == tokens(self.backend.step()) == list(names)
        return self.backend


def tokens(events: Sequence[TokenEvent]) -> list[str]:
    return [event.request_id for event in events if event.token_id is not None]


def test_memory_that_lacks_for_a_step_ahead_costs_nothing_but_the_wait(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(folder, monkeypatch)
    failing.fails = [None, torch.OutOfMemoryError("no room"), None, None, torch.OutOfMemoryError("no room")]
    same(answers(failing.backend, ASKED), plainly(folder, ASKED))
    assert failing.backend.stats().preemptions == 0


def test_a_step_that_no_memory_is_left_for_is_made_smaller_and_done_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(folder, monkeypatch)
    out_of_memory = [torch.OutOfMemoryError("no room") for _ in range(2)]
    failing.fails = [None, None, *out_of_memory]  # ahead, and again once the step before was read
    same(answers(failing.backend, ASKED), plainly(folder, ASKED))
    assert failing.backend.stats().prompts_limit == 1


def test_memory_that_lacks_when_a_step_is_read_takes_both_steps_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing(folder, monkeypatch)
    failing.queue.breaks = torch.OutOfMemoryError("no room")
    same(answers(failing.backend, ASKED), plainly(folder, ASKED))
    assert caplog.text.count("with 16 prompt tokens per step") == 1


def test_a_step_that_fails_when_it_is_read_ends_its_requests_and_not_those_of_the_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(folder, monkeypatch)
    backend = failing.started("a", "b")
    late = {"late": Asked(3)}
    backend.submit(late["late"].request("late"))
    failing.queue.breaks = RuntimeError("a kernel failed")
    events = backend.step()
    assert {event.request_id: event.finish for event in events} == {"a": "error", "b": "error"}
    assert "a kernel failed" in events[0].message
    backend.check()
    found: list[TokenEvent] = []
    while not late["late"].ends(found):
        found += backend.step()
    backend.cancel("late")
    same({"late": found}, plainly(folder, late))
    assert not backend.step() and not backend.has_work()
    assert backend.stats().pages_free == backend.stats().pages_total


def test_a_launch_that_fails_ends_its_requests_once_the_step_before_was_handed_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(folder, monkeypatch)
    backend = failing.started("a")
    failing.fails = [RuntimeError("a kernel failed"), RuntimeError("a kernel failed")]
    assert tokens(backend.step()) == ["a"]
    assert [event.finish for event in backend.step()] == ["error"]
    backend.check()
    assert not backend.has_work()


def test_a_lost_device_ends_the_worker_and_no_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(folder, monkeypatch)
    backend = failing.started("a", "b")
    failing.queue.breaks = torch.AcceleratorError("CUDA error: unspecified launch failure")
    with pytest.raises(WorkerFailed, match="the worker lost its device: CUDA error: unspecified launch failure"):
        backend.step()
    for name in ("a", "b"):
        backend.cancel(name)
    assert not backend.has_work()
    backend.check()


def test_a_request_without_probabilities_fails_alone_and_what_came_of_it_is_dropped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(folder, monkeypatch)
    backend = failing.started("a", "b")
    failing.spoils = 1  # the step that is launched now
    assert tokens(backend.step()) == ["a", "b"]
    events = backend.step()
    assert [(event.request_id, event.finish) for event in events] == [("a", "error"), ("b", None)]
    found = [event for _ in range(4) for event in backend.step()]
    expected = plainly(folder, {"b": ASKED["b"]})["b"]
    assert [event.token_id for event in [events[1], *found]] == [event.token_id for event in expected[3:8]]


def test_requests_that_are_all_cancelled_leave_a_step_that_is_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(folder, monkeypatch)
    backend = failing.started("a", "b")
    for name in ("a", "b"):
        backend.cancel(name)
    assert backend.stats().pages_free < backend.stats().pages_total  # written to by the step that is launched
    assert backend.has_work()
    assert not backend.step()
    assert not backend.has_work()
    assert backend.stats().pages_free == backend.stats().pages_total


def test_an_id_that_is_used_again_at_once_is_another_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(folder, monkeypatch)
    backend = failing.started("a", "b")
    backend.cancel("a")
    again = Asked(5, SamplingParams(temperature=0, max_tokens=6))
    backend.submit(again.request("a"))
    found: list[TokenEvent] = []
    while not again.ends(found):
        found += [event for event in backend.step() if event.request_id == "a"]
        backend.check()
    same({"a": found}, plainly(folder, {"a": again}))
