"""Workers killed, crashed and hung at random under load: nothing lost, nothing twice, nothing left over.

CHAOS_SECONDS=120 makes it last two minutes, as does `python -m tests.chaos`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.run import Plan, fake_plan, run, torch_plan

SECONDS = float(os.environ.get("CHAOS_SECONDS", "6"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 400)]


@pytest.mark.parametrize("plan", [fake_plan(SECONDS), torch_plan(SECONDS)], ids=["fake", "torch"])
async def test_every_token_of_every_request_is_accounted_for_whatever_dies(tmp_path: Path, plan: Plan) -> None:
    report = await run(plan, tmp_path)
    assert report.tally.wrong == []
    assert report.leaks == []
    assert report.tally.ends.keys() <= {"length", "stop", "cancelled"}
    assert report.restarts >= report.processes_struck > 0
    assert report.requeued > 0
