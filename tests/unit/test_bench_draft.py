"""What is typed into the form of a bench: kept, whatever is looked at meanwhile."""

from __future__ import annotations

from console.bench.kinds import PLANS
from console.bench.plan_fields import form_of
from console.link.benches import BenchOrder, BenchServer
from console.tui.screens.benches.bench_draft import BenchDraft

FORMS = {name: form_of(plan) for name, plan in PLANS.items()}
SERVE, USERS, GRID = FORMS["serve"], FORMS["users"], FORMS["grid"]
TRACE, PROMPT = (next(field for field in SERVE.fields if field.name == name) for name in ("trace", "prompt_tokens"))
REQUESTS = next(field for field in USERS.fields if field.name == "requests")


def test_what_is_typed_stays_and_the_rest_follows_the_size() -> None:
    draft = BenchDraft()
    draft.type(USERS, REQUESTS, "7")
    draft.quick = False
    values = {field.name: draft.value(USERS, field) for field in USERS.fields}
    assert values["requests"] == "7"
    assert values["users"] == "1,2,3,5,7,9"


def test_what_is_typed_back_follows_the_size_again() -> None:
    draft = BenchDraft()
    draft.type(USERS, REQUESTS, "7")
    draft.type(USERS, REQUESTS, REQUESTS.quick)
    draft.quick = False
    assert draft.value(USERS, REQUESTS) == REQUESTS.full


def test_lengths_that_nobody_typed_are_those_of_a_trace() -> None:
    draft = BenchDraft()
    draft.type(SERVE, TRACE, "talks.json")
    assert draft.value(SERVE, PROMPT) == "trace"
    draft.type(SERVE, PROMPT, "64")
    assert draft.order(SERVE, "").settings["prompt_tokens"] == "64"
    assert draft.order(SERVE, "").settings["output_tokens"] == "trace"
    draft.type(SERVE, TRACE, "")
    assert draft.order(SERVE, "").settings["output_tokens"] == "32"


def test_what_is_typed_for_one_bench_is_not_for_another() -> None:
    draft = BenchDraft()
    draft.type(USERS, REQUESTS, "7")
    assert draft.order(SERVE, "").settings["requests"] == "16"


def test_without_an_address_the_engine_is_asked() -> None:
    draft = BenchDraft(server=BenchServer(url="", key="left"))
    assert draft.order(USERS, "m") == BenchOrder(
        bench="users", model="m", settings={field.name: field.quick for field in USERS.fields}
    )
    draft.server = BenchServer(url="http://x", key="left")
    assert draft.order(USERS, "m").server == draft.server


def test_why_a_bench_cannot_be_run_depends_on_what_is_asked() -> None:
    draft = BenchDraft()
    assert draft.refused(GRID) == ""
    assert draft.refused(FORMS["load"]) == FORMS["load"].refused
    draft.server = BenchServer(url="http://x")
    assert draft.refused(GRID) == GRID.no_server
