"""A module whose import never ends."""

import signal

signal.pause()
