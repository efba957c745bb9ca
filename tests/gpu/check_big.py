"""What needs minutes and tens of GiB: the shape of 8B parameters in bfloat16 and in 4.65 bits per weight."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from tests.gpu.check_speed import backend_rows, exllama_spec, packed_rows, served, torch_spec
from tests.gpu.check_throughput import compared
from tests.gpu.load import as_they_come
from tests.gpu.models import EIGHT_BILLION
from tests.gpu.place import Place
from tests.gpu.report import Row, attempt, skipped

NEEDED_BYTES = 40 << 30
_CLIENTS = (1, 8, 32)


def checks(place: Place) -> Iterator[Row]:
    """exllamav2 first, by itself and against the library alone; then torch, from bfloat16, and from GPTQ."""
    free_bytes = torch.cuda.mem_get_info()[0]
    if free_bytes < NEEDED_BYTES:
        yield skipped("8B", f"{free_bytes / 2**30:.0f} GiB of GPU memory are free, it needs {NEEDED_BYTES / 2**30:.0f}")
        return
    shape = EIGHT_BILLION
    yield from attempt("exllamav2", lambda: backend_rows(exllama_spec(place, shape), "exllamav2", shape))
    yield from attempt("throughput", lambda: as_they_come(compared(place, shape, _CLIENTS)))
    yield from attempt("torch bfloat16", lambda: backend_rows(torch_spec(place, shape), "torch bfloat16", shape))
    yield from attempt("torch, served", lambda: as_they_come(served(place, torch_spec(place, shape), place.clients)))
    yield from attempt("torch gptq", partial(packed_rows, place, shape, "gptq"))
