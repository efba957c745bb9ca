"""Chat templates: Jinja programs that come with a model and turn messages into its prompt text."""

from __future__ import annotations

import asyncio
import marshal
import os
import re
import select
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Any

from engine.errors import EngineError, InvalidRequest
from engine.system.child_process import ROOT, block_stop_signals, child_environment, python_command
from engine.text.printable import printable
from engine.text.template_protocol import LENGTH, OUT_OF_MEMORY, Answer

MAX_SOURCE = 2**18
"""Characters of a template."""

_MAX_SENTENCE = 500
_READ_BYTES = 2**20
_END_S = 5.0

_ALLOCATION = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**17)}
"""glibc gives long texts back at once then, so that one rendering's memory is not the next one's."""


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Limits of one rendering: processor time, memory and bytes of text, the latter two beyond what the size of its
    messages explains, and time on the clock, for a machine that has no processor to spare."""

    cpu_s: float = 1.0
    memory_bytes: int = 64 * 2**20
    text_bytes: int = 8 * 2**20
    wait_s: float = 30.0


LIMITS = TemplateLimits()
_END_MARK = "TheAnswerGoesOnFromHere"


class ChatTemplate:
    """One template, which runs in a process of its own: a model's template is a program of unknown origin.

    The process starts with the first use, serves one rendering after another, and ends with `close` or this object. One
    that takes too much is killed; the next rendering has a new one. Clients whose conversations wait take turns, and of
    each its shortest is next: however many one has, long or short, the others wait for one of them.
    variables: what the template may use besides the messages, bos_token and eos_token among them.
    """

    def __init__(self, source: str, variables: Mapping[str, str], limits: TemplateLimits = LIMITS) -> None:
        self.source = source
        self._variables = dict(variables)
        self._limits = limits
        self._thread = ThreadPoolExecutor(1, "chat-template")
        self._waiting = _Waiting()
        self._process: _Process | None = None
        self._warming: _Process | None = None
        self._is_closed = False
        self._broken = ""
        self._used: dict[str, bool] = {}

    def warm_up(self) -> Future[None]:
        """Start the process and compile the template, so that the first rendering waits for neither; undoes `close`."""
        self._is_closed = False
        return self._thread.submit(self._warm_up)

    def close(self) -> Future[None]:
        """End the process once nothing waits to be rendered, a warm-up at once; the future is done then. What is still
        asked for after that is rendered too, each time in a process that ends at once."""
        self._is_closed = True
        if (warming := self._warming) is not None:
            warming.kill()
        return self._thread.submit(self._end_if_unused)

    def uses(self, variable: str) -> bool:
        """Return whether an expression or a statement of the template has that name in it; found once for each name."""
        if variable not in self._used:
            self._used[variable] = self._finds(variable)
        return self._used[variable]

    def _finds(self, variable: str) -> bool:
        if len(self.source) > MAX_SOURCE:
            return False
        is_inside = False
        for found in re.finditer(rf"\{{[%{{]|[%}}]\}}|\b{re.escape(variable)}\b", self.source):
            if found[0] == variable:
                if is_inside:
                    return True
            else:
                is_inside = found[0][0] == "{"
        return False

    async def render(
        self,
        messages: Sequence[Mapping[str, object]],
        client: str = "",
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        **kwargs: object,
    ) -> str:
        """The prompt text of `messages`, with `kwargs` as further variables; all are plain JSON. client: who asks.

        continue_final: it ends with the text of the last message, which the answer continues.
        Raises InvalidRequest with the template's own complaint, or where it fails or takes more than its limits, and
        EngineError where this machine fails it.
        """
        variables = {
            **self._variables,
            "messages": _marked(messages) if continue_final else list(map(dict, messages)),
            "add_generation_prompt": add_generation_prompt,
            "tools": tools or None,
            "documents": None,
        }
        try:
            text = await asyncio.wrap_future(self._answer(client, _pack_job("render", variables | kwargs)))
        except _Refused as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from None
        except _Lost as error:
            raise EngineError(f"the model's chat template could not be rendered: {error}") from None
        except _Failed as error:
            raise InvalidRequest(
                f"the model's chat template cannot render these messages: {error}", param="messages"
            ) from None
        return _up_to_mark(text) if continue_final else text

    def _answer(self, client: str, job: bytes) -> Future[str]:
        answer: Future[str] = Future()
        self._waiting.add(client, job, answer)
        self._thread.submit(self._answer_next)
        return answer

    def _answer_next(self) -> None:
        """Do the next job that waits, unless its answer was cancelled."""
        job, answer = self._waiting.take()
        try:
            if answer.set_running_or_notify_cancel():
                answer.set_result(self._ensure_compiled().ask(job))
        except BaseException as error:
            answer.set_exception(error)
        finally:
            del answer  # it has the error, whose traceback leads here: nothing that is a cycle ends soon
            self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self._is_closed and not self._waiting and self._process is not None:
            self._process.end()
            self._process = None

    def _warm_up(self) -> None:
        with suppress(_Failed):  # the first rendering says so
            self._ensure_compiled(is_warm_up=True)

    def _ensure_compiled(self, *, is_warm_up: bool = False) -> _Process:
        """The process, with the template in it. A template that cannot be compiled is not tried again."""
        if self._broken:
            raise _Failed(self._broken)
        if self._process is None or self._process.has_ended:
            if len(self.source) > MAX_SOURCE:
                self._broken = f"it is longer than {MAX_SOURCE} characters"
                raise _Failed(self._broken)
            process = _Process(self._limits)
            self._warming = process if is_warm_up else None
            try:
                if is_warm_up and self._is_closed:
                    process.kill()
                process.ask(_pack_job("compile", self.source))
            except _Failed as error:
                self._broken = "" if isinstance(error, _Lost) else str(error)
                raise
            finally:
                self._warming = None
            self._process = process
        return self._process


def _marked(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return messages with a mark at the end of the last one, which templates neither trim nor take for a token."""
    *before, last = map(dict, messages)
    content = str(last.get("content") or "")
    return [*before, last | {"content": content + _END_MARK} if content.strip() else last]


