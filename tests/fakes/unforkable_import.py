"""A module after whose import the system forks no process."""

import errno

from engine.worker_process import fork_server
from tests.fakes.backend_factories import make

__all__ = ["make"]


def _refuse() -> int:
    raise OSError(errno.EAGAIN, "")


fork_server._fork_sibling = _refuse
