"""The list of the Requests screen: every order, every filter, and no row lost or twice whatever comes when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.tui.screens.requests.groups import UNNAMED, Group
from console.tui.screens.requests.request_list import SHOWS, SORTS, RequestList, key_of
from engine.errors import ErrorInfo
from engine.snapshot import RequestRow


def _row(order: int, state: str = "finished", **fields: object) -> RequestRow:
    values = {"id": f"r{order}", "source": "api", "state": state, "order": order, "created_at": 1e9 + order, **fields}
    return RequestRow(**values)  # type: ignore[arg-type]


def _ids(requests: RequestList) -> list[str]:
    return [requests[at].id for at in range(len(requests))]


def test_the_newest_comes_first_live_or_not() -> None:
    requests = RequestList()
    requests.update([_row(3, "decode"), _row(5, "queued")], [_row(1), _row(2), _row(4)])
    assert _ids(requests) == ["r5", "r4", "r3", "r2", "r1"]


def test_a_request_that_ended_is_no_longer_live_though_a_late_snapshot_says_so() -> None:
    requests = RequestList()
    requests.update([_row(1, "decode")], [])
    requests.update([_row(1, "decode")], [_row(1, finish="stop")])
    assert [requests[at].state for at in range(len(requests))] == ["finished"]


@pytest.mark.parametrize("descending", [True, False])
def test_rows_without_a_value_come_last_whichever_way(descending: bool) -> None:
    requests = RequestList()
    requests.update([], [_row(1, ttft_s=0.2), _row(2), _row(3, ttft_s=0.1)])
    requests.sort("TTFT", descending=descending)
    assert _ids(requests) == (["r1", "r3", "r2"] if descending else ["r3", "r1", "r2"])


def test_workers_are_sorted_by_their_numbers() -> None:
    requests = RequestList()
    requests.update([], [_row(1, worker="w10"), _row(2, worker="w9"), _row(3, worker="w2")])
    requests.sort("worker", descending=False)
    assert _ids(requests) == ["r3", "r2", "r1"]


def test_a_filter_takes_all_its_words_wherever_they_are() -> None:
    requests = RequestList()
    requests.update(
        [_row(9, "queued", client="Alice")],
        [_row(1, client="alice", finish="length"), _row(2, client="bob", finish="length"), _row(3, client="alice")],
    )
    requests.filter(text="ALICE length")
    assert _ids(requests) == ["r1"] and requests.filtered
    requests.filter(text="queued")
    assert _ids(requests) == ["r9"]
    requests.filter(text="")
    assert len(requests) == 4 and not requests.filtered


def test_states_can_be_chosen() -> None:
    requests = RequestList()
    requests.update([_row(8, "decode"), _row(9, "queued")], [_row(1, finish="stop"), _row(2, finish="error")])
    seen = {}
    for show in SHOWS:
        requests.filter(show=show)
        seen[show] = _ids(requests)
    assert seen == {
        "all": ["r9", "r8", "r2", "r1"],
        "live": ["r9", "r8"],
        "queued": ["r9"],
        "finished": ["r2", "r1"],
        "failed": ["r2"],
    }


def test_the_oldest_that_ended_make_room_and_are_found_no_more() -> None:
    requests = RequestList(most=3)
    for order in range(1, 7):
        requests.update([], [_row(order)])
    assert _ids(requests) == ["r6", "r5", "r4"] and requests.ended == 3
    assert requests.find("r1#1") is None and requests.get("r1#1") is None
    assert requests.find("r5#5") == 1


def test_of_what_another_instance_says_of_its_requests_no_more_is_kept_than_of_ours() -> None:
    requests = RequestList()
    book = ErrorInfo(code="c", message="m" * 10**5, details={f"{number}": number for number in range(1000)})
    error = ErrorInfo(code="c", message="m" * 1000)
    requests.update(
        [], [_row(1, error=book), _row(2, client="c" * 10**4), _row(3, error=error), _row(4, id="漢" * 9000)]
    )
    assert [(row.id, row.error) for row in map(requests.__getitem__, range(2))] == [("r3", error), ("r1", None)]
    assert len(requests) == requests.ended == 2


def test_an_id_that_was_used_twice_is_two_requests() -> None:
    requests = RequestList()
    requests.update([_row(2, "decode", id="same")], [_row(1, id="same")])
    assert [key_of(requests[at]) for at in range(2)] == ["same#2", "same#1"]


def test_what_is_told_twice_at_once_is_as_it_was_told_first() -> None:
    requests = RequestList()
    requests.update([], [_row(1, client="alice"), _row(1, client="bob")])
    assert [requests[at].client for at in range(len(requests))] == ["alice"]


def test_a_group_counts_its_live_waiting_ended_and_failed_requests_and_their_tokens() -> None:
    requests = RequestList()
    alice: dict[str, object] = {"client": "alice", "prompt_tokens": 10, "output_tokens": 4}
    requests.update(
        [_row(7, "decode", tokens_per_s=20.0, **alice), _row(8, "prefill", **alice), _row(9, "queued", **alice)],
        [_row(1, finish="stop", client="bob"), _row(2, finish="error", **alice)],
    )
    requests.group_by("client")
    first, second = requests.groups()
    assert first == Group("alice", 2, 1, 1, 1, 20.0, 40, 16)
    assert (second.name, second.done, second.live) == ("bob", 1, 0)
    assert requests.shows_groups and not requests.filtered
    requests.show_group("client", "bob")
    assert _ids(requests) == ["r1"] and not requests.shows_groups and requests.filtered
    requests.show_group("key", UNNAMED)
    assert len(requests) == 5


_ROWS = st.builds(
    _row,
    st.integers(1, 60),
    st.sampled_from(["queued", "prefill", "decode", "finished"]),
    ttft_s=st.none() | st.floats(0, 10),
    worker=st.none() | st.sampled_from(["w0", "w1", "w10"]),
    client=st.sampled_from(["", "alice", "bob"]),
)


@given(st.lists(st.lists(_ROWS, max_size=8), max_size=8), st.sampled_from(sorted(SORTS)), st.booleans(), st.booleans())
def test_however_rows_come_the_list_is_what_sorting_all_of_them_gives(
    rounds: list[list[RequestRow]], column: str, descending: bool, filtered: bool
) -> None:
    requests = RequestList(most=20)
    ended: dict[str, RequestRow] = {}
    live: list[RequestRow] = []
    requests.sort(column, descending=descending)
    requests.filter(text="alice" if filtered else "")
    for rows in rounds:
        live = list({key_of(row): row for row in rows if row.state != "finished"}.values())
        requests.update(live, [row for row in rows if row.state == "finished"])
        for row in rows:
            if row.state == "finished":
                ended.setdefault(key_of(row), row)
        for key in list(ended)[: max(0, len(ended) - 20)]:
            del ended[key]
    anew = RequestList(most=20)
    anew.update(live, list(ended.values()))
    anew.filter(text="alice" if filtered else "")
    anew.sort(column, descending=descending)
    assert _ids(requests) == _ids(anew)
    wanted = {*ended, *map(key_of, live)}
    assert filtered or {key_of(requests[at]) for at in range(len(requests))} == wanted
    assert all(requests.find(key_of(requests[at])) == at for at in range(len(requests)))
