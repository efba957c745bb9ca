"""Numbers as an operator reads them: short, with a unit, never wider than they must be."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from engine.backends.base import LoadProgress
from engine.snapshot import LoadPlan, Snapshot
from engine.text.device_names import device_label as device_label
from engine.text.device_names import device_name as device_name
from engine.text.printable import format_seconds, printable

# Times of day, as text.

MAX_TIME = 253_402_300_800.0
"""Unix time at which the year 10,000 begins: no calendar here goes further."""


def local_time(at: float, pattern: str = "%H:%M:%S") -> str:
    """Return a unix time as the clock on the wall has it; "–" for one, from elsewhere, that no calendar has."""
    try:
        return time.strftime(pattern, time.localtime(at))
    except (OverflowError, OSError, ValueError):
        return "–"


def date_and_time(at: float, now: float) -> str:
    """Return the time of day, after its date where that is not the date of `now`: "2026-11-27 23:59:02"."""
    date = local_time(at, "%Y-%m-%d")
    return local_time(at) if date == local_time(now, "%Y-%m-%d") else f"{date} {local_time(at)}"


_KIB = 1024
_PHASES = {
    "download": "downloading",
    "inspect": "inspecting",
    "kernels": "compiling kernels",
    "wait": "waiting for another worker",
    "weights": "weights",
    "kv_cache": "KV cache",
    "warm_up": "warming up",
}
_EMPTY_DECIMALS = re.compile(r"\.0+(?!\d)|(?<=\.\d)0+(?!\d)")
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def size(size_bytes: float) -> str:
    """ "9.4 GiB", "310 MiB", "12 KiB"."""
    for unit, scale in (("TiB", _KIB**4), ("GiB", _KIB**3), ("MiB", _KIB**2)):
        if size_bytes >= scale:
            return f"{_short(size_bytes / scale)} {unit}"
    return f"{size_bytes / _KIB:.0f} KiB"


def gib(size_bytes: float) -> str:
    """GiB without the unit, with one decimal whatever stands beside it: "9.4", "<0.1"."""
    value = size_bytes / _KIB**3
    return "<0.1" if 0 < value < 0.05 else f"{value:.1f}"


def common_unit(sizes_bytes: Iterable[int]) -> str:
    """The unit that a column of sizes reads well in: GiB, or MiB where none of them reaches half a GiB."""
    return "GiB" if max(sizes_bytes, default=0) >= _KIB**3 / 2 else "MiB"


def in_unit(size_bytes: float, unit: str) -> str:
    """The number alone: "9.4" in GiB, "1,204" in MiB."""
    return gib(size_bytes) if unit == "GiB" else f"{size_bytes / _KIB**2:,.0f}"


seconds = format_seconds


def waited(value_s: float | None) -> str:
    """A time in a queue, in six cells: "<1 ms" for less than that."""
    return "<1 ms" if value_s is not None and 0 < value_s < 0.00095 else seconds(value_s)


def bound(label: str) -> str:
    """The label of a round bound without empty decimals: "8 s" for "8.00 s", "2k" for "2.0k"."""
    return _EMPTY_DECIMALS.sub("", label)


def count(value: float) -> str:
    """ "612", "1.9k", "2.1M"."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale * 0.9995:
            return f"{_short(value / scale)}{unit}"
    return f"{value:.0f}"


def rate(value_per_s: float | None) -> str:
    """Tokens per second: one decimal below ten, none above."""
    if value_per_s is None:
        return "–"
    return f"{value_per_s:.1f}" if 0 < value_per_s < 9.95 else count(value_per_s)


def architecture(name: str) -> str:
    """ "Llama" of "LlamaForCausalLM"; "–" where it is not known."""
    return name.removesuffix("ForCausalLM").removesuffix("LMHeadModel") or "–"


def percent(fraction: float | None) -> str:
    """ "71%", "–" for what is not known; clamped to what a percentage can be."""
    return "–" if fraction is None else f"{min(1.0, max(0.0, fraction)):.0%}"


def share(fraction: float) -> str:
    """ "6%"; what is there and rounds to nothing is "<1%"."""
    return "<1%" if 0 < fraction < 0.005 else percent(fraction)


def plural(number: int, noun: str) -> str:
    """ "1 worker", "2 workers", "1,234 pages"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def bits_per_weight(bits: float | None) -> str:
    """ "5.0", "–" for what is not known."""
    return f"{bits:.1f}" if bits else "–"


def dtype(name: str) -> str:
    """ "bf16" for "bfloat16"."""
    return _DTYPES.get(name, name)


def progress(load: LoadProgress) -> str:
    """ "weights 3.1/9.4 GiB", "warming up 2/5"."""
    phase = _PHASES[load.phase]
    if load.total <= 0:
        return phase
    if load.unit != "bytes":
        return f"{phase} {load.done}/{load.total}"
    total, _, unit = size(load.total).partition(" ")
    scale = {"TiB": _KIB**4, "GiB": _KIB**3, "MiB": _KIB**2, "KiB": _KIB}[unit]
    return f"{phase} {_short(load.done / scale)}/{total} {unit}"


def fraction(load: LoadProgress) -> float:
    """How far a load's phase is, 0..1."""
    return min(1.0, load.done / load.total) if load.total > 0 else 0.0


