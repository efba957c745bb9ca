"""A module whose import leaves a thread, as that of some plugins of Python does."""

import threading

from tests.fakes.backend_factories import make

__all__ = ["make"]

threading.Thread(target=threading.Event().wait, daemon=True).start()
