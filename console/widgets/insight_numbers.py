"""Numbers of insight as an operator reads them: rates, energy, money, shares of a whole."""

from __future__ import annotations

from console.clock import local_time

_SCALES = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
_JOULES_PER_KWH = 3.6e6
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86_400


def short(value: float) -> str:
    """Three digits, more where they are before the point: "0.52", "5.2", "52", "1,204"."""
    for digits, below in ((2, 0.9995), (1, 9.95)):
        if abs(value) < below:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}"


def scaled(value: float, unit: str) -> str:
    """ "8.6 TFLOP/s", "936 GB/s", "0 B/s"."""
    return f"{_number(value)} {_prefix(value)}{unit}"


def of_limit(value: float, limit: float, unit: str) -> str:
    """ "8.6 of 71 TFLOP/s": both in the unit of the limit."""
    prefix = _prefix(limit)
    scale = next((scale for name, scale in _SCALES if name == prefix), 1.0)
    return f"{short(value / scale) if value else 0} of {short(limit / scale)} {prefix}{unit}"


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


def clock(at: float) -> str:
    """Time of the day at unix time `at`, where this machine is."""
    return local_time(at)


def tokens(number: float) -> str:
    """A length in full as long as that is short: "3,421", "32.8k"."""
    return f"{number:,.0f}" if number < 10_000 else f"{number / 1000:,.1f}k"


def _prefix(value: float) -> str:
    return next((name for name, scale in _SCALES if abs(value) >= scale * 0.9995), "")


def _number(value: float) -> str:
    scale = dict(_SCALES).get(_prefix(value), 1.0)
    return short(value / scale) if value else "0"
