"""What the sections of Tune's workload, the devices page and the latency breakdown say of given numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest
from textual.content import Content

from console.text import cost, duration, energy, of_limit, share, three_digits, with_si_prefix
from console.tui.screens.dashboard.panels.session import session_facts
from console.tui.screens.devices.screen import device_blocks
from console.tui.screens.tune import workload
from console.tui.screens.tune.workload import histogram, share_bars
from console.tui.widgets.latency import Room, latency_breakdown
from console.tui.widgets.plot import meter
from engine.backends.base import BackendStats, ItlReport
from engine.snapshot import (
    DeviceLimits,
    DeviceReading,
    DeviceWork,
    Energy,
    Goodput,
    Insight,
    Lengths,
    Session,
    Snapshot,
)
from tests.fakes import insight_scenes, scenes

ROOM = Room(54)


def said(panel: Callable[[Snapshot, Room], Iterable[Content]], snapshot: Snapshot, room: Room = ROOM) -> str:
    """What a panel says, as text."""
    return "\n".join(line.plain for line in panel(snapshot, room))


def of(**changes: object) -> Snapshot:
    """A snapshot with that insight alone."""
    return scenes.empty(insight=Insight(**changes))  # type: ignore[arg-type]


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0, "0.00"), (0.523, "0.52"), (1.0, "1.0"), (5.23, "5.2"), (52.3, "52"), (1204.4, "1,204")],
)
def test_numbers_have_the_digits_that_matter(value: float, expected: str) -> None:
    assert three_digits(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0 FLOP/s"),
        (2.4e9, "2.4 GFLOP/s"),
        (8.61e12, "8.6 TFLOP/s"),
        (9.999e11, "1.0 TFLOP/s"),
        (1.2e15, "1.2 PFLOP/s"),
    ],
)
def test_rates_have_a_unit_that_fits(value: float, expected: str) -> None:
    assert with_si_prefix(value, "FLOP/s") == expected


def test_a_rate_and_its_limit_have_the_unit_of_the_limit() -> None:
    assert of_limit(8.6e12, 7.1e13, "FLOP/s") == "8.6 of 71 TFLOP/s"
    assert of_limit(12e9, 3.352e12, "B/s") == "0.01 of 3.4 TB/s"
    assert of_limit(0.0, 3.352e12, "B/s") == "0 of 3.4 TB/s"


@pytest.mark.parametrize(
    ("joules", "expected"),
    [(0, "0 J"), (512, "512 J"), (11_520, "3.2 Wh"), (4.464e6, "1.24 kWh"), (7.2e9, "2,000.00 kWh")],
)
def test_energy_has_the_unit_of_its_size(joules: float, expected: str) -> None:
    assert energy(joules) == expected


def test_a_cost_is_energy_times_the_rate() -> None:
    assert cost(3.6e6 * 4, 0.25, "EUR") == "1.00 EUR"
    assert cost(36_000, 0.25, "EUR") == "0.0025 EUR"
    assert cost(3.6e6 * 2, 0.3, "") == "0.60"


@pytest.mark.parametrize(
    ("seconds", "expected"), [(41, "41 s"), (725, "12 min"), (8120, "2 h 15 min"), (273_700, "3 d 4 h")]
)
def test_durations_have_two_units_at_most(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


def test_what_is_there_is_never_nothing() -> None:
    assert (share(0.0), share(0.001), share(0.06)) == ("0%", "<1%", "6%")


# --- charts -----------------------------------------------------------------------------------------------------------


def test_a_gauge_is_read_without_colours() -> None:
    assert meter(0.5, 10, "").plain == "━━━━━─────"
    assert meter(0.25, 10, "").plain == "━━╸───────"
    assert (meter(-1.0, 4, "").plain, meter(7.0, 4, "").plain) == ("────", "━━━━")


def test_a_histogram_shows_the_buckets_from_the_first_to_the_last_that_have_something() -> None:
    lengths = Lengths(bounds=(16, 32, 64, 128, 256, 512), counts=(0, 0, 4, 0, 2, 0, 0))
    lines = [line.plain.rstrip() for line in histogram(lengths, 40, "")]
    assert lines[-1].split() == ["≤32", "≤64", "≤128", "≤256", "≤512"]
    assert lines[0] == "      █████"
    assert lines[3] == "      █████       █████"


def test_a_histogram_that_is_too_wide_joins_neighbours_and_loses_nobody() -> None:
    lengths = Lengths(bounds=tuple(2**power for power in range(4, 18)), counts=(1,) * 15)
    lines = [line.plain for line in histogram(lengths, 16, "")]
    assert max(map(len, lines)) <= 18
    assert lines[-1].endswith("more")


def test_a_histogram_of_nothing_is_nothing() -> None:
    assert histogram(Lengths(bounds=(16,), counts=(0, 0)), 40, "") == []


def test_a_histogram_in_ascii_has_no_blocks() -> None:
    lengths = Lengths(bounds=(16, 32), counts=(3, 1, 0))
    assert all(line.plain.isascii() for line in histogram(lengths, 30, "", ascii_only=True)[:-1])


def test_bars_of_shares_are_aligned() -> None:
    lines = [line.plain for line in share_bars((("stop", 0.9, "", "3,702"), ("length", 0.06, "", "249")), 50)]
    assert [len(line) for line in lines] == [50, 50]
    assert lines[1].endswith("   6%    249")


# --- panels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [44, 54, 76, 120])
@pytest.mark.parametrize(
    "snapshot",
    [insight_scenes.hours_of_work(), insight_scenes.one_answer(), scenes.empty()],
    ids=["hours", "one answer", "nothing"],
)
def test_every_line_fits_its_panel(snapshot: Snapshot, width: int) -> None:
    sections = (workload.endings, workload.prompts, workload.answers, workload.context, workload.drafts)
    for section in (latency_breakdown, *sections):
        assert all(line.cell_length <= max(width, 51) for line in section(snapshot, Room(width))), section.__name__


def test_a_session_averages_over_busy_time() -> None:
    busy = Session(since=scenes.NOW, elapsed_s=200.0, busy_s=50.0, output_tokens=5000, prompt_tokens=1000, batch=3.0)
    facts = dict(session_facts(of(session=busy)))
    assert facts["busy"] == "25% · 100 tok/s generated, 20 prefilled · average batch 3.0"
    assert "busy" not in dict(session_facts(of(session=Session())))


def test_the_share_of_a_phase_is_of_all_time_spent() -> None:
    text = said(latency_breakdown, insight_scenes.hours_of_work())
    assert "decode     5.21 s  12.8 s  31.0 s  6.40 s     95%" in text


def test_goodput_without_an_slo_says_where_one_is_set() -> None:
    assert "slo_ttft" in said(workload.goodput, of())


def test_goodput_is_a_share_and_a_rate() -> None:
    text = said(workload.goodput, of(goodput=Goodput(slo_itl_s=0.05, judged=8, within_slo=6, per_s=1.5)))
    assert "mean ITL within 50 ms" in text
    assert "TTFT" not in text
    assert "75% · 6 of 8 requests" in text
    assert "1.5 in the last minute" in text


def test_an_itl_target_has_the_error_of_predicted_steps_and_what_answers_alone_take() -> None:
    def told(**report: Any) -> str:
        stats = BackendStats(itl=ItlReport(target_s=0.05, **report))
        workers = (scenes.worker(0, stats=stats), scenes.worker(1))
        insight = Insight(goodput=Goodput(slo_itl_s=0.05))
        return said(workload.goodput, scenes.busy(insight=insight, workers=workers))

    assert "predicted" not in told()
    assert "predicted within 3%" in told(error=0.03, floor_s=0.02, answers=8)
    assert "no prompt" not in told(error=0.03, floor_s=0.02, answers=8)
    assert "64 ms with 16 answers and no prompt" in told(error=0.03, floor_s=0.064, answers=16)


def test_goodput_before_the_first_answer_is_unknown() -> None:
    assert "no finished answers yet" in said(workload.goodput, of(goodput=Goodput(slo_itl_s=0.05)))


def test_context_is_held_against_what_the_model_takes() -> None:
    text = said(workload.context, of(longest_context_tokens=2048, configured_context_tokens=8192))
    assert "2,048 of 8,192 tokens · 25%" in text
    assert "no model is loaded" in said(workload.context, of(longest_context_tokens=2048))


def test_energy_has_its_cost_where_a_rate_is_set() -> None:
    drawn = Energy(power_w=300.0, session_joules=9e5, busy_joules=6e5, today_joules=3.6e6)
    done = Session(output_tokens=300_000)
    plain = scenes.busy(insight=Insight(energy=drawn, session=done), output_tokens_per_s=600.0)
    assert "now           300 W · 2.0 tok/s per W" in device_blocks(plain).plain
    assert "2.0 J per token while busy · 0.25 kWh" in device_blocks(plain).plain
    assert device_blocks(plain).plain.endswith("today         1.00 kWh")
    assert dict(session_facts(plain))["energy"] == "300 W · 2.0 J/token while busy · today 1.00 kWh"
    priced = msgspec.structs.replace(drawn, rate_per_kwh=0.3, currency="EUR")
    snapshot = scenes.busy(insight=Insight(energy=priced))
    assert "1.00 kWh · 0.30 EUR" in device_blocks(snapshot).plain
    assert dict(session_facts(snapshot))["energy"].endswith("today 1.00 kWh, 0.30 EUR")


@pytest.mark.parametrize(
    ("energy", "words"),
    [
        (Energy(unmetered=1), "power not reported by this device"),
        (Energy(), "no device in use"),
        (Energy(power_w=5.0, unmetered=1), "1 device in use without power reading, not included"),
    ],
)
def test_power_that_no_device_reports_is_said_to_be_unknown(energy: Energy, words: str) -> None:
    assert words in device_blocks(scenes.busy(insight=Insight(energy=energy))).plain


def test_the_energy_of_today_stays_after_the_devices_went_silent() -> None:
    assert "0.50 kWh" in device_blocks(scenes.busy(insight=Insight(energy=Energy(today_joules=1.8e6)))).plain


def test_work_is_a_share_of_the_peak_and_an_unknown_peak_is_no_share() -> None:
    known = DeviceWork(
        device="cuda:0", flops_per_s=1e13, flops_limit_per_s=1e14, bytes_per_s=9e11, bytes_limit_per_s=6e11
    )
    devices = (scenes.gpu(0), scenes.gpu(1))
    unknown = DeviceWork(device="cuda:1", flops_per_s=1e13)
    text = device_blocks(scenes.busy(devices=devices, insight=Insight(work=(known, unknown)))).plain
    first, _, second = text.partition("GPU1")
    assert "10%  10 of 100 TFLOP/s" in first
    assert "150%" in first
    assert "10 TFLOP/s  peak not known" in second


def test_a_simulated_device_and_an_unmeasured_processor_are_said_to_be_so() -> None:
    simulated = DeviceReading(id="sim:0", name="", kind="simulated", utilisation=None, total_bytes=1)
    work = Insight(work=(DeviceWork(device="sim:0"),))
    assert "0 FLOP/s  simulated" in device_blocks(scenes.empty(devices=(simulated,), insight=work)).plain
    assert "peak not measured" in device_blocks(insight_scenes.one_answer()).plain
    measured = insight_scenes.one_answer(limits=DeviceLimits(flops_16bit_per_s=1e11, bytes_per_s=2e10))
    assert "not measured" not in device_blocks(measured).plain
