"""What engines are asked in the benchmark, in which order, and how long it will take."""

from __future__ import annotations

import pytest

from tools.benchmarks.driver import Plan, all_turns
from tools.benchmarks.engines import ROWS, Row, chosen
from tools.benchmarks.pace import Pace
from tools.benchmarks.prompts import FIRST_ID, VOCABULARY, work_of
from tools.benchmarks.protocol import Given, Work
from tools.synthetic_models import SHAPES

ROUNDS = Plan(
    rows=(Row("a", "A", "bf16"), Row("b", "B", "bf16", clients=(8,))), shapes=("135m",), clients=(1, 8), rounds=2
)


def test_prompts_are_of_the_promised_length_and_their_ids_fit_every_shape() -> None:
    prompts = [prompt for round_ in range(10) for prompt in work_of(32, round_).prompts]
    assert {len(prompt) for prompt in prompts} == set(range(112, 145))
    assert {FIRST_ID <= number < VOCABULARY for prompt in prompts for number in prompt} == {True}
    smallest = min(int(str(SHAPES[shape]["vocab_size"])) for shape in SHAPES)
    assert smallest >= VOCABULARY


def test_no_prompt_is_asked_twice_and_every_engine_is_asked_the_same() -> None:
    prompts = [prompt for round_ in range(-1, 4) for count in (1, 8, 32) for prompt in work_of(count, round_).prompts]
    assert len(set(prompts)) == len(prompts) == 5 * 41
    assert work_of(8, 2) == work_of(8, 2)


def test_a_round_has_as_many_requests_as_clients() -> None:
    assert [len(work_of(count, 0).prompts) for count in (1, 8, 32)] == [1, 8, 32]
    assert len(work_of(8, 0, requests=20).prompts) == 20


def test_work_comes_out_of_its_line_as_it_went_in() -> None:
    work = work_of(3, 0, requests=8)
    assert Work.from_line(work.line()) == work
    assert [len(batch) for batch in work.batches()] == [3, 3, 2]
    assert sum(work.batches(), ()) == work.prompts


def test_every_other_round_goes_backwards_and_a_row_keeps_to_its_clients() -> None:
    keys = [(clients, row) for _, clients, row in all_turns(ROUNDS)]
    assert keys == [(1, "a"), (8, "a"), (8, "b"), (1, "a"), (8, "b"), (8, "a")]


def test_the_rest_of_a_run_is_reckoned_by_what_its_like_took() -> None:
    pace = Pace(all_turns(ROUNDS))
    assert pace.left_s == 0.0
    for clients, row, took_s in ((1, "a", 2.0), (8, "a", 8.0)):
        pace.next("135m", clients, row)
        pace.took(took_s)
    # To come: b with 8 clients twice, never seen, at the mean of 2 and 1 seconds a client; then a as before.
    assert pace.left_s == pytest.approx(2 * 8 * 1.5 + 2.0 + 8.0)
    assert pace.text == "2 of 6, about 1 min left"


def test_rows_are_chosen_by_key_and_an_unknown_one_is_named() -> None:
    assert [row.key for row in chosen(["openvino", "ours"], goals_only=False)] == ["ours", "openvino"]
    assert chosen(None, goals_only=False, flags=["amx_int8"]) == ROWS
    assert {row.key for row in chosen(None, goals_only=True)} < {row.key for row in ROWS}
    with pytest.raises(ValueError, match=r"there is no vllm; there are ours, "):
        chosen(["vllm"], goals_only=False)


def test_what_a_runner_is_given_is_its_command_line() -> None:
    given = Given.from_arguments(
        ["--model", "m", "--clients", "2", "--max_tokens", "300", "--threads", "4", "--mode", ""]
    )
    assert Given.from_arguments(given.arguments()) == given
