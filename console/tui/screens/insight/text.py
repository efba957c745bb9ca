"""The panels of insight, as lines of content for a width. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from textual.content import Content

from console import text
from console.text import device_name, local_time
from console.tui.widgets.plot import BarSegment, draw, stack
from engine.snapshot import DeviceReading, DeviceWork, Goodput, Lengths, Snapshot, Spread

# Numbers of insight as an operator reads them: rates, energy, money, shares of a whole.

_SCALES = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
_JOULES_PER_KWH = 3.6e6
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86_400


def three_digits(value: float) -> str:
    """Three digits, more where they are before the point: "0.52", "5.2", "52", "1,204"."""
    for digits, below in ((2, 0.9995), (1, 9.95)):
        if abs(value) < below:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}"


def with_si_prefix(value: float, unit: str) -> str:
    """ "8.6 TFLOP/s", "936 GB/s", "0 B/s"."""
    return f"{_number(value)} {_prefix(value)}{unit}"


def of_limit(value: float, limit: float, unit: str) -> str:
    """ "8.6 of 71 TFLOP/s": both in the unit of the limit."""
    prefix = _prefix(limit)
    scale = next((scale for name, scale in _SCALES if name == prefix), 1.0)
    return f"{three_digits(value / scale) if value else 0} of {three_digits(limit / scale)} {prefix}{unit}"


def energy(joules: float) -> str:
    """ "1.24 kWh", "3.2 Wh", "512 J"."""
    if joules >= _JOULES_PER_KWH / 10:
        return f"{joules / _JOULES_PER_KWH:,.2f} kWh"
    if joules >= _JOULES_PER_KWH / 1000:
        return f"{joules / _JOULES_PER_KWH * 1000:.1f} Wh"
    return f"{joules:.0f} J"


def cost(joules: float, rate_per_kwh: float, currency: str) -> str:
    """ "0.97 EUR"; four decimals below a tenth, as nothing would be left of it otherwise."""
    money = joules / _JOULES_PER_KWH * rate_per_kwh
    return f"{money:,.{2 if money >= 0.1 or not money else 4}f} {currency}".rstrip()


def duration(seconds: float) -> str:
    """ "41 s", "12 min", "2 h 15 min", "3 d 4 h"."""
    if seconds < _MINUTE_S:
        return f"{seconds:.0f} s"
    if seconds < _HOUR_S:
        return f"{seconds // _MINUTE_S:.0f} min"
    if seconds < _DAY_S:
        return f"{seconds // _HOUR_S:.0f} h {seconds % _HOUR_S // _MINUTE_S:.0f} min"
    return f"{seconds // _DAY_S:.0f} d {seconds % _DAY_S // _HOUR_S:.0f} h"


def tokens(number: float) -> str:
    """A length in full as long as that is short: "3,421", "32.8k"."""
    return f"{number:,.0f}" if number < 10_000 else f"{number / 1000:,.1f}k"


def _prefix(value: float) -> str:
    return next((name for name, scale in _SCALES if abs(value) >= scale * 0.9995), "")


def _number(value: float) -> str:
    scale = dict(_SCALES).get(_prefix(value), 1.0)
    return three_digits(value / scale) if value else "0"


# Small charts of insight as content: a histogram in columns, shares as bars. Pure.

_ROWS = 4
_WIDEST = 6
_NARROWEST = 2
_LABEL = 11
_SHARE = 5


def histogram(lengths: Lengths, width: int, style: str, *, ascii_only: bool = False) -> list[Content]:
    """Columns for the buckets that have something and those between, with the upper bound of each beneath.

    Where there are more than fit, neighbours are drawn as one.
    """
    labels = [*map(_bound, lengths.bounds), "more"]
    filled = [index for index, count in enumerate(lengths.counts) if count]
    if not filled:
        return []
    first, last = max(0, filled[0] - 1), min(len(labels), filled[-1] + 2)
    counts, labels = list(lengths.counts[first:last]), labels[first:last]
    while len(counts) * _NARROWEST > width and len(counts) > 1:
        counts, labels = _in_pairs(counts), [*labels[1::2], *labels[len(labels) - len(labels) % 2 :]]
    cells = max(_NARROWEST, min(_WIDEST, width // len(counts)))
    heights = [float(count) if cell < cells - 1 else None for count in counts for cell in range(cells)]
    rows = draw(heights, [], max(counts), _ROWS, ascii_only=ascii_only)
    plot = [Content.styled("".join(cell.char for cell in row), style) for row in rows]
    return [*plot, Content.styled(_axis(labels, cells), "$muted")]


def _bound(tokens: int) -> str:
    return str(tokens) if tokens < 1024 else f"{tokens // 1024}k"


def _in_pairs(counts: Sequence[int]) -> list[int]:
    return [sum(counts[index : index + 2]) for index in range(0, len(counts), 2)]


def _axis(labels: Sequence[str], cells: int) -> str:
    """As many of the labels as fit under their columns, the last one in any case."""
    every = next((step for step in range(1, len(labels)) if step * cells > max(map(len, labels))), len(labels))
    shown = [label if (len(labels) - 1 - index) % every == 0 else "" for index, label in enumerate(labels)]
    line = ""
    for index, label in enumerate(shown):
        line = f"{line:<{index * cells}}{label}" if label else line
    return line


def percent(share: float) -> str:
    """ "6%"; what is there and rounds to nothing is "<1%"."""
    return "<1%" if 0 < share < 0.005 else text.percent(share)


def gauge(share: float, width: int, style: str) -> Content:
    """A share of 100% as a line, heavy as far as it goes, so that it is read without colours too."""
    halves = round(min(1.0, max(0.0, share)) * width * 2)
    whole, half = divmod(halves, 2)
    line = "━" * whole + "╸" * half
    return Content.assemble((line, style), ("─" * (width - len(line)), "$gpu-free"))


def share_bars(shares: Iterable[tuple[str, float, str, str]], width: int) -> list[Content]:
    """A line for each (name, share, style, numbers): the name, a bar of the share, the share, the numbers."""
    rows = list(shares)
    numbers = max((len(row[3]) for row in rows), default=0)
    bar = max(4, width - _LABEL - _SHARE - numbers - 2)
    return [
        Content.assemble(
            (f"{name:<{_LABEL}}", "$muted"),
            gauge(share, bar, style),
            (f"{percent(share):>{_SHARE}}", "bold"),
            (f"  {label:>{numbers}}", "$muted"),
        )
        for name, share, style, label in rows
    ]


_NAME = 11
_COLUMN = 8
_PHASES = (("queue", "$request-queued", "q"), ("prefill", "$request-prefill", "p"), ("decode", "$request-decode", "d"))
_ENDINGS = {
    "stop": "$request-done",
    "length": "$warning",
    "cancelled": "$muted",
    "timeout": "$error",
    "error": "$error",
}


class Room(NamedTuple):
    """The room of a panel. lettered: parts of a bar are marked by letters, for want of blocks or colours."""

    width: int
    ascii_only: bool = False
    lettered: bool = False


Lines = Iterator[Content]


def session(snapshot: Snapshot, room: Room) -> Lines:
    """Return the work of the session, and its rates while busy."""
    seen = snapshot.insight.session
    elapsed_s = max(seen.elapsed_s, seen.busy_s)
    yield _line("since", f"{local_time(seen.since)}, {duration(elapsed_s)}" if seen.since else "–")
    yield _line("busy", f"{text.percent(seen.busy_s / elapsed_s if elapsed_s else None)} · {duration(seen.busy_s)}")
    yield _line("requests", f"{seen.requests:,} ended")
    yield _line("tokens", f"{text.count(seen.output_tokens)} generated · {text.count(seen.prompt_tokens)} prefilled")
    if seen.busy_s > 0:
        out, computed = (number / seen.busy_s for number in (seen.output_tokens, seen.prompt_tokens))
        yield _line("while busy", f"{text.rate(out)} tok/s generated · {text.rate(computed)} prefilled", "bold")
    else:
        yield _line("while busy", "–")
    yield _line("batch", "–" if seen.batch is None else f"average {three_digits(seen.batch)}")


def time_spent(snapshot: Snapshot, room: Room) -> Lines:
    """Queue, prefill and decode: percentiles and share of each."""
    insight = snapshot.insight
    spreads = {"queue": insight.queue, "prefill": insight.prefill, "decode": insight.decode}
    spent = {name: (spread.mean or 0.0) * spread.count for name, spread in spreads.items()}
    total = sum(spent.values())
    header = "".join(f"{name:>{_COLUMN}}" for name in ("p50", "p90", "p99", "mean", "share"))
    yield Content.styled(f"{'':<{_NAME}}{header}", "$muted")
    for name, style, letter in _PHASES:
        share = percent(spent[name] / total) if total else "–"
        yield _phase(letter if room.lettered else "■", name, style, spreads[name], share)
    if total:
        parts = [BarSegment(spent[name], style, letter) for name, style, letter in _PHASES]
        yield stack(parts, room.width, ascii_only=room.lettered)


def goodput(snapshot: Snapshot, room: Room) -> Lines:
    """How many answers kept the SLO."""
    seen = snapshot.insight.goodput
    if seen.slo_ttft_s is None and seen.slo_itl_s is None:
        yield Content.styled("No SLO is set. Settings (8) have slo_ttft and slo_itl.", "$muted")
        return
    yield _line("SLO", " · ".join(_asked(seen)))
    if not seen.judged:
        yield _line("kept", "– no answer has ended yet")
        return
    share = seen.within_slo / seen.judged
    style = "$success" if share >= 0.95 else "$warning" if share >= 0.8 else "$error"
    counts = f" · {seen.within_slo:,} of {seen.judged:,} requests"
    yield Content.assemble((f"{'kept':<{_NAME}}", "$muted"), (text.percent(share), f"bold {style}"), counts)
    yield _line("per second", f"{three_digits(seen.per_s)} in the last minute")
    yield gauge(share, room.width, style)


def endings(snapshot: Snapshot, room: Room) -> Lines:
    """How requests ended."""
    finished = snapshot.insight.finished
    total = sum(finished.values())
    if not total:
        yield Content.styled("No request has ended yet.", "$muted")
        return
    shares = ((reason, finished.get(reason, 0)) for reason in _ENDINGS)
    yield from share_bars(
        ((reason, count / total, _ENDINGS[reason], f"{count:,}") for reason, count in shares if count), room.width
    )


def prompts(snapshot: Snapshot, room: Room) -> Lines:
    """How long prompts are."""
    return _lengths(snapshot.insight.prompts, "$graph-running", room)


def answers(snapshot: Snapshot, room: Room) -> Lines:
    """How long answers are."""
    return _lengths(snapshot.insight.outputs, "$graph-tokens", room)


def context(snapshot: Snapshot, room: Room) -> Lines:
    """The longest text that there was, against what the model takes."""
    longest, most = snapshot.insight.longest_context_tokens, snapshot.insight.configured_context_tokens
    if not most:
        yield _line("longest", f"{longest:,} tokens; no model is loaded" if longest else "– no model is loaded")
        return
    yield _line("longest", f"{longest:,} of {most:,} tokens · {text.percent(longest / most)}" if longest else "–")
    yield gauge(longest / most, room.width, "$gpu-kv")


def drafts(snapshot: Snapshot, room: Room) -> Lines:
    """Return the acceptance rate of draft tokens, by position."""
    yield from share_bars(
        (
            (
                f"+{position}",
                each.accepted / each.drafted if each.drafted else 0.0,
                "$graph-tokens",
                f"{text.count(each.accepted)} of {text.count(each.drafted)}",
            )
            for position, each in enumerate(snapshot.insight.drafts, start=1)
        ),
        room.width,
    )


def power(snapshot: Snapshot, room: Room) -> Lines:
    """Return the power of the devices, the energy of a token, and today's energy and cost."""
    seen, done = snapshot.insight.energy, snapshot.insight.session
    if seen.power_w is None:
        yield _line("now", "– power not reported by this device" if seen.unmetered else "– no device is in use")
    else:
        per_watt = snapshot.output_tokens_per_s / seen.power_w if seen.power_w else 0.0
        yield _line("now", f"{seen.power_w:,.0f} W · {three_digits(per_watt)} tok/s per W")
    if seen.session_joules:
        per_token = seen.busy_joules / done.output_tokens if done.output_tokens else None
        per_token_text = f"{three_digits(per_token)} J per token while busy · " if per_token is not None else ""
        yield _line("session", f"{per_token_text}{energy(seen.session_joules)}")
    if seen.session_joules or seen.today_joules:
        money = "" if seen.rate_per_kwh is None else cost(seen.today_joules, seen.rate_per_kwh, seen.currency)
        yield _line("today", f"{energy(seen.today_joules)}{' · ' if money else ''}{money}", "bold")
    if seen.unmetered and seen.power_w is not None:
        yield _line("", f"{text.plural(seen.unmetered, 'device')} in use not counted: no reading", "$muted")


