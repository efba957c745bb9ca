"""The driver of the terminal: keys arrive, its thread sleeps while there are none, and ends when it is to."""

from __future__ import annotations

import os
import queue
import selectors
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from textual import events
from textual.message import Message

from console.tui.driver import TerminalDriver

PATIENCE_S = 10.0


class Selector(selectors.SelectSelector):
    """Notes how long each look waits for."""

    waits: queue.Queue[float | None]

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Look."""
        self.waits.put(timeout)
        return super().select(timeout)


class Driver(TerminalDriver):
    """One without a terminal to set up. messages: what it has read."""

    def __init__(self, fileno: int) -> None:
        self.messages: queue.Queue[Message] = queue.Queue()
        self.exit_event = threading.Event()
        self.fileno = fileno
        self._debug = False
        self._writer_thread = None
        self._open()
        self._key_thread = threading.Thread(target=self.run_input_thread)
        self._key_thread.start()

    def process_message(self, message: Message) -> None:
        """Keep it."""
        self.messages.put(message)

    def _disable_mouse_support(self) -> None:
        pass


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> queue.Queue[float | None]:
    """What each look waits for."""
    found: queue.Queue[float | None] = queue.Queue()
    monkeypatch.setattr(Selector, "waits", found, raising=False)
    monkeypatch.setattr("console.tui.driver.selectors.SelectSelector", Selector)
    return found


@pytest.fixture
def terminal(waits: queue.Queue[float | None]) -> Iterator[tuple[Driver, int]]:
    """A driver, and what its terminal sends."""
    read, write = os.pipe()
    driver = Driver(read)
    yield driver, write
    driver.disable_input()
    driver.close()
    os.close(read)
    os.close(write)


def until_asleep(waits: queue.Queue[float | None]) -> None:
    """Wait until the thread waits for nothing but keys."""
    while waits.get(timeout=PATIENCE_S) is not None:
        pass


def test_a_thread_that_has_read_all_keys_sleeps_until_the_next(
    terminal: tuple[Driver, int], waits: queue.Queue[float | None]
) -> None:
    driver, keys = terminal
    until_asleep(waits)
    os.write(keys, b"a")
    assert _key(driver) == "a"
    until_asleep(waits)
    assert waits.empty()


def test_an_escape_that_begins_no_other_key_arrives_without_one(terminal: tuple[Driver, int]) -> None:
    driver, keys = terminal
    os.write(keys, b"\x1b")
    assert _key(driver) == "escape"
    os.write(keys, b"\x1b[A")
    assert _key(driver) == "up"


def test_a_character_in_two_pieces_arrives_whole_and_one_that_is_none_ends_nothing(
    terminal: tuple[Driver, int],
) -> None:
    driver, keys = terminal
    os.write(keys, "ä".encode()[:1])
    os.write(keys, "ä".encode()[1:] + b"\xff")
    assert _key(driver) == "ä"
    os.write(keys, b"b")
    assert "b" in (_key(driver), _key(driver))


def test_the_thread_ends_at_once_when_the_console_leaves_and_reads_again_after_that(
    terminal: tuple[Driver, int], waits: queue.Queue[float | None]
) -> None:
    driver, keys = terminal
    until_asleep(waits)
    first = driver._key_thread
    driver.disable_input()
    assert first is not None
    assert not first.is_alive()
    driver._key_thread = threading.Thread(target=driver.run_input_thread)
    driver._key_thread.start()
    os.write(keys, b"c")
    assert _key(driver) == "c"


def test_a_terminal_that_is_gone_is_read_no_more(
    terminal: tuple[Driver, int], waits: queue.Queue[float | None]
) -> None:
    driver, keys = terminal
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, keys)  # closes the end that sends
    os.close(null)
    until_asleep(waits)
    assert waits.empty()
    assert driver.messages.empty()


def _key(driver: Driver) -> Any:
    message = driver.messages.get(timeout=PATIENCE_S)
    assert isinstance(message, events.Key)
    return message.character if message.is_printable else message.key
