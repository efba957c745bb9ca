"""Settings for every test."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# No deadlines: machines differ and tests share them. CI draws the same examples each time; here they are new ones.
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("here"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")