def clip(text: str, width: int) -> str:
    """`text` on one line of at most `width` characters, with an ellipsis where it was cut."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= width else line[: max(0, width - 1)] + "…"


def class_title(name: str) -> str:
    """ "ModelTable" -> "Model table"."""
    words = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name.lstrip("_")).strip()
    return words[0].upper() + words[1:]


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


# Rates, energy, money and long times.

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
    prefix, scale = _si_prefix(value)
    return f"{three_digits(value / scale) if value else 0} {prefix}{unit}"


def of_limit(value: float, limit: float, unit: str) -> str:
    """ "8.6 of 71 TFLOP/s": both in the unit of the limit."""
    prefix, scale = _si_prefix(limit)
    return f"{three_digits(value / scale) if value else 0} of {three_digits(limit / scale)} {prefix}{unit}"


def _si_prefix(value: float) -> tuple[str, float]:
    return next(((name, scale) for name, scale in _SCALES if abs(value) >= scale * 0.9995), ("", 1.0))


def energy(joules: float) -> str:
    """ "1.24 kWh", "3.2 Wh", "512 J"."""
    if joules >= _JOULES_PER_KWH / 10:
        return f"{joules / _JOULES_PER_KWH:,.2f} kWh"
    if joules >= _JOULES_PER_KWH / 1000:
        return f"{joules / _JOULES_PER_KWH * 1000:.1f} Wh"
    return f"{joules:.0f} J"


def cost(joules: float, rate_per_kwh: float, currency: str) -> str:
    """ "0.97 EUR"; four decimals below a tenth, where two would round it to nothing."""
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


def load_plan(plan: LoadPlan, waiting: int, at: float) -> str:
    """ "unloads a and b, ready in about 12 s, 3 requests wait". at: unix time now."""
    unloads = [] if plan.loading or not plan.unloads else [f"unloads {' and '.join(plan.unloads)}"]
    remaining_s = plan.remaining_s(at)
    ready = [f"ready in about {duration(remaining_s)}"] if remaining_s is not None and remaining_s >= 1 else []
    waits = [f"{plural(waiting, 'request')} {'waits' if waiting == 1 else 'wait'}"] if waiting else []
    return ", ".join((*unloads, *ready, *waits))


# Names of clients and requests.

_MADE_ID = re.compile(r"[a-z]+[-_](?P<own>[0-9a-f]{8})[0-9a-f]{8,}(?P<choice>-\d+)?")


def client_name(address: str, key: str = "", program: str = "") -> str:
    """ "shop@10.0.0.17 curl/8.5.0": the key and the program where there are any."""
    return f"{key}@{address} {program}".strip() if key else f"{address} {program}".strip()


def without_flags(sentence: str) -> str:
    """A sentence with settings named as forms do: "max prompts" for "--max-prompts"."""
    return _FLAG.sub(lambda found: re.sub("[-_]", " ", found[1]), sentence)


_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9_-]*)")


def live_requests(running: int, queued: int, waiting: int = 0) -> str:
    """ "3 requests running, 23 queued, 2 waiting for a load"; what there is none of is left out."""
    counts = ((running, "running"), (queued, "queued"), (waiting, "waiting for a load"))
    (first, state), *others = [each for each in counts if each[0]] or counts[:1]
    return ", ".join((f"{plural(first, 'request')} {state}", *(f"{count:,} {name}" for count, name in others)))


def request_id(full: str) -> str:
    """The part of an id made by this program that differs from others; any other id in full."""
    made = _MADE_ID.fullmatch(full)
    return full if made is None else f"{made['own']}{made['choice'] or ''}"


# Names of several devices.

_FEW_PLACES = 3


def devices_name(devices: Sequence[str]) -> str:
    """Where a worker is: "GPU0", "GPU0+1" for two of a kind on one machine, "–" where nothing is known."""
    names = [device_name(device) for device in devices]
    if not names:
        return "–"
    kind = names[0].rstrip("0123456789")
    if all(name.startswith(kind) for name in names):
        return "+".join([names[0], *(name.removeprefix(kind) for name in names[1:])])
    return "+".join(names)


def places_name(workers: Iterable[Sequence[str]]) -> str:
    """Where several workers are, by the devices of each: "1 on GPU0, 2 on GPU1"; short where many have the same."""
    places = Counter(map(devices_name, workers))
    if len(places) > _FEW_PLACES and len(set(places.values())) == 1:
        return f"{next(iter(places.values()))} on each of {len(places)} devices"
    return ", ".join(f"{number} on {place}" for place, number in places.items())


def has_simulated_devices(snapshot: Snapshot) -> bool:
    """Return whether any of the devices is only simulated."""
    return any(device.kind == "simulated" for device in snapshot.devices)
