"""Asks /health ten times a second in a process of its own, which nothing else holds up: run with port and seconds.

It prints how long each answer took, in seconds, as JSON; anything but 200 ends it with an error.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from contextlib import closing

PAUSE_S = 0.1
PATIENCE_S = 60.0


def watch(port: int, seconds: float) -> list[float]:
    """How long each answer took."""
    took_s: list[float] = []
    until_s = time.monotonic() + seconds
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
        while time.monotonic() < until_s:
            asked_s = time.monotonic()
            connection.request("GET", "/health")
            response = connection.getresponse()
            response.read()
            assert response.status == 200, response.status
            took_s.append(time.monotonic() - asked_s)
            time.sleep(PAUSE_S)
    return took_s


if __name__ == "__main__":
    print(json.dumps(watch(int(sys.argv[1]), float(sys.argv[2]))))
