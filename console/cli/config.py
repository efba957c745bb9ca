"""`ericllm config`: print a commented config.toml, or its path."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from console.runtime.output import write
from console.settings.config_file import sample
from console.settings.schema import config_path


def config(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run the command."""
    parser.description = "Print a commented config.toml, or its path."
    parser.add_argument("what", choices=("sample", "path"), help="what to print")
    what = parser.parse_args(argv).what
    write(sample().rstrip("\n") if what == "sample" else str(config_path()))
    return 0
