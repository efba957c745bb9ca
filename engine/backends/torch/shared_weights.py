"""A model's finished weights in one piece of memory for all workers of this machine that compute on its CPU.

The first worker reads, casts, fuses and packs as it would alone, puts every tensor into a file of RAM (`sealed.py`)
as it goes, and computes with what lies there. The next ones find that file and map it: they neither read nor pack.
Where anything of this does not work here, a worker has its weights to itself, as on a GPU.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from engine.backends.torch.linear import Linear, PackedLinear, PlainLinear
from engine.backends.torch.native.layer import Form, NativeLinear
from engine.backends.torch.native.library import NativeLibrary
from engine.backends.torch.opaque import Packed, can_put_together, put_together, taken_apart
from engine.backends.torch.sealed import SealedFile, UnsealedFile, alone
from engine.config import WeightsName

_LAYOUT = 3
"""Goes up whenever the file's layout or the names of its tensors change."""

_TABLE_SIZE_BYTES = 8

_logger = logging.getLogger(__name__)


class WeightStore(Protocol):
    """Where a decoder's tensors come from.

    complete: whether all are there, and take no more memory.  shared_bytes: how many bytes all workers have once.
    """

    complete: bool
    shared_bytes: int

    def tensor(self, key: str, make: Callable[[], Tensor]) -> Tensor:
        """The tensor of that key, made by `make` where it is not there yet."""

    def linear(self, key: str, make: Callable[[], Linear]) -> Linear:
        """The linear layer of that key, made by `make` where it is not there yet."""

    def enlarge_pages(self) -> None:
        """Have the memory backed by large pages where it can be, by a thread. That keeps others from touching new
        memory, so it is for when the load is over."""


class OwnWeights:
    """Every tensor is this worker's own."""

    complete = False
    shared_bytes = 0

    def tensor(self, key: str, make: Callable[[], Tensor]) -> Tensor:
        """What `make` makes."""
        return make()

    def linear(self, key: str, make: Callable[[], Linear]) -> Linear:
        """What `make` makes."""
        return make()

    def enlarge_pages(self) -> None:
        """It is left as it is."""


class _Place(msgspec.Struct, frozen=True):
    """Where a tensor lies in the file. layout: oneDNN's description of its layout, b"" for a plain one.
    native: what a weight is that lies as our own kernel reads it."""

    offset: int
    size_bytes: int
    shape: tuple[int, ...]
    dtype: str
    layout: bytes = b""
    native: Form | None = None


