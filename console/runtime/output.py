"""Output of commands: results on stdout, sentences on stderr. Nothing that it quotes steers a terminal.

And whether there is a terminal that a screen can be shown in."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from console.settings.schema import APP_NAME
from engine.errors import EngineError, InvalidRequest
from engine.text.printable import printable, printable_json, printable_lines


class OutputFailed(EngineError):
    """A result cannot be written, to a full disk say."""

    code = "output_failed"


def write(text: str, *, as_json: bool = False) -> None:
    """Print a result of one line or several; as_json: one that a program reads as what it was made of.

    Raises OutputFailed, and BrokenPipeError where its reader is gone: nothing more is written then.
    """
    try:
        sys.stdout.write(f"{printable_json(text) if as_json else printable_lines(text)}\n")
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the rest of it, flushed at the exit
        if isinstance(error, BrokenPipeError):
            raise
        raise OutputFailed(f"The output cannot be written: {error.strerror}") from None


def say(sentence: str) -> None:
    """Print a line on stderr, its end with it: the log may write there from another thread. Dropped where it cannot
    be written (a full disk, a reader that is gone)."""
    with suppress(OSError):
        sys.stderr.write(f"{APP_NAME}: {printable(sentence)}\n")
        sys.stderr.flush()


def open_closed_streams() -> None:
    """Have the null device for each standard stream that came closed: the first files and sockets opened would get its
    number, and what native code prints."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            os.set_inheritable(number, True)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def redirected_stream() -> str:
    """The name of a standard stream that is not a terminal, "" where all three are. Keys come from stdin, the screen
    goes to stderr. Raises InvalidRequest for a terminal that can show no screen."""
    streams = {"stdout": sys.__stdout__, "stderr": sys.__stderr__, "stdin": sys.__stdin__}
    found = next((name for name, stream in streams.items() if stream is None or not stream.isatty()), "")
    if not found and os.environ.get("TERM") == "dumb":
        raise InvalidRequest("This terminal cannot show the console (TERM=dumb); use --headless")
    return found