def work(snapshot: Snapshot, room: Room) -> Lines:
    """Return the use of each device's compute and memory bandwidth, against its peak."""
    seen = snapshot.insight.work
    if not seen:
        yield Content.styled("No worker holds a model.", "$muted")
    readings = {device.id: device for device in snapshot.devices}
    for each in seen:
        unknown = _unknown(readings.get(each.device))
        name = device_name(each.device)
        yield _against(name, "compute", each.flops_per_s, each.flops_limit_per_s, "FLOP/s", unknown, room)
        yield _against("", "memory", each.bytes_per_s, each.bytes_limit_per_s, "B/s", unknown, room)
    if measurable(seen):
        yield Content.styled("l measures peak CPU throughput.", "$muted")


def measurable(seen: tuple[DeviceWork, ...]) -> bool:
    """Return whether a processor is in use whose limits were not measured."""
    return any(each.device == "cpu" and each.bytes_limit_per_s is None for each in seen)


# --- parts ------------------------------------------------------------------------------------------------------------


def _line(name: str, value: str, style: str = "") -> Content:
    return Content.assemble((f"{name:<{_NAME}}", "$muted"), (value, style))


def _phase(mark: str, name: str, style: str, spread: Spread, share: str) -> Content:
    numbers = (text.seconds(value) for value in (spread.p50, spread.p90, spread.p99, spread.mean))
    cells = "".join(f"{number:>{_COLUMN}}" for number in (*numbers, share))
    return Content.assemble((f"{mark} ", style), (f"{name:<{_NAME - 2}}", "$muted"), cells)