class SharedWriter:
    """Makes every tensor and puts it into the file. What cannot be put there stays this worker's own.

    Call `publish` once all are made.
    """

    complete = False

    def __init__(self, file: UnsealedFile) -> None:
        self.shared_bytes = 0
        self._file: UnsealedFile | None = file
        self._mapped_file = file
        self._places: dict[str, _Place] = {}
        self._plain: dict[int, _Place] = {}
        self._window: tuple[memoryview, Tensor] | None = None

    def tensor(self, key: str, make: Callable[[], Tensor]) -> Tensor:
        """What `make` makes, out of the file."""
        return self._put(key, make())

    def linear(self, key: str, make: Callable[[], Linear]) -> Linear:
        """What `make` makes, over tensors in the file."""
        made = make()
        match made:
            case NativeLinear():
                weight = self._put(f"{key}.weight", made.weight, native=made.form)
                bias, scales = self._put_part(f"{key}.bias", made.bias), self._put_part(f"{key}.scales", made.scales)
                return NativeLinear(made.library, made.form, weight, bias, scales)
            case PackedLinear():
                return PackedLinear(self._put(f"{key}.weight", made.weight), self._put_part(f"{key}.bias", made.bias))
            case PlainLinear():
                return PlainLinear(self._put(f"{key}.weight", made.weight), self._put_part(f"{key}.bias", made.bias))
            case _:
                return made

    def enlarge_pages(self) -> None:
        """See WeightStore."""
        self._mapped_file.enlarge_pages()

    def publish(self) -> None:
        """Let the other workers find the file."""
        if self._file is None:
            return
        table = msgspec.msgpack.encode(self._places)
        try:
            self._file.append(memoryview(table + len(table).to_bytes(_TABLE_SIZE_BYTES, "big")))
            self._file.seal()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Put nothing there any more. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _put_part(self, key: str, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else self._put(key, tensor)

    def _put(self, key: str, tensor: Tensor, native: Form | None = None) -> Tensor:
        if self._file is None or (tensor.is_mkldnn and not can_put_together(tensor.dtype)):
            return tensor
        if not tensor.is_mkldnn and tensor.data_ptr() in self._plain:  # a tied head, which is the embedding
            self._places[key] = self._plain[tensor.data_ptr()]
            return tensor
        parts = _bytes_of(tensor)
        try:
            memory, start, offset = self._file.append(parts.view())
        except OSError as error:
            self._give_up(error)
            return tensor
        dtype = str(tensor.dtype).removeprefix("torch.")
        place = _Place(offset, parts.size_bytes, tuple(tensor.shape), dtype, parts.layout, native)
        placed = _tensor_over(self._mapped(memory), start, place)
        self._places[key] = place
        self.shared_bytes += parts.size_bytes
        if not place.layout:
            self._plain[placed.data_ptr()] = place
        return placed

    def _mapped(self, memory: memoryview) -> Tensor:
        if self._window is None or self._window[0] is not memory:
            self._window = memory, _as_tensor(memory)
        return self._window[1]

    def _give_up(self, error: OSError) -> None:
        _logger.warning("the weights stay this worker's own, as they cannot be shared: %s", error)
        self.close()
        self.shared_bytes = 0


class SharedReader:
    """Takes every tensor out of a complete file."""

    complete = True

    def __init__(self, file: SealedFile, native: NativeLibrary | None) -> None:
        self._native = native
        self._file = file
        self._bytes = _as_tensor(file.memory)
        end = len(file.memory) - _TABLE_SIZE_BYTES
        size_bytes = int.from_bytes(file.memory[end:], "big")
        self._places = msgspec.msgpack.decode(file.memory[end - size_bytes : end], type=dict[str, _Place])
        self.shared_bytes = sum({place.offset: place.size_bytes for place in self._places.values()}.values())

    def tensor(self, key: str, make: Callable[[], Tensor]) -> Tensor:
        """The one in the file; where its writer could not put it there, what `make` makes."""
        return self._at(key) if key in self._places else make()

    def linear(self, key: str, make: Callable[[], Linear]) -> Linear:
        """A layer over the tensors in the file; where its writer could not put them there, what `make` makes."""
        place = self._places.get(f"{key}.weight")
        if place is None:
            return make()
        bias, scales = (self._at(name) if name in self._places else None for name in (f"{key}.bias", f"{key}.scales"))
        weight = self._at(f"{key}.weight")
        if place.native is not None:
            assert self._native is not None, "the file's identity names the kernels"
            return NativeLinear(self._native, place.native, weight, bias, scales)
        return (PackedLinear if place.layout else PlainLinear)(weight, bias)

    def enlarge_pages(self) -> None:
        """See WeightStore."""
        self._file.enlarge_pages()

    def _at(self, key: str) -> Tensor:
        place = self._places[key]
        return _tensor_over(self._bytes, place.offset, place)


@contextmanager
def weight_store(
    folder: Path,
    files: Iterable[Path],
    dtype: torch.dtype,
    devices: Iterable[torch.device],
    cancelled: Callable[[], bool],
    native: NativeLibrary | None = None,
    weights: WeightsName = "auto",
) -> Iterator[WeightStore]:
    """Where to build the decoder of one model from, inside this: what another worker made, or this one makes for all.

    folder: the model's.  files: all that its weights depend on.  native: the kernels that
    compute with them, which read a layout of their own.  weights: what
    linear layers are made into.  Waits while another worker makes them; one that dies
    meanwhile leaves that to the next. What was made here is published when the block ends without an error, and freed
    with the last decoder that was built from it.
    """
    if sys.platform != "linux" or any(device.type != "cpu" for device in devices):
        yield OwnWeights()
        return
    name = identity(files, dtype, native, weights)
    with alone(folder, cancelled):
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
        (_LAYOUT, torch.__version__, str(dtype), weights, native.key if native else ""),
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


def _bytes_of(tensor: Tensor) -> Packed:
    assert tensor.is_mkldnn or tensor.is_contiguous(), "weights are contiguous once made"
    if tensor.is_mkldnn:
        return taken_apart(tensor)
    return Packed(tensor.data_ptr(), tensor.nbytes, b"")


def _as_tensor(memory: memoryview) -> Tensor:
    """The bytes of a mapping, which stays mapped while the tensor is alive."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # nobody writes to weights
        return torch.frombuffer(memory, dtype=torch.uint8)


def _tensor_over(memory: Tensor, start: int, place: _Place) -> Tensor:
    """The tensor of `place` over bytes of `memory`, from `start` on."""
    dtype = getattr(torch, place.dtype)
    if not place.layout:
        return memory[start : start + place.size_bytes].view(dtype).view(place.shape)
    tensor = put_together(memory.data_ptr() + start, place.shape, dtype, place.layout)
    tensor.memory = memory  # type: ignore[attr-defined]  # a packed tensor does not keep it mapped by itself
    return tensor
