"""The benches of a target, by the names of their commands."""

from __future__ import annotations

from collections.abc import Mapping

from console.bench.kinds.base import Plan
from console.bench.kinds.grid import Grid
from console.bench.kinds.latency import Latency
from console.bench.kinds.long import Long
from console.bench.kinds.model_load import Load
from console.bench.kinds.prefix import Prefix
from console.bench.kinds.serve import Serve
from console.bench.kinds.threads import Threads
from console.bench.kinds.users import Users

__all__ = ["PLANS", "Plan"]

PLANS: Mapping[str, type[Plan]] = {
    plan.name: plan for plan in (Latency, Users, Threads, Grid, Serve, Prefix, Long, Load)
}