def _asked(seen: Goodput) -> Iterator[str]:
    if seen.slo_ttft_s is not None:
        yield f"TTFT within {text.seconds(seen.slo_ttft_s)}"
    if seen.slo_itl_s is not None:
        yield f"mean ITL within {text.seconds(seen.slo_itl_s)}"


def _lengths(lengths: Lengths, style: str, room: Room) -> Lines:
    spread = lengths.spread
    if not spread.count:
        yield Content.styled("No answer has ended yet.", "$muted")
        return
    yield from histogram(lengths, room.width, style, ascii_only=room.ascii_only)
    named = (("p50", spread.p50), ("p90", spread.p90), ("p99", spread.p99), ("longest", spread.longest))
    numbers = (Content.assemble((f"{name} ", "$muted"), tokens(value or 0)) for name, value in named)
    yield Content("  ").join(numbers)


def _unknown(device: DeviceReading | None) -> str:
    """Why a device has no limit, in two or three words."""
    if device is not None and device.kind == "simulated":
        return "simulated"
    return "not measured" if device is not None and device.id == "cpu" else "limit not known"


def _against(name: str, what: str, value: float, limit: float | None, unit: str, unknown: str, room: Room) -> Content:
    reading = with_si_prefix(value, unit) if limit is None else of_limit(value, limit, unit)
    share = None if limit is None else value / limit
    numbers = f"{reading:>21}"
    caption = Content.assemble((f"{name:<{_NAME - 4}}", "bold"), (f"{what:<8}", "$muted"))
    left = max(4, room.width - caption.cell_length - len(numbers) - 6)
    if share is None:
        return Content.assemble(caption, (f"{unknown:<{left + 5}}", "$muted"), " ", numbers)
    style = "$graph-tokens" if what == "compute" else "$gpu-kv"
    return Content.assemble(caption, gauge(share, left, style), (f"{share:>5.0%}", "bold"), " ", numbers)
