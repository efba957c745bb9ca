"""Exit codes and error messages of the commands in tools/, as `ericllm` has them."""

from __future__ import annotations

from collections.abc import Callable

from console.runtime.output import say
from engine.errors import EngineError

FAILURE = 1
USAGE_ERROR = 2
INTERRUPTED = 130


def exit_code(command: Callable[[], None]) -> int:
    """Run a command and return 0, 1 after a failure, 2 for a wrong value, or 130 after Ctrl+C."""
    try:
        command()
    except EngineError as error:
        say(error.message)
        return USAGE_ERROR if error.http_status < 500 else FAILURE
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0
