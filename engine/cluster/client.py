"""The engine's end of the process that holds Ray: started here, called from any thread, its output put into the log."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import IO

import msgspec

from engine.cluster import messages
from engine.errors import ClusterUnavailable, from_info
from engine.system.child_process import HUB_SECRETS, ROOT, block_stop_signals, python_command
from engine.worker_process.channel import socket_pair
from engine.worker_process.process import signal_name, worker_environment
from engine.worker_process.protocol import split_frames

_TAIL_LINES = 20
_CLOSE_S = 15.0
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"^\[.* [EF] |Error\b")
_log = logging.getLogger("engine")

Result = messages.ClusterView | messages.Started | messages.Done


class DriverClient:
    """One driver process. on_news, on_lost: called on a thread of its own; on_lost once, unless it was closed."""

    def __init__(
        self, on_news: Callable[[messages.OutputLines | messages.Ended], None], on_lost: Callable[[str], None]
    ) -> None:
        """Start the process. Raises ClusterUnavailable."""
        self._on_news = on_news
        self._on_lost = on_lost
        self._calls: dict[int, Future[Result]] = {}
        self._last_id = 0
        self._lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._closed = False
        self._lost = False
        self._sock, theirs = socket_pair()
        try:
            self._process = _spawn(theirs)
        except OSError as error:
            self._sock.close()
            raise ClusterUnavailable(f"the process that joins the cluster could not be started: {error}") from error
        finally:
            theirs.close()
        assert self._process.stdout is not None
        self._logging = threading.Thread(target=self._log_output, args=(self._process.stdout,), daemon=True)
        self._logging.start()
        threading.Thread(target=self._read, name="cluster", daemon=True).start()

    def call(self, request: messages.Request, patience_s: float) -> Result:
        """Send a request and wait for its result. Raises an EngineError; ClusterUnavailable without an answer."""
        future = self.call_soon(request)
        try:
            return future.result(patience_s)
        except TimeoutError:
            name = type(request).__name__.lower()
            hint = f"; Ray: {self._tail[-1]}" if self._tail else ""
            raise ClusterUnavailable(f"the cluster did not answer ({name}) within {patience_s:g} s{hint}") from None

    def call_soon(self, request: messages.Request) -> Future[Result]:
        """Send a request; return the future of its result."""
        future: Future[Result] = Future()
        with self._lock:
            self._last_id += 1
            self._calls[self._last_id] = future
            try:
                if self._lost:
                    raise OSError("it has exited")
                call = messages.Call(id=self._last_id, request=request)
                self._sock.sendall(messages.frame_of(self._encoder.encode(call)))
            except OSError as error:
                del self._calls[self._last_id]
                future.set_exception(ClusterUnavailable(f"the connection to the cluster is lost: {error}"))
        return future

    def close(self) -> None:
        """Leave the cluster and end the process; idempotent. Blocks."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        decoder: msgspec.msgpack.Decoder[messages.News] = msgspec.msgpack.Decoder(messages.News)
        buffer = bytearray()
        try:
            while chunk := self._sock.recv(1 << 16):
                buffer += chunk
                for body in split_frames(buffer):
                    self._take(decoder.decode(body))
        except OSError:
            pass
        except msgspec.MsgspecError:
            _log.exception("the cluster's process sent an invalid message")
        self._end()

    def _take(self, news: messages.News) -> None:
        if not isinstance(news, messages.Reply):
            self._on_news(news)
            return
        with self._lock:
            future = self._calls.pop(news.id, None)
        if future is None:
            return
        if news.error is not None:
            future.set_exception(from_info(news.error))
        else:
            future.set_result(news.result)

    def _end(self) -> None:
        """The process has closed its end, or is about to die."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_S)
        self._logging.join(1.0)
        with self._lock:
            self._lost = True
            calls, self._calls = list(self._calls.values()), {}
        self._sock.close()
        reason = f"the connection to the cluster is lost: the process that held it {self._how()}"
        for future in calls:
            future.set_exception(ClusterUnavailable(reason))
        if not self._closed:
            self._on_lost(reason)

    def _how(self) -> str:
        """How the process ended, with the error that it wrote last."""
        code = self._process.returncode
        if code is None:
            return "does not answer"
        if code < 0:
            return f"was killed by {signal_name(-code)}"
        error = next((line for line in reversed(self._tail) if _ERROR.search(line)), "")
        return f"exited with code {code}" + (f": {error}" if error else "")

    def _log_output(self, stream: IO[bytes]) -> None:
        """Log the output of Ray, which would otherwise reach the screen."""
        for line in stream:
            text = _COLOUR.sub("", line.decode(errors="replace")).rstrip()
            if text and "[state-dump]" not in text:
                self._tail.append(text)
                _log.info("%s", text, extra={"source": "ray"})


def _spawn(sock: socket.socket) -> subprocess.Popen[bytes]:
    """Start it with the keys that Ray itself takes, and the hub's: a node that lacks the model fetches it. In a folder
    of ours, for Ray has all its workers import from the one that it is started in."""
    own = {name for name in os.environ if name.startswith("RAY_")}
    with block_stop_signals():
        return subprocess.Popen(
            python_command("-m", "engine.cluster", "--fd", str(sock.fileno())),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(sock.fileno(),),
            cwd=ROOT,
            start_new_session=True,
            env=worker_environment(HUB_SECRETS | own),
        )
