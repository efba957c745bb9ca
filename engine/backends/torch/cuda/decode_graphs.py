"""DecodeGraphs: steps that only decode, recorded once per size and replayed with one launch (CUDA graphs).

A recording has fixed kernels, sizes and addresses. So a step is padded to a recorded size, and its indices are written
to the buffer that the recordings read. Any other step is computed without a recording. Only `CudaRecorder` needs CUDA;
it was not yet run on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.backends.common.step_memory import graph_bytes
from engine.backends.paged_attention.interface import PagedAttention
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.cuda.step_transfer import Uploader, fill_pending_ids, offsets, view
from engine.backends.torch.device_memory import DeviceMemory
from engine.backends.torch.kv.page_tensors import KvPool
from engine.backends.torch.model.decoder import Decoder
from engine.backends.torch.model.step_plan import PagedGroup, PagedPlan, StepPlan
from engine.backends.torch_device import clear_workspaces, failure_reason, is_device_lost, is_out_of_memory

MIN_TABLE_TOKENS = 2048
"""Tokens per sequence of the narrowest block tables; wider ones double."""

_logger = logging.getLogger(__name__)


class Recording(Protocol):
    """A recorded step."""

    def replay(self) -> None:
        """Run it again on the current contents of its input buffer."""


class Recorder(Protocol):
    """Records work of a device."""

    def record(self, compute: Callable[[], None]) -> Recording:
        """Run `compute` to warm up, and record it. It must neither wait nor depend on values of tensors."""


class CudaRecorder:
    """Records work on one device. All recordings share their working memory and cuBLAS's workspace: no two run at
    once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Run `work` twice on a stream of its own, so that kernels are compiled and libraries ready, then capture it.

        An existing cuBLAS workspace belongs to all work of its stream, a new one to the capture. So there must be none
        when a capture begins, and none is left when it has ended.
        """
        with torch.cuda.device(self._device):
            current, stream, graph = torch.cuda.current_stream(), self._stream, torch.cuda.CUDAGraph()
            stream.wait_stream(current)
            try:
                with torch.cuda.stream(stream):  # restores the stream also where the end of a capture fails
                    work()
                    work()
                    clear_workspaces()
                    with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                        work()
            finally:
                clear_workspaces()
            current.wait_stream(stream)
        return graph


def recorder_for(device: torch.device) -> Recorder | None:
    """Return the recorder of `device`; None where it has none."""
    return CudaRecorder(device) if device.type == "cuda" else None


@dataclass(frozen=True, slots=True)
class Bucket:
    """A size of recorded steps: number of sequences, and width of their block tables."""

    batch: int
    pages: int


@dataclass(frozen=True, slots=True)
class Buckets:
    """The recorded sizes, in ascending order."""

    batches: tuple[int, ...]
    pages: tuple[int, ...]

    @classmethod
    def up_to(cls, sequences: int, tokens: int, page_tokens: int) -> Buckets:
        """Return sizes for up to `sequences` of up to `tokens` each: 1, 2, 4, then multiples of 8, of 16 from 32 and of
        32 from 128 on, so that less than half of a step is padding, and little of a large one; tables double."""
        batches = [size for size in (1, 2, 4) if size < sequences]
        while not batches or batches[-1] < sequences:
            last = batches[-1] if batches else 0
            batches.append(min(sequences, last + (8 - last % 8 if last < 32 else 16 if last < 128 else 32)))
        widest = -(-tokens // page_tokens)
        pages = [min(widest, -(-MIN_TABLE_TOKENS // page_tokens))]
        while pages[-1] < widest:
            pages.append(min(widest, 2 * pages[-1]))
        return cls(tuple(batches), tuple(pages))

    def smallest_for(self, chunks: Sequence[ChunkInput], page_tokens: int) -> Bucket | None:
        """Return the smallest size that fits; None if the chunks are not plain decodes, too many, or too long."""
        if not all(_is_plain_decode(chunk) for chunk in chunks):
            return None
        longest = max((chunk.end for chunk in chunks), default=0)
        batch = next((size for size in self.batches if size >= len(chunks)), None)
        pages = next((size for size in self.pages if size * page_tokens >= longest), None)
        return None if not chunks or batch is None or pages is None else Bucket(batch, pages)


def _is_plain_decode(chunk: ChunkInput) -> bool:
    return len(chunk.token_ids) == 1 and chunk.sample and not (chunk.adapter or chunk.num_drafts or chunk.prompt_states)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Index tensors of a step of one size, in one buffer of bytes. See StepPlan and PagedGroup."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    lengths: Tensor
    block_table: Tensor

    @classmethod
    def over(cls, buffer: Tensor, bucket: Bucket) -> StepInputs:
        """Return the tensors in `buffer`, which may be longer."""
        layout = _layout(bucket)
        starts, _ = offsets([_nbytes(*part) for part in layout])
        return cls(*(view(buffer, start, *part) for start, part in zip(starts, layout, strict=True)))

    @staticmethod
    def size_bytes(bucket: Bucket) -> int:
        """Return the size of such a buffer."""
        return offsets([_nbytes(*part) for part in _layout(bucket)])[1]

    def fill(self, chunks: Sequence[ChunkInput], page_tokens: int) -> None:
        """Write the indices of decodes. Padding repeats the shortest sequence: it writes the same to the same place,
        and needs no page of its own."""
        shortest = min(range(len(chunks)), key=lambda index: chunks[index].end)
        rows = [*chunks, *[chunks[shortest]] * (len(self.ids) - len(chunks))]
        locations = [(chunk.pages[chunk.start // page_tokens], chunk.start % page_tokens) for chunk in rows]
        self.ids.copy_(torch.tensor([chunk.token_ids[0] for chunk in rows]))
        self.positions.copy_(torch.tensor([chunk.start for chunk in rows]))
        self.slots.copy_(torch.tensor([page * page_tokens + offset for page, offset in locations]))
        self.lengths.copy_(torch.tensor([chunk.end for chunk in rows]))
        self.block_table.zero_()
        for row, chunk in zip(self.block_table, rows, strict=True):
            count = -(-chunk.end // page_tokens)
            row[:count] = torch.tensor(chunk.pages[:count], dtype=torch.int32)

    def plan(self, attention: PagedAttention) -> StepPlan:
        """Return the plan of the step, with logits of all rows, in order."""
        rows = len(self.ids)
        group = PagedGroup(0, rows, 1, self.lengths, self.block_table)
        return StepPlan(
            ids=self.ids,
            positions=self.positions,
            slots=self.slots,
            sampled_rows=self.slots[:0],
            groups=(),
            paged=PagedPlan(attention, (group,)),
        )


def _layout(bucket: Bucket) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    row, table = (bucket.batch,), (bucket.batch, bucket.pages)
    return [(torch.int64, row)] * 3 + [(torch.int32, row), (torch.int32, table)]


def _nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return torch.empty(shape, dtype=dtype, device="meta").nbytes


class DecodeGraphs:
    """Recordings of a model's decodes. They share one buffer of indices and one of logits, as they never run at once.

    compute: returns logits [rows, vocab] of all rows of a step.  has_room: returns whether the device has memory for
    one more recording.
    """

    def __init__(
        self,
        buckets: Buckets,
        *,
        vocab_size: int,
        page_tokens: int,
        device: torch.device,
        attention: PagedAttention,
        compute: Callable[[StepPlan], Tensor],
        recorder: Recorder,
        uploader: Uploader,
        has_room: Callable[[], bool],
    ) -> None:
        """Allocate both buffers. Raises torch.OutOfMemoryError."""
        largest = Bucket(buckets.batches[-1], buckets.pages[-1])
        self.buckets = buckets
        self._page_tokens, self._attention, self._compute = page_tokens, attention, compute
        self._recorder, self._uploader, self._has_room = recorder, uploader, has_room
        self._inputs = torch.zeros(StepInputs.size_bytes(largest), dtype=torch.uint8, device=device)
        self._logits = torch.empty(largest.batch, vocab_size, dtype=torch.float32, device=device)
        self._recordings: dict[Bucket, Recording] = {}
        self._stopped = False

    @property
    def recorded_buckets(self) -> frozenset[Bucket]:
        """The sizes recorded so far."""
        return frozenset(self._recordings)

    def prepare(self) -> None:
        """Record steps of each number of sequences with the narrowest tables; page 0 must be unused."""
        for batch in self.buckets.batches:
            self.logits([ChunkInput([0], 0, [0], sample=True)] * batch)

    def logits(self, chunks: Sequence[ChunkInput], drawn: Tensor | None = None) -> Tensor | None:
        """Return float32 logits [len(chunks), vocab] of a step, valid until the next one; None for a step that cannot
        be replayed or recorded. drawn: ids that the previous step sampled, in place of pending ones."""
        bucket = self.buckets.smallest_for(chunks, self._page_tokens)
        if bucket is None or (self._stopped and bucket not in self._recordings):
            return None
        buffer = self._uploader.buffer(StepInputs.size_bytes(bucket))
        StepInputs.over(buffer, bucket).fill(chunks, self._page_tokens)
        self._uploader.send(buffer, self._inputs)
        if drawn is not None:
            fill_pending_ids(StepInputs.over(self._inputs, bucket).ids, drawn)
        recording = self._recordings.get(bucket) or self._record(bucket)
        if recording is None:
            return None
        recording.replay()
        return self._logits[: len(chunks)]

    def _record(self, bucket: Bucket) -> Recording | None:
        """Record a size. After a failure no more are recorded."""
        plan = StepInputs.over(self._inputs, bucket).plan(self._attention)
        out = self._logits[: bucket.batch]

        def compute() -> None:
            out.copy_(self._compute(plan))

        try:
            if not self._has_room():
                raise torch.OutOfMemoryError("the device is out of memory")
            self._recordings[bucket] = self._recorder.record(compute)
        except Exception as error:
            if is_device_lost(error):
                raise
            self._stopped = True
            _logger.warning("decode graphs end at %d sequences: %s", bucket.batch, failure_reason(error))
        return self._recordings.get(bucket)


def record_decode_graphs(
    decoder: Decoder,
    kv: KvPool,
    max_sequences: int,
    *,
    attention: PagedAttention,
    memory: DeviceMemory,
    recorder: Recorder,
    uploader: Uploader,
) -> DecodeGraphs | None:
    """Record decodes of `decoder` of up to `max_sequences` over the pages of `kv`, page 0 of which must be unused; None
    where it cannot be recorded, or memory does not suffice. memory: of its only device."""
    config = decoder.config
    if decoder.needs_host:
        return None
    num_pages, page_tokens = kv.layers[0].shape[:2]
    buckets = Buckets.up_to(max_sequences, min(config.max_model_len, num_pages * page_tokens), page_tokens)
    needed_bytes = graph_bytes(config, buckets.batches[-1], decoder.embedding.dtype.itemsize)
    try:
        graphs = DecodeGraphs(
            buckets,
            vocab_size=config.vocab_size,
            page_tokens=page_tokens,
            device=memory.device,
            attention=attention,
            compute=lambda plan: decoder.logits(decoder.hidden(plan, kv)),
            recorder=recorder,
            uploader=uploader,
            has_room=lambda: memory.free_bytes() >= needed_bytes,
        )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        _logger.warning("decode graphs are off: %s", failure_reason(error))
        return None
    graphs.prepare()
    return graphs
