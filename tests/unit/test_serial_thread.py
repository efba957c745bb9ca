"""SerialThread: one piece of work after the other, and the loop comes round between any two."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from console.api.http.serial_thread import SerialThread


async def test_pieces_are_done_one_at_a_time_in_their_order_in_one_thread() -> None:
    thread, busy = SerialThread("test"), threading.Lock()
    done: list[int] = []
    threads: set[int] = set()

    def work(number: int) -> int:
        assert busy.acquire(blocking=False), "another piece is under way"
        threads.add(threading.get_ident())
        done.append(number)
        busy.release()
        return number

    answers = await asyncio.gather(*(thread.run(partial(work, number)) for number in range(20)))
    assert answers == done == list(range(20))
    assert len(threads) == 1 and threading.get_ident() not in threads


async def test_a_piece_begins_once_the_task_before_it_goes_on() -> None:
    thread = SerialThread("test")
    gone_on: list[int] = []

    async def task(number: int) -> None:
        assert await thread.run(lambda: len(gone_on)) == number
        gone_on.append(number)

    await asyncio.gather(*map(task, range(10)))
    assert gone_on == list(range(10))


async def test_clients_take_turns_however_many_pieces_one_has() -> None:
    thread, goes_on = SerialThread("test"), threading.Event()
    done: list[str] = []

    async def task(client: str) -> None:
        await thread.run(goes_on.wait, client)
        done.append(client)

    tasks = [asyncio.create_task(task(client)) for client in ("greedy", "greedy", "greedy", "other", "third")]
    await asyncio.sleep(0)
    goes_on.set()
    await asyncio.gather(*tasks)
    assert done == ["greedy", "other", "third", "greedy", "greedy"]


async def test_an_error_is_its_task_s_alone_and_a_cancelled_task_keeps_nobody_waiting() -> None:
    thread, goes_on = SerialThread("test"), threading.Event()

    def fail() -> None:
        raise ValueError("no")

    held = asyncio.create_task(thread.run(goes_on.wait))
    waiting = asyncio.create_task(thread.run(lambda: 1))
    await asyncio.sleep(0)
    held.cancel()
    failing = asyncio.create_task(thread.run(fail))
    goes_on.set()
    assert await waiting == 1
    with pytest.raises(ValueError, match="no"):
        await failing
    assert await thread.run(lambda: 2) == 2
