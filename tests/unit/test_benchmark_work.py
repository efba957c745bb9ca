"""What engines are asked in the benchmark, in which order, and how long it will take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from tests.fakes.virtual_time import VirtualLoop, run
from tools.benchmarks import protocol
from tools.benchmarks.driver import Measured, Pace, Plan
from tools.benchmarks.engines import RATIOS, ROWS, SERVER, Row, chosen
from tools.benchmarks.machine import Machine
from tools.benchmarks.places import REQUIREMENTS
from tools.benchmarks.protocol import (
    FIRST_ID,
    VOCABULARY,
    Answer,
    Arrived,
    Done,
    Given,
    Load,
    Prompt,
    Ready,
    Stepper,
    done,
    max_tokens,
    work_of,
    work_or_load,
)
from tools.benchmarks.results import Cell, Failure, Place, Results, Round
from tools.benchmarks.runners.server import SERVERS
from tools.synthetic_models import SHAPES

PLAN = Plan(
    rows=(Row("a", "A", "bf16"), Row("b", "B", "bf16", clients=(8,))), shapes=("135m",), clients=(1, 8), rounds=2
)


def places(plan: Plan) -> list[Place]:
    return [place for shape in plan.shapes for _, place, _ in plan.turns(shape)]


@pytest.mark.parametrize("tokens", [128, 1024])
def test_prompts_are_within_an_eighth_of_the_promised_length_and_their_ids_fit_every_shape(tokens: int) -> None:
    prompts = [prompt for round_ in range(10) for prompt in work_of(32, round_, prompt_tokens=tokens).prompts]
    lengths = {len(prompt) for prompt in prompts}
    assert tokens * 7 // 8 <= min(lengths) < tokens < max(lengths) <= tokens * 9 // 8
    assert max(lengths) + 128 < max_tokens(tokens)
    assert {FIRST_ID <= number < VOCABULARY for prompt in prompts for number in prompt} == {True}
    assert min(int(str(SHAPES[shape]["vocab_size"])) for shape in SHAPES) >= VOCABULARY


def test_no_prompt_is_asked_twice_and_every_engine_is_asked_the_same() -> None:
    prompts = [prompt for round_ in range(-1, 4) for count in (1, 8, 32) for prompt in work_of(count, round_).prompts]
    assert len(set(prompts)) == len(prompts) == 5 * 41
    assert work_of(8, 2) == work_of(8, 2)


def test_work_and_load_come_out_of_their_lines_as_they_went_in() -> None:
    work, load = work_of(3, 0), Load(streams=2, seconds=1.5)
    assert work_or_load(work.line()) == work
    assert work_or_load(load.line()) == load
    assert sum(work.batches(), ()) == work.prompts


def test_what_a_runner_is_given_is_its_command_line() -> None:
    given = Given.from_arguments(["--model", "m", "--clients", "2", "--max_tokens", "300", "--threads", "4"])
    assert Given.from_arguments(given.arguments()) == given
    assert given.tokens == 600


def test_every_other_round_goes_backwards_and_a_row_has_its_own_clients() -> None:
    keys = [(place.clients, place.row) for place in places(PLAN)]
    assert keys == [(1, "a"), (8, "a"), (8, "b"), (1, "a"), (8, "b"), (8, "a")]


def test_each_length_of_prompts_is_measured_in_each_round() -> None:
    plan = Plan(rows=PLAN.rows[:1], shapes=("135m",), clients=(8,), rounds=2, prompts=(128, 1024))
    assert [place.prompt_tokens for place in places(plan)] == [128, 1024, 128, 1024]


def test_the_rest_of_a_run_is_reckoned_by_what_its_like_took() -> None:
    turns = places(PLAN)
    pace = Pace(turns)
    assert pace.left_s == 0.0
    for place, took_s in zip(turns, (2.0, 8.0), strict=False):
        pace.next()
        pace.took(place, took_s)
    # To come: b with 8 clients twice, never seen, at the mean of 2 and 1 seconds a client; then a as before.
    assert pace.left_s == pytest.approx(2 * 8 * 1.5 + 2.0 + 8.0)
    assert pace.text == "2 of 6, about 1 min left"


def test_a_resumed_run_keeps_its_rounds_and_tries_again_what_failed() -> None:
    before = Results(
        machine=Machine("CPU", (), 2, 8 << 30, "Linux", "3.11"),
        date="2030-01-02",
        commands=("first",),
        minutes=3.0,
        cells=(Cell("135m", "a", 1, 128, (Round(50.0),)),),
        failures=(Failure("135m", "b", "no memory"),),
        versions={"a": {"torch": "2"}},
    )
    measured = Measured.of(before)
    assert measured.cells == before.cells
    assert measured.failures == []
    assert measured.versions == before.versions


def test_rows_are_chosen_by_key_and_an_unknown_one_is_named() -> None:
    assert [row.key for row in chosen(["openvino", "ours"])] == ["ours", "openvino"]
    assert chosen(None) == ROWS
    with pytest.raises(ValueError, match=r"there is no sglang; there are ours, "):
        chosen(["sglang"])


def test_every_row_has_its_packages_its_runner_and_bits() -> None:
    for row in ROWS:
        assert row.is_ours or (REQUIREMENTS / f"{row.venv}.txt").is_file()
        assert (REQUIREMENTS.parent / "runners" / f"{row.runner}.py").is_file()
        assert row.runner != SERVER or row.mode in SERVERS
        assert row.bits in (4, 8, 16, 32)
    keys = [row.key for row in ROWS]
    assert len(set(keys)) == len(keys)
    assert {key for ratio in RATIOS for key in (ratio.row, *ratio.over)} <= set(keys)


def test_peers_are_compared_with_weights_of_as_many_bits() -> None:
    bits = {row.key: row.bits for row in ROWS}
    over = {ratio.row: {bits[key] for key in ratio.over} for ratio in RATIOS[:3]}
    assert over == {"ours": {16, 32}, "ours-int8": {8}, "ours-int4": {4}}


async def test_clients_ask_again_as_soon_as_their_answer_is_whole() -> None:
    running = most = 0

    async def ask(prompt: Prompt, tokens: int, answer: Answer) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(tokens):
            await asyncio.sleep(0)
            answer.arrived()
        running -= 1

    found = await done(Ready("bf16", ask=ask), work_of(3, 0, output_tokens=4))
    assert (found.tokens, most, len(found.ttft_s), len(found.itl_s)) == (12, 3, 3, 9)


async def test_an_engine_without_a_queue_gets_batches_and_cannot_be_under_load() -> None:
    batches = []

    def batch(prompts: Sequence[Prompt], tokens: int, answers: Sequence[Answer]) -> None:
        batches.append(len(prompts))
        for answer in answers:
            answer.arrived(tokens)

    ready = Ready("bf16", batch=batch)
    assert (await done(ready, work_of(3, 0, output_tokens=4))).tokens == 12
    assert batches == [3]
    with pytest.raises(RuntimeError, match="takes no request while others run"):
        await done(ready, Load())


class Steps:
    """An engine that gives each request one token a step, and fails at a step."""

    def __init__(self, fails_at: int = 1000) -> None:
        self.left: dict[Arrived, int] = {}
        self.steps, self._fails_at = 0, fails_at

    def add(self, prompt: Prompt, tokens: int, arrived: Arrived) -> Callable[[], object]:
        self.left[arrived] = tokens
        return lambda: self.left.pop(arrived)

    def step(self) -> None:
        self.steps += 1
        if self.steps == self._fails_at:
            raise RuntimeError("out of pages")
        for arrived in [arrived for arrived, tokens in self.left.items() if tokens]:
            self.left[arrived] -= 1
            arrived(1)


async def test_an_engine_of_steps_serves_all_its_requests_together() -> None:
    steps = Steps()
    ready = Ready("bf16", ask=Stepper(steps.add, steps.step).ask)
    found = await done(ready, work_of(4, 0, output_tokens=8))
    assert (found.tokens, len(found.itl_s)) == (32, 28)
    assert steps.steps <= 9
    assert (await done(ready, work_of(2, 1, output_tokens=3))).tokens == 6


async def test_a_request_whose_client_leaves_is_cancelled_in_the_engine() -> None:
    steps, began = Steps(), asyncio.Event()

    def step() -> None:
        steps.step()
        began.set()

    asking = asyncio.ensure_future(Stepper(steps.add, step).ask((3,), 10**6, Answer()))
    await began.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert steps.left == {}


async def test_a_setting_is_applied_before_a_load_and_one_that_an_engine_lacks_is_refused() -> None:
    applied: list[str] = []

    async def configure(setting: str) -> None:
        applied.append(setting)
        raise RuntimeError("enough")

    async def ask(prompt: Prompt, tokens: int, answer: Answer) -> None:
        raise AssertionError

    with pytest.raises(RuntimeError, match="enough"):
        await done(Ready("bf16", ask=ask, configure=configure), Load(setting="itl=30"))
    assert applied == ["itl=30"]
    with pytest.raises(RuntimeError, match="it has no setting itl=30"):
        await done(Ready("bf16", ask=ask), Load(setting="itl=30"))


def test_a_load_asks_for_room_for_its_streams_and_two_long_prompts() -> None:
    load = Load(streams=16, stream_prompt_tokens=64, answer_tokens=512, prompt_tokens=8192)
    assert load.max_tokens == 8192 + 16
    assert load.kv_tokens == 16 * (64 + 512 + 16) + 2 * (8192 + 16)
    assert Given(Path("m"), 18, load.max_tokens, 2, kv_tokens=load.kv_tokens).tokens == load.kv_tokens


async def test_a_step_that_fails_is_the_error_of_the_work() -> None:
    steps = Steps(fails_at=3)
    with pytest.raises(RuntimeError, match="out of pages"):
        await done(Ready("bf16", ask=Stepper(steps.add, steps.step).ask), work_of(2, 0, output_tokens=8))


def test_under_load_streams_never_end_and_a_long_prompt_counts_by_its_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    token_s, long_s = 0.25, 3.0

    async def ask(prompt: Prompt, tokens: int, answer: Answer) -> None:
        await asyncio.sleep(long_s - token_s if tokens == 1 else 0)
        for _ in range(tokens):
            await asyncio.sleep(token_s)
            answer.arrived()

    load = Load(streams=2, answer_tokens=8, prompt_tokens=500, every_s=0.0, seconds=12.0, warm_up_s=4.0)

    async def under_load(loop: VirtualLoop) -> Done:
        monkeypatch.setattr(protocol, "time", SimpleNamespace(perf_counter=loop.time))
        return await done(Ready("bf16", ask=ask), load)

    found = run(under_load, Random(0))
    assert found.seconds == 12
    assert found.ttft_s == (long_s,) * 4, "of those that were sent after 6, 9, 12 and 15 s"
    assert found.itl_s == (token_s,) * found.tokens
    assert found.tokens == 2 * 6 * 7, "of 2 streams, the tokens but the first of each answer, of 2 s"
    assert found.prompt_tokens == pytest.approx(500 * (2 / 3 + 3 + 1 / 3))


async def test_a_request_that_fails_under_load_is_its_error() -> None:
    async def ask(prompt: Prompt, tokens: int, answer: Answer) -> None:
        if tokens == 1:
            raise RuntimeError("400: longer than the model's maximum")
        await asyncio.sleep(3600)

    with pytest.raises(RuntimeError, match="longer than the model's maximum"):
        await done(Ready("bf16", ask=ask), Load(streams=1))
