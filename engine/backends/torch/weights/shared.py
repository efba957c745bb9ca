"""Weights in memory shared by all workers that compute on this machine's CPU.

The first worker reads, casts, fuses and packs as usual, but into a RAM file (`SharedWriter`, `SealedFile`), and
computes with that. The next ones find the file and map it: they neither read nor pack. Where that does not work, a
worker has its own weights, as on a GPU.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec
import torch
from torch import Tensor

from engine.backends.base import LoadProgress
from engine.backends.common.model_config import WHOLE_MODEL, Shard
from engine.backends.torch.huge_pages import LARGE_PAGE_BYTES, FileMapping, shared_tensor
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
from engine.backends.torch.native.layer import NativeLinear, WeightFormat
from engine.backends.torch.native.library import NativeLibrary, allocate_aligned
from engine.backends.torch.weights.store import Make, OwnWeights, Result, WeightStore
from engine.config import WeightsName

# Memory that one process writes and others map: anonymous files in RAM, found through /proc, sealed once complete.
#
# Nothing is on disk, so nothing is left behind however the processes end: the kernel frees such a file with the last
# process that has it open or mapped. A seal makes it immutable, for its writer too, and distinguishes a complete file
# from one whose writer is still at work or was killed. Linux only.

_PROCESSES = Path("/proc")
_WINDOW_BYTES = 1 << 30
_ALIGNMENT = 64
_POLL_S = 0.02


class SealedFile:
    """An immutable RAM file, open for reading."""

    def __init__(self, fd: int) -> None:
        self._mapping = FileMapping(fd, os.fstat(fd).st_size)

    @classmethod
    def find(cls, name: str) -> SealedFile | None:
        """Return the sealed file of that name which a process of this user has open; None if there is none."""
        for path in find_ram_files(name):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # its process has just ended
                continue
            try:
                if os.fstat(fd).st_uid == os.geteuid() and _is_sealed(fd):
                    return cls(fd)
            finally:
                os.close(fd)
        return None

    @property
    def memory(self) -> memoryview:
        """Its contents, mapped read-only. While this is used, others can find the file."""
        return self._mapping.view

    def enlarge_pages(self) -> None:
        """Map it with large pages, which its writer has created."""
        self._mapping.enlarge_pages(len(self._mapping.view))


class UnsealedFile:
    """A RAM file that is written piece by piece; pieces can be read at once.

    Methods raise OSError where the system has no such files or no memory.
    """

    def __init__(self, name: str) -> None:
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._window: FileMapping | None = None
        self._window_start = self._window_end = self._end = 0
        self._mappings: list[tuple[FileMapping, int]] = []

    def append(self, piece: memoryview) -> tuple[memoryview, int, int]:
        """Append a piece. Returns a mapping that contains it, and its offsets in the mapping and in the file."""
        window, start = self._reserve(piece.nbytes)
        written = 0
        while written < piece.nbytes:
            written += os.pwrite(self._fd, piece[written:], start + written)
        self._end = start + piece.nbytes
        return window.view, start - self._window_start, start

    def reserve(self, size_bytes: int) -> tuple[memoryview, int, int]:
        """Append a piece that kernels will write in place; returns as `append`. Its memory is allocated, as running out
        of it while writing would be fatal."""
        window, start = self._reserve(size_bytes)
        os.posix_fallocate(self._fd, start, size_bytes)
        self._end = start + size_bytes
        return window.view, start - self._window_start, start

    def seal(self) -> None:
        """Make the file immutable, so that others find it."""
        os.truncate(self._fd, self._end)
        self._close_window()
        fcntl.fcntl(
            self._fd,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL,
        )

    def enlarge_pages(self) -> None:
        """Back all closed mappings with large pages."""
        for mapping, size_bytes in self._mappings:
            mapping.enlarge_pages(size_bytes)
        self._mappings.clear()

    def close(self) -> None:
        """Stop writing. Mappings stay, and the file can be found if it was sealed. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _reserve(self, size_bytes: int) -> tuple[FileMapping, int]:
        """Return a mapping with room for a piece, and the piece's offset in the file."""
        start = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        if self._window is None or start + size_bytes > self._window_end:
            start = -(-start // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
            self._open_window(start, max(_WINDOW_BYTES, size_bytes))
        assert self._window is not None
        return self._window, start

    def _open_window(self, start: int, size_bytes: int) -> None:
        """Map beyond the end, which is free, so that many pieces share a mapping."""
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
            self._mappings.append((self._window, self._end - self._window_start))
            self._window = None


@contextmanager
def folder_lock(
    folder: Path, cancelled: Callable[[], bool], on_wait: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Hold a lock on the folder; returns without it once `cancelled()` is true. `on_wait` is called several times a
    second while another process has it.

    The kernel releases the lock of a dead process. On a file system without locks, the block runs without one.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while not cancelled():
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                on_wait()
                time.sleep(_POLL_S)
            except OSError:
                break
        yield
    finally:
        os.close(fd)


def _is_sealed(fd: int) -> bool:
    wanted = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & wanted == wanted


def find_ram_files(name: str) -> Iterator[Path]:
    """Yield paths of all descriptors of this user's processes that refer to an anonymous RAM file of that name."""
    target = f"/memfd:{name} (deleted)"
    for process in _PROCESSES.iterdir():
        try:
            if not process.name.isdecimal() or process.stat().st_uid != os.geteuid():
                continue
            descriptors = list((process / "fd").iterdir())
        except OSError:  # it has just ended, or belongs to another user
            continue
        for descriptor in descriptors:
            try:
                sealed = str(descriptor.readlink()) == target
            except OSError:
                continue
            if sealed:
                yield descriptor


# A model's weights in a RAM file: written by the worker that makes them, mapped by the others.

StoredWeights = WeightsName | Literal["codes"]
"""As `--weights` makes linear layers, or in the codes of a GGUF file."""

LAYOUT = 5
"""Version of the file's layout and tensor names."""

_TABLE_SIZE_BYTES = 8

_logger = logging.getLogger(__name__)


class _Place(msgspec.Struct, frozen=True):
    """Location of a tensor in the file. layout: oneDNN's description of its layout, b"" for a plain tensor.
    native: format of a weight packed for the native kernels."""

    offset: int
    size_bytes: int
    shape: tuple[int, ...]
    dtype: str
    layout: bytes = b""
    native: WeightFormat | None = None


class SharedWriter:
    """Makes every tensor and writes it to the file; those that cannot be shared stay this worker's own.

    Call `publish` once all are made.
    """

    complete = False

    def __init__(self, file: UnsealedFile) -> None:
        self.shared_bytes = 0
        self._file: UnsealedFile | None = file
        self._mapped_file = file
        self._places: dict[str, _Place] = {}
        self._by_address: dict[int, _Place] = {}
        self._reserved: dict[int, _Place] = {}
        self._window: tuple[memoryview, Tensor] | None = None

    def tensor(self, key: str, make: Make[Tensor]) -> Tensor:
        """Return the result of `make`, in the file."""
        return self._make_in_file(make, lambda made: self._put(key, made))

    def linear(self, key: str, make: Make[Linear]) -> Linear:
        """Return the result of `make`, with tensors in the file."""
        return self._make_in_file(make, lambda made: self._put_linear(key, made))

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate in the file, so that a packed weight needs no copy."""
        if self._file is None:
            return allocate_aligned(shape, dtype)
        size_bytes = torch.Size(shape).numel() * dtype.itemsize
        memory, start, offset = self._file.reserve(size_bytes)
        place = _Place(offset, size_bytes, shape, dtype_name(dtype))
        allocate = _tensor_over(self._as_mapped(memory), start, place)
        self._reserved[allocate.data_ptr()] = place
        return allocate

    def enlarge_pages(self) -> None:
        """Back the file's memory with large pages."""
        self._mapped_file.enlarge_pages()

    def publish(self) -> None:
        """Seal the file, so that other workers find it."""
        if self._file is None:
            return
        table = msgspec.msgpack.encode(self._places)
        try:
            self._file.append(memoryview(table + len(table).to_bytes(_TABLE_SIZE_BYTES, "big")))
            self._file.seal()
        except OSError as error:
            self._stop_sharing(error)

    def close(self) -> None:
        """Stop writing to the file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _make_in_file(self, make: Make[Result], place: Callable[[Result], Result]) -> Result:
        """Make a result and write it to the file; where that fails, make it again in this worker's own memory."""
        if self._file is not None:
            try:
                return place(make(True))
            except OSError as error:
                self._stop_sharing(error)
        return make(False)

    def _put_linear(self, key: str, made: Linear) -> Linear:
        match made:
            case NativeLinear():
                weight = self._put(f"{key}.weight", made.weight, made.format)
                return NativeLinear(made.library, made.format, weight, self._put_optional(f"{key}.bias", made.bias))
            case PackedLinear():
                return PackedLinear(
                    self._put(f"{key}.weight", made.weight), self._put_optional(f"{key}.bias", made.bias)
                )
            case PlainLinear():
                return PlainLinear(
                    self._put(f"{key}.weight", made.weight), self._put_optional(f"{key}.bias", made.bias)
                )
            case _:
                return made

    def _put_optional(self, key: str, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else self._put(key, tensor)

    def _put(self, key: str, tensor: Tensor, native: WeightFormat | None = None) -> Tensor:
        if tensor.is_mkldnn:
            return self._append(key, tensor) if can_deserialize(tensor.dtype) else tensor
        address = tensor.data_ptr()
        if address in self._by_address:  # a tied head is the embedding
            self._places[key] = self._by_address[address]
        elif address in self._reserved:
            place = msgspec.structs.replace(self._reserved.pop(address), native=native)
            self._places[key] = place
            self.shared_bytes += place.size_bytes
        else:
            tensor = self._append(key, tensor, native)
            self._by_address[tensor.data_ptr()] = self._places[key]
        return tensor

    def _append(self, key: str, tensor: Tensor, native: WeightFormat | None = None) -> Tensor:
        assert self._file is not None, "own tensors are not written to the file"
        parts = _bytes_of(tensor)
        memory, start, offset = self._file.append(parts.view())
        place = _Place(offset, parts.size_bytes, tuple(tensor.shape), dtype_name(tensor.dtype), parts.layout, native)
        self._places[key] = place
        self.shared_bytes += parts.size_bytes
        return _tensor_over(self._as_mapped(memory), start, place)

    def _as_mapped(self, memory: memoryview) -> Tensor:
        if self._window is None or self._window[0] is not memory:
            self._window = memory, shared_tensor(memory)
        return self._window[1]

    def _stop_sharing(self, error: OSError) -> None:
        why = str(error)  # a log record with the error would keep tensors of its frames alive
        _logger.warning("weights are not shared between workers: %s", why)
        self.close()
        self.shared_bytes = 0


class SharedReader:
    """Reads every tensor from a sealed file."""

    complete = True

    def __init__(self, file: SealedFile, native: NativeLibrary | None) -> None:
        self._native = native
        self._file = file
        self._bytes = shared_tensor(file.memory)
        end = len(file.memory) - _TABLE_SIZE_BYTES
        size_bytes = int.from_bytes(file.memory[end:], "big")
        self._places = msgspec.msgpack.decode(file.memory[end - size_bytes : end], type=dict[str, _Place])
        self.shared_bytes = sum({place.offset: place.size_bytes for place in self._places.values()}.values())

    def tensor(self, key: str, make: Make[Tensor]) -> Tensor:
        """Return the tensor in the file, or the result of `make` if it is not there."""
        return self._at(key) if key in self._places else make(False)

    def linear(self, key: str, make: Make[Linear]) -> Linear:
        """Return a layer with tensors in the file, or the result of `make` if they are not there."""
        place = self._places.get(f"{key}.weight")
        if place is None:
            return make(False)
        weight = self._at(f"{key}.weight")
        bias = self._at(f"{key}.bias") if f"{key}.bias" in self._places else None
        if place.native is not None:
            assert self._native is not None, "the file's name depends on the kernels"
            return NativeLinear(self._native, place.native, weight, bias)
        return (PackedLinear if place.layout else PlainLinear)(weight, bias)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate in this process's memory, as the file is sealed."""
        return allocate_aligned(shape, dtype)

    def enlarge_pages(self) -> None:
        """Back the file's memory with large pages."""
        self._file.enlarge_pages()

    def _at(self, key: str) -> Tensor:
        place = self._places[key]
        return _tensor_over(self._bytes, place.offset, place)


def _bytes_of(tensor: Tensor) -> PackedWeight:
    assert tensor.is_mkldnn or tensor.is_contiguous(), "weights are contiguous"
    if tensor.is_mkldnn:
        return serialize_packed(tensor)
    return PackedWeight(tensor.data_ptr(), tensor.nbytes, b"")


def _tensor_over(memory: Tensor, start: int, place: _Place) -> Tensor:
    """The tensor of `place` over bytes of `memory`, from `start` on."""
    dtype = getattr(torch, place.dtype)
    if not place.layout:
        return memory[start : start + place.size_bytes].view(dtype).view(place.shape)
    tensor = deserialize_packed(memory.data_ptr() + start, place.shape, dtype, place.layout)
    tensor.memory = memory  # type: ignore[attr-defined]  # keeps it mapped, which a packed tensor does not
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
    weights: StoredWeights = "auto",
    shard: Shard = WHOLE_MODEL,
) -> Iterator[WeightStore]:
    """Have a store for the decoder of one model: weights that another worker made, or that this one makes for all.

    folder: the model's.  files: all that its weights depend on.  native: the native kernels, which have their own
    layout.
    weights: quantisation of linear layers.  shard: the part of the model that they are.  Waits while another worker
    makes them, and reports that as the phase "wait"; if that one dies, the next one makes them. They are published when
    the block ends without an error, and freed with the last decoder that uses them.
    """
    if sys.platform != "linux" or any(device.type != "cpu" for device in devices):
        yield OwnWeights()
        return
    name = weights_id(files, dtype, native, weights, shard)
    with folder_lock(folder, cancelled, lambda: report(LoadProgress(phase="wait", done=0, total=0, unit="steps"))):
        sealed = SealedFile.find(name)
        if sealed is not None:
            yield SharedReader(sealed, native)
            return
        writer = _new_writer(name)
        try:
            yield writer or OwnWeights()
            if writer is not None:
                writer.publish()
        finally:
            if writer is not None:
                writer.close()


def weights_id(
    files: Iterable[Path],
    dtype: torch.dtype,
    native: NativeLibrary | None = None,
    weights: StoredWeights = "auto",
    shard: Shard = WHOLE_MODEL,
) -> str:
    """Return a name that identifies the weights bit by bit: by files and their times, dtype, quantisation, torch,
    kernels and instruction set."""
    stats = [file.stat() for file in sorted(files)]
    facts = (
        (LAYOUT, torch.__version__, str(dtype), weights, native.key if native else "", shard.rank, shard.size),
        (torch.backends.cpu.get_cpu_capability(), os.environ.get("ONEDNN_MAX_CPU_ISA", "")),
        # The time of the inode's change cannot be set, that of the content's can.
        *((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for stat in stats),
    )
    return f"ericllm-{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}"


def _new_writer(name: str) -> SharedWriter | None:
    try:
        return SharedWriter(UnsealedFile(name))
    except OSError as error:
        _logger.warning("weights are not shared between workers: %s", error)
        return None
