"""Small operations of torch between native kernels: on one thread, as its others would have to wake up for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.backends.common.rope_config import RopeConfig
from engine.backends.sampling.sampler import SampleRow, draw
from engine.backends.torch.model.rope import RotaryEmbedding
from engine.backends.torch_device import one_thread
from engine.config import SamplingParams


class ThreadsOfOperations(TorchDispatchMode):
    """Records how many threads torch may use in each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.by_name[func.overloadpacket.__name__] = torch.get_num_threads()
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def greedy(count: int) -> list[SampleRow]:
    return [SampleRow(SamplingParams(temperature=0.0), prompt_ids=[1]) for _ in range(count)]


@pytest.mark.parametrize(("vocab", "threads"), [(49152, 1), (151936, 2)])
def test_the_best_tokens_of_few_logits_are_found_by_one_thread_and_those_of_many_by_all(
    vocab: int, threads: int
) -> None:
    logits = torch.zeros(8, vocab)
    logits[:, 7] = 1.0
    with ThreadsOfOperations() as found:
        drawn = draw(logits, greedy(8))
    assert found.by_name["max"] == threads
    assert drawn.ids.tolist() == [7] * 8
    assert torch.get_num_threads() == 2


def test_angles_of_a_step_are_computed_by_one_thread_and_equal_those_of_two() -> None:
    rotary = RotaryEmbedding(RopeConfig(), 64, torch.device("cpu"))
    positions = torch.arange(1000)
    with ThreadsOfOperations() as found:
        angles = rotary.angles(positions, torch.float32)
    assert (found.by_name["cos"], found.by_name["sin"]) == (1, 1)
    radians = positions.float()[:, None] * rotary._frequencies
    assert torch.equal(angles[0][:, 0], radians.cos())


def test_torch_has_its_threads_again_after_an_error() -> None:
    with pytest.raises(ValueError, match="broken"), one_thread():
        assert torch.get_num_threads() == 1
        raise ValueError("broken")
    assert torch.get_num_threads() == 2
