"""When the adviser speaks. Each number has its reason; all of them err on the side of saying nothing."""

from __future__ import annotations

WINDOW_S = 60.0
"""Counters are looked at over a minute: long enough for a rate, short enough that what was put right is forgotten. For
as long after a load of this program's own, nothing is said of the load."""

SETTLE_S = 10.0
"""A reading of the moment must hold so long: a prompt being read or a fan spinning up lasts less."""

LINGER_S = 15.0
"""Advice stays so long after it ceased to hold, so that a value about its threshold does not flicker."""

HUSH_S = 60.0
"""Advice that was taken keeps quiet so long: windows of a minute must see what came of it."""

MIN_PREEMPTIONS = 3
"""In a window. One is how a full cache finds its balance; more mean that work is done twice, again and again."""

MIN_TRUNCATED, TRUNCATED_SHARE = 2, 0.05
"""Of the answers that ended last. One may be a client that wants all there is."""

QUEUE_S = 20
"""A request must have waited in every second of these: bursts that are shorter are what a queue is for."""

QUEUE_SHARE = 0.5
"""Waiting requests against places: with half as many, the next one waits for half an answer."""

QUEUE_EASING = 2
"""Once it is said, a queue this many times shorter is enough, so that one about its threshold does not flicker: its
numbers are those of the moment."""

KV_ROOM = 0.8
"""Up to this usage of KV pages, more requests at a time find pages; above, they would preempt each other."""

KV_FILL = 0.9
"""How full KV pages may become when more requests are let in: what is left is for those that grow long."""

MAX_GROWTH = 4
"""Times the max prompts in use that one piece of advice proposes: more would change ITL beyond what was seen."""

KV_FULL = 0.95
"""From this usage on, requests wait for pages or are about to be preempted."""

BUSY_SHARE = 0.75
"""Free memory is only a waste while this share of the places is taken: demand that is not there needs no more
workers."""

WORKER_MARGIN = 1.05
"""Another worker fits for certain where this much of what one takes is free."""

CORES_S, CORES_BUSY = 20, 0.7
"""Seconds, and the share of the processor's time in them from which on another worker that computes on it would only
take from the others."""

LARGE_FREE_SHARE = 0.25
"""This share of a device free is worth loading again for when KV pages are full."""

HOT_C = 85.0
"""Most GPUs begin to lower their clock a few degrees above."""

POWER_SHARE, POWER_BUSY = 0.98, 0.5
"""Draw against the limit; below half its time busy, a device that draws so much is only spinning up or down."""

MIN_DRAFT_TOKENS, MIN_DRAFTS_ACCEPTED = 1000, 0.3
"""In a window. Where fewer are accepted, verifying them costs about what they save."""

MIN_CONTEXT, CONTEXT_FACTOR, MIN_ENDED = 4096, 4, 100
"""A context is far above need where the longest of that many requests would fit four times; small ones cost nothing."""

CONTEXT_KV = 0.5
"""Where KV pages were fuller than this, they are put to use, however short each request is."""

MIN_PREFIX_TOKENS, PREFIX_SHARE = 200_000, 0.02
"""That many prompt tokens and hardly any found again: not a cache that has yet to fill."""
