"""`ericllm replay FILE`: show a recording in the console."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def replay(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run the command."""
    parser.description = "Show a recording in the console: space pauses, arrows seek, < and > change the speed."
    parser.add_argument("file", metavar="FILE", type=Path, help="recording file")
    parser.add_argument("--theme", metavar="NAME", default=None, help="colour theme")
    given = parser.parse_args(argv)
    from console.link.recording.link import ReplayLink
    from console.link.recording.reader import Recording
    from console.tui.attach_ui import show_recording

    return show_recording(ReplayLink(Recording(given.file)), given.theme)
