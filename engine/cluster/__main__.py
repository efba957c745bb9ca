"""`python -m engine.cluster --fd N`: the process that holds Ray; see `driver`."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys

from engine.cluster.driver import Driver
from engine.system.child_process import ignore_stop_signals


def main() -> int:
    """Serve the engine until it goes away. What Ray writes, its token first of all, is for this user alone."""
    os.umask(0o077)
    parser = argparse.ArgumentParser(prog="engine.cluster")
    parser.add_argument("--fd", type=int, required=True)
    sock = socket.socket(fileno=parser.parse_args().fd)
    sock.set_inheritable(False)
    ignore_stop_signals()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    Driver(sock).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
