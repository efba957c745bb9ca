"""The sampling parameters of a batch of rows as columns of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice

import torch
from torch import Tensor

from engine.config import PARAMETERS, SamplingParams
from engine.samplers import Sampler, samplers

# Small tensors that the host makes for the sampler, on their way to the logits' device.


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return `values`, which are not pinned, on `device`.

    The driver has copied them when this returns, so that they may be changed, and nothing waits for earlier work of
    the device.
    """
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

WIDER = 16
"""Factor of how many are looked at where those were too few."""

OFF = 2.0
"""A probability, or a mass of them, that is never reached."""

_NO_TOKEN = -1
_COIN = 1  # the stream of noise that XTC's coin comes from


@dataclass(frozen=True, slots=True)
class Draw:
    """The draw of one row: its parameters, the next token's position, the ids that end its answer, those of
    engine/samplers/ that it uses, and how many of the best tokens to look at first."""

    params: SamplingParams
    position: int
    end_token_ids: Sequence[int] = ()
    samplers: Sequence[Sampler] = ()
    look: int = FIRST_LOOK

    def noise(self) -> float:
        """The uniform number for the next token."""
        return uniform(self.params.seed or 0, self.position)

    def xtc_threshold(self) -> float:
        """The probability from which XTC excludes tokens at this position: OFF where its coin fell the other way."""
        chance = self.params.xtc_probability
        on = chance > 0 and uniform(self.params.seed or 0, self.position, _COIN) < chance
        return self.params.xtc_threshold if on else OFF


def has_dynamic_temperature(params: SamplingParams) -> bool:
    """Return whether the temperature depends on the entropy; a range of one temperature is none, as for ExLlamaV2."""
    return params.max_temp > params.min_temp


def is_bounded(params: SamplingParams) -> bool:
    """Return whether the filters alone say which of the best tokens can be drawn, so that few need to be sorted."""
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0 or params.top_a > 0


def is_filtered(params: SamplingParams, used: Sequence[Sampler]) -> bool:
    """Return whether there is more to a draw than a temperature; `used`: see `used_samplers`."""
    return bool(used) or is_bounded(params) or params.xtc_probability > 0 or has_dynamic_temperature(params)


def used_samplers(params: SamplingParams) -> tuple[Sampler, ...]:
    """Return those of engine/samplers/ whose first parameter is not neutral."""
    switches = ((sampler, sampler.names[0]) for sampler in samplers())
    return tuple(sampler for sampler, name in switches if getattr(params, name) != PARAMETERS[name].neutral)


