"""Flags that were given and would change nothing, which are refused by name."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator

from console.planning.flags import ASKED, LOADING
from engine.errors import InvalidRequest

_LENGTHS = ("prompt", "output", "shared", "shared_tokens", "prefixes", "seed")


def refuse_unused(given: argparse.Namespace) -> None:
    """Raise InvalidRequest for the first flag of `given.named` that the others leave nothing to do."""
    for names, why in _unused(given):
        for name in names:
            if name in given.named:
                flag = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
                raise InvalidRequest(f"{flag} would change nothing: {why}", param=name)
    if given.workers is not None and "cards" in (given.ask or ()):
        raise InvalidRequest("--workers says how many there are, and --ask cards asks for that; give one", param="ask")
    if given.trace is not None and "front" in (given.ask or ()):
        raise InvalidRequest("--ask front makes the demand stronger, which a trace cannot be made", param="ask")


def questions(given: argparse.Namespace) -> Collection[str]:
    """Which questions are answered: those that were asked, or all that can be."""
    if given.ask:
        return tuple(given.ask)
    left_out = {"cards"} if given.workers is not None else set[str]()
    return tuple(each for each in ASKED if each not in left_out | ({"front"} if given.trace is not None else set()))


def _unused(given: argparse.Namespace) -> Iterator[tuple[Collection[str], str]]:
    """Flags, and why they would be of no use."""
    if given.validate is not None:
        yield sorted(given.named - {"model", "validate", "as_json"}), "--validate has loads and clusters of its own"
        return
    if given.costs is not None and not given.measure:
        measured = ("model", "threads", "seconds", *LOADING)
        yield measured, f"the costs in {given.costs} are of what was measured then; --measure measures again"
    if given.trace is not None:
        yield (*_LENGTHS, "burstiness", "think"), "--trace says when requests come, and how long they are"
    elif given.rate is not None:
        yield ("think",), "--rate has no users who think"
    else:
        yield ("burstiness",), "users ask when they were answered and have thought; --rate has bursts"
    if not given.shared:
        yield ("shared_tokens", "prefixes"), "no prompt has a common prefix; --shared says how many have"
    asked = questions(given)
    if given.workers is not None:
        yield ("most_workers", "share"), "--workers says how many there are"
    if given.workers is not None:
        yield ("cards_per_worker",), "--workers says how many there are, and cards are counted for --ask cards"
    if "death" not in asked:
        yield ("die_at", "detect", "restart", "workers_per_node"), "no node dies without --ask death"
