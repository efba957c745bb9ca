"""How many files a process may have open: each connection is one."""

from __future__ import annotations

import resource
from contextlib import suppress

WANTED = 65_536
"""Files, where the system lets a process have so many: usual limits are 1024 that it may raise itself."""

RESERVED = 256
"""Files that are no connections: of models, workers, keys and logs."""

MIN_CONNECTIONS = 64


def raise_file_limit() -> None:
    """Let this process have as many files open as it may, up to `WANTED`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # macOS has limits of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_connections() -> int:
    """Return how many connections leave enough files for all else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(MIN_CONNECTIONS, (WANTED if soft == resource.RLIM_INFINITY else min(soft, WANTED)) - RESERVED)
