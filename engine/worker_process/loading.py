"""Loading a model inside a worker: progress at a readable pace, and every failure as a value."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.backends.base import Backend, LoadedModel, LoadPhase, LoadProgress
from engine.config import AdapterSpec, ModelSpec
from engine.errors import EngineError, LoadCancelled, ModelLoadFailed, NoModelLoaded, first_line
from engine.system.slow_disk import ReadWatch
from engine.text.tokenizer import Tokenizer
from engine.worker_process.factory import BackendFactory
from engine.worker_process.protocol import Attached, Load

PROGRESS_INTERVAL_S = 0.1

_logger = logging.getLogger(__name__)


class ProgressThrottle:
    """Passes on the first and the last report of each phase, and of the others one per interval; those of weights with
    the rate of a slow disk."""

    def __init__(
        self,
        send: Callable[[LoadProgress], None],
        clock: Callable[[], float] = time.monotonic,
        reads: ReadWatch | None = None,
    ) -> None:
        self._send = send
        self._clock = clock
        self._reads = reads or ReadWatch(clock)
        self._phase: LoadPhase | None = None
        self._sent_at = 0.0

    def report(self, progress: LoadProgress) -> None:
        """Send the report on, or drop it."""
        now = self._clock()
        if progress.phase == "weights" and (rate := self._reads.slow_bytes_per_s(progress.done)) is not None:
            progress = msgspec.structs.replace(progress, slow_bytes_per_s=rate)
        ends = progress.phase != self._phase or 0 < progress.total <= progress.done
        if ends or now - self._sent_at >= PROGRESS_INTERVAL_S:
            self._phase = progress.phase
            self._sent_at = now
            self._send(progress)


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded model: its backend, its tokenizer and its properties."""

    backend: Backend
    tokenizer: Tokenizer
    model: LoadedModel


def load_replica(
    load: Load,
    create_backend: BackendFactory,
    *,
    report: Callable[[LoadProgress], None],
    cancelled: Callable[[], bool],
) -> Replica:
    """Load the model of `load`; raises EngineError, with nothing left allocated."""
    backend: Backend | None = None
    try:
        tokenizer = Tokenizer.from_folder(Path(load.spec.path))
        backend = create_backend(load.spec)
        limit_torch_threads(process_threads(load.threads, load.spec))
        model = backend.load(
            load.spec,
            max_prompts=load.max_prompts,
            step_tokens=load.step_tokens,
            page_tokens=load.page_tokens,
            report=ProgressThrottle(report).report,
            cancelled=cancelled,
        )
        backend.set_itl_target(load.itl_target_s)
        if cancelled():
            raise LoadCancelled(f"the load of {load.spec.name} was cancelled")
        return Replica(backend=backend, tokenizer=tokenizer, model=model)
    except Exception as error:
        if backend is not None:
            backend.unload()
        if isinstance(error, EngineError):
            raise
        _logger.exception("loading %s failed", load.spec.name)
        raise ModelLoadFailed(f"{load.spec.name} could not be loaded: {first_line(error)}") from error


def attach_adapter(replica: Replica | None, adapter: AdapterSpec) -> Attached:
    """Attach an adapter to the loaded model; return the result as a value."""
    error: EngineError
    try:
        if replica is None:
            raise NoModelLoaded("the worker has no model", state="unloaded")
        return Attached(key=adapter.key, size_bytes=replica.backend.attach(adapter))
    except EngineError as refusal:
        error = refusal
    except Exception as failure:
        _logger.exception("attaching %s failed", adapter.name)
        error = ModelLoadFailed(f"the adapter {adapter.name} could not be attached: {first_line(failure)}")
    return Attached(key=adapter.key, error=error.info)


def process_threads(threads: int, spec: ModelSpec) -> int:
    """Return the CPU threads of each process of a worker with `threads`: it has one for each rank of the model."""
    return max(1, threads // spec.tensor_parallel_size)


def limit_torch_threads(threads: int) -> None:
    """Let torch use that many CPU threads, if the backend brought it into the process."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(max(1, threads))
