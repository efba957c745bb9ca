"""A model's finished weights in one piece of memory for all workers of this machine that compute on its CPU.

The first worker reads, casts, fuses and packs as it would alone, but into a file of RAM (`SharedWriter`,
`SealedFile`), and computes with what lies there. The next ones find that file and map it: they neither read nor pack.
Where anything of this does not work here, a worker has its weights to itself, as on a GPU.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from engine.backends.base import LoadProgress
from engine.backends.torch.huge_pages import LARGE_PAGE_BYTES, FileMapping
from engine.backends.torch.model.linear import (
    Linear,
    PackedLinear,
    PackedWeight,
    PlainLinear,
    can_deserialize,
    deserialize_packed,
    dtype_name,
    serialize_packed,
)
from engine.backends.torch.native.layer import Form, NativeLinear
from engine.backends.torch.native.library import NativeLibrary, aligned
from engine.backends.torch.weights.store import Made, Make, OwnWeights, WeightStore
from engine.config import WeightsName

# Memory that one process fills and others map: nameless files in RAM, found through /proc, sealed once complete.
#
# Nothing of it is on any disk, so nothing is left behind however its users end: the kernel frees such a file with the
# last process that has it open or mapped. A seal makes it unchangeable for everybody, its writer included, and is what
# tells a complete file from one whose writer is still at it or was killed. Linux alone has them.

_PROCESSES = Path("/proc")
_WINDOW_BYTES = 1 << 30
_ALIGNMENT = 64
_POLL_S = 0.02


class SealedFile:
    """A file of RAM, open for reading, that nobody can change any more."""

    def __init__(self, fd: int) -> None:
        self._mapping = FileMapping(fd, os.fstat(fd).st_size)

    @classmethod
    def find(cls, name: str) -> SealedFile | None:
        """The complete file of that name that some process of this user holds, or None."""
        for path in _open_files(f"/memfd:{name} (deleted)"):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # its holder has just ended
                continue
            try:
                if os.fstat(fd).st_uid == os.geteuid() and _is_sealed(fd):
                    return cls(fd)
            finally:
                os.close(fd)
        return None

    @property
    def memory(self) -> memoryview:
        """All of it, mapped read-only. It stays mapped, and can be found by others, while this is used."""
        return self._mapping.view

    def enlarge_pages(self) -> None:
        """Have it backed by large pages: its writer had them made, now this process's table says so."""
        self._mapping.enlarge_pages(len(self._mapping.view))


class UnsealedFile:
    """A file of RAM that is being written, piece by piece, each of which can be read at once.

    Its methods raise OSError where the system has no such files or no memory.
    """

    def __init__(self, name: str) -> None:
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._window: FileMapping | None = None
        self._window_start = self._window_end = self._end = 0
        self._small: list[tuple[FileMapping, int]] = []

    def append(self, piece: memoryview) -> tuple[memoryview, int, int]:
        """Add a piece. Returns a mapping in which it lies, where in that, and where in the file."""
        window, start = self._room(piece.nbytes)
        written = 0
        while written < piece.nbytes:
            written += os.pwrite(self._fd, piece[written:], start + written)
        self._end = start + piece.nbytes
        return window.view, start - self._window_start, start

    def reserve(self, size_bytes: int) -> tuple[memoryview, int, int]:
        """Add a piece that is yet to be written, by kernels, where it lies; the same of it. It has its memory already:
        to find none while writing would be fatal."""
        window, start = self._room(size_bytes)
        os.posix_fallocate(self._fd, start, size_bytes)
        self._end = start + size_bytes
        return window.view, start - self._window_start, start

    def seal(self) -> None:
        """Let nothing be changed from now on, and others find it."""
        os.truncate(self._fd, self._end)
        self._close_window()
        fcntl.fcntl(
            self._fd,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL,
        )

    def enlarge_pages(self) -> None:
        """Have what was mapped so far, but for the window that is open, backed by large pages."""
        for mapping, size_bytes in self._small:
            mapping.enlarge_pages(size_bytes)
        self._small.clear()

    def close(self) -> None:
        """Write no more. What was mapped stays, and can be found if it was sealed. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _room(self, size_bytes: int) -> tuple[FileMapping, int]:
        """A mapping with so much room at the end, and where in the file that is."""
        start = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        if self._window is None or start + size_bytes > self._window_end:
            start = -(-start // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
            self._open_window(start, max(_WINDOW_BYTES, size_bytes))
        assert self._window is not None
        return self._window, start

    def _open_window(self, start: int, size_bytes: int) -> None:
        """Map ahead of the end, which costs nothing, so that many pieces share a mapping."""
        self._close_window()
        reader = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.truncate(self._fd, max(start + size_bytes, os.fstat(self._fd).st_size))
            self._window = FileMapping(reader, size_bytes, start, writer=self._fd)
        finally:
            os.close(reader)
        self._window_start, self._window_end = start, start + size_bytes

    def _close_window(self) -> None:
        if self._window is not None:
            self._window.end_writing()
            self._small.append((self._window, self._end - self._window_start))
            self._window = None


@contextmanager
def alone(folder: Path, cancelled: Callable[[], bool], waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Be the only process inside this for that folder; returns early, not alone, once `cancelled()` is true. `waiting`
    is called several times a second while another process is inside.

    The kernel lets go of the lock when its holder dies. On a file system without locks, all are let in.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while not cancelled():
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting()
                time.sleep(_POLL_S)
            except OSError:
                break
        yield
    finally:
        os.close(fd)


def _is_sealed(fd: int) -> bool:
    wanted = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & wanted == wanted


def _open_files(target: str) -> Iterator[Path]:
    """Every descriptor of this user's processes that leads to `target`, as a path that opens the same file."""
    for process in _PROCESSES.iterdir():
        try:
            if not process.name.isdecimal() or process.stat().st_uid != os.geteuid():
                continue
            descriptors = list((process / "fd").iterdir())
        except OSError:  # it has just ended, or is none of ours
            continue
        for descriptor in descriptors:
            try:
                found = str(descriptor.readlink()) == target
            except OSError:
                continue
            if found:
                yield descriptor


# A model's finished weights in a file of RAM: put there by the worker that makes them, read by the others.

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
            return self._appended(key, tensor) if can_deserialize(tensor.dtype) else tensor
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


def _bytes_of(tensor: Tensor) -> PackedWeight:
    assert tensor.is_mkldnn or tensor.is_contiguous(), "weights are contiguous once made"
    if tensor.is_mkldnn:
        return serialize_packed(tensor)
    return PackedWeight(tensor.data_ptr(), tensor.nbytes, b"")


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
    tensor = deserialize_packed(memory.data_ptr() + start, place.shape, dtype, place.layout)
    tensor.memory = memory  # type: ignore[attr-defined]  # a packed tensor does not keep it mapped by itself
    return tensor


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
