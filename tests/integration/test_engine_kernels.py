"""All workers of a model compute with the native kernels, or none does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from engine.backends.base import LoadedModel, LoadProgress
from engine.config import ModelSpec
from engine.errors import ModelLoadFailed
from tests.fakes.backend import FakeBackend, Gate
from tests.fakes.engines import Backends, all_ready, ask, read, serving, started, until
from tests.fakes.model import fake_spec


class CompilingBackend(FakeBackend):
    """Computes with the native kernels if it finds them, and may or must."""

    def __init__(self, *, finds: bool, load_gate: Gate | None = None) -> None:
        super().__init__(load_gate=load_gate)
        self._finds = finds

    def load(
        self,
        spec: ModelSpec,
        *,
        max_prompts: int,
        step_tokens: int,
        page_tokens: int,
        report: Callable[[LoadProgress], None],
        cancelled: Callable[[], bool],
    ) -> LoadedModel:
        """Load as every fake does."""
        if spec.native and not self._finds:
            raise ModelLoadFailed("the other workers compute with the native kernels")
        model = super().load(
            spec,
            max_prompts=max_prompts,
            step_tokens=step_tokens,
            page_tokens=page_tokens,
            report=report,
            cancelled=cancelled,
        )
        return msgspec.structs.replace(model, native=self._finds and spec.native is not False)


def natives(backends: Backends) -> list[bool | None]:
    """What each backend was asked to be, in the order in which they were made."""
    return [backend.loaded.native if backend.loaded is not None else None for backend in backends.made]


@pytest.mark.parametrize("first", [True, False])
async def test_a_worker_that_is_added_or_restarted_computes_as_the_first(tmp_path: Path, first: bool) -> None:
    backends = Backends(CompilingBackend(finds=first), then=lambda: CompilingBackend(finds=True))
    async with serving(tmp_path, backends) as engine:
        await engine.reconfigure(num_workers=2)
        await all_ready(engine)
        await engine.restart_worker("w0")
        await until(lambda: len(backends.made) == 3)
        await all_ready(engine)
        assert natives(backends) == [None, first, first]


async def test_a_worker_that_found_kernels_its_sibling_missed_is_loaded_again_without_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    gate = Gate()
    second = CompilingBackend(finds=True, load_gate=gate)
    backends = Backends(CompilingBackend(finds=False), second, then=lambda: CompilingBackend(finds=True))
    async with started(backends, num_workers=2) as engine:
        await engine.load(fake_spec(tmp_path))
        gate.open()
        await until(lambda: len(backends.made) == 3)
        await all_ready(engine)
        assert natives(backends) == [None, None, False]
        assert "its results differ from those of the model's other workers" in caplog.text
        answers = await asyncio.gather(*(read(engine.submit(ask(f"{number}"))) for number in range(4)))
        assert {answer.last.finish for answer in answers} == {"length"}
        assert not second.submitted


async def test_a_worker_that_cannot_have_the_kernels_of_its_siblings_fails_and_says_so(tmp_path: Path) -> None:
    gate = Gate()
    backends = Backends(
        CompilingBackend(finds=True),
        CompilingBackend(finds=False, load_gate=gate),
        then=lambda: CompilingBackend(finds=False),
    )
    async with started(backends, num_workers=2, max_deaths=2) as engine:
        await engine.load(fake_spec(tmp_path))
        gate.open()
        await until(lambda: "failed" in [each.state for each in engine.publish().workers])
        errors = [each.last_error for each in engine.publish().workers if each.state == "failed"]
        assert len(errors) == 1
        assert errors[0] is not None
        assert "the other workers compute with the native kernels" in errors[0].message
        assert (await read(engine.submit(ask("x")))).last.finish == "length"


async def test_a_model_that_is_loaded_again_decides_again(tmp_path: Path) -> None:
    backends = Backends(CompilingBackend(finds=False), then=lambda: CompilingBackend(finds=True))
    async with serving(tmp_path, backends) as engine:
        await engine.unload()
        model = await engine.load(fake_spec(tmp_path))
        assert model.native


async def test_a_load_shows_the_worker_that_loads_and_not_the_one_that_waits(tmp_path: Path) -> None:
    class WaitingBackend(FakeBackend):
        def load(self, spec: ModelSpec, **options: object) -> LoadedModel:  # type: ignore[override]
            report = options["report"]
            assert callable(report)
            report(LoadProgress(phase="wait", done=0, total=0, unit="steps"))
            return super().load(spec, **options)  # type: ignore[arg-type]

    one, other = Gate(2), Gate()

    def phases() -> set[str]:
        return {each.progress.phase for each in engine.publish().workers if each.progress is not None}

    async with started(Backends(FakeBackend(load_gate=one), WaitingBackend(load_gate=other)), num_workers=2) as engine:
        loading = asyncio.create_task(engine.load(fake_spec(tmp_path)))
        await until(lambda: phases() == {"wait", "weights"})
        shown = engine.status.progress
        assert shown is not None
        assert shown.phase == "weights"
        one.open()
        await loading