def _up_to_mark(text: str) -> str:
    """Return `text` up to its mark, without what a template adds after a message."""
    found = text.rfind(_END_MARK)
    if found < 0:
        raise InvalidRequest(
            "the last message cannot be continued: the model's chat template does not render it unchanged",
            param="messages",
        )
    return text[:found]


class _Waiting:
    """Jobs that wait, by client. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._order = count()
        self._by_client: dict[str, list[tuple[int, int, bytes, Future[str]]]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_client)

    def add(self, client: str, job: bytes, answer: Future[str]) -> None:
        """Put a job into its client's queue; a client that had none comes after all others."""
        with self._lock:
            heappush(self._by_client.setdefault(client, []), (len(job), next(self._order), job, answer))

    def take(self) -> tuple[bytes, Future[str]]:
        """Take the shortest job of the client that has waited longest for a turn."""
        with self._lock:
            client = next(iter(self._by_client))
            jobs = self._by_client.pop(client)
            _, _, job, answer = heappop(jobs)
            if jobs:
                self._by_client[client] = jobs
        return job, answer


class _Failed(Exception):
    """Why a template made no text of its messages."""


class _Lost(_Failed):
    """The process ended, or did not answer, for no reason of the template's."""


class _Refused(Exception):
    """The template's own complaint about its messages."""


class _Process:
    """One renderer, for one thread at a time. It ends with this object."""

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        command = python_command("-m", "engine.text.template_sandbox", str(limits.cpu_s), str(limits.memory_bytes))
        try:
            with block_stop_signals():
                self._child = subprocess.Popen(
                    command,
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    cwd=ROOT,
                    env=child_environment() | _ALLOCATION,
                    start_new_session=True,
                )
        except OSError as error:
            raise _Lost(f"its process cannot be started ({error.strerror})") from error
        assert self._child.stdin is not None and self._child.stdout is not None
        self._jobs, self._answers = self._child.stdin.fileno(), self._child.stdout.fileno()
        os.set_blocking(self._jobs, False)
        self.end = weakref.finalize(self, _end, self._child)

    def kill(self) -> None:
        """End it, from any thread: what is being asked is lost."""
        self._child.kill()

    @property
    def has_ended(self) -> bool:
        """It takes no further job."""
        return self._child.poll() is not None

    def ask(self, job: bytes) -> str:
        """Return the text of the answer to a packed job.

        Raises _Refused or _Failed; unless the template itself or the sandbox complained, the process has ended.
        """
        until_s = time.monotonic() + self._limits.wait_s
        try:
            self._write(LENGTH.pack(len(job)) + job, until_s)
            [length] = LENGTH.unpack(self._read(LENGTH.size, until_s))
            if length > self._limits.text_bytes + 4 * len(job):
                raise _Failed(f"its output has {length:,} bytes")
            answer = self._read(max(1, length), until_s)
            text = answer[1:].decode("utf-8", "surrogatepass")
        except BaseException as error:
            _end(self._child, kill_at_once=not isinstance(error, EOFError | BrokenPipeError))
            if isinstance(error, OSError | EOFError | UnicodeDecodeError):
                raise self._failure(error) from None
            raise
        if answer[0] == Answer.DONE:
            return text
        complaint = printable(text)[:_MAX_SENTENCE]
        raise _Refused(complaint) if answer[0] == Answer.REFUSED else _Failed(complaint)

    def _write(self, data: bytes, until_s: float) -> None:
        view = memoryview(data)
        while view:
            _wait(self._jobs, select.POLLOUT, until_s)
            view = view[os.write(self._jobs, view[:_READ_BYTES]) :]

    def _read(self, length: int, until_s: float) -> bytearray:
        data = bytearray()
        while len(data) < length:
            _wait(self._answers, select.POLLIN, until_s)
            part = os.read(self._answers, min(_READ_BYTES, length - len(data)))
            if not part:
                raise EOFError
            data += part
        return data

    def _failure(self, error: Exception) -> _Failed:
        """Return why there is no answer."""
        limits, status = self._limits, self._child.returncode
        if isinstance(error, TimeoutError):
            return _Lost(f"it took longer than {limits.wait_s:g} s")
        if status == -signal.SIGPROF:
            return _Failed(f"it takes longer than {limits.cpu_s:g} s of processor time")
        if status == OUT_OF_MEMORY:
            return _Failed(f"it takes more than {limits.memory_bytes / 2**20:g} MiB of memory in addition")
        return _Lost(f"its process ended with status {status}")


def _pack_job(kind: str, value: Any) -> bytes:
    """A job for the process."""
    try:
        return marshal.dumps((kind, value))
    except ValueError:  # it takes all that JSON has but what is nested more deeply than any message
        raise _Failed("they are nested too deeply") from None


def _wait(descriptor: int, event: int, until_s: float) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, until_s - time.monotonic()) * 1000):
        raise TimeoutError


def _end(child: subprocess.Popen[bytes], *, kill_at_once: bool = True) -> None:
    """End a process; one that is ending by itself has a while for that, so that its status is its own."""
    with suppress(subprocess.TimeoutExpired):
        child.wait(0 if kill_at_once else _END_S)
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
