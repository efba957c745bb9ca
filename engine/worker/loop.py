"""The loop of one model replica: drain commands, one backend step, text stage, one event batch."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable

import psutil

from engine.backends.base import Backend, BackendRequest, BackendStats, PrefixChanges, TokenEvent
from engine.errors import EngineError, InvalidRequest, NoModelLoaded, WorkerFailed
from engine.text.masks import GrammarMasks
from engine.worker import protocol
from engine.worker.answer import Answer
from engine.worker.channel import WorkerChannel
from engine.worker.factory import BackendFactory
from engine.worker.loading import Replica, attach_adapter, limit_torch_threads, load_replica, reason
from engine.worker.masking import Masking
from engine.worker.outbox import Outbox

HEARTBEAT_S = 1.0
GAUGE_S = 1.0
COMPILING_S = 0.005
MAX_FAILED_STEPS = 2

_logger = logging.getLogger(__name__)


class WorkerLoop:
    """Runs one backend on the calling thread for whoever holds the other end of `channel`.

    before_load: called with each Load before anything of it happens.
    strict: a failed backend check ends the worker instead of being logged (for tests).
    """

    def __init__(
        self,
        channel: WorkerChannel,
        create_backend: BackendFactory,
        *,
        before_load: Callable[[protocol.Load], None] | None = None,
        strict: bool = False,
    ) -> None:
        self._channel = channel
        self._create_backend = create_backend
        self._before_load = before_load
        self._strict = strict
        self._process = psutil.Process()
        self._replica: Replica | None = None
        self._answers: dict[str, Answer] = {}
        self._masking: Masking | None = None
        self._outbox = Outbox()
        self._gauged_s = -math.inf
        self._rss_bytes = 0
        self._leaving: set[str] = set()
        self._failed_steps = 0
        self._unchecked = False
        self._stopping = False

    def run(self) -> bool:
        """Work until Shutdown or the channel's end, then unload; False where the backend broke for good."""
        self._channel.send(protocol.Hello(pid=os.getpid()))
        try:
            while not (self._stopping or self._channel.closed):
                self._turn()
            return True
        except Exception as error:
            _logger.exception("the worker cannot go on")
            broken = error if isinstance(error, WorkerFailed) else WorkerFailed(f"the worker broke: {reason(error)}")
            self._channel.send(protocol.WorkerError(error=broken.info))
            return False
        finally:
            try:
                self._unload()
            finally:
                self._channel.close()

    def _turn(self) -> None:
        """Obey what has come, then do one step; with nothing to do, wait up to a heartbeat and say how things are."""
        self._detach_unused()
        busy = self._busy_backend() is not None
        if not busy:
            self._check()
        patience_s = COMPILING_S if self._masking else HEARTBEAT_S
        command = self._channel.take(0.0 if busy or self._outbox.holds else patience_s)
        if command is not None and self._outbox.holds:
            self._send_batch()  # it may make the next step a long one
        while command is not None:
            self._obey(command)
            if self._stopping:
                return
            command = self._channel.take()
        self._take_masks()
        backend = self._busy_backend()
        if backend is not None:
            self._step(backend)
        else:
            self._send_batch()

    def _busy_backend(self) -> Backend | None:
        backend = self._replica.backend if self._replica is not None else None
        return backend if backend is not None and backend.has_work() else None

    # --- commands -------------------------------------------------------------------------------------

    def _obey(self, command: protocol.Command) -> None:
        match command:
            case protocol.Submit(request=request):
                self._submit(request)
            case protocol.Cancel(request_id=request_id):
                self._forget(request_id)
            case protocol.SetMaxPrompts(max_prompts=max_prompts):
                if self._replica is not None:
                    self._replica.backend.set_max_prompts(max_prompts)
            case protocol.SetThreads(threads=threads):
                limit_torch_threads(threads)
            case protocol.Attach(adapter=adapter):
                self._leaving.discard(adapter.name)
                self._channel.send(attach_adapter(self._replica, adapter))
            case protocol.Detach(name=name):
                self._leaving.add(name)
            case protocol.Load():
                self._load(command)
            case protocol.CancelLoad():
                pass  # the load that it meant is over
            case protocol.Shutdown():
                self._stopping = True

    def _load(self, load: protocol.Load) -> None:
        self._unload()
        if self._before_load is not None:
            self._before_load(load)
        started_s = time.monotonic()
        try:
            self._replica = load_replica(
                load,
                self._create_backend,
                report=lambda progress: self._channel.send(protocol.Progress(progress=progress)),
                cancelled=lambda: self._channel.closed or self._channel.holds(protocol.CancelLoad, protocol.Shutdown),
            )
        except EngineError as error:
            self._channel.send(protocol.LoadFailed(error=error.info))
            return
        attached = [attach_adapter(self._replica, adapter) for adapter in load.adapters]
        self._failed_steps = 0
        self._masking = Masking(GrammarMasks(self._replica.tokenizer, self._replica.model.vocab_size))
        self._gauged_s = -math.inf  # what it took is read off the next report
        self._channel.send(protocol.Loaded(model=self._replica.model, load_s=time.monotonic() - started_s))
        for answer in attached:
            self._channel.send(answer)

    def _unload(self) -> None:
        self._answers.clear()
        self._masking = None
        self._outbox = Outbox()
        self._leaving.clear()
        if self._replica is not None:
            self._replica.backend.unload()
            self._replica = None

    def _detach_unused(self) -> None:
        """Detach the adapters that are to go and that no live request names: any may have to begin anew somewhere."""
        if not self._leaving:
            return
        unused = self._leaving - {answer.adapter for answer in self._answers.values()}
        self._leaving -= unused
        if self._replica is not None:
            for name in unused:
                self._replica.backend.detach(name)

    def _submit(self, request: BackendRequest) -> None:
        self._channel.send(protocol.Taken(request_id=request.id))
        try:
            if self._replica is None:
                raise NoModelLoaded("the worker holds no model", state="unloaded")
            if request.id in self._answers:
                self._forget(request.id)
                raise InvalidRequest(f"a request with the id {request.id} is already being worked on", param="id")
            answer = Answer(self._replica.tokenizer, request)
            if answer.finish is not None:
                self._outbox.of(request.id).finish = answer.finish
                return
            if request.params.grammar is None or self._masking is None:
                self._replica.backend.submit(request)
            else:
                self._masking.begin(request)
            self._answers[request.id] = answer
        except EngineError as error:
            self._outbox.of(request.id).fail(error.info)
        except Exception as error:
            _logger.exception("request %s could not be taken", request.id)
            self._outbox.of(request.id).fail(f"the request could not be taken: {reason(error)}")

    def _take_masks(self) -> None:
        """Give the backend the requests whose grammars are compiled."""
        if not self._masking or self._replica is None:
            return
        for request, compiling in self._masking.done():
            answer, output = self._answers[request.id], self._outbox.of(request.id)
            try:
                answer.mask = compiling.result()
                self._replica.backend.submit(request, answer.mask)
            except EngineError as error:
                output.fail(error.info)
            except Exception as error:
                _logger.exception("request %s could not be held to its grammar", request.id)
                output.fail(f"the request could not be taken: {reason(error)}")
            if output.finish is not None:
                del self._answers[request.id]

    def _forget(self, request_id: str) -> None:
        self._outbox.drop(request_id)
        if self._masking is not None:
            self._masking.forget(request_id)
        if self._answers.pop(request_id, None) is not None and self._replica is not None:
            self._replica.backend.cancel(request_id)

    # --- steps ----------------------------------------------------------------------------------------

    def _step(self, backend: Backend) -> None:
        started_s, answers = time.monotonic(), 0
        self._unchecked = True
        try:
            events = backend.step()
        except Exception as error:
            self._step_failed(error, backend)
        else:
            self._failed_steps = 0
            for event in events:
                answers += event.token_id is not None and event.cached_tokens is None
                self._apply(event, backend)
            for answer in [answer for answer in self._answers.values() if answer.rewinding]:
                self._rewind(answer, backend)
        if self._outbox.stepped(started_s, time.monotonic(), answers):
            self._send_batch(everything=False)

    def _apply(self, event: TokenEvent, backend: Backend) -> None:
        """One token through its request's text stage; tokens past a request's end, or taken back, are dropped."""
        answer = self._answers.get(event.request_id)
        if answer is None or answer.rewinding:
            return
        output = self._outbox.of(event.request_id)
        try:
            answer.take(event, output)
        except Exception as error:
            _logger.exception("the text of request %s failed", event.request_id)
            output.fail(f"the answer's text could not be made: {reason(error)}")
        if output.finish is not None:
            del self._answers[event.request_id]
            if event.finish is None:
                backend.cancel(event.request_id)

    def _rewind(self, answer: Answer, backend: Backend) -> None:
        """Have the backend go another way from where a banned string began; the prefix cache makes that cheap."""
        backend.cancel(answer.id)
        output = self._outbox.of(answer.id)
        try:
            request = answer.rewound()
            if answer.mask is not None:
                answer.mask.restart(request.generated)
            backend.submit(request, answer.mask)
        except EngineError as error:
            output.fail(error.info)
        except Exception as error:
            _logger.exception("request %s could not go on", answer.id)
            output.fail(f"the request could not go on: {reason(error)}")
        if output.finish is not None:
            del self._answers[answer.id]

    def _step_failed(self, error: Exception, backend: Backend) -> None:
        """Fail everybody who was in the step; give up when steps go on failing."""
        _logger.exception("a step failed")
        for request_id in [name for name in self._answers if self._masking is None or name not in self._masking]:
            del self._answers[request_id]
            backend.cancel(request_id)
            self._outbox.of(request_id).fail(f"the step failed: {reason(error)}")
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS:
            self._send_batch()
            raise WorkerFailed(f"{self._failed_steps} steps in a row failed: {reason(error)}") from error

    def _check(self) -> None:
        """The backend's accounts, once after it became idle."""
        if not self._unchecked or self._replica is None:
            return
        self._unchecked = False
        try:
            self._replica.backend.check()
        except AssertionError as error:
            if self._strict:
                raise
            _logger.error("the backend's accounts do not add up: %s", reason(error))

    def _send_batch(self, *, everything: bool = True) -> None:
        """Tell the engine what steps brought since the last time, what may wait too if `everything`, and how it is."""
        now_s = time.monotonic()
        if now_s - self._gauged_s >= GAUGE_S:
            self._gauged_s, self._rss_bytes = now_s, self._process.memory_info().rss
        done = self._outbox.done
        backend = self._replica.backend if self._replica is not None else None
        self._channel.send(
            protocol.StepBatch(
                outputs=self._outbox.take(everything=everything),
                stats=backend.stats() if backend is not None else BackendStats(),
                steps=done.steps,
                step_s=done.seconds / done.steps if done.steps else 0.0,
                answers=done.answers,
                rss_bytes=self._rss_bytes,
                prefix=backend.prefix_changes() if backend is not None else PrefixChanges(),
            )
        )
