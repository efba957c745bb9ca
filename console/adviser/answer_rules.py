"""Rules about answers and what they are computed with: cut off, guessed in vain, never found again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from console.adviser import thresholds as at
from console.adviser.advice import Advice, Open
from console.adviser.evidence import Evidence
from console.widgets import text
from engine.backends.base import LoadedModel
from engine.snapshot import RequestRow, Snapshot


def truncated(evidence: Evidence) -> Iterator[Advice]:
    """Answers end because there was no room for more, not because their clients wanted no more."""
    ended = [row for row in evidence.snapshot.requests if row.state == "finished" and row.finish in ("stop", "length")]
    cuts = [_cut(evidence.snapshot, row) for row in ended if row.finish == "length"]
    for where in ("context", "pages"):
        found = [cut for cut in cuts if cut is not None and cut.by == where]
        if len(found) < max(at.LEAST_TRUNCATED, at.TRUNCATED_SHARE * len(ended)):
            continue
        why = f"the context of {found[0].tokens:,} tokens" if where == "context" else "KV pages that ran out"
        yield Advice(
            "truncated",
            f"{len(found)} of the last {len(ended)} answers were cut off by {why}, not by their max_tokens.",
            f"{len(found)} of {len(ended)} answers cut off by {why}",
            Open("models"),
            where,
        )


class _Cut(NamedTuple):
    by: str
    tokens: int


def _cut(snapshot: Snapshot, row: RequestRow) -> _Cut | None:
    """What ended an answer too early; None where it is as long as it was asked to be, or that is not known."""
    model = _model_of(snapshot, row.model)
    if model is None:
        return None
    context = min(model.max_model_len, model.kv_tokens or model.max_model_len)
    if row.prompt_tokens + row.output_tokens >= context:
        return _Cut("context", context)
    return _Cut("pages", context) if row.max_tokens and row.output_tokens < row.max_tokens else None


def _model_of(snapshot: Snapshot, name: str) -> LoadedModel | None:
    named = (model.status.model for model in snapshot.models if name and model.name == name)
    return next(named, snapshot.status.model)


def drafts_rejected(evidence: Evidence) -> Iterator[Advice]:
    """Most tokens that are guessed ahead are wrong."""
    guessed, held = evidence.recent.draft_tokens, evidence.recent.draft_accepted
    if guessed < at.LEAST_DRAFT_TOKENS or held >= at.DRAFTS_HELD * guessed:
        return
    share = text.percent(held / guessed)
    yield Advice(
        "drafts_rejected",
        f"Only {share} of {guessed:,} tokens guessed ahead within a minute held: it may be faster without drafts.",
        f"Only {share} of the tokens guessed ahead held",
        Open("models"),
    )


def context_unused(evidence: Evidence) -> Iterator[Advice]:
    """The context is many times what any request needed, and KV pages lie idle for it."""
    snapshot = evidence.snapshot
    ended = sum(snapshot.insight.finished.values()) or sum(snapshot.totals.finished.values())
    longest, context = _longest(snapshot), snapshot.status.model.max_model_len if snapshot.status.model else 0
    if ended < at.LEAST_ENDED or not longest or context < max(at.LEAST_CONTEXT, at.CONTEXT_FACTOR * longest):
        return
    fullest = max((second.kv_usage for second in snapshot.history), default=0.0)
    if fullest > at.CONTEXT_KV:
        return
    yield Advice(
        "context_unused",
        f"No request was longer than {longest:,} of the {context:,} tokens of context, and KV pages were never fuller"
        f" than {text.percent(fullest)}: a smaller one leaves memory.",
        f"No request was longer than {longest:,} of {context:,} tokens",
        Open("models"),
    )


def _longest(snapshot: Snapshot) -> int:
    """Tokens of the longest request of the model in view."""
    own = (model.longest_context_tokens for model in snapshot.models if model.status == snapshot.status)
    return next(own, 0) or (snapshot.insight.longest_context_tokens if len(snapshot.models) <= 1 else 0)


def prefix_useless(evidence: Evidence) -> Iterator[Advice]:
    """Prompts share nothing that could be kept."""
    asked = sum(worker.stats.prefix_query_tokens for worker in evidence.snapshot.workers)
    hits = evidence.snapshot.prefix_hit_rate
    if asked < at.LEAST_PREFIX_TOKENS or hits is None or hits >= at.PREFIX_SHARE:
        return
    yield Advice(
        "prefix_useless",
        f"Only {hits:.1%} of {text.count(asked)} prompt tokens were in the prefix cache: what prompts have in common"
        " should come first.",
        f"Only {hits:.1%} of prompt tokens were in the prefix cache",
    )
