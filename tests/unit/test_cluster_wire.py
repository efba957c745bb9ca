"""The socket to a worker on another machine: nobody gets it without the token."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from engine.cluster.wire import TOKEN_BYTES, Listener, dial, new_token

PATIENCE_S = 60.0


class Door:
    """A listener that accepts on a thread."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self.token = new_token()
        self.listener = Listener("127.0.0.1", self.token)
        self.port = self.listener.port
        thread = ThreadPoolExecutor(1)
        self.accepted: Future[socket.socket] = thread.submit(self.listener.accept, patience_s)
        thread.shutdown(wait=False)

    def knock(self, token: bytes) -> socket.socket:
        """Connect, showing this."""
        return dial("127.0.0.1", self.port, token, PATIENCE_S)


def is_turned_away(sock: socket.socket) -> bool:
    """Whether the other end closes without a word."""
    sock.settimeout(PATIENCE_S)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_who_shows_the_token_talks_to_the_worker() -> None:
    door = Door()
    with door.knock(door.token) as ours, door.accepted.result(PATIENCE_S) as theirs:
        ours.sendall(b"load")
        assert theirs.recv(4) == b"load"


@pytest.mark.parametrize("wrong", [lambda token: bytes(TOKEN_BYTES), lambda token: token[:-1] + bytes([token[-1] ^ 1])])
def test_who_shows_another_is_turned_away_and_the_engine_still_gets_in(wrong: Callable[[bytes], bytes]) -> None:
    door = Door()
    with door.knock(wrong(door.token)) as stranger:
        assert is_turned_away(stranger)
    with door.knock(door.token), door.accepted.result(PATIENCE_S):
        pass


def test_who_leaves_before_showing_it_is_no_obstacle() -> None:
    door = Door()
    socket.create_connection(("127.0.0.1", door.port)).close()
    with door.knock(door.token), door.accepted.result(PATIENCE_S):
        pass


def test_a_token_is_good_for_one_connection() -> None:
    door = Door()
    with door.knock(door.token), door.accepted.result(PATIENCE_S), pytest.raises(ConnectionRefusedError):
        door.knock(door.token)


def test_nobody_coming_is_an_error_and_the_port_is_given_back() -> None:
    door = Door(patience_s=0.01)
    with pytest.raises(TimeoutError, match="did not connect"):
        door.accepted.result(PATIENCE_S)
    with pytest.raises(ConnectionRefusedError):
        door.knock(door.token)


def test_it_listens_on_the_one_address_it_was_given() -> None:
    listener = Listener("127.0.0.2", new_token())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", listener.port))
    listener.close()