@dataclass(frozen=True, slots=True)
class BatchSampler:
    """A sampler in a batch of R rows.

    columns: one [R, 1] float64 tensor for each of its parameters.  used: [R, 1], 0 in rows that do not use it; None
    where all do.
    """

    sampler: Sampler
    columns: tuple[Tensor, ...]
    used: Tensor | None

    def apply(self, values: Tensor) -> Tensor:
        """Return `values` with the rows that use the sampler as it leaves them."""
        changed: Tensor = self.sampler.apply(values, *(column.to(values.dtype) for column in self.columns))
        return changed if self.used is None else changed.where(self.used > 0, values)

    def select(self, rows: Tensor) -> BatchSampler:
        """Return the sampler for those rows alone."""
        columns = tuple(column[rows] for column in self.columns)
        return BatchSampler(self.sampler, columns, None if self.used is None else self.used[rows])


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling parameters of R rows, each [R, 1] float64; what is off has a value that excludes nothing.

    Those that may be None are None where no row uses them.
    temperature: before the filters.      last_temperature: after them.
    min_temp, max_temp, temp_exponent: of rows with dynamic temperature; max_temp is 0 in the others.
    xtc_threshold: see `Draw.xtc_threshold`.      ends: [R, E] int64, the rows' end tokens and then -1.
    samplers: those of engine/samplers/ that any row uses, in their order.
    largest_k: the largest top_k of all.      width: how many of the best tokens of each row to look at.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    noise: Tensor
    top_a: Tensor | None
    last_temperature: Tensor | None
    min_temp: Tensor | None
    max_temp: Tensor | None
    temp_exponent: Tensor | None
    xtc_threshold: Tensor | None
    ends: Tensor | None
    samplers: tuple[BatchSampler, ...]
    largest_k: int
    width: int

    @classmethod
    def from_draws(cls, draws: Sequence[Draw], vocab: int, device: torch.device) -> SamplingTensors:
        """Return the parameters of these rows, whose distributions are over `vocab` tokens; one copy to the device."""
        params = [draw.params for draw in draws]
        top_k = [min(p.top_k, vocab) or vocab for p in params]
        look = [min(draw.look, vocab) if is_bounded(draw.params) else vocab for draw in draws]
        dynamic = any(has_dynamic_temperature(p) for p in params)
        values: dict[str, Sequence[float] | None] = {
            "temperature": [1.0 if p.temperature_last else p.temperature for p in params],
            "top_k": top_k,
            "top_p": [p.top_p if p.top_p < 1 else OFF for p in params],
            "min_p": [p.min_p for p in params],
            "noise": [draw.noise() for draw in draws],
            "top_a": _unless_neutral([p.top_a for p in params], 0.0),
            "last_temperature": _unless_neutral([p.temperature if p.temperature_last else 1.0 for p in params], 1.0),
            "min_temp": [p.min_temp for p in params] if dynamic else None,
            "max_temp": [p.max_temp if has_dynamic_temperature(p) else 0.0 for p in params] if dynamic else None,
            "temp_exponent": [p.temp_exponent for p in params] if dynamic else None,
            "xtc_threshold": _unless_neutral([draw.xtc_threshold() for draw in draws], OFF),
        }
        in_batch = {sampler for draw in draws for sampler in draw.samplers}
        used = {sampler: [sampler in draw.samplers for draw in draws] for sampler in samplers() if sampler in in_batch}
        given = {name: column for name, column in values.items() if column is not None}
        of_samplers = [
            column
            for sampler, rows in used.items()
            for column in (rows, *([getattr(p, name) for p in params] for name in sampler.names))
        ]
        tensors = iter(columns([*given.values(), *of_samplers], device))
        named: dict[str, Tensor | None] = dict.fromkeys(values)
        named |= {name: next(tensors) for name in given}
        batch_samplers = tuple(
            _batch_sampler(sampler, tensors, used_by_all=all(rows)) for sampler, rows in used.items()
        )
        width = max(k if p.top_k > 0 else few for k, few, p in zip(top_k, look, params, strict=True))
        ends = None if named["xtc_threshold"] is None else to_device(_pad_end_tokens(draws), device)
        return cls(**named, ends=ends, samplers=batch_samplers, largest_k=max(top_k), width=width)  # type: ignore[arg-type]

    @property
    def suffices(self) -> bool:
        """True if no row can need more than `width` tokens."""
        return self.width >= self.largest_k

    def wider(self, rows: Tensor, vocab: int) -> SamplingTensors:
        """Return the parameters of those rows, for which `width` was not enough."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        some = {name: value[rows] for name, value in values.items() if isinstance(value, Tensor)}
        batch_samplers = tuple(sampler.select(rows) for sampler in self.samplers)
        return replace(self, **some, samplers=batch_samplers, width=min(self.width * WIDER, vocab))  # type: ignore[arg-type]


def _batch_sampler(sampler: Sampler, tensors: Iterator[Tensor], *, used_by_all: bool) -> BatchSampler:
    """Take the sampler's columns from `tensors`: who uses it, then its parameters."""
    used = next(tensors)
    return BatchSampler(sampler, tuple(islice(tensors, len(sampler.names))), None if used_by_all else used)


def columns(values: Sequence[Sequence[float]], device: torch.device) -> tuple[Tensor, ...]:
    """Each of `values` as a [R, 1] float64 column; one copy to the device for all."""
    return to_device(torch.tensor(values, dtype=torch.float64), device).unsqueeze(-1).unbind(0)


def _unless_neutral(values: list[float], neutral: float) -> list[float] | None:
    """Return the values, None where all are neutral."""
    return values if any(value != neutral for value in values) else None


def _pad_end_tokens(draws: Sequence[Draw]) -> Tensor:
    longest = max(len(draw.end_token_ids) for draw in draws)
    return torch.tensor(
        [[*draw.end_token_ids, *[_NO_TOKEN] * (longest - len(draw.end_token_ids))] for draw in draws], dtype=torch.int64
    )
