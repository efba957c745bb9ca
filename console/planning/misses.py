"""Why requests do not count as served, in words with numbers."""

from __future__ import annotations

from engine.simulation.cluster import Cluster
from engine.simulation.outcome import Miss, Slo, Summary


def misses_text(summary: Summary, cluster: Cluster, slo: Slo) -> str:
    """One sentence with the most frequent reason first; "" where no request misses the goal."""
    missed = sum(summary.misses.values())
    if not missed:
        return ""
    reasons = ", ".join(f"{count} {_reason(miss, count, cluster, slo)}" for miss, count in summary.misses.items())
    return f"Of {summary.requests} requests {missed} miss it ({missed / summary.requests:.1%}): {reasons}."


def _reason(miss: Miss, count: int, cluster: Cluster, slo: Slo) -> str:
    """What became of so many of them."""
    one = count == 1
    match miss:
        case "too long":
            return f"{'has' if one else 'have'} a prompt of more than {_room(cluster)}"
        case "refused":
            return f"{'finds' if one else 'find'} the queue full (--max-queue {cluster.max_queue})"
        case "timeout":
            return f"{'is' if one else 'are'} not done within --timeout {cluster.timeout_s:g} s"
        case "failed":
            return f"{'fails' if one else 'fail'}, as too many of {'its' if one else 'their'} workers died"
        case "first token":
            return f"{'waits' if one else 'wait'} longer than {_ms(slo.ttft_s)} for the first token"
        case "other tokens":
            return f"{'gets its' if one else 'get their'} other tokens more than {_ms(slo.itl_s)} apart"


def _room(cluster: Cluster) -> str:
    whose = "the context" if cluster.max_model_len <= cluster.kv_tokens else "a worker's KV pages"
    return f"the {cluster.longest_prompt} tokens that {whose} can take"


def _ms(seconds: float | None) -> str:
    return f"{(seconds or 0.0) * 1e3:g} ms"
