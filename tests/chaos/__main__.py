"""`python -m tests.chaos --seconds 120`: see tests/chaos/run.py. Ends with 1 where anything was lost."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.chaos.run import fake_plan, run, torch_plan


def main() -> int:
    """Run it and print the report."""
    parser = argparse.ArgumentParser(prog="tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--torch", action="store_true", help="a real model in float32, not the fake backend")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make = torch_plan if options.torch else fake_plan
    plan = make(options.seconds, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        report = asyncio.run(run(plan, Path(folder)))
    print(*report.lines(), sep="\n")
    return 1 if report.tally.wrong or report.leaks else 0


if __name__ == "__main__":
    sys.exit(main())
