"""`ericllm bench`: what the engine costs, measured on this machine. The results are kept in docs/performance.md."""

from __future__ import annotations

from console.bench.command import bench

__all__ = ["bench"]
