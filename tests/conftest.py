"""Settings for every test."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

# No deadlines: machines differ and tests share them. CI draws the same examples each time; here they are new ones.
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("here"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")

# Without a GPU, Triton's kernels run in its interpreter; it has to be told before its first import.
if not any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/dxg")):
    os.environ.setdefault("TRITON_INTERPRET", "1")
