"""Arguments of the commands that look at other instances, and links to these."""

from __future__ import annotations

import argparse
import math
import os
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from console.link.remote.http import DEFAULT_URL, address_of
from console.link.remote.link import RemoteLink
from console.runtime.loops import LoopThread
from console.settings.schema import ENV_PREFIX
from console.settings.secrets import read_secret
from engine.errors import InvalidRequest
from engine.models.files import home_expanded

KEY_VARIABLE = f"{ENV_PREFIX}API_KEY"
FILE_VARIABLE = f"{KEY_VARIABLE}_FILE"


def add_key(parser: argparse.ArgumentParser) -> None:
    """--api-key, --api-key-file and --ca. A key in config.toml is this machine's own, so it is sent nowhere."""
    key = parser.add_mutually_exclusive_group()
    key.add_argument(
        "--api-key-file",
        metavar="FILE",
        type=Path,
        default=None,
        help=f"file whose first line is the API key of the instance (or {FILE_VARIABLE})",
    )
    key.add_argument(
        "--api-key",
        metavar="KEY",
        default=None,
        help=f"the API key; visible to other users of this machine, unlike {KEY_VARIABLE}",
    )
    parser.add_argument(
        "--ca", metavar="FILE", default=None, help="additional CA certificate (PEM) to trust for https:// URLs"
    )


def add_url(parser: argparse.ArgumentParser) -> None:
    """One instance."""
    parser.add_argument(
        "url", metavar="URL", nargs="?", default=DEFAULT_URL, help=f"the instance (default {DEFAULT_URL})"
    )


def key_of(given: argparse.Namespace) -> str | None:
    """The key to send, None for none. Raises InvalidRequest where a file holds none."""
    if given.api_key_file is not None:
        return read_secret(given.api_key_file, "--api-key-file")
    if key := given.api_key or os.environ.get(KEY_VARIABLE):
        return str(key)
    file = os.environ.get(FILE_VARIABLE)
    return read_secret(Path(file), FILE_VARIABLE) if file else None


def tls_of(given: argparse.Namespace) -> ssl.SSLContext | None:
    """Whose certificates to trust, None for those that the system does. Raises InvalidRequest for what is none."""
    if given.ca is None:
        return None
    context = ssl.create_default_context()
    try:
        context.load_verify_locations(home_expanded(given.ca))
    except OSError as error:  # ssl's errors are OSErrors
        reason = "not a PEM certificate" if isinstance(error, ssl.SSLError) else error.strerror
        raise InvalidRequest(f"--ca {given.ca} cannot be used: {reason}", param="ca") from None
    return context


@contextmanager
def remote_links(
    urls: list[str], api_key: str | None, hz: float, tls: ssl.SSLContext | None = None
) -> Iterator[list[RemoteLink]]:
    """Links to instances, on a loop of their own. Raises InvalidRequest for what is not an address."""
    addresses = list(dict.fromkeys(map(address_of, urls)))
    loop = LoopThread("remote")
    links = [RemoteLink(address, loop=loop, api_key=api_key, hz=hz, tls=tls) for address in addresses]
    try:
        yield links
    finally:
        for link in links:
            link.close()
        loop.stop()


def number(low: float, high: float) -> Callable[[str], float]:
    """Return a parser of numbers between two others, for argparse."""

    def read(value: str) -> float:
        try:
            found = float(value)
        except ValueError:
            found = math.nan
        if not low <= found <= high:
            raise argparse.ArgumentTypeError(f"{value} is not a number between {low:g} and {high:g}")
        return found

    return read
