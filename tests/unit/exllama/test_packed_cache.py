"""exllamav2's caches of 8, 6 and 4 bits: the real library decodes over them as they are, and no longer decodes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.backends.exllamav2.library import MAX_Q_SIZE
from engine.errors import WorkerFailed

pytest.importorskip("triton")
packed_cache = pytest.importorskip("engine.backends.exllamav2.packed_cache")
pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]


@pytest.fixture(
    scope="module", params=[6, pytest.param(8, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What `tests.fakes.exllamav2_packed_on_cpu` finds."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fakes.exllamav2_packed_on_cpu", str(request.param)],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])[str(request.param)]  # type: ignore[no-any-return]


def short(steps: list[Any]) -> list[Any]:
    """The decodes among steps: sequences, tokens, whether in a row, calls of the library's decoding, difference."""
    return [step for step in steps if step[1] <= MAX_Q_SIZE]


def test_the_library_decodes_no_page_in_steps_of_few_tokens(found: dict[str, Any]) -> None:
    before, now = short(found["decoded"]["steps"]), short(found["packed"]["steps"])
    assert sum(step[3] for step in before) > 4, "it did without our reading"
    assert sum(step[3] for step in now) == 0
    assert {step[2] for step in now} == {True, False}, "pages in a row and others"
    assert {step[0] for step in now} >= {1, 3}
    assert found["packed"]["tokens"] == found["decoded"]["tokens"] == [4, 5, 6]


def test_such_steps_give_attention_over_all_that_is_packed(found: dict[str, Any]) -> None:
    assert max(step[4] for step in short(found["packed"]["steps"])) < 0.02


def test_longer_steps_are_computed_as_before(found: dict[str, Any]) -> None:
    steps = [[step for step in found[way]["steps"] if step[1] > MAX_Q_SIZE] for way in ("decoded", "packed")]
    assert steps[0] == steps[1] != []


def test_a_reading_that_fails_its_trial_is_not_taken_and_one_sentence_says_so(found: dict[str, Any]) -> None:
    [message] = found["refused"]["messages"]
    assert message.startswith(
        "exllamav2 decodes its packed KV cache in every layer and step: what was tried on cpu is off"
    )
    assert found["refused"]["registered"] == 0
    assert found["engaged"] == {"messages": [], "registered": 1}


def test_the_trial_compiles_all_kernels_and_no_cache_outlives_its_model(found: dict[str, Any]) -> None:
    assert found["unprepared"] == 0
    assert found["left"] == 0


def test_the_check_on_a_card_times_a_decode_both_ways(found: dict[str, Any]) -> None:
    assert found["rows"] == [["passed", None], ["measured", 1], ["measured", 0]]


def cache(**facts: Any) -> SimpleNamespace:
    whole = {"wbits": 4, "head_dim": 128, "q_block": 1, "num_key_value_heads": 4, "max_seq_len": 4096}
    return SimpleNamespace(**(whole | facts))


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"head_dim": 96}, "heads of 96 elements"),
        ({"q_block": 2, "num_key_value_heads": 2}, "2 key heads of 128 elements"),
        ({"max_seq_len": 256}, "one page"),
    ],
)
def test_a_cache_whose_heads_are_mixed_is_left_to_the_library(
    facts: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    registered: list[object] = []
    packed_cache.read_packed(cache(**facts), None, 8, {None}, 0.0, registered.append)
    assert says in caplog.text and not registered


def test_a_cache_that_is_split_over_gpus_is_left_to_the_library(caplog: pytest.LogCaptureFixture) -> None:
    registered: list[object] = []
    packed_cache.read_packed(SimpleNamespace(), None, 8, {None}, 0.0, registered.append)
    assert "split over GPUs" in caplog.text and not registered


@pytest.mark.parametrize(
    ("text", "lost"), [("no host compiler", False), ("CUDA error: an illegal memory access", True)]
)
def test_a_trial_that_raises_is_a_reason_and_a_device_that_it_loses_ends_the_load(
    text: str, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_args: object, **_options: object) -> float:
        raise RuntimeError(f"{text} was encountered")

    monkeypatch.setattr(packed_cache.PackedReads, "_difference", raises)
    reads = object.__new__(packed_cache.PackedReads)
    reads._layers = [[torch.zeros(1)]]
    if lost:
        with pytest.raises(WorkerFailed, match="reading a packed KV cache broke cpu: CUDA error"):
            reads.failure(8, {None}, 0.0)
    else:
        assert (
            reads.failure(8, {None}, 0.0)
            == "what was tried on cpu failed: RuntimeError: no host compiler was encountered"
        )
