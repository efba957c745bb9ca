"""`ericllm api-keys`: make, list and revoke keys for the HTTP API.

A server on this machine knows of a change within a second.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import msgspec

from console.api.http.keys import Keys
from console.api.http.scopes import SCOPES, describe_scopes
from console.link.api import MAX_LIMIT, KeyLimits, KeyReading
from console.runtime.output import OutputFailed, say, write
from console.settings.schema import state_dir


def api_keys(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """Run the command. Raises EngineError with one sentence."""
    given = _parsed(argv, parser)
    keys = Keys(state_dir())
    keys.open()
    match given.what:
        case "make":
            limits = KeyLimits(requests_per_min=given.rate, tokens_per_min=given.tokens, concurrent=given.concurrent)
            made = keys.make(given.name, tuple(given.scope or ["use"]), limits)
            say(f"key {made.name} created: {describe_scopes(made.scopes)}. It is shown only once")
            try:
                write(made.key)
            except (OutputFailed, BrokenPipeError):
                keys.revoke(made.name)  # it was never shown
                raise
        case "revoke":
            keys.revoke(given.name)
            say(f"key {given.name} revoked")
        case _ if given.as_json:
            write(msgspec.json.encode(keys.readings()).decode(), as_json=True)
        case _:
            write("\n".join(map(_line, keys.readings())) or "No keys.")
    return 0


def _line(key: KeyReading) -> str:
    made = time.strftime("%Y-%m-%d", time.localtime(key.made_at))
    used = "never used" if key.last_used_at is None else f"{key.requests:,} requests"
    parts = (key.name, f"{describe_scopes(key.scopes)}", key.limits.in_words(), f"created {made}", used)
    return ", ".join(part for part in parts if part)


def _parsed(argv: Sequence[str], parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.description = "Create, list and revoke keys for the HTTP API."
    what = parser.add_subparsers(dest="what", metavar="make | list | revoke", required=True)
    make = what.add_parser("make", help="create a key and print it once")
    make.add_argument("name", metavar="NAME", help="name of the key")
    make.add_argument(
        "--scope", action="append", choices=SCOPES, help="what the key may do; can be repeated (default: use)"
    )
    for flag, help in (
        ("--rate", "max model requests per minute"),
        ("--tokens", "max tokens per minute, prompts and answers"),
        ("--concurrent", "max concurrent model requests"),
    ):
        make.add_argument(flag, metavar="N", type=_number, default=0, help=f"{help} (default: unlimited)")
    revoke = what.add_parser("revoke", help="revoke a key")
    revoke.add_argument("name", metavar="NAME", help="name of the key")
    listed = what.add_parser("list", help="list all keys")
    listed.add_argument("--json", action="store_true", dest="as_json", help="print JSON")
    return parser.parse_args(argv)


def _number(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_LIMIT:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 to {MAX_LIMIT}")
    return int(text)
