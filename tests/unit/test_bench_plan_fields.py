"""Benches as a console offers them: the settings of each, what is refused, and results in a few words."""

from __future__ import annotations

import random

import pytest

from console.bench.bench_runs import MAX_TOKENS, check_size, plan_of_order
from console.bench.comparison import headline, settings_text
from console.bench.kinds import PLANS
from console.bench.kinds.base import BenchPart
from console.bench.kinds.serve import Serve
from console.bench.kinds.users import Users
from console.bench.plan_fields import form_of, plan_from
from console.bench.workload import Fresh
from console.link.benches import BenchOrder, BenchServer, refuse_from_elsewhere
from engine.errors import InvalidRequest
from engine.simulation.lengths import fixed
from tests.fakes import bench_scenes
from tests.fakes.bench_target import PlainIds

FORMS = [form_of(plan) for plan in PLANS.values()]


def test_every_bench_is_offered_with_a_sentence_and_fields_that_have_a_title_and_a_hint() -> None:
    for form in FORMS:
        assert form.measures.endswith(".") and form.measures[0].isupper()
        assert all(field.hint and field.title for field in form.fields)
        assert form.refused or form.fields


@pytest.mark.parametrize("quick", [True, False])
def test_a_form_that_is_sent_as_it_is_gives_the_plan_of_the_command_line(quick: bool) -> None:
    for form in FORMS:
        if form.refused:
            continue
        given = {field.name: field.quick if quick else field.full for field in form.fields}
        plan = PLANS[form.bench]
        assert plan_of_order(BenchOrder(bench=form.bench, settings=given, quick=quick)) == plan(
            **plan.quick if quick else {}
        )


def test_an_order_takes_what_flags_take() -> None:
    order = BenchOrder(bench="serve", settings={"rates": "1, inf", "slo_ttft": "500ms", "slo_tpot": ""}, quick=False)
    plan = plan_of_order(order)
    assert isinstance(plan, Serve)
    assert (plan.rates, plan.slo_ttft, plan.slo_tpot) == ((1.0, float("inf")), 0.5, None)


@pytest.mark.parametrize(
    ("bench", "settings", "said"),
    [
        ("users", {"users": "1,many"}, "users: many is not a whole number"),
        ("users", {"prompt_tokens": "long"}, "prompt tokens: long is not a length"),
        ("users", {"output_tokens": "long"}, "^answer tokens: long is not a length"),
        ("latency", {"repeats": "0"}, "repeats: 0 is not between 1 and 1000"),
        ("serve", {"burstiness": "2"}, "burstiness of benchmark serve is for the command line only"),
        ("load", {}, "unloads the model"),
        ("nonsense", {}, "there is no benchmark nonsense; available: latency, users"),
    ],
)
def test_what_cannot_be_ordered_is_one_sentence(bench: str, settings: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        plan_of_order(BenchOrder(bench=bench, settings=settings))


def test_a_bench_that_would_fill_the_queue_is_refused_with_numbers() -> None:
    plan = Users(users=(1, 2000), requests=1)
    with pytest.raises(InvalidRequest, match=r"2,000 concurrent requests exceed the queue limit \(1,024\)"):
        check_size(plan, [BenchPart(keys={"users": 2000}, requests=2000)], 128, max_queue=1024)
    check_size(plan, [BenchPart(keys={"users": 2000}, requests=2000)], 128, max_queue=2000)


def test_requests_that_arrive_by_the_clock_may_all_be_waiting_at_once() -> None:
    with pytest.raises(InvalidRequest, match="1,500 concurrent requests"):
        check_size(Serve(requests=1500), [BenchPart(keys={}, requests=1500)], 8, max_queue=1024)
    check_size(Serve(requests=1500, max_concurrent=8), [BenchPart(keys={}, requests=1500)], 8, max_queue=1024)


def test_prompts_that_take_too_long_to_make_beside_others_are_refused() -> None:
    plan = Users(users=(1,), requests=100, prompt_tokens=fixed(MAX_TOKENS // 50))
    with pytest.raises(InvalidRequest, match="would delay other clients"):
        check_size(plan, [BenchPart(keys={"users": 1}, requests=100)], MAX_TOKENS // 50, max_queue=1024)


@pytest.mark.parametrize("name", ["users", "threads"])
def test_nobody_who_asks_is_no_number_of_clients(name: str) -> None:
    field = {"users": "users", "threads": "clients"}[name]
    plan = plan_from(PLANS[name], {field: "0,4"}, quick=True)
    with pytest.raises(InvalidRequest, match=f"{field} must be 1 or more"):
        plan.check()


def test_a_result_is_its_last_row_or_its_best_where_that_is_looked_for() -> None:
    assert headline(bench_scenes.users()) == "1.62 s mean response, users 4"
    assert headline(bench_scenes.grid()) == "1,148.0 tok/s output, workers 2, max prompts 16"
    assert headline(bench_scenes.users(rows=())) == ""


def test_a_small_number_is_no_nought_in_a_headline() -> None:
    assert headline(bench_scenes.users(0.001)) == "0.0016 s mean response, users 4"


def test_a_result_says_with_what_it_was_measured() -> None:
    assert settings_text(bench_scenes.users()) == "2×16, 64 requests, 128+128 tokens, 3 repeats"
    assert settings_text(bench_scenes.grid(settings={})) == ""


def test_fresh_prompts_are_as_long_and_as_alike_and_never_those_of_another_run() -> None:
    one, other = Fresh(PlainIds()), Fresh(PlainIds())
    first, again = (one.prompt(32, random.Random("a group")) for _ in range(2))
    assert first == again
    assert first.tokens == 32
    assert one.prompt(32, random.Random("another")) != first
    assert other.prompt(32, random.Random("a group")) != first


def test_a_server_takes_every_bench_but_those_of_the_engine_here() -> None:
    server = BenchServer(url="http://x")
    for form in FORMS:
        order = BenchOrder(bench=form.bench, server=server)
        if not form.no_server:
            assert plan_of_order(order).name == form.bench
            continue
        with pytest.raises(InvalidRequest) as refused:
            plan_of_order(order)
        assert refused.value.message == form.no_server
    assert {form.bench for form in FORMS if form.no_server} == {"grid", "load"}


def test_servers_and_files_are_not_for_who_orders_from_elsewhere() -> None:
    refuse_from_elsewhere(BenchOrder(bench="serve", settings={"trace": ""}))
    with pytest.raises(InvalidRequest, match="'ericllm bench users --url http://host'") as refused:
        refuse_from_elsewhere(BenchOrder(bench="users", server=BenchServer(url="http://host")))
    assert refused.value.details["param"] == "url"
    with pytest.raises(InvalidRequest, match="a trace is a file on the engine's machine") as refused:
        refuse_from_elsewhere(BenchOrder(bench="serve", settings={"trace": "/etc/passwd"}))
    assert refused.value.details["param"] == "trace"
