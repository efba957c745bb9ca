"""A worker in a few words: why it crashed, when it restarts, how many requests it may take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from textual.content import Content

from console import text
from console.text import device_name
from console.tui.load_pace import Pace
from console.tui.widgets.plot import BarSegment, meter, stack
from console.tui.widgets.states import is_dead
from engine.backends.base import KvTierStats, LoadPhase, LoadProgress
from engine.config import DeviceShare
from engine.snapshot import WorkerReading

# The phases of a load, one line each: done, under way with its bytes and its pace, still to come.

_BAR_CELLS = 12
_PHASES: tuple[tuple[LoadPhase, str], ...] = (
    ("download", "Download"),
    ("inspect", "Inspect"),
    ("kernels", "Compile kernels"),
    ("wait", "Wait for worker"),
    ("weights", "Read weights"),
    ("kv_cache", "Allocate KV pages"),
    ("warm_up", "Warm up"),
)
_RARE = {"download", "kernels", "wait"}


def phase_lines(progress: LoadProgress | None, pace: Pace | None = None) -> list[Content]:
    """All of them; those that few loads have only while they are under way."""
    names = [phase for phase, _ in _PHASES]
    now = names.index(progress.phase) if progress else -1
    lines = []
    for index, (phase, label) in enumerate(_PHASES):
        if phase in _RARE and index != now:
            continue
        if progress is not None and index == now:
            lines += current_phase(progress, pace)
        else:
            glyph, style = ("✓", "$success") if index < now else ("○", "$muted")
            lines.append(Content.styled(f"{glyph} {label}", style))
    return lines


def current_phase(progress: LoadProgress, pace: Pace | None = None) -> list[Content]:
    """The phase under way: its bar, and below it how much is done and how fast that goes."""
    label = dict(_PHASES)[progress.phase]
    if progress.total <= 0:
        return [Content.styled(f"◔ {label}", "$worker-loading")]
    done = text.fraction(progress)
    filled = round(done * _BAR_CELLS)
    bar = Content.assemble(
        (f"◔ {label:<18}", "$worker-loading"),
        ("━" * filled, "$worker-loading"),
        ("━" * (_BAR_CELLS - filled), "$gpu-free"),
        f" {text.percent(done)}",
    )
    numbers = ", ".join(word for word in (_phase_numbers(progress), pace_text(progress, pace)) if word)
    return [bar, Content.styled(f"  {numbers}", "$muted")]


def pace_text(progress: LoadProgress, pace: Pace | None) -> str:
    """ "1.2 GiB/s, 5.1 s left", "" where it is not measurable."""
    if pace is None:
        return ""
    if pace.left_s is None:
        return "stalled"
    rate = f"{text.size(pace.per_s)}/s, " if progress.unit == "bytes" else ""
    return f"{rate}{text.seconds(pace.left_s) if pace.left_s >= 1 else '< 1 s'} left"


def _phase_numbers(progress: LoadProgress) -> str:
    """ "3.1/9.4 GiB", "2/5"."""
    words = text.progress(progress).split(" ")
    return " ".join(words[-2:] if progress.unit == "bytes" else words[-1:])


# Where the layers of a worker lie and what they take: planned against used, device by device, in aligned columns.

_MIN_BAR, _MAX_BAR = 8, 40
_NUMBER = 8
_MUCH_MORE = 5
_KINDS = (
    ("weights", "weights_bytes", "$gpu-weights", "w"),
    ("KV", "kv_bytes", "$gpu-kv", "k"),
    ("work", "working_bytes", "$gpu-work", "o"),
)


def placement_map(
    planned: Sequence[DeviceShare],
    used: Sequence[DeviceShare],
    totals: Mapping[str, int],
    width: int,
    *,
    ascii_only: bool = False,
) -> list[Content]:
    """A head, then two rows for each device. totals: bytes of each device by id, what its bars are measured against."""
    devices = devices_of(planned, used)
    if not devices:
        return []
    unit = text.common_unit([share.total_bytes for share in (*planned, *used)])
    names = max(len(device_name(device)) for device in devices)
    fixed = names + len("  planned ") + _NUMBER * (len(_KINDS) + 1)
    room = min(_MAX_BAR, max(_MIN_BAR, width - fixed))
    head = "".join(f"{title:>{_NUMBER}}" for title in (*(title for title, *_ in _KINDS), unit))
    lines = [Content.styled(" " * (fixed - len(head) + room) + head, "$muted")]
    for device in devices:
        both = (_share(planned, device), _share(used, device))
        whole = max(totals.get(device, 0), *(share.total_bytes for share in both if share is not None))
        for name, label, share in zip((device_name(device), ""), ("planned", "used"), both, strict=True):
            bar = _bar(share, whole, room, ascii_only)
            lines.append(
                Content.assemble(
                    (f"{name:<{names}}  ", "bold $foreground"), (f"{label:<8}", "$muted"), bar, _numbers(share, unit)
                )
            )
    return lines


def difference(planned: Sequence[DeviceShare], used: Sequence[DeviceShare], device: str) -> Content:
    """ "planned 16.7 → used 16.2 GiB, −3%", of one device."""
    before, after = _share(planned, device), _share(used, device)
    totals = [share.total_bytes for share in (before, after) if share is not None]
    unit = text.common_unit(totals)
    numbers = [
        Content.assemble((f"{word} ", "$muted"), text.in_unit(share.total_bytes, unit))
        for word, share in (("planned", before), ("used", after))
        if share is not None
    ]
    line = Content.assemble(Content.styled(" → ", "$muted").join(numbers), f" {unit}")
    if before is None or after is None or not before.total_bytes:
        return line
    change = round(100 * (after.total_bytes / before.total_bytes - 1))
    label = f"{'+' if change > 0 else '−'}{abs(change)}%" if change else "as planned"
    return Content.assemble(line, (f", {label}", "$warning" if change > _MUCH_MORE else "$muted"))


def devices_of(*shares: Sequence[DeviceShare]) -> list[str]:
    """Every device that is named, once, in order."""
    return list(dict.fromkeys(share.device for group in shares for share in group))


def device_bytes(device: str, shares: Sequence[DeviceShare]) -> int:
    """Bytes that shares take of a device."""
    return sum(share.total_bytes for share in shares if share.device == device)


def _share(shares: Sequence[DeviceShare], device: str) -> DeviceShare | None:
    return next((share for share in shares if share.device == device), None)


def _bar(share: DeviceShare | None, whole: int, width: int, ascii_only: bool) -> Content:
    if share is None or whole <= 0:
        return Content.styled("·" * width, "$gpu-free")
    parts = [BarSegment(float(getattr(share, field)), style, letter) for _, field, style, letter in _KINDS]
    rest = BarSegment(float(whole - share.total_bytes), "$gpu-free", ".")
    return stack([*parts, rest], width, ascii_only=ascii_only)


def _numbers(share: DeviceShare | None, unit: str) -> Content:
    if share is None:
        return Content.styled(f"{'–':>{_NUMBER}}" * (len(_KINDS) + 1), "$muted")
    kinds = "".join(f"{text.in_unit(getattr(share, field), unit):>{_NUMBER}}" for _, field, _, _ in _KINDS)
    return Content.assemble(kinds, (f"{text.in_unit(share.total_bytes, unit):>{_NUMBER}}", "bold $foreground"))


def tier_text(tier: KvTierStats) -> Content:
    """ "━━────────── 1.5 GiB of 8.0 GiB"."""
    used = tier.used_bytes / tier.limit_bytes if tier.limit_bytes else None
    sizes = f" {text.size(tier.used_bytes)} of {text.size(tier.limit_bytes)}"
    return Content.assemble(meter(used, _BAR_CELLS, "$gpu-kv"), sizes)


def num_slots(worker: WorkerReading) -> int:
    """Requests it may work on at once: max prompts, or fewer where a step ran out of memory."""
    return min(worker.max_prompts, worker.stats.prompts_limit or worker.max_prompts)


def kv_tokens_text(workers: Sequence[WorkerReading]) -> str:
    """Return the KV tokens in use of all that the workers have: "48.5k/65.5k"; "–" where none has any."""
    sized = [worker for worker in workers if worker.stats.pages_total]
    used = sum((1 - worker.stats.pages_free / worker.stats.pages_total) * worker.kv_tokens for worker in sized)
    return f"{text.count(used)}/{text.count(sum(worker.kv_tokens for worker in sized))}" if sized else "–"


def crash_reason(worker: WorkerReading) -> str:
    """Return why it crashed: "SIGKILL", "exit 1", "hung, silent for 31 s", else the sentence; "" where it did not."""
    if worker.last_error is None:
        return ""
    details = worker.last_error.details
    if signal := details.get("signal"):
        return str(signal)
    if (code := details.get("code")) is not None:
        return f"exit {code}"
    if isinstance(silent_s := details.get("silent_s"), float | int):
        return f"hung, silent for {silent_s:.0f} s"
    last = worker.last_error.message.rpartition("Last error: ")[2]  # of one that is left dead
    return last.removeprefix(f"worker {worker.id} ")


def failure_text(worker: WorkerReading) -> str:
    """Return the end of the state's word: " in 4 s: SIGKILL", " after 5 crashes: exit 1"; "" for a healthy worker."""
    if worker.state not in ("restarting", "failed"):
        return ""
    why = text.clip(crash_reason(worker), 160)
    if worker.state == "restarting":
        wait = f" in {countdown(worker.retry_in_s)}" if worker.retry_in_s is not None else ""
        return f"{wait}: {why}" if why else wait
    if is_dead(worker) and worker.deaths_in_a_row:
        return f" after {worker.deaths_in_a_row} {'crash' if worker.deaths_in_a_row == 1 else 'crashes'}: {why}"
    return f" {why}"


def countdown(left_s: float) -> str:
    """Whole seconds, never 0 while there is anything left: "4 s"."""
    return f"{max(1, math.ceil(left_s))} s" if left_s > 0 else "0 s"


def time_left(pace: Pace | None) -> str:
    """ ", 12 s left", ", 2:05 left"; "" where it is not measurable."""
    if pace is None or pace.left_s is None:
        return ""
    whole_s = max(1, math.ceil(pace.left_s))
    return f", {f'{whole_s} s' if whole_s < 100 else text.seconds(whole_s)} left"
