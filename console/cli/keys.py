"""`ericllm keys`: print every key of the console as a commented keys.toml, or its path."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from console.runtime.output import write


def keys(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run the command."""
    parser.description = "Print every key as a commented keys.toml, or its path."
    parser.add_argument("what", nargs="?", choices=("sample", "path"), default="sample", help="what to print")
    what = parser.parse_args(argv).what
    from console.tui.binding_index import all_bindings
    from console.tui.keys_file import keys_path, sample

    write(sample(all_bindings()).rstrip("\n") if what == "sample" else str(keys_path()))
    return 0
