"""Numbers and names as screens show them."""

from __future__ import annotations

import pytest

from console import text


@pytest.mark.parametrize(
    ("full", "shown"),
    [
        ("chatcmpl-7f3a91bc5d5e4f60718293a4b5c6d7e8", "7f3a91bc"),
        ("cmpl-7f3a91bc5d5e4f60718293a4b5c6d7e8-12", "7f3a91bc-12"),
        ("msg_7f3a91bc5d5e4f60718293a4", "7f3a91bc"),
        ("gen-7f3a91bc5d5e4f60", "7f3a91bc"),
        ("order-4711", "order-4711"),
        ("", ""),
    ],
)
def test_a_made_id_shows_the_part_that_differs_and_any_other_id_is_shown_in_full(full: str, shown: str) -> None:
    assert text.request_id(full) == shown


def test_a_client_is_named_by_key_address_and_program() -> None:
    assert text.client_name("10.0.0.17", "shop", "curl/8.5.0") == "shop@10.0.0.17 curl/8.5.0"
    assert text.client_name("10.0.0.17", program="curl/8.5.0") == "10.0.0.17 curl/8.5.0"
    assert text.client_name("console") == "console"


@pytest.mark.parametrize(
    ("value_s", "shown"),
    [(0.0, "0 ms"), (0.00001, "<0.1 ms"), (0.00006, "0.1 ms"), (0.5, "500 ms"), (8.0, "8.00 s"), (125.0, "2:05")],
)
def test_a_time_never_rounds_to_nothing(value_s: float, shown: str) -> None:
    assert text.seconds(value_s) == shown


def test_a_bound_of_an_axis_has_no_empty_decimals() -> None:
    labels = ("8.00 s", "2.50 s", "500 ms", "10.0 s", "2.0k", "1.5k", "30", "1:40", "100%")
    assert [text.bound(label) for label in labels] == [
        "8 s", "2.5 s", "500 ms", "10 s", "2k", "1.5k", "30", "1:40", "100%",
    ]  # fmt: skip


def test_requests_that_wait_for_a_load_are_named_as_such() -> None:
    assert text.live_requests(0, 0, 2) == "2 requests waiting for a load"
    assert text.live_requests(1, 2, 3) == "1 request running, 2 queued, 3 waiting for a load"


@pytest.mark.parametrize(
    ("running", "queued", "said"),
    [
        (1, 0, "1 request running"),
        (3, 23, "3 requests running, 23 queued"),
        (0, 1, "1 request queued"),
        (0, 0, "0 requests running"),
    ],
)
def test_live_requests_are_named_running_and_queued_apart(running: int, queued: int, said: str) -> None:
    assert text.live_requests(running, queued) == said


@pytest.mark.parametrize(
    ("waited", "said"),
    [(None, "–"), (0.0, "0 ms"), (0.00001, "<1 ms"), (0.0009, "<1 ms"), (0.001, "1.0 ms"), (3, "3.00 s")],
)
def test_a_time_in_a_queue_takes_six_cells_at_most(waited: float | None, said: str) -> None:
    assert text.waited(waited) == said
    assert len(said) <= 6


def test_settings_are_named_in_a_form_as_it_names_them() -> None:
    assert text.without_flags("--prefix_sharing requires --backend torch") == "prefix sharing requires backend torch"
    assert text.without_flags("a -- b, x--y and 1--2") == "a -- b, x--y and 1--2"
