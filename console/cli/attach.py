"""`ericllm attach URL [URL ...]`: open the console on instances elsewhere."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from console.cli.remote_args import add_key, key_of, number, remote_links, tls_of
from console.link.remote.http import DEFAULT_URL
from console.link.remote.link import DEFAULT_HZ


def attach(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Open the console on the instances; returns the exit code when the operator leaves."""
    parser.description = "Open the console on one or several running instances, over HTTP."
    parser.add_argument(
        "urls", metavar="URL", nargs="*", default=[DEFAULT_URL], help=f"URLs of the instances (default {DEFAULT_URL})"
    )
    add_key(parser)
    parser.add_argument("--read-only", action="store_true", help="show everything, change nothing")
    parser.add_argument(
        "--hz", metavar="N", type=number(0.1, 10), default=DEFAULT_HZ, help="snapshots per second (default 2)"
    )
    parser.add_argument("--theme", metavar="NAME", default=None, help="colour theme")
    given = parser.parse_args(argv)
    with remote_links(given.urls, key_of(given), given.hz, tls_of(given)) as links:
        from console.tui.attach_ui import show_instances

        return show_instances(links, given.theme, read_only=given.read_only)
