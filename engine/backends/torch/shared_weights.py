"""A model's finished weights in one piece of memory for all workers of this machine that compute on its CPU.

The first worker reads, casts, fuses and packs as it would alone, but into a file of RAM (`weight_file.py`,
`sealed.py`), and computes with what lies there. The next ones find that file and map it: they neither read nor pack.
Where anything of this does not work here, a worker has its weights to itself, as on a GPU.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from engine.backends.base import LoadProgress
from engine.backends.torch.native.library import NativeLibrary
from engine.backends.torch.sealed import SealedFile, UnsealedFile, alone
from engine.backends.torch.weight_file import LAYOUT, SharedReader, SharedWriter
from engine.backends.torch.weight_store import OwnWeights, WeightStore
from engine.config import WeightsName

_logger = logging.getLogger(__name__)


@contextmanager
def weight_store(
    folder: Path,
    files: Iterable[Path],
    dtype: torch.dtype,
    devices: Iterable[torch.device],
    report: Callable[[LoadProgress], None],
    cancelled: Callable[[], bool],
    native: NativeLibrary | None = None,
    weights: WeightsName = "auto",
) -> Iterator[WeightStore]:
    """Where to build the decoder of one model from, inside this: what another worker made, or this one makes for all.

    folder: the model's.  files: all that its weights depend on.  native: the kernels that compute with them, which read
    a layout of their own.  weights: what linear layers are made into.  Waits while another worker makes them, and
    reports that as the phase "wait"; one that dies meanwhile leaves that to the next. What was made here is published
    when the block ends without an error, and freed
    with the last decoder that was built from it.
    """
    if sys.platform != "linux" or any(device.type != "cpu" for device in devices):
        yield OwnWeights()
        return
    name = identity(files, dtype, native, weights)
    with alone(folder, cancelled, lambda: report(LoadProgress(phase="wait", done=0, total=0, unit="steps"))):
        found = SealedFile.find(name)
        if found is not None:
            yield SharedReader(found, native)
            return
        writer = _new_writer(name)
        try:
            yield writer or OwnWeights()
            if writer is not None:
                writer.publish()
        finally:
            if writer is not None:
                writer.close()


def identity(
    files: Iterable[Path], dtype: torch.dtype, native: NativeLibrary | None = None, weights: WeightsName = "auto"
) -> str:
    """A name that only weights which are the same to the bit have: made of the same files, unchanged since, as the same
    dtype and bits, by the same torch and the same kernels for the same instructions."""
    stats = [file.stat() for file in sorted(files)]
    facts = (
        (LAYOUT, torch.__version__, str(dtype), weights, native.key if native else ""),
        (torch.backends.cpu.get_cpu_capability(), os.environ.get("ONEDNN_MAX_CPU_ISA", "")),
        *((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats),
    )
    return f"ericllm-{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}"


def _new_writer(name: str) -> SharedWriter | None:
    try:
        return SharedWriter(UnsealedFile(name))
    except OSError as error:
        _logger.warning("the weights stay this worker's own, as they cannot be shared: %s", error)
        return None
