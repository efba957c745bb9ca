"""The process of a worker whose steps are measured.

Run as a program, with a MeterOrder as JSON, it loads the model, says what it is, and then answers each line, the
seconds that it may take, with the steps that it measured, as JSON.
"""

from __future__ import annotations

import sys

import msgspec

from console.planning.child import say
from console.planning.local_model import local_model
from console.planning.measuring import Loaded, MeterOrder, StepMeter, loaded
from engine.errors import EngineError


def _main(text: str) -> int:
    order = msgspec.json.decode(text, type=MeterOrder)
    try:
        local = local_model(order.model, threads=order.threads, changes=order.changes)
        replica = loaded(local, order.design)
        meter, model = StepMeter(replica, order.design, seed=0), replica.model
        here = Loaded(device=model.devices[0], dtype=model.dtype, max_model_len=model.max_model_len)
        say(msgspec.json.encode(here))
        for line in sys.stdin:
            say(msgspec.json.encode(meter.measure(float(line))))
    except EngineError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
