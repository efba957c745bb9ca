"""A model's finished weights in a file of RAM: put there by the worker that makes them, read by the others."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from engine.backends.torch.linear import Linear, PackedLinear, PlainLinear
from engine.backends.torch.native.layer import Form, NativeLinear
from engine.backends.torch.native.library import NativeLibrary
from engine.backends.torch.native.rows import aligned
from engine.backends.torch.opaque import Packed, can_put_together, dtype_name, put_together, taken_apart
from engine.backends.torch.sealed import SealedFile, UnsealedFile
from engine.backends.torch.weight_store import Made, Make

LAYOUT = 4
"""Goes up whenever the file's layout or the names of its tensors change."""

_TABLE_SIZE_BYTES = 8

_logger = logging.getLogger(__name__)


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
        self._rooms: dict[int, _Place] = {}
        self._window: tuple[memoryview, Tensor] | None = None

    def tensor(self, key: str, make: Make[Tensor]) -> Tensor:
        """What `make` makes, out of the file."""
        return self._made(make, lambda made: self._put(key, made))

    def linear(self, key: str, make: Make[Linear]) -> Linear:
        """What `make` makes, over tensors in the file."""
        return self._made(make, lambda made: self._placed(key, made))

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """In the file, where what is packed need not be copied to."""
        if self._file is None:
            return aligned(shape, dtype)
        size_bytes = torch.Size(shape).numel() * dtype.itemsize
        memory, start, offset = self._file.reserve(size_bytes)
        place = _Place(offset, size_bytes, shape, dtype_name(dtype))
        room = _tensor_over(self._mapped(memory), start, place)
        self._rooms[room.data_ptr()] = place
        return room

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

    def _made(self, make: Make[Made], place: Callable[[Made], Made]) -> Made:
        """What is made and placed; made anew, for this worker alone, where there is no place for it."""
        if self._file is not None:
            try:
                return place(make(True))
            except OSError as error:
                self._give_up(error)
        return make(False)

    def _placed(self, key: str, made: Linear) -> Linear:
        match made:
            case NativeLinear():
                weight = self._put(f"{key}.weight", made.weight, made.form)
                return NativeLinear(made.library, made.form, weight, self._put_part(f"{key}.bias", made.bias))
            case PackedLinear():
                return PackedLinear(self._put(f"{key}.weight", made.weight), self._put_part(f"{key}.bias", made.bias))
            case PlainLinear():
                return PlainLinear(self._put(f"{key}.weight", made.weight), self._put_part(f"{key}.bias", made.bias))
            case _:
                return made

    def _put_part(self, key: str, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else self._put(key, tensor)

    def _put(self, key: str, tensor: Tensor, native: Form | None = None) -> Tensor:
        if tensor.is_mkldnn:
            return self._appended(key, tensor) if can_put_together(tensor.dtype) else tensor
        at = tensor.data_ptr()
        if at in self._plain:  # a tied head, which is the embedding
            self._places[key] = self._plain[at]
        elif at in self._rooms:
            place = msgspec.structs.replace(self._rooms.pop(at), native=native)
            self._places[key] = place
            self.shared_bytes += place.size_bytes
        else:
            tensor = self._appended(key, tensor, native)
            self._plain[tensor.data_ptr()] = self._places[key]
        return tensor

    def _appended(self, key: str, tensor: Tensor, native: Form | None = None) -> Tensor:
        assert self._file is not None, "what is made for this worker alone is not put there"
        parts = _bytes_of(tensor)
        memory, start, offset = self._file.append(parts.view())
        place = _Place(offset, parts.size_bytes, tuple(tensor.shape), dtype_name(tensor.dtype), parts.layout, native)
        self._places[key] = place
        self.shared_bytes += parts.size_bytes
        return _tensor_over(self._mapped(memory), start, place)

    def _mapped(self, memory: memoryview) -> Tensor:
        if self._window is None or self._window[0] is not memory:
            self._window = memory, _as_tensor(memory)
        return self._window[1]

    def _give_up(self, error: OSError) -> None:
        why = str(error)  # a record that kept the error would keep what it passed through: tensors
        _logger.warning("the weights stay this worker's own, as they cannot be shared: %s", why)
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

    def tensor(self, key: str, make: Make[Tensor]) -> Tensor:
        """The one in the file; where its writer could not put it there, what `make` makes."""
        return self._at(key) if key in self._places else make(False)

    def linear(self, key: str, make: Make[Linear]) -> Linear:
        """A layer over the tensors in the file; where its writer could not put them there, what `make` makes."""
        place = self._places.get(f"{key}.weight")
        if place is None:
            return make(False)
        weight = self._at(f"{key}.weight")
        bias = self._at(f"{key}.bias") if f"{key}.bias" in self._places else None
        if place.native is not None:
            assert self._native is not None, "the file's identity names the kernels"
            return NativeLinear(self._native, place.native, weight, bias)
        return (PackedLinear if place.layout else PlainLinear)(weight, bias)

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """In this process's memory: the file has what it has."""
        return aligned(shape, dtype)

    def enlarge_pages(self) -> None:
        """See WeightStore."""
        self._file.enlarge_pages()

    def _at(self, key: str) -> Tensor:
        place = self._places[key]
        return _tensor_over(self._bytes, place.offset, place)


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
