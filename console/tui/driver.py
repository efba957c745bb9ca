"""The terminal's driver: Textual's looks for keys ten times a second; this one sleeps until there are any."""

from __future__ import annotations

import codecs
import os
import selectors
import socket
import time
from typing import Any

from textual import constants
from textual._xterm_parser import XTermParser
from textual.drivers.linux_driver import LinuxDriver

_TICK_S = 0.05
_TICKING_S = constants.ESCAPE_DELAY + 2 * _TICK_S
"""For so long after input it may turn out that an escape was the key itself, and began no other."""
_EXIT_S = 0.2
_READ_BYTES = 4096


class TerminalDriver(LinuxDriver):
    """Reads keys on a thread that sleeps until one comes, or until the console leaves the terminal."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._open()

    def _open(self) -> None:
        self._leaving, self._leave = socket.socketpair()

    def disable_input(self) -> None:
        """Read no more keys; the thread has ended then."""
        if self._key_thread is not None and self._key_thread.is_alive():
            self._leave.send(b"\0")
        super().disable_input()

    def close(self) -> None:
        """Give back all there is."""
        super().close()
        self._leaving.close()
        self._leave.close()

    def run_input_thread(self) -> None:
        """Turn what the terminal sends into messages."""
        parser, decoder = XTermParser(self._debug), codecs.getincrementaldecoder("utf-8")(errors="replace")
        ticks_until = time.monotonic() + _TICKING_S
        with selectors.SelectSelector() as selector:  # the one that takes terminals everywhere
            selector.register(self.fileno, selectors.EVENT_READ)
            selector.register(self._leaving, selectors.EVENT_READ)
            while not self.exit_event.is_set():
                timeout_s = _TICK_S if time.monotonic() < ticks_until else None
                ready = {key.fileobj for key, _ in selector.select(timeout_s)}
                if self._leaving in ready:
                    self._leaving.recv(1)
                    self.exit_event.wait(_EXIT_S)  # it is set right after; not by a byte that an ended thread left
                if self.fileno in ready:
                    read = os.read(self.fileno, _READ_BYTES)
                    if not read:  # the terminal is gone, or was never one
                        selector.unregister(self.fileno)
                    for message in parser.feed(text) if (text := decoder.decode(read)) else ():
                        self.process_message(message)
                    ticks_until = time.monotonic() + _TICKING_S
                for message in parser.tick():
                    self.process_message(message)
