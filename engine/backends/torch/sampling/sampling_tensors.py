"""The sampling knobs of a batch of rows as columns of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from engine.config import SamplingParams

# Small tensors that the host makes for the sampler, on their way to where the logits are.


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """`values`, which are in no pinned memory, on `device`: the driver has taken them when this returns, so that they
    may be changed, and nothing waits for the work that the device has before them."""
    return values.to(device, non_blocking=True)


# Random numbers that are a function of a request's seed and a token's position alone.

_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """A number in (0, 1), never its ends, that is a function of the arguments alone: the position-th output of
    SplitMix64 (Steele, Lea, Flood 2014), started from the mixed seed so that close seeds are unrelated. Another
    `stream` gives numbers that are independent of the first's."""
    start = _mix(seed & _MASK64)
    if stream:
        start = _mix(start ^ _mix(stream))
    bits = _mix((start + position * _GOLDEN) & _MASK64)
    return ((bits >> 12) + 0.5) * 2.0**-52


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


FIRST_LOOK = 256
"""How many of the best tokens are looked at before the whole vocabulary is sorted."""

OFF = 2.0
"""A probability, or a mass of them, that is never reached."""

_NO_TOKEN = -1
_COIN = 1  # the stream of noise that XTC's coin comes from


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row brings to a draw: its parameters, the next token's position, and the ids that end its answer."""

    params: SamplingParams
    position: int
    end_token_ids: Sequence[int] = ()

    def noise(self) -> float:
        """The uniform number for the next token."""
        return uniform(self.params.seed or 0, self.position)

    def xtc_threshold(self) -> float:
        """The probability from which XTC leaves out at this position: OFF where its coin fell the other way."""
        chance = self.params.xtc_probability
        on = chance > 0 and uniform(self.params.seed or 0, self.position, _COIN) < chance
        return self.params.xtc_threshold if on else OFF


def dynamic(params: SamplingParams) -> bool:
    """Whether the temperature depends on the entropy; a range of one temperature is none, as for ExLlamaV2."""
    return params.max_temp > params.min_temp


def bounded(params: SamplingParams) -> bool:
    """Whether the filters alone say which of the best tokens can be drawn, so that few need to be sorted."""
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0 or params.top_a > 0


def filtered(params: SamplingParams) -> bool:
    """Whether there is more to a draw than a temperature."""
    return (
        bounded(params)
        or params.tfs < 1
        or params.typical_p < 1
        or params.smoothing_factor > 0
        or params.xtc_probability > 0
        or dynamic(params)
    )


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling knobs of R rows, each [R, 1] float64; what is off has a value that keeps everything.

    Those that may be None are None where no row uses them.
    temperature: before the filters.      last_temperature: after them.
    min_temp, max_temp, temp_exponent: of rows with dynamic temperature; max_temp is 0 in the others.
    xtc_threshold: see `Draw.xtc_threshold`.      ends: [R, E] int64, the rows' end tokens and then -1.
    largest_k: the largest top_k of all.      width: how many of the best tokens of each row to look at.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    noise: Tensor
    top_a: Tensor | None
    tfs: Tensor | None
    typical_p: Tensor | None
    smoothing: Tensor | None
    last_temperature: Tensor | None
    min_temp: Tensor | None
    max_temp: Tensor | None
    temp_exponent: Tensor | None
    xtc_threshold: Tensor | None
    ends: Tensor | None
    largest_k: int
    width: int

    @classmethod
    def of(cls, draws: Sequence[Draw], vocab: int, device: torch.device) -> SamplingTensors:
        """The knobs of these rows, whose distributions are over `vocab` tokens."""
        params = [draw.params for draw in draws]
        top_k = [min(p.top_k, vocab) or vocab for p in params]
        look = min(FIRST_LOOK, vocab)
        shapes = any(dynamic(p) for p in params)
        values: dict[str, Sequence[float] | None] = {
            "temperature": [1.0 if p.temperature_last else p.temperature for p in params],
            "top_k": top_k,
            "top_p": [p.top_p if p.top_p < 1 else OFF for p in params],
            "min_p": [p.min_p for p in params],
            "noise": [draw.noise() for draw in draws],
            "top_a": _used([p.top_a for p in params], 0.0),
            "tfs": _used([p.tfs if p.tfs < 1 else OFF for p in params], OFF),
            "typical_p": _used([p.typical_p if p.typical_p < 1 else OFF for p in params], OFF),
            "smoothing": _used([p.smoothing_factor for p in params], 0.0),
            "last_temperature": _used([p.temperature if p.temperature_last else 1.0 for p in params], 1.0, shapes),
            "min_temp": [p.min_temp for p in params] if shapes else None,
            "max_temp": [p.max_temp if dynamic(p) else 0.0 for p in params] if shapes else None,
            "temp_exponent": [p.temp_exponent for p in params] if shapes else None,
            "xtc_threshold": _used([draw.xtc_threshold() for draw in draws], OFF),
        }
        named: dict[str, Tensor | None] = dict.fromkeys(values)
        used = {name: each for name, each in values.items() if each is not None}
        named |= zip(used, columns(list(used.values()), device), strict=True)
        width = max(k if p.top_k > 0 else look if bounded(p) else vocab for k, p in zip(top_k, params, strict=True))
        ends = None if named["xtc_threshold"] is None else to_device(_padded(draws), device)
        return cls(**named, ends=ends, largest_k=max(top_k), width=width)  # type: ignore[arg-type]

    def wider(self, rows: Tensor, vocab: int) -> SamplingTensors:
        """The knobs of those rows, for which `width` was not enough."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        some = {name: value[rows] for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **some, width=min(self.width * 16, vocab))  # type: ignore[arg-type]


def columns(values: Sequence[Sequence[float]], device: torch.device) -> tuple[Tensor, ...]:
    """Each of `values` as a [R, 1] float64 column; one copy to the device for all."""
    return to_device(torch.tensor(values, dtype=torch.float64), device).unsqueeze(-1).unbind(0)


def _used(values: list[float], neutral: float, anyway: bool = False) -> list[float] | None:
    """The values, None where all are neutral."""
    return values if anyway or any(value != neutral for value in values) else None


def _padded(draws: Sequence[Draw]) -> Tensor:
    longest = max(len(draw.end_token_ids) for draw in draws)
    return torch.tensor(
        [[*draw.end_token_ids, *[_NO_TOKEN] * (longest - len(draw.end_token_ids))] for draw in draws], dtype=torch.int64
    )
