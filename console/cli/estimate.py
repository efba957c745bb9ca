"""`ericllm estimate`: what a model would take of each device, and whether it fits."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from console.cli.parser import FAILURE, add_every_setting, parse
from console.runtime.output import write
from console.settings.sources import Sources


def estimate(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run the command; return 0 where the model could be loaded, else 1."""
    add_every_setting(parser, "Estimate how much memory a model takes on each device, and whether it fits.")
    parser.add_argument("name", metavar="MODEL", nargs="?", help="same as --model")
    parser.add_argument(
        "--workers", dest="num_workers", metavar="N", default=argparse.SUPPRESS, help="same as --num-workers"
    )
    parser.add_argument("--json", action="store_true", dest="as_json", help="print JSON")
    flags = parse(argv, parser)
    name, wanted_json = flags.pop("name"), flags.pop("as_json")
    sources = Sources.read(flags | ({"model": name} if name is not None else {}))
    settings = sources.settings()
    from console.runtime.estimate import as_json, as_text, estimate_for

    found = estimate_for(settings, library_prompts=sources.library_prompts)
    write(as_json(found) if wanted_json else as_text(found), as_json=wanted_json)
    return 0 if found.can_load else FAILURE
