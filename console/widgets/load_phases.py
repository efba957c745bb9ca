"""The phases of a load, one line each: done, under way with its bytes and its pace, still to come."""

from __future__ import annotations

from textual.content import Content

from console.load_pace import Pace
from console.widgets import text
from engine.backends.base import LoadPhase, LoadProgress

_BAR_CELLS = 12
_PHASES: tuple[tuple[LoadPhase, str], ...] = (
    ("download", "Download"),
    ("make", "Make weights"),
    ("inspect", "Inspect"),
    ("kernels", "Compile kernels"),
    ("wait", "Wait for worker"),
    ("weights", "Read weights"),
    ("kv_cache", "Allocate KV pages"),
    ("warm_up", "Warm up"),
)
_RARE = {"download", "make", "kernels", "wait"}


def phase_lines(progress: LoadProgress | None, pace: Pace | None = None) -> list[Content]:
    """All of them; those that few loads have only while they are under way."""
    names = [phase for phase, _ in _PHASES]
    now = names.index(progress.phase) if progress else -1
    lines = []
    for index, (phase, label) in enumerate(_PHASES):
        if phase in _RARE and index != now:
            continue
        if progress is not None and index == now:
            lines += phase_now(progress, pace)
        else:
            glyph, style = ("✓", "$success") if index < now else ("○", "$muted")
            lines.append(Content.styled(f"{glyph} {label}", style))
    return lines


def phase_now(progress: LoadProgress, pace: Pace | None = None) -> list[Content]:
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
    said = ", ".join(word for word in (_numbers(progress), pace_words(progress, pace)) if word)
    return [bar, Content.styled(f"  {said}", "$muted")]


def pace_words(progress: LoadProgress, pace: Pace | None) -> str:
    """ "1.2 GiB/s, 5.1 s left", "" where nothing can be told."""
    if pace is None:
        return ""
    if pace.left_s is None:
        return "nothing moves"
    rate = f"{text.size(pace.per_s)}/s, " if progress.unit == "bytes" else ""
    return f"{rate}{text.seconds(pace.left_s) if pace.left_s >= 1 else '< 1 s'} left"


def _numbers(progress: LoadProgress) -> str:
    """ "3.1/9.4 GiB", "2/5"."""
    words = text.progress(progress).split(" ")
    return " ".join(words[-2:] if progress.unit == "bytes" else words[-1:])
