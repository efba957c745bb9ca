"""Messages between rank 0, which is the worker, and each other rank of its model, over a pair of stream sockets.

Frames are a 4-byte big-endian length and a msgpack body.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from engine.backends.base import LoadProgress
from engine.backends.scheduler.batch import ChunkInput
from engine.config import AdapterSpec, DeviceShare, ModelSpec
from engine.errors import ErrorInfo

# Rank 0 -> another rank.


class LoadPart(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Load a part of the model on the device of `spec`; answered by Started, Progress..., and Done. threads: of a
    CPU."""

    spec: ModelSpec
    rank: int
    ranks: int
    threads: int


class AllocateKv(msgspec.Struct, frozen=True, kw_only=True, tag="allocate_kv"):
    """Allocate KV pages; answered by Done."""

    num_pages: int
    page_tokens: int
    max_sequences: int


class PrepareAttention(msgspec.Struct, frozen=True, tag="prepare_attention"):
    """Compile the kernels of attention; answered by Done."""


class WireChunk(msgspec.Struct, frozen=True, array_like=True):
    """A ChunkInput. pages: int32 each."""

    token_ids: Sequence[int]
    start: int
    pages: bytes
    sample: bool
    adapter: str
    num_drafts: int
    residency: int
    states: tuple[int, int]

    @classmethod
    def from_chunk(cls, chunk: ChunkInput) -> WireChunk:
        """Return a chunk as it is sent."""
        states = chunk.prompt_states
        return cls(
            list(chunk.token_ids),
            chunk.start,
            array("i", chunk.pages).tobytes(),
            chunk.sample,
            chunk.adapter,
            chunk.num_drafts,
            chunk.residency,
            (states.start, states.stop),
        )

    def chunk(self) -> ChunkInput:
        """Return the chunk."""
        return ChunkInput(
            self.token_ids,
            self.start,
            array("i", self.pages),
            self.sample,
            adapter=self.adapter,
            num_drafts=self.num_drafts,
            prompt_states=range(*self.states),
            residency=self.residency,
        )


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """Compute a step, without an answer, or only account for its memory.

    adapters: keys of those that are in use, where these are others than before; a rank frees the rest.
    threads: CPU threads from now on.
    """

    chunks: list[WireChunk]
    only_account: bool = False
    adapters: tuple[str, ...] | None = None
    threads: int | None = None


class ComputeHead(msgspec.Struct, frozen=True, tag="head"):
    """Compute the logits of a number of rows that rank 0 broadcasts, without an answer."""

    rows: int


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """Load a part of an adapter; answered by Done or Refused."""

    adapter: AdapterSpec


class EnlargePages(msgspec.Struct, frozen=True, tag="enlarge_pages"):
    """Back the weights with large pages, without an answer."""


class Report(msgspec.Struct, frozen=True, tag="report"):
    """Report the memory that is used; answered by Done."""


Order = LoadPart | AllocateKv | PrepareAttention | Step | ComputeHead | Attach | EnlargePages | Report

# A rank -> rank 0.


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The process runs, and connects to the other ranks next."""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """The load moved on."""

    progress: LoadProgress


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """An order is carried out.

    dtype, attention: with which the rank computes.  shares: of its device.  free_bytes: that KV pages may take.
    shared_bytes: of its weights, which all workers have once.  adapter: key of the one that was attached.
    """

    dtype: str
    attention: str
    shares: tuple[DeviceShare, ...]
    free_bytes: int
    shared_bytes: int
    adapter: str = ""
    adapter_bytes: int = 0


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """An order could not be carried out; the rank goes on."""

    error: ErrorInfo


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The rank ends. secondary: because it lost another rank."""

    error: ErrorInfo
    secondary: bool = False


Reply = Started | Progress | Done | Refused | Failed

_LENGTH_BYTES = 4

Received = TypeVar("Received")


class Connection(Generic[Received]):
    """One end of a pair of sockets. `send` may be called from any thread, `receive` from one."""

    def __init__(self, sock: socket.socket, received: object) -> None:
        """received: the union of the messages that arrive here."""
        self._sock, self._sending = sock, threading.Lock()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_to_builtin)
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(
            received,
            dec_hook=_from_builtin,
        )
        self._stream = sock.makefile("rb")

    def send(self, message: Order | Reply) -> None:
        """Write a message. Raises OSError where the other end is closed."""
        body = self._encoder.encode(message)
        with self._sending:
            self._sock.sendall(len(body).to_bytes(_LENGTH_BYTES, "big") + body)

    def receive(self) -> Received | None:
        """Wait for a message; None once the other end is closed."""
        try:
            length = self._stream.read(_LENGTH_BYTES)
            body = self._stream.read(int.from_bytes(length, "big")) if len(length) == _LENGTH_BYTES else b""
        except (OSError, ValueError):  # closed here meanwhile
            return None
        return self._decoder.decode(body) if body else None

    def close(self) -> None:
        """Close this end; a `receive` of it returns."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def _to_builtin(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to another rank")


def _from_builtin(kind: type, value: object) -> object:
    if kind is Path:
        return Path(str(value))
    raise NotImplementedError(f"{kind.__name__} cannot be sent to another rank")
