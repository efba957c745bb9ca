"""Where workers go, what they get there, and why they cannot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.backends.common import kv_tiers
from engine.config import ModelSpec
from engine.errors import InsufficientMemory, InvalidRequest
from engine.placement.model_memory import ModelCosts, device_kind
from engine.placement.plan import Placement, Plan, candidates, plan_costs
from engine.snapshot import DeviceReading

MIB = 2**20
LAYERS = 8
COSTS = ModelCosts(
    name="m",
    identity="",
    backend="torch",
    dtype="bfloat16",
    kind="cuda",
    cache_bits=16,
    context_tokens=2048,
    page_tokens=16,
    layer_bytes=(100 * MIB,) * LAYERS,
    first_bytes=50 * MIB,
    last_bytes=50 * MIB,
    page_bytes=16 * 2048,
    working_bytes=44 * MIB,
    head_working_bytes=44 * MIB,
)
LEAST_MIB = 900 + 44 + 32  # weights, working memory, and 128 KV pages of 32 KiB in 8 layers


def device(name: str, free_mib: float, node: str = "") -> DeviceReading:
    return DeviceReading(
        id=name,
        name=name,
        kind=device_kind(name),
        utilisation=None,
        total_bytes=0,
        free_bytes=int(free_mib * MIB),
        node=node,
    )


def cards(*free_mib: float) -> list[DeviceReading]:
    """GPUs with so many MiB to take, beyond what stays free."""
    return [device(f"cuda:{number}", 192 + free) for number, free in enumerate(free_mib)]


def spec(**fields: object) -> ModelSpec:
    return ModelSpec(path=Path("/models/m"), name="m", **fields)  # type: ignore[arg-type]


def planned(
    workers: int,
    devices: list[DeviceReading],
    *,
    costs: ModelCosts = COSTS,
    max_prompts: int = 1,
    later: Sequence[DeviceReading] = (),
    **fields: object,
) -> Plan:
    model = spec(**fields)
    return plan_costs(workers, costs, candidates(devices, model), model, max_prompts, later=later, hosts=devices)


def layers_of(found: Plan) -> list[dict[str, int]]:
    return [{share.device: share.layers for share in placement.shares} for placement in found.placements]


# -- automatic ---------------------------------------------------------------------------------------------------------


def test_each_worker_goes_whole_where_most_memory_is_left() -> None:
    found = planned(3, cards(2500, 3000))
    assert layers_of(found) == [{"cuda:1": LAYERS}, {"cuda:0": LAYERS}, {"cuda:1": LAYERS}]
    assert [placement.device for placement in found.placements] == ["cuda:1", "cuda:0", "cuda:1"]


def test_beside_workers_that_leave_new_ones_go_where_most_memory_is_left_once_those_are_gone() -> None:
    before, later = cards(3000, 6000), cards(6000, 6000)
    assert layers_of(planned(3, before)) == [{"cuda:1": LAYERS}] * 3
    assert layers_of(planned(3, before, later=later)) == layers_of(planned(3, later))
    crowded = cards(0, 6000)
    assert layers_of(planned(3, crowded, later=later)) == [{"cuda:1": LAYERS}] * 3


def test_only_what_fits_on_no_device_is_split_and_over_as_few_as_can_be() -> None:
    found = planned(2, cards(900, 1300, 600, 20))
    assert layers_of(found) == [{"cuda:1": LAYERS}, {"cuda:0": 7, "cuda:2": 1}]
    assert found.placements[1].device == "auto"
    assert found.fits


def test_the_embedding_goes_with_the_first_share_and_the_head_with_the_last() -> None:
    costs = msgspec.structs.replace(COSTS, first_bytes=70 * MIB, last_bytes=90 * MIB, head_working_bytes=60 * MIB)
    first, last = planned(1, cards(1000, 700), costs=costs).placements[0].shares
    assert first.weights_bytes == (first.layers * 100 + 70) * MIB
    assert last.weights_bytes == (last.layers * 100 + 90) * MIB
    assert (first.working_bytes, last.working_bytes) == (44 * MIB, 60 * MIB)


def test_a_tied_head_is_held_twice_only_where_the_embedding_lies_elsewhere() -> None:
    costs = msgspec.structs.replace(COSTS, joined_bytes=50 * MIB)
    assert sum(share.weights_bytes for share in planned(1, cards(5000), costs=costs).placements[0].shares) == 850 * MIB
    split = planned(1, cards(800, 800), costs=costs).placements[0].shares
    assert sum(share.weights_bytes for share in split) == 900 * MIB


def test_gpus_and_simulated_devices_are_preferred_to_the_cpu() -> None:
    gpu, cpu = device("cuda:0", 2000), device("cpu", 90000)
    assert candidates([gpu, cpu], spec()) == [gpu]
    assert candidates([cpu], spec()) == [cpu]
    simulated = msgspec.structs.replace(gpu, id="sim:0", kind="simulated")
    assert candidates([simulated, cpu], spec()) == [simulated]


def test_ram_that_the_host_tier_of_the_kv_cache_may_take_yet_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_tiers.shutil, "disk_usage", lambda path: SimpleNamespace(used=2**30))
    kept = {
        (name, gib): planned(1, [device(name, 32 * 1024)], kv_host_gib=gib).device_plans[0].headroom_bytes
        for name in ("cpu", "cuda:0")
        for gib in (0, 0.5, 3)
    }
    batch = 16 * 2**20  # which pages are read into
    assert kept["cpu", 3] - kept["cpu", 0] == 2 * 2**30 + batch
    assert kept["cpu", 0.5] - kept["cpu", 0] == batch, "it has all that it wants"
    assert len({kept["cuda:0", gib] for gib in (0, 0.5, 3)}) == 1
    on_disk = planned(1, [device("cpu", 32 * 1024)], kv_disk_gib=9).device_plans[0].headroom_bytes
    assert on_disk - kept["cpu", 0] == 256 * 2**20 + 4 * batch, "pages that wait to be written, and four reads"


def test_a_named_device_is_used_alone() -> None:
    every = [device("cuda:0", 9000), device("cuda:1", 4000), device("cpu", 9000)]
    assert layers_of(planned(2, every, device="cuda:1")) == [{"cuda:1": LAYERS}] * 2
    assert layers_of(planned(1, every, device="cpu")) == [{"cpu": LAYERS}]


def test_a_device_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(InvalidRequest, match="no device cuda:7; available: cuda:0, cpu"):
        candidates([device("cuda:0", 9000), device("cpu", 9000)], spec(device="cuda:7"))


def test_no_worker_spans_two_machines() -> None:
    halves = [device("cuda:0", 192 + 700, "a"), device("cuda:0", 192 + 700, "b")]
    assert not planned(1, halves).fits
    together = [*halves, device("cuda:1", 192 + 700, "b")]
    found = planned(1, together)
    assert (found.fits, found.placements[0].node, len(found.placements[0].shares)) == (True, "b", 2)


# -- as told -----------------------------------------------------------------------------------------------------------


def test_gpu_balance_gives_each_card_a_whole_worker_and_splits_the_odd_one_over_all() -> None:
    found = planned(3, cards(9000, 5000), gpu_balance=True)
    assert layers_of(found) == [{"cuda:0": LAYERS}, {"cuda:1": LAYERS}, {"cuda:0": 4, "cuda:1": 4}]


def test_gpu_balance_puts_fewer_workers_than_cards_on_one_each() -> None:
    found = planned(2, cards(3000, 9000, 4000), gpu_balance=True)
    assert layers_of(found) == [{"cuda:1": LAYERS}, {"cuda:2": LAYERS}]


def test_gpu_split_gives_the_layers_in_order_as_far_as_each_size_goes() -> None:
    found = planned(2, cards(9000, 9000), gpu_split_gb=(0.5, 1.0))
    assert layers_of(found) == [{"cuda:0": 4, "cuda:1": 4}] * 2


def test_a_gpu_split_that_cannot_hold_the_weights_or_names_too_many_cards_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"0\.2\+0\.3 GB for the weights of m, which need 0\.88 GB"):
        planned(1, cards(9000, 9000), gpu_split_gb=(0.2, 0.3))
    with pytest.raises(InvalidRequest, match="names 3 GPUs; this machine has 2: cuda:0, cuda:1"):
        planned(1, cards(9000, 9000), gpu_split_gb=(1, 1, 1))


def test_workers_that_share_their_weights_on_a_device_take_them_once() -> None:
    costs = msgspec.structs.replace(COSTS, shares_weights=True)
    devices = [device("cpu", 256 + LEAST_MIB + 2 * (LEAST_MIB - 900))]
    costs = msgspec.structs.replace(costs, kind="cpu")
    found = planned(3, devices, costs=costs)
    assert (found.fits, found.device_plans[0].used_bytes) == (True, (900 + 3 * (LEAST_MIB - 900)) * MIB)
    assert not planned(4, devices, costs=costs).fits
    assert plan_costs(15, costs, devices, spec(), 1, resident=True).device_plans[0].short_bytes == 15 * (
        LEAST_MIB - 900
    ) * MIB - (found.device_plans[0].used_bytes)


def test_tensor_parallelism_takes_every_card() -> None:
    assert layers_of(planned(1, cards(9000, 9000), tensor_parallel=True)) == [{"cuda:0": 4, "cuda:1": 4}]


def test_ranks_take_the_roomiest_cards_of_a_machine_with_all_layers_on_each() -> None:
    each = msgspec.structs.replace(COSTS, ranks=2)
    found = planned(1, cards(3000, 1000, 2000), costs=each)
    assert layers_of(found) == [{"cuda:0": LAYERS, "cuda:2": LAYERS}]
    assert {share.ranks for share in found.placements[0].shares} == {2}
    assert [bool(planned.used_bytes) for planned in found.device_plans] == [True, False, True]
    assert found.placements[0].device == "auto"
    pairs = layers_of(planned(2, cards(1000, 1000, 1000, 1000), costs=each))
    assert pairs == [{"cuda:0": LAYERS, "cuda:1": LAYERS}, {"cuda:2": LAYERS, "cuda:3": LAYERS}]


def test_ranks_that_do_not_fit_say_what_each_card_lacks() -> None:
    found = planned(1, cards(LEAST_MIB, LEAST_MIB - 100), costs=msgspec.structs.replace(COSTS, ranks=2))
    assert [planned.short_bytes for planned in found.device_plans] == [0, 100 * MIB]


def test_more_ranks_than_a_machine_has_cards_are_refused() -> None:
    ranks = msgspec.structs.replace(COSTS, ranks=3)
    with pytest.raises(InvalidRequest, match="tensor_parallel_size is 3; that takes 3 GPUs of one machine") as refused:
        planned(1, cards(9000, 9000), costs=ranks)
    assert refused.value.details["param"] == "tensor_parallel_size"
    machines = [device(f"{node}/cuda:{number}", 9000, node) for node in "ab" for number in range(2)]
    with pytest.raises(InvalidRequest, match="3 GPUs of one machine"):
        planned(1, machines, costs=ranks)


def test_ranks_on_a_cpu_share_it() -> None:
    costs = msgspec.structs.replace(COSTS, kind="cpu", ranks=2)
    found = planned(1, [device("cpu", 9000)], costs=costs)
    assert [(share.device, share.layers, share.ranks) for share in found.placements[0].shares] == [("cpu", LAYERS, 2)]


# -- headroom and refusals ---------------------------------------------------------------------------------------------


def test_headroom_is_a_share_of_the_device_and_a_floor_or_what_was_asked_for() -> None:
    large = msgspec.structs.replace(device("cuda:0", 9000), total_bytes=10000 * MIB)
    assert planned(1, [large]).device_plans[0].headroom_bytes == (100 + 192) * MIB
    assert planned(1, [large], gpu_reserve_mib=(1000,)).device_plans[0].headroom_bytes == 1000 * MIB


def test_a_refusal_says_what_each_device_lacks() -> None:
    found = planned(4, cards(LEAST_MIB + 100, LEAST_MIB - 100))
    error = found.refusal()
    assert error.message.startswith("4 workers with m do not fit: GPU")
    assert error.message.count("short by") == 2
    for name in ("cuda:0", "cuda:1"):
        assert error.details[f"{name}.short_bytes"] == (
            error.details[f"{name}.needed_bytes"]  # type: ignore[operator]
            + error.details[f"{name}.headroom_bytes"]
            - error.details[f"{name}.free_bytes"]
        )
    assert error.details["short_bytes"] == max(each.short_bytes for each in found.device_plans)


def test_a_model_too_large_for_every_card_lacks_what_a_split_over_them_would_lack() -> None:
    found = planned(1, cards(500, 500))
    whole_short = LEAST_MIB - 500
    assert sum(each.short_bytes for each in found.device_plans) < whole_short * MIB
    assert len(found.placements[0].shares) == 2


# -- simulated devices -------------------------------------------------------------------------------------------------

SIMULATED = msgspec.structs.replace(COSTS, kind="simulated", host_process_bytes=256 * MIB)


def simulated(host_free_mib: float, *free_mib: float) -> list[DeviceReading]:
    """Simulated devices with so many MiB to take, and a host with as many."""
    return [
        *(device(f"sim:{number}", 64 + free) for number, free in enumerate(free_mib)),
        device("cpu", 256 + host_free_mib),
    ]


def test_workers_on_simulated_devices_take_the_hosts_memory_too() -> None:
    each = LEAST_MIB + 256  # a process of its own besides what it holds on its device
    assert planned(3, simulated(3 * each, 90000, 90000), costs=SIMULATED, kv_cache_tokens=2048).fits
    found = planned(3, simulated(3 * each - 1, 90000, 90000), costs=SIMULATED, kv_cache_tokens=2048)
    assert not found.fits
    assert found.shortage.startswith(f"CPU: needed {3 * each} MiB (weights 2700 MiB, KV pages 96 MiB, ")
    assert found.refusal().details["cpu.short_bytes"] == MIB
    assert [each.device.id for each in found.device_plans] == ["sim:0", "sim:1", "cpu"]


def test_workers_on_simulated_devices_that_share_their_weights_take_them_of_the_host_once() -> None:
    costs = msgspec.structs.replace(SIMULATED, host_shares_weights=True)
    room = 900 + 3 * (LEAST_MIB - 900 + 256)
    assert planned(3, simulated(room, 90000, 90000), costs=costs, kv_cache_tokens=2048).fits
    assert not planned(3, simulated(room - 1, 90000, 90000), costs=costs, kv_cache_tokens=2048).fits


def test_kv_pages_of_simulated_devices_grow_no_further_than_the_host_holds() -> None:
    room = 2 * (LEAST_MIB + 256) + 1000
    found = planned(2, simulated(room, 90000, 90000), costs=SIMULATED, max_prompts=10_000)
    assert found.fits
    assert found.device_plans[-1].used_bytes <= room * MIB
    assert {placement.kv_tokens > 2048 for placement in found.placements} == {True}


def test_each_machine_holds_the_workers_of_its_own_simulated_devices() -> None:
    names = [("sim:0", "a", 90000), ("cpu", "a", 90000), ("sim:0", "b", 90000), ("cpu", "b", 300)]
    found = planned(2, [device(name, free, node) for name, node, free in names], costs=SIMULATED)
    assert [each.device.node for each in found.device_plans if each.short_bytes] == ["b"]


# -- KV pages ----------------------------------------------------------------------------------------------------------


def test_kv_pages_hold_a_typical_length_of_each_request_or_one_whole_context() -> None:
    for costs in (SIMULATED, msgspec.structs.replace(SIMULATED, context_tokens=100_000)):
        found = planned(1, simulated(90000, 90000), costs=costs, max_prompts=5)
        assert found.placements[0].kv_tokens == max(5 * 2048, costs.context_tokens)


def test_kv_pages_fill_a_gpu_up_to_what_all_requests_can_have() -> None:
    long = msgspec.structs.replace(COSTS, context_tokens=100_000)
    assert planned(1, cards(90000), costs=long, max_prompts=5).placements[0].kv_tokens == 5 * 100_000
    for max_models, share in ((0, 0.5), (1, 0.9)):
        found = plan_costs(1, long, cards(20000), spec(), 64, max_models=max_models)
        assert 64 * 2048 < found.placements[0].kv_tokens < 64 * 100_000
        used_mib = LEAST_MIB + share * (20000 - LEAST_MIB)
        assert used_mib - 1 < found.device_plans[0].used_bytes / MIB <= used_mib
    few = planned(1, cards(LEAST_MIB + 1000), costs=long, max_prompts=5).device_plans[0]
    assert few.used_bytes / MIB > LEAST_MIB + 899


def test_workers_on_one_device_get_equal_parts_of_what_all_of_them_leave() -> None:
    found = planned(2, cards(2 * LEAST_MIB + 1000), max_prompts=100)
    held = {placement.kv_tokens for placement in found.placements}
    assert len(held) == 1
    assert 2048 < held.pop() < 100 * 2048
    assert found.device_plans[0].used_bytes <= (2 * LEAST_MIB + 900) * MIB


def test_kv_cache_tokens_are_honoured_to_the_page_or_refused() -> None:
    assert planned(1, cards(90000), max_prompts=100, kv_cache_tokens=100).placements[0].kv_tokens == 112
    assert not planned(1, cards(LEAST_MIB), kv_cache_tokens=4096).fits


# -- properties --------------------------------------------------------------------------------------------------------

SIZES = st.integers(0, 40)
WANTS = st.sampled_from(({}, {"gpu_balance": True}, {"tensor_parallel": True}, {"gpu_split_gb": (6 / 2**30, 1.0)}))


@st.composite
def models(draw: st.DrawFn) -> ModelCosts:
    """Small numbers, where every rounding shows."""
    first, last = draw(SIZES), draw(SIZES)
    work = draw(SIZES)
    return msgspec.structs.replace(
        COSTS,
        context_tokens=draw(st.sampled_from((16, 64))),
        layer_bytes=tuple(draw(st.lists(st.integers(1, 20), min_size=1, max_size=6))),
        first_bytes=first,
        last_bytes=last,
        joined_bytes=draw(st.integers(0, min(first, last))),
        page_bytes=draw(st.integers(0, 3)),
        device_page_bytes=draw(st.integers(0, 3)),
        first_page_bytes=draw(st.integers(0, 3)),
        working_bytes=work,
        head_working_bytes=work + draw(SIZES),
        shares_weights=draw(st.booleans()),
    )


ROOMS = st.lists(st.integers(-20, 300), min_size=1, max_size=4)


def in_bytes(
    workers: int, costs: ModelCosts, rooms: list[int], wants: dict[str, object], nodes: int = 1
) -> Plan | None:
    """A plan over cards with so many bytes beyond their headroom; None where the split that was given cannot be."""
    devices = [
        DeviceReading(
            id=f"cuda:{number}",
            name="",
            kind="cuda",
            utilisation=None,
            total_bytes=0,
            free_bytes=192 * MIB + room,
            node=str(number % nodes),
        )
        for number, room in enumerate(rooms)
    ]
    try:
        return plan_costs(workers, costs, devices, spec(**wants), max_prompts=4)
    except InvalidRequest:
        return None


@settings(max_examples=400, deadline=None)
@given(st.integers(1, 6), models(), ROOMS, WANTS, st.integers(1, 2))
def test_no_device_gives_more_than_it_has_beyond_its_headroom_and_every_layer_has_a_place(
    workers: int, costs: ModelCosts, rooms: list[int], wants: dict[str, object], nodes: int
) -> None:
    found = in_bytes(workers, costs, rooms, wants, nodes)
    if found is None:
        return
    assert len(found.placements) == workers
    for placement in found.placements:
        assert sum(share.layers for share in placement.shares) == costs.layers
        assert len({share.device for share in placement.shares}) == len(placement.shares)
        assert placement.kv_tokens >= costs.context_tokens
    if found.fits:
        for number, room in enumerate(rooms):
            here = [(placement, share) for placement in found.placements for share in placement.shares]
            here = [(placement, share) for placement, share in here if share.device == f"cuda:{number}"]
            taken = sum(share.total_bytes for _, share in here)
            if costs.shares_weights:
                alone = sum(len(placement.shares) == 1 for placement, _ in here)
                taken -= costs.weights_bytes * max(0, alone - 1)
            assert taken == found.device_plans[number].used_bytes <= max(room, 0)


@settings(max_examples=600, deadline=None)
@given(st.integers(1, 6), models(), ROOMS, WANTS, st.data())
def test_more_memory_and_fewer_workers_never_turn_a_fit_into_a_refusal(
    workers: int, costs: ModelCosts, rooms: list[int], wants: dict[str, object], data: st.DataObject
) -> None:
    found = in_bytes(workers, costs, rooms, wants)
    if found is None or not found.fits:
        return
    more = [room + data.draw(st.integers(0, 150)) for room in rooms]
    fewer = data.draw(st.integers(1, workers))
    for again in (in_bytes(workers, costs, more, wants), in_bytes(fewer, costs, rooms, wants)):
        assert again is not None
        assert again.fits


FLEXIBLE = msgspec.structs.replace(
    COSTS,
    context_tokens=64,
    layer_bytes=(2, 1, 1, 1, 2),
    first_bytes=0,
    last_bytes=0,
    joined_bytes=0,
    page_bytes=3,
    device_page_bytes=0,
    first_page_bytes=0,
    working_bytes=0,
    head_working_bytes=0,
    shares_weights=True,
)
"""A model that is split otherwise once the devices have what the first split lacks."""


@settings(max_examples=400, deadline=None)
@given(st.integers(1, 6), models(), ROOMS, WANTS, st.integers(1, 2))
@example(4, FLEXIBLE, [1, 1, 162], {}, 1)
def test_granting_exactly_what_a_refusal_says_is_short_makes_it_fit(
    workers: int, costs: ModelCosts, rooms: list[int], wants: dict[str, object], nodes: int
) -> None:
    found = in_bytes(workers, costs, rooms, wants, nodes)
    if found is None or found.fits:
        return
    granted = [room + each.short_bytes for room, each in zip(rooms, found.device_plans, strict=True)]
    again = in_bytes(workers, costs, granted, wants, nodes)
    assert again is not None
    assert again.fits


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 6), models(), ROOMS)
def test_automatic_never_splits_what_fits_whole(workers: int, costs: ModelCosts, rooms: list[int]) -> None:
    found = in_bytes(workers, costs, rooms, {})
    assert found is not None
    whole = costs.share("", 0, costs.layers, costs.pages(costs.context_tokens)).total_bytes
    further = whole - costs.weights_bytes * costs.shares_weights
    room_for = sum(1 + (room - whole) // max(1, further) for room in rooms if room >= whole)
    if found.fits:
        assert sum(len(placement.shares) > 1 for placement in found.placements) >= workers - room_for
    if workers <= room_for:
        assert found.fits
        assert all(len(placement.shares) == 1 for placement in found.placements)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 9), models(), st.lists(st.integers(0, 2000), min_size=2, max_size=4))
def test_gpu_balance_counts_of_whole_workers_differ_by_one_at_most(
    workers: int, costs: ModelCosts, rooms: list[int]
) -> None:
    found = in_bytes(workers, costs, rooms, {"gpu_balance": True})
    assert found is not None
    whole = [placement.device for placement in found.placements if len(placement.shares) == 1]
    counts = [whole.count(f"cuda:{number}") for number in range(len(rooms))]
    assert max(counts) - min(counts) <= 1


def test_a_refusal_is_raised_as_such() -> None:
    with pytest.raises(InsufficientMemory, match="a worker with m does not fit"):
        raise planned(1, cards(10)).refusal()


def test_a_placement_names_its_device_only_where_there_is_one() -> None:
    shares = planned(1, cards(800, 800)).placements[0].shares
    assert Placement(shares=shares, kv_tokens=16).device == "auto"
    assert Placement(shares=shares[:1], kv_tokens=16).device == "cuda:0"
