"""The simulated cluster: the same twice, nothing lost, and the laws of queues."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from engine.metrics.distributions import QuantileSketch
from engine.metrics.slo import Slo
from engine.simulation.cluster import Cluster, Death, FrontDoor
from engine.simulation.demand import Ask, ClosedDemand, Mix, OpenDemand, SeriesDemand, ShorterDemand, TraceDemand
from engine.simulation.lengths import Length, fixed, uniform
from engine.simulation.outcome import Outcome, Percentiles
from engine.simulation.simulation import simulate
from engine.simulation.step_costs import StepCosts

COSTS = StepCosts(fixed_s=4e-3, decode_s=5e-4, context_token_s=1e-7, prompt_token_s=2e-4)
MIX = Mix(prompt=uniform(20, 200), output=uniform(1, 80))
CLUSTER = Cluster(costs=COSTS, workers=2, max_prompts=8, kv_tokens=4096, max_model_len=1024)


def poisson(rate_per_s: float, duration_s: float = 20.0, seed: int = 0, mix: Mix = MIX) -> OpenDemand:
    return OpenDemand(mix, rate_per_s=rate_per_s, duration_s=duration_s, seed=seed)


def users(duration_s: float = 10.0) -> ClosedDemand:
    return ClosedDemand(MIX, users=5, think_s=0.2, duration_s=duration_s)


def check_books(outcome: Outcome) -> None:
    """Every request ended once, and got what it asked for if it was answered."""
    for served in outcome.served:
        assert served.fate is not None
        assert served.ended_s >= served.ask.at_s
        if served.fate == "answered":
            assert served.output_tokens == served.ask.output_tokens
            assert served.first_s is not None and served.last_s == served.ended_s
            assert served.ask.at_s <= (served.placed_s or 0) <= served.first_s <= served.last_s


def told(outcome: Outcome) -> list[tuple[float, str | None, float | None, float, int]]:
    return [(each.ask.at_s, each.fate, each.first_s, each.ended_s, each.worker) for each in outcome.served]


def test_the_same_seed_gives_the_same_outcome_and_another_one_another() -> None:
    first, second, other = (simulate(CLUSTER, poisson(12, seed=seed)) for seed in (3, 3, 4))
    assert told(first) == told(second)
    assert first.summary() == second.summary()
    assert told(first) != told(other)


@settings(max_examples=25, deadline=None)
@given(
    rate=st.floats(1, 60),
    workers=st.integers(1, 4),
    max_prompts=st.integers(1, 12),
    kv_tokens=st.sampled_from((320, 640, 4096)),
    max_queue=st.sampled_from((0, 5, 1000)),
    timeout_s=st.sampled_from((0.0, 0.5, 30.0)),
    deaths=st.lists(st.tuples(st.floats(0, 6), st.floats(0, 1), st.floats(0, 4)), max_size=2),
    seed=st.integers(0, 99),
)
def test_every_request_ends_once_whatever_happens(
    rate: float,
    workers: int,
    max_prompts: int,
    kv_tokens: int,
    max_queue: int,
    timeout_s: float,
    deaths: list[tuple[float, float, float]],
    seed: int,
) -> None:
    cluster = Cluster(
        costs=COSTS,
        workers=workers,
        max_prompts=max_prompts,
        kv_tokens=kv_tokens,
        max_model_len=512,
        max_queue=max_queue,
        timeout_s=timeout_s,
        deaths=tuple(Death(at_s=at, detected_s=seen, restart_s=back) for at, seen, back in deaths),
    )
    demand = poisson(rate, 5.0, seed)
    outcome = simulate(cluster, demand)
    check_books(outcome)
    assert sorted(each.ask.at_s for each in outcome.served) == [ask.at_s for ask in demand.first()]


@pytest.mark.parametrize("rate", [3.0, 15.0, 60.0])
def test_littles_law_holds(rate: float) -> None:
    """Requests in the system on average = requests per second x seconds that each is in it."""
    outcome = simulate(CLUSTER, poisson(rate))
    stays = [each.ended_s - each.admitted_s for each in outcome.served if each.admitted_s is not None]
    assert outcome.area == pytest.approx(math.fsum(stays), rel=1e-9)
    moments = outcome.moments
    sampled = sum(each.queued + each.running for each in moments) / len(moments)
    assert sampled == pytest.approx(outcome.area / outcome.seconds, rel=0.25, abs=0.5)


def test_a_lone_request_takes_what_its_steps_cost() -> None:
    ask = Ask(at_s=1.0, prompt_tokens=100, output_tokens=30)
    front = FrontDoor(request_s=1e-3, output_s=1e-4, slot_s=0.0)
    cluster = msgspec.structs.replace(CLUSTER, workers=1, front=front)
    (served,) = simulate(cluster, TraceDemand([ask])).served
    prompt_s = COSTS.fixed_s + 100 * COSTS.prompt_token_s
    assert served.ttft_s == pytest.approx(1e-3 + prompt_s + 1e-4)
    steps_s = sum(COSTS.fixed_s + COSTS.decode_s + (101 + number) * COSTS.context_token_s for number in range(29))
    assert served.e2e_s == pytest.approx(1e-3 + prompt_s + steps_s + 1e-4)


def test_a_nodes_death_loses_no_request_and_no_token() -> None:
    cluster = msgspec.structs.replace(
        CLUSTER, workers=4, workers_per_node=2, deaths=(Death(at_s=8.0, node=1, detected_s=0.5, restart_s=4.0),)
    )
    outcome = simulate(cluster, poisson(30))
    check_books(outcome)
    assert {each.fate for each in outcome.served} == {"answered"}
    resumed = [each for each in outcome.served if each.lost]
    assert resumed and all(each.worker in (0, 1) or each.ended_s > 12.5 for each in resumed)
    calm = simulate(msgspec.structs.replace(cluster, deaths=()), poisson(30))
    assert outcome.summary().ttft_s.most > calm.summary().ttft_s.most
    assert outcome.summary().output_tokens_per_s == pytest.approx(calm.summary().output_tokens_per_s, rel=0.05)


def test_a_death_of_all_workers_keeps_the_queue_until_they_are_back() -> None:
    cluster = msgspec.structs.replace(CLUSTER, workers=1, deaths=(Death(at_s=2.0, restart_s=5.0),))
    outcome = simulate(cluster, poisson(4, 6.0))
    check_books(outcome)
    assert {each.fate for each in outcome.served} == {"answered"}
    assert not any(each.first_s is not None and 2.001 < each.first_s < 7.0 for each in outcome.served)


def test_a_full_queue_refuses_and_a_time_out_ends() -> None:
    burst = TraceDemand([Ask(at_s=0.0, prompt_tokens=50, output_tokens=80) for _ in range(60)])
    small = msgspec.structs.replace(CLUSTER, workers=1, max_prompts=4, max_queue=10, timeout_s=1.0)
    outcome = simulate(small, burst)
    fates = outcome.summary().fates
    assert fates["refused"] == 60 - 10 - 4
    assert fates["timeout"] > 0 and fates["answered"] > 0
    assert all(
        each.ended_s - (each.admitted_s or 0) == pytest.approx(1.0) for each in outcome.served if each.fate == "timeout"
    )


def test_a_prompt_that_no_worker_can_hold_is_refused() -> None:
    outcome = simulate(CLUSTER, TraceDemand([Ask(at_s=0.0, prompt_tokens=1024, output_tokens=4)]))
    assert outcome.summary().fates == {"too long": 1}


def test_users_send_one_request_at_a_time() -> None:
    outcome = simulate(CLUSTER, users())
    check_books(outcome)
    assert max(each.queued + each.running for each in outcome.moments) <= 5
    for user in range(5):
        own = [each for each in outcome.served if each.ask.client == f"user {user}"]
        assert len(own) > 3
        assert all(later.ask.at_s >= earlier.ended_s for earlier, later in itertools.pairwise(own))


def test_shared_prefixes_are_found_on_the_worker_that_holds_them() -> None:
    mix = Mix(prompt=fixed(16), output=fixed(8), shared=1.0, groups=3, shared_tokens=320)
    outcome = simulate(CLUSTER, poisson(10, mix=mix))
    cached = [each.cached_tokens for each in outcome.served]
    assert sum(tokens == 320 for tokens in cached) >= len(cached) - 3 * CLUSTER.workers


def test_workers_share_the_load() -> None:
    outcome = simulate(msgspec.structs.replace(CLUSTER, workers=4), poisson(60))
    assert min(outcome.utilisation) > 0.8 * max(outcome.utilisation)


def test_a_front_door_that_is_too_slow_falls_behind_and_one_that_is_not_does_not() -> None:
    slow = FrontDoor(request_s=0.06, output_s=1e-3)
    late = simulate(msgspec.structs.replace(CLUSTER, workers=8, front=slow), poisson(20))
    quick = simulate(msgspec.structs.replace(CLUSTER, workers=8), poisson(20))
    assert late.front_busy > 0.95 and late.most_behind_s > 5
    assert quick.front_busy < 0.1 and quick.most_behind_s < 0.1
    assert late.summary().ttft_s.p95 > 5 > 0.5 > quick.summary().ttft_s.p95


def test_goodput_counts_what_kept_both_halves_of_the_slo() -> None:
    outcome = simulate(CLUSTER, poisson(40))
    loose = outcome.summary(Slo(ttft_s=100, itl_s=100))
    tight = outcome.summary(Slo(ttft_s=1e-6))
    assert loose.kept_share == 1 and loose.goodput_per_s == pytest.approx(loose.requests_per_s)
    assert tight.kept_share == 0


def test_poisson_and_gamma_arrivals_have_their_rate_and_burstiness() -> None:
    for cv in (0.5, 1.0, 3.0):
        times = [ask.at_s for ask in OpenDemand(MIX, rate_per_s=50, duration_s=400, cv=cv).first()]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        mean = sum(gaps) / len(gaps)
        deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
        assert 1 / mean == pytest.approx(50, rel=0.1)
        assert deviation / mean == pytest.approx(cv, rel=0.1)


def test_percentiles_are_nearest_ranks_and_gaps_come_within_a_percent() -> None:
    found = Percentiles.of(range(1, 101))
    assert (found.p50, found.p95, found.p99, found.most) == (50, 95, 99, 100)
    gaps = QuantileSketch()
    for value in range(1, 1001):
        gaps.add(value / 1000)
    assert Percentiles.of_sketch(gaps).p95 == pytest.approx(0.95, rel=0.011)


def test_a_trace_is_read_and_a_bad_line_is_named(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("at_s,prompt_tokens,output_tokens\n1.5,10,3\n0.5,20,4\n")
    assert [ask.prompt_tokens for ask in TraceDemand.read(trace).first()] == [20, 10]
    trace.write_text("at_s,prompt_tokens,output_tokens\n1.5,10,3\nsoon,20,4\n")
    with pytest.raises(InvalidRequest, match="line 3 of"):
        TraceDemand.read(trace)
    trace.write_text("at_s,tokens\n1,2\n")
    with pytest.raises(InvalidRequest, match="lacks the column prompt_tokens"):
        TraceDemand.read(trace)
    trace.write_text('at_s,prompt_tokens,output_tokens\n1,2,"3\n')
    with pytest.raises(InvalidRequest, match="could not be read: unexpected end of data"):
        TraceDemand.read(trace)
    trace.write_text("at_s,prompt_tokens,output_tokens\n")
    with pytest.raises(InvalidRequest, match="has no requests"):
        TraceDemand.read(trace)


def test_a_trace_may_be_of_a_spreadsheet_and_count_from_any_moment(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("\ufeffat_s, prompt_tokens, output_tokens\n1732000003.5, 20, 4\n1732000001, 10, 3\n")
    asks = list(TraceDemand.read(trace).first())
    assert [(ask.at_s, ask.prompt_tokens) for ask in asks] == [(0.0, 10), (2.5, 20)]


def test_a_trace_is_cut_where_that_is_asked() -> None:
    trace = TraceDemand([Ask(at_s=at, prompt_tokens=5, output_tokens=5) for at in (0.0, 2.0, 7.0)])
    assert (len(trace), trace.last_s) == (3, 7.0)
    assert (len(trace.before(7.0)), trace.before(7.0).last_s) == (2, 2.0)


def test_a_demand_that_ends_sooner_is_the_same_until_then() -> None:
    assert list(ShorterDemand(poisson(12), 5.0).first()) == [ask for ask in poisson(12).first() if ask.at_s < 5.0]
    came = [each.ask.at_s for each in simulate(CLUSTER, ShorterDemand(users(), 5.0)).served]
    longer = [each.ask.at_s for each in simulate(CLUSTER, users()).served]
    assert came == [at_s for at_s in longer if at_s < 5.0] != longer


def test_as_many_requests_come_as_is_expected_of_a_demand() -> None:
    for demand in (poisson(10, 60.0), users(60.0), SeriesDemand(users().first())):
        outcome = simulate(CLUSTER, demand)
        mean_s = math.fsum(each.e2e_s for each in outcome.served) / len(outcome.served)
        assert demand.offered_per_s(mean_s) == pytest.approx(len(outcome.served) / outcome.seconds, rel=0.15)
    trace = TraceDemand([Ask(at_s=at, prompt_tokens=5, output_tokens=5) for at in (0.0, 2.0, 8.0, 8.0)])
    assert trace.offered_per_s(1.0) == ShorterDemand(trace, 1.0).offered_per_s(1.0) == 0.5


def test_requests_in_a_series_never_wait_for_each_other() -> None:
    asks = [Ask(at_s=1.0, prompt_tokens=100, output_tokens=10) for _ in range(5)]
    outcome = simulate(CLUSTER, SeriesDemand(asks))
    assert len(outcome.served) == 5
    assert all(before.ended_s <= after.ask.at_s for before, after in itertools.pairwise(outcome.served))


def test_a_user_who_is_refused_at_once_does_not_ask_again_in_the_same_moment() -> None:
    small = msgspec.structs.replace(CLUSTER, max_model_len=64, front=FrontDoor(request_s=0.0))
    hasty = ClosedDemand(Mix(prompt=fixed(100), output=fixed(1)), users=1, think_s=0.0, duration_s=0.1)
    assert len(simulate(small, hasty).served) <= 100


def test_why_requests_miss_is_counted_by_the_first_reason() -> None:
    long = [Ask(at_s=0.0, prompt_tokens=2000, output_tokens=4)]
    outcome = simulate(CLUSTER, TraceDemand([*long, *(Ask(at_s=0.1, prompt_tokens=50, output_tokens=9),) * 3]))
    assert outcome.summary(Slo(ttft_s=1e-6, itl_s=1e-6)).misses == {"first token": 3, "too long": 1}
    assert outcome.summary(Slo(itl_s=1e-6)).misses == {"other tokens": 3, "too long": 1}
    assert outcome.summary().misses == {"too long": 1}
    assert Outcome().summary().kept_share == 0


@pytest.mark.parametrize("text", ["", "many", "0", "9-3", "5~", "5~-1", "nan~1", "5~0", "5~11", "trace"])
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="prompt: ") as refused:
        Length.parse(text, "prompt")
    assert refused.value.details["param"] == "prompt"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"workers": 0}, "workers is 0"),
        ({"kv_tokens": 3}, "kv_tokens is 3"),
        ({"front": FrontDoor(request_s=-1)}, "request_s of the front end is -1"),
        ({"deaths": (Death(at_s=1, node=2),)}, "no node 2"),
        ({"costs": StepCosts(fixed_s=0.0)}, "step costs must have"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused_by_name(change: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        simulate(msgspec.structs.replace(CLUSTER, **change), poisson(1))


def test_an_itl_target_is_kept_as_a_worker_keeps_it() -> None:
    """Answers whose steps take 8 ms, and a prompt of 8,000 tokens that begins with them: 512 of these take 102 ms."""
    asks = [
        ask
        for at_s in range(0, 60, 6)
        for ask in (
            *(Ask(at_s=at_s, prompt_tokens=50, output_tokens=60) for _ in range(8)),
            Ask(at_s=at_s + 0.1, prompt_tokens=8000, output_tokens=2),
        )
    ]
    plain = Cluster(costs=COSTS, max_prompts=16, kv_tokens=65_536, max_model_len=16_384)
    means_s: dict[float | None, float] = {}
    for target_s in (None, 0.02):
        outcome = simulate(msgspec.structs.replace(plain, slo_itl_s=target_s), TraceDemand(asks))
        check_books(outcome)
        later = [each.tpot_s or 0.0 for each in outcome.served if each.ask.at_s > 30 and each.ask.output_tokens == 60]
        means_s[target_s] = max(later)
    paced_s, free_s = means_s[0.02], means_s[None]
    assert paced_s <= 0.02 < 1.5 * paced_s < free_s
