"""Sampling parameters by backend: the refusal of what a backend lacks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import get_args

from engine.config import PARAMETERS, BackendKind, SamplingParams
from engine.errors import InvalidRequest
from engine.samplers import added_parameters

BACKENDS: tuple[BackendKind, ...] = get_args(BackendKind)

_NEUTRAL = SamplingParams()
_ADDED = frozenset(row.name for row in added_parameters())
_LIBRARIES: Mapping[str, str] = {"exllamav2": "its library has no such sampler"}
"""The backends that do not sample by `backends.sampling`, which alone applies the files of engine/samplers/."""


def lacking(name: str) -> Mapping[str, str]:
    """Return why backends do not support a parameter, by backend; all others support it."""
    row = PARAMETERS[name]
    if row.part_of:
        return lacking(row.part_of)
    return {**_LIBRARIES, **row.lacking} if name in _ADDED else row.lacking


def refuse_lacking(params: SamplingParams, backend: str) -> None:
    """Raise InvalidRequest naming the first parameter that is not neutral and that `backend` lacks."""
    for name, reason in _refusals(backend):
        if getattr(params, name) != getattr(_NEUTRAL, name):
            raise InvalidRequest(
                f"{name} is not supported by the {backend} backend: {reason}", param=name, backend=backend
            )


@cache
def _refusals(backend: str) -> tuple[tuple[str, str], ...]:
    """Parameters that the backend lacks, and why; those that are part of another one are left to that."""
    rows = [row for row in PARAMETERS.values() if not row.part_of]
    return tuple((row.name, lacking(row.name)[backend]) for row in rows if backend in lacking(row.name))
