"""`ericllm doctor`: check this machine for what `ericllm` with the same flags needs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from console.cli.parser import FAILURE, add_every_setting, parse
from console.runtime.output import write
from console.settings.sources import Sources


def doctor(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run the command; return 0 where `ericllm` could run, else 1."""
    add_every_setting(
        parser, "Check this machine for what `ericllm` with the same flags needs, and print how to fix what is missing."
    )
    parser.add_argument("--json", action="store_true", dest="as_json", help="print JSON")
    parser.add_argument(
        "--compile", action="store_true", help="compile the CPU kernels first, for example into a container image"
    )
    flags = parse(argv, parser)
    wanted_json, compiles = flags.pop("as_json"), flags.pop("compile")
    sources = Sources.read(flags)
    from console.runtime.doctor import as_json, as_text, compile_kernels, diagnose

    if compiles:
        compile_kernels()
    report = diagnose(sources.settings(), sources)
    write(as_json(report) if wanted_json else as_text(report), as_json=wanted_json)
    return 0 if report.can_run else FAILURE
